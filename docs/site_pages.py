"""Pages of the docs site that are generated: settings, commands, claims, the Python reference, lessons."""

import argparse
import ast
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from enum import StrEnum
from functools import cache
from inspect import get_annotations
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("harness/config/schema.py", "engine/core/options.py", "engine/runtime/options.py")

_PYTHON = {
    "core": (
        "Policy core",
        "What is decided: scheduler, KV cache managers, step plan. `from engine.core import …` has all of it.",
        ("engine.core", "engine.core.policies", "engine.core.options"),
    ),
    "engine": (
        "Engine",
        "What is done: models on KV tensors, with vLLM's names where they fit.",
        ("engine.runtime.llm", "engine.runtime.options"),
    ),
    "kernels": (
        "Kernels",
        "Attention over paged KV, writes to the cache, copies of blocks.",
        ("paged_kernels",),
    ),
    "traces": (
        "Traces",
        "What arrives: traces, readers, generators, analysis.",
        (
            "traces.trace",
            "traces.reading",
            "traces.errors",
            "traces.synth.generator",
            "traces.analysis.reuse",
        ),
    ),
    "harness": (
        "Harness",
        "A point of a sweep from Python, and the definitions of all figures.",
        (
            "harness.point",
            "harness.report.write_report",
            "harness.metrics",
            "harness.config.errors",
        ),
    ),
}

ADDED = {
    "harness/lessons/README.md": """
## The pages

Built with this site, from the same code:

* [A pool of blocks](../../lessons/pool.html)
* [What do these lengths take?](../../lessons/accountant.html)
* [The pool of a run](../../lessons/replay.html)
"""
}
"""What the site adds at the end of a document."""


def generated() -> Mapping[str, str]:
    """Text by its place in the site's sources."""
    from harness.lessons.pages import LESSONS, page, record

    lessons = {
        f"lessons/{name}.html": page(name, record([]) if name == "replay" else None) for name in LESSONS
    }
    return {
        **lessons,
        "reference/configuration.md": "".join(configuration()),
        "reference/commands.md": "".join(commands()),
        "reference/claims.md": "".join(claims()),
        "reference/capabilities.md": "".join(capabilities()),
        **{f"reference/{name}.md": _python_page(*parts) for name, parts in _PYTHON.items()},
    }


def _python_page(title: str, about: str, names: tuple[str, ...]) -> str:
    return f"# {title}\n\n{about}\n\n" + "".join(f"::: {name}\n\n" for name in names)


# -- settings ----------------------------------------------------------------------------------------------


@cache
def comments() -> Mapping[tuple[str, str], str]:
    """What the comment behind a field or a value says, or that above it, by the names of its class and of itself."""
    found = {}
    for source in _SOURCES:
        with (ROOT / source).open("rb") as file:
            comments = [each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT]
        by_line = {each.start[0]: each.string.lstrip("# ") for each in comments}
        alone = {each.start[0] for each in comments if each.line.lstrip().startswith("#")}
        for node in ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))):
            for line in node.body if isinstance(node, ast.ClassDef) else ():
                target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
                if isinstance(target, ast.Name):
                    lines = range(line.lineno, (line.end_lineno or line.lineno) + 1)
                    behind = [by_line[number] for number in lines if number in by_line]
                    texts = [*behind]
                    number = line.lineno - 1
                    while not behind and number in alone:
                        texts.insert(0, by_line[number])
                        number -= 1
                    found[node.name, target.id] = " ".join(texts)
    return found


def configuration() -> Iterator[str]:
    """Every key: allowed values, default, meaning."""
    from harness.config.groups import default_choices, groups, purpose
    from harness.config.schema import RunConfig

    yield "# Configuration\n\nEvery key of `run`, `sweep`, `show` and the commands that take overrides, from "
    yield "`harness/config/schema.py`. `python -m harness show` prints them with their values.\n\n"
    hints = get_type_hints(RunConfig)
    plain = [one for one in fields(RunConfig) if not hasattr(hints[one.name], "__dataclass_fields__")]
    yield "## Of the whole run\n\n"
    yield from _keys(RunConfig, "", plain)
    for section in fields(RunConfig):
        kind = hints[section.name]
        if section in plain:
            continue
        about = (kind.__doc__ or "").strip().partition("\n")[0]
        yield f"\n## {section.name}\n\n{_cell(about)}\n\n"
        yield from _keys(kind, f"{section.name}.", list(fields(kind)))
        if section.name in groups():
            default = default_choices().get(section.name, "")
            yield f"\nOptions: `{section.name}=NAME`\n\n| name | |\n|---|---|\n"
            for option in groups()[section.name]:
                mark = " (default)" if option == default else ""
                yield f"| `{option}`{mark} | {_cell(purpose(section.name, option))} |\n"


def _keys(kind: Any, prefix: str, members: list[Any]) -> Iterator[str]:
    from harness.config.checks import RANGES

    hints = get_type_hints(kind)
    yield "| key | values | default | |\n|---|---|---|---|\n"
    for one in members:
        key = f"{prefix}{one.name}"
        values = str(RANGES[key]) if key in RANGES else _values(hints[one.name])
        owner = next(base for base in kind.__mro__ if one.name in get_annotations(base))
        says = comments().get((owner.__name__, one.name), "")
        default = "null" if one.default is None else one.default
        shown = (
            "" if default is MISSING else str(default).lower() if isinstance(default, bool) else str(default)
        )
        choices = _choices(hints[one.name])
        yield f"| `{key}` | {_cell(values)} | `{shown}` | {_cell(says)}{choices} |\n"


def _values(hint: Any) -> str:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    names = {bool: "true, false", int: "a whole number", float: "a number", str: "text"}
    return " or ".join(names.get(kind, "one of") for kind in kinds)


def _choices(hint: Any) -> str:
    if not (isinstance(hint, type) and issubclass(hint, StrEnum)):
        return ""
    said = [(value.value, comments().get((hint.__name__, value.name), "")) for value in hint]
    return "<br>" + "<br>".join(f"`{value}`{': ' + _cell(says) if says else ''}" for value, says in said)


def _cell(text: str) -> str:
    """Text for a cell of a table; what stands in backticks stays code."""
    parts = text.split("`")
    plain = [part if index % 2 else _escaped(part) for index, part in enumerate(parts)]
    return " ".join("`".join(plain).replace("|", "\\|").split())


def _escaped(text: str) -> str:
    for sign in "\\*_[]":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("<", "&lt;").replace(">", "&gt;")


# -- commands and claims -----------------------------------------------------------------------------------


def commands() -> Iterator[str]:
    """The help of every command and of its actions."""
    from harness.cli.main import build_parser

    yield "# Commands\n\nWhat `--help` prints.\n\n"
    yield from _help(build_parser(), "python -m harness", 2)


def _help(parser: argparse.ArgumentParser, name: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name}\n\n~~~~text\n{parser.format_help()}~~~~\n\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from _help(below, f"{name} {word}", level + 1)


def capabilities() -> Iterator[str]:
    """What a point may ask for, and the ways to run it that cannot take it."""
    from harness.config.capabilities import TABLE, Way

    heads = {
        Way.measured: "measured",
        Way.groups: "groups of layers",
        Way.measured_groups: "groups, measured",
        Way.replicas: "replicas",
        Way.client: "beams as requests",
        Way.no_cache: "without a prefix cache",
        Way.no_rows: "without rows",
        Way.compiled: "compiled replay",
        Way.oracle: "vLLM's scheduler beside",
    }
    yield "# What goes with what\n\nAn empty cell: it goes. Else the reason why it does not.\n\n"
    yield f"| asked for | {' | '.join(heads.values())} |\n|---{'|---' * len(heads)}|\n"
    for row in TABLE:
        cells = (_cell(row.reasons.get(way, "")) for way in heads)
        yield f"| `{row.key}` | {' | '.join(cells)} |\n"


def claims() -> Iterator[str]:
    """The ledger, computed now."""
    from harness.papers.ledger import VERDICTS, chosen, judge, sources, tally

    judged = [judge(claim) for claim in chosen([])]
    yield f"# Claims, computed\n\nFrom `python -m harness claims`, when this site was built. {tally(judged)}.\n\n"
    for lesson, rows in groupby(judged, lambda one: one.claim.id.partition(".")[0]):
        yield f"## {sources()[lesson]}\n\n| | claim | verdict | computed | right value |\n|---|---|---|---|---|\n"
        for one in rows:
            claim, verdict = one.claim, VERDICTS[one.claim.verdict]
            state = "" if one.holds else " (the row does not hold)"
            right = " ".join(part for part in (claim.right, claim.why) if part)
            mark = f"**{verdict}**" if claim.verdict == "wrong" else verdict
            yield f"| {claim.id} | {_cell(claim.says)} | {mark}{state} | {_cell(one.shown)} | {_cell(right)} |\n"
        yield "\n"
