"""The policy layer: CPU time of block manager and scheduler, relative to the accepted version of the same core."""

import tempfile
from pathlib import Path
from typing import Any

from harness.gate.beside import Work, accepted_sources, judge, load, package_sources, ratios_of, unfit
from harness.gate.findings import Measured
from harness.gate.loads import loads

__all__ = ["case_names", "judge", "measure", "sources", "unfit"]
NAME = "policy"
_LOADS = "harness.gate.loads"


def case_names() -> list[str]:
    """The names of the loads."""
    return [*loads()]


def sources() -> dict[str, str]:
    """Today's sources of the policy core and of its loads, by module."""
    return package_sources("engine.core") | {
        _LOADS: Path(loads.__code__.co_filename).read_text(encoding="utf-8")
    }


def measure(folder: Path | None = None) -> Measured:
    """Time every load on today's core and on the accepted one; without a baseline in `folder`, on today's twice."""
    today = sources()
    accepted = accepted_sources(folder and folder / f"{NAME}.json", NAME, today)
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="pagetwin-gate-") as place:
        for name, ours in loads().items():

            def sides(name: str = name, ours: Work = ours.run) -> tuple[Work, Work]:
                theirs = load(accepted, Path(place))[_LOADS].loads()
                return ours, theirs[name].run if name in theirs else ours  # a new load has no accepted one

            cases[name] = {"ratios": ratios_of(sides)}
    return Measured(NAME, NAME, {}, None, cases, {"sources": today})
