"""Imports run one way: one order of all packages, and each may import only what stands before it.

A folder without subfolders is one unit. In a folder with subfolders each file is a unit of its own, and the name of
the folder stands for its `__init__.py`. Every import statement counts, wherever it stands: inside functions, under
`TYPE_CHECKING`, and module names given as strings. There are no exceptions.

A new import that this test refuses is a question about the design. Change the order only with the design.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tiers import cases

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("traces", "engine", "kernels/paged_kernels", "harness", "benchmarks", "tests/gpu_acceptance")
OURS = tuple(folder.rpartition("/")[2] for folder in FOLDERS)

UNITS = """
    traces
        traces.errors traces.trace traces.arrivals traces.formats traces.tokens traces.reshape
        traces.analysis traces.synth traces.catalogue traces.reading

    engine
        engine.core.errors engine.core.options engine.core.identity engine.core.request engine.core.plan
        engine.core.sequence engine.core.policies engine.core.memory engine.core.scheduling
    engine.core

    paged_kernels.arguments paged_kernels.launch_policy
        paged_kernels.private paged_kernels.native paged_kernels.backends
        paged_kernels.cascade_groups paged_kernels.reference paged_kernels.torch_backend paged_kernels.triton
        paged_kernels.operations
    paged_kernels
        paged_kernels.case paged_kernels.providers

    engine.runtime
        engine.runtime.errors engine.runtime.text engine.runtime.structured engine.runtime.params
        engine.runtime.options engine.runtime.kv_pool engine.runtime.group_pool
    engine.runtime.attention
    engine.runtime.models engine.runtime.decoding
        engine.runtime.batch engine.runtime.graphs engine.runtime.runner engine.runtime.requests
        engine.runtime.engine engine.runtime.llm engine.runtime.async_engine

    harness
        harness.workers harness.console harness.config harness.environment harness.metrics harness.store
        harness.replay harness.cost harness.compiled
        harness.workload harness.oracle harness.measure harness.calibrate harness.point harness.sweep harness.cluster
    harness.report.style harness.report.study harness.report.axes harness.report.numbers
        harness.report.trace_pictures harness.report.figures harness.report.answers harness.report.verdict_text
        harness.report.tables harness.report.provenance harness.report.page harness.report.write harness.report
    harness.capacity harness.serve harness.trace harness.twin harness.scoreboard harness.papers
        harness.lessons
    harness.bench
    harness.kernel_speed harness.gate harness.pytest_gate
    harness.cli
    harness.__main__

    benchmarks gpu_acceptance
"""
ORDER = UNITS.split()

FRAMES = ("torch", "transformers", "triton", "seaborn", "matplotlib", "pandas")
HEAVY = (*FRAMES, "scipy.stats")
TENSORS = ("engine.runtime", "paged_kernels")
RUNS = ("harness.replay", "harness.workload", "harness.measure", "harness.calibrate")
# What the files of a package must not import anywhere, whatever the order says. The longest name that fits decides.
FORBIDDEN = {
    "traces": (*HEAVY, "simpy"),
    "engine.core": (*HEAVY, "simpy", "time"),
    "paged_kernels": ("engine", "traces"),
    "harness": ("paged_kernels",),
    "harness.config": (*HEAVY, "paged_kernels", "engine.core.memory", "engine.core.scheduling"),
    "harness.metrics": (*FRAMES, *TENSORS),  # a verdict needs intervals, thus scipy
    "harness.store": (*HEAVY, *TENSORS, "engine.core", "traces"),
    "harness.replay": (*HEAVY, *TENSORS),
    "harness.oracle": TENSORS,
    "harness.sweep": (*HEAVY, *TENSORS, *RUNS),  # it knows a point's function by name alone
    "harness.report": (*TENSORS, *RUNS, "harness.point"),  # it reads a store and nothing else
    "harness.papers": (),  # claims about attention are computed with the reference of the kernels
    "harness.bench": (),
    "harness.gate": (),
    "harness.environment": FRAMES,  # why there are no C kernels, which torch is not needed for; as the next
    "harness.cost.kernel_table": FRAMES,
    "harness.kernel_speed": (),  # it cuts rows into parts as the kernels' launch policy does
    "harness.cli": (*HEAVY, "paged_kernels"),
}


class Source(NamedTuple):
    """A file of ours: its text, and whether it is the `__init__.py` of a folder."""

    text: str
    is_package: bool = False


Sources = Mapping[str, Source]


@cache
def shipped() -> Sources:
    """Every module of ours by its name."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(file.relative_to((ROOT / folder).parent).with_suffix("").parts)
            source = Source(file.read_text(encoding="utf-8"), file.name == "__init__.py")
            found[name.removesuffix(".__init__")] = source
    return found


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of these packages or lies in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def imports(module: str, source: Source) -> tuple[tuple[int, str], ...]:
    """(line, name) of all that a file imports, in the order of the syntax tree."""
    package = module if source.is_package else module.rpartition(".")[0]
    return tuple(
        pair for node in ast.walk(ast.parse(source.text)) for pair in _imports_of_node(package, node)
    )


def _imports_of_node(package: str, node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Import):
        yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        start = ".".join(part for part in (base, node.module) if part)
        yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        name = node.value.partition(":")[0]
        if "." in name and within(name, OURS):  # a module to be imported by its name
            yield node.lineno, name


def module_of(name: str, sources: Sources) -> str | None:
    """The module of ours that an imported name leads to: itself, or the one that defines it."""
    parent = name.rpartition(".")[0]
    return name if name in sources else parent if parent in sources else None


def arrows(sources: Sources) -> Iterator[tuple[str, int, str]]:
    """(importing module, line, imported module), both ours."""
    for module, source in sources.items():
        for line, name in imports(module, source):
            target = module_of(name, sources)
            if target is not None and target != module:
                yield module, line, target


def units(sources: Sources) -> dict[str, str]:
    """The unit that each module belongs to."""
    folders = {name for name, source in sources.items() if source.is_package}
    folders |= {name.rpartition(".")[0] for name in sources if "." in name}  # those without an __init__.py
    divided = {folder.rpartition(".")[0] for folder in folders}
    found = {}
    for name in sources:
        folder = name if name in folders else name.rpartition(".")[0]
        found[name] = name if folder in divided or not folder else folder
    return found


def wrong_order(sources: Sources) -> list[str]:
    """Imports of something that does not stand before the importing unit, and of what is forbidden to it."""
    place, unit = {name: index for index, name in enumerate(ORDER)}, units(sources)
    upward = [
        f"{module}:{line} imports {target}, which does not stand before it"
        for module, line, target in arrows(sources)
        if unit[module] != unit[target] and place.get(unit[module], -1) <= place.get(unit[target], len(ORDER))
    ]
    return upward + [
        f"{module}:{line} must not import {name}"
        for module, source in sources.items()
        for line, name in imports(module, source)
        if within(name, forbidden(module))
    ]


def forbidden(module: str) -> tuple[str, ...]:
    packages = [package for package in FORBIDDEN if within(module, (package,))]
    return FORBIDDEN[max(packages, key=len)] if packages else ()


def circle(sources: Sources) -> list[str]:
    """Files that import each other in a circle; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for module, _, target in arrows(sources):
        graph.setdefault(module, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def planted(**texts: str) -> Sources:
    """The shipped modules, some with another text; a double underscore stands for the dot."""
    changed = {name.replace("__", "."): text for name, text in texts.items()}
    return {**shipped(), **{name: Source(text) for name, text in changed.items()}}


def news(check: Callable[[Sources], Iterable[str]], sources: Sources) -> set[str]:
    """What a check finds in these sources and not in those that are shipped."""
    return set(check(sources)) - set(check(shipped()))


def listed(sources: Sources) -> set[str]:
    """The units that the order must list."""
    return set(units(sources).values())


def test_the_order_lists_every_unit_once() -> None:
    found, names = listed(shipped()), set(ORDER)
    assert {"missing": found - names, "gone": names - found} == {"missing": set(), "gone": set()}
    assert len(ORDER) == len(set(ORDER))


def test_imports_run_one_way() -> None:
    assert wrong_order(shipped()) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(shipped()) == []


@cases(
    ("module", "text"),
    [
        ("traces__reading", "import engine.core.plan"),
        ("engine__core__memory__block_pool", "def f():\n    import torch"),
        ("engine__core__memory__block_pool", "from .. import scheduling"),
        ("engine__core__memory__block_pool", "from ...runtime import errors"),
        ("engine__runtime__runner", "from harness import replay"),
        (
            "engine__runtime__runner",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import harness.cost",
        ),
        ("harness__replay__loop", "from torch import nn"),
        ("harness__replay__loop", "from engine.runtime.llm import LLM"),
        ("harness__replay__loop", "from harness.cost import fitted"),
        ("harness__point__run", "from paged_kernels.operations import paged_attention_decode"),
        ("harness__report__page", "from harness.point import run_point"),
        ("harness__report__style", "def f():\n    from harness.report.page import page"),
        ("harness__point__run", "RUNNER = 'harness.sweep.execute:execute'"),
        ("harness__store__commit", "from harness.cli import main"),
    ],
    day=2,
)
def test_a_wrong_import_is_seen(module: str, text: str) -> None:
    assert len(news(wrong_order, planted(**{module: text}))) == 1


def test_a_package_that_is_not_listed_is_seen() -> None:
    assert news(listed, planted(harness__novel__part="")) == {"harness.novel"}


def test_a_file_that_is_not_listed_is_seen_where_its_folder_is_divided() -> None:
    assert news(listed, planted(engine__core__novel="")) == {"engine.core.novel"}


def test_a_circle_within_a_package_is_seen() -> None:
    texts = {
        "harness__metrics__one": "from harness.metrics import two",
        "harness__metrics__two": "def f():\n    from harness.metrics.one import g",
    }
    assert news(circle, planted(**texts)) == {"harness.metrics.one", "harness.metrics.two"}
    assert news(wrong_order, planted(**texts)) == set()
