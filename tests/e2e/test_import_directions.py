"""Imports run one way: traces <- engine.core <- engine.runtime <- harness, and paged_kernels <- engine.runtime.

A new arrow that this test refuses is a question about the design, not about the test.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("traces", "engine", "harness", "paged_kernels")
HEAVY = ("torch", "transformers", "triton", "seaborn", "matplotlib", "pandas", "scipy.stats")

# The most specific room decides. What a room may import of ours, itself included.
ALLOWED = {
    "traces": ("traces",),
    "paged_kernels": ("paged_kernels",),
    "engine": ("engine",),
    "engine.core": ("engine.core", "traces"),
    "engine.runtime": ("engine", "traces", "paged_kernels"),
    "harness": ("harness", "engine", "traces"),
    "harness.bench": ("harness", "engine", "traces", "paged_kernels"),
    "harness.gate": ("harness", "engine", "traces", "paged_kernels"),
    "harness.replay": ("harness.replay", "harness.metrics", "engine.core", "traces"),
    "harness.metrics": ("harness.metrics", "engine.core", "traces"),
    "harness.compare": ("harness.compare", "harness.metrics"),
    "harness.report": ("harness.report", "harness.store", "harness.metrics", "harness.compare"),
    "harness.config": ("harness.config",),
    "harness.store": ("harness.store", "harness.config"),
    "harness.plan": ("harness.plan", "harness.config", "harness.store"),
    "harness.sweep": ("harness.sweep", "harness.plan", "harness.config", "harness.store"),
}
# What a room must not import of others, anywhere in a file.
FORBIDDEN = {
    "traces": (*HEAVY, "simpy"),
    "engine.core": (*HEAVY, "simpy", "time"),
    "harness.replay": HEAVY,
    "harness.metrics": HEAVY,
    "harness.config": HEAVY,
    "harness.plan": HEAVY,
    "harness.sweep": HEAVY,
    "harness.store": HEAVY,
    "harness.cli": HEAVY,
}


def sources() -> Iterator[tuple[str, Path]]:
    """(module name, file) of all that is shipped."""
    for folder in (ROOT / "traces", ROOT / "engine", ROOT / "harness", ROOT / "kernels" / "paged_kernels"):
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__"), file


def imports(module: str, file: Path) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import statement, wherever it stands."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            target = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{target}.{alias.name}") for alias in node.names)


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def rule_for(module: str, rules: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    rooms = [room for room in rules if within(module, (room,))]
    return rules[max(rooms, key=len)] if rooms else None


def wrong_arrows(module: str, file: Path) -> list[str]:
    allowed, forbidden = rule_for(module, ALLOWED) or (), rule_for(module, FORBIDDEN) or ()
    return [
        f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{line}: {module} imports {target}"
        for line, target in imports(module, file)
        if (within(target, OURS) and not within(target, allowed)) or within(target, forbidden)
    ]


@pytest.mark.parametrize(("module", "file"), [pytest.param(*pair, id=pair[0]) for pair in sources()])
def test_imports_run_one_way(module: str, file: Path) -> None:
    assert wrong_arrows(module, file) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("traces.reading", "import engine.core"),
        ("engine.core.memory.block_pool", "def f():\n    import torch"),
        ("engine.core.memory.block_pool", "from .. import runtime"),
        ("engine.runtime.runner", "from harness import sim"),
        ("harness.replay.loop", "from torch import nn"),
        ("harness.point.run", "from paged_kernels.attention import attention"),
        ("harness.report.page", "from harness.point import run_point"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert len(wrong_arrows(module, file)) == 1
