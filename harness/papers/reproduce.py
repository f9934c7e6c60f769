"""Run a published figure's experiment and judge it: printed value beside ours, error, verdict.

Points run as those of a sweep do: checked first, in worker processes, committed one by one. What is committed is not
run again, so a stopped command goes on where it stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from harness.config.errors import UserError
from harness.config.groups import REPRODUCE, list_options, option_file, options
from harness.config.overrides import quoted
from harness.metrics.record import PointRecord
from harness.papers import sizes
from harness.point import PointSession
from harness.store.atomic import exclusive, remove_leftovers
from harness.store.commit import read_store
from harness.store.manifest import Manifest, SweepPoint, write_manifest
from harness.sweep.execute import execute
from harness.sweep.plan import SweepPlan, plan_sweep, run_request

# A grid, the overrides that choose one of its points, and a metric; metrics joined by `+` are added.
Place = tuple[str, tuple[str, ...], str]


@dataclass(frozen=True)
class Bar:
    """One printed value and where ours comes from. `printed` is a number or a range."""

    of: str
    printed: float | tuple[float, float]
    part: str = ""
    value: Place | None = None
    over: Place | None = None
    take: str = ""
    times: float = 1.0
    fitted: bool = False


@dataclass(frozen=True)
class Experiment:
    """A published figure."""

    name: str
    figure: str
    title: str
    source: str
    data: str
    unit: str = ""
    form: str = "bars"
    base: tuple[str, ...] = ()
    grids: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compute: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    curves: tuple[str, str, str] | None = None
    choices: tuple[str, ...] = ()
    within: float = 0.10
    reason: str = ""
    not_comparable: str = ""
    needs: str = ""


def experiment(name: str) -> Experiment:
    """The experiment with this name. Raises UserError for an unknown one, or for a file that cannot be used."""
    if name not in options(REPRODUCE):
        raise UserError(f"no figure '{name}'; choose one of\n{list_options('reproduce')}")
    path = option_file("reproduce", name)
    row: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    unknown = row.keys() - {one.name for one in fields(Experiment)}
    if unknown:
        raise UserError(f"{path}: unknown key {sorted(unknown)[0]!r}")
    row["bars"] = tuple(_bar(bar) for bar in row.get("bars", ()))
    for key in ("base", "choices", "curves"):
        if key in row:
            row[key] = tuple(row[key])
    return Experiment(name=name, **row)


def _bar(row: dict[str, Any]) -> Bar:
    for key in ("value", "over"):
        if key in row:
            grid, chosen, metric = row[key]
            row[key] = (grid, tuple(chosen), metric)
    printed = row.pop("printed")
    return Bar(printed=tuple(printed) if isinstance(printed, list) else printed, **row)


# The records of each grid, in the order of its points.
Grids = Mapping[str, Sequence[PointRecord]]


@dataclass(frozen=True)
class JudgedBar:
    """A bar with our value; `error` is relative to the printed value, or to the nearer end of its range."""

    bar: Bar
    ours: float

    @property
    def inside(self) -> bool:
        """Whether the paper prints a range and our value lies in it."""
        return isinstance(self.bar.printed, tuple) and self.error == 0

    @property
    def error(self) -> float:
        """0 inside a printed range."""
        shown = self.bar.printed
        low, high = shown if isinstance(shown, tuple) else (shown, shown)
        end = low if self.ours < low else high if self.ours > high else self.ours
        return (self.ours - end) / end if end else 0.0


@dataclass(frozen=True)
class Result:
    """A reproduced figure: its bars, its curves, and the verdict in words."""

    experiment: Experiment
    bars: tuple[JudgedBar, ...]
    curves: Mapping[str, Sequence[tuple[float, float]]]
    points: int
    seconds: float

    @property
    def verdict(self) -> str:
        """`reproduced`, or how many bars were, or why there is no verdict; the data that stood in follow in `data`."""
        found = self.experiment
        if found.needs:
            return f"needs {found.needs}"
        if found.not_comparable:
            return f"not comparable, because {found.not_comparable}"
        judged = [one for one in self.bars if not one.bar.fitted]
        good = sum(abs(one.error) <= found.within for one in judged)
        inside = sum(one.inside for one in judged)
        said = f"{inside} of them inside a printed range, which is no agreement to a number"
        apart = [said] if inside else []
        fitted = [one for one in self.bars if one.bar.fitted]
        missed = sum(abs(one.error) > found.within for one in fitted)
        beside = f", though {missed} of them are off by more" if missed else ""
        apart += [f"{len(fitted)} more were fitted to the paper and prove nothing{beside}"] if fitted else []
        more = f" ({'; '.join(apart)})" if apart else ""
        if good == len(judged):
            return f"reproduced: all {good} values within {100 * found.within:g} %{more}"
        why = f": {found.reason}" if found.reason else ""
        return f"{good} of {len(judged)} values within {100 * found.within:g} %{more}{why}"


def run_experiment(
    found: Experiment, runs: Path, session: PointSession, say: Callable[[str], None]
) -> Result:
    """Run what is missing under `runs`, and judge.

    Raises UserError where a point fails, with its message.
    """
    grids: dict[str, list[PointRecord]] = {}
    for name, overrides in found.grids.items():
        say(f"{found.name}: {name}")
        grids[name] = _run_grid([*found.base, *overrides], runs / found.name / name, session)
    values = {
        key: value
        for name, given in found.compute.items()
        for key, value in getattr(sizes, name)(**given).items()
    }
    bars = tuple(JudgedBar(bar, bar.times * _ours(bar, grids, values)) for bar in found.bars)
    records = [record for grid in grids.values() for record in grid]
    seconds = sum(record.seconds.get("point", 0.0) for record in records)  # the others are parts of it
    return Result(found, bars, _curves(found, grids), len(records), seconds)


def _run_grid(overrides: Sequence[str], folder: Path, session: PointSession) -> list[PointRecord]:
    request = run_request([*overrides, f"out={quoted(str(folder))}", "report.figures=none"])
    sweep = plan_sweep(request, session)
    with exclusive(folder):
        done = read_store(folder).records
        todo = [point for point in sweep.points if point.fingerprint not in done]
        if todo:
            write_manifest(folder, _manifest(sweep))
            outcome = execute(sweep, todo, session)
            remove_leftovers(folder)
            if outcome.interrupted:
                raise KeyboardInterrupt
            if outcome.failed:
                first = outcome.failed[0]
                reason = f"{folder}: {len(outcome.failed)} points failed, first {first.label}: {first.error}"
                raise UserError(reason)
            done = read_store(folder).records
    return [done[point.fingerprint] for point in sweep.points]


def _manifest(sweep: SweepPlan) -> Manifest:
    return Manifest(
        name=sweep.name,
        command="python -m harness sweep " + " ".join(map(quoted, sweep.overrides)),
        overrides=sweep.overrides,
        points=tuple(SweepPoint(point.fingerprint, point.varying) for point in sweep.points),
    )


def _ours(bar: Bar, grids: Grids, values: Mapping[str, float]) -> float:
    if bar.value is None:
        return float(values[bar.take])
    return _metric(bar.value, grids) / (_metric(bar.over, grids) if bar.over else 1.0)


def _metric(place: Place, grids: Grids) -> float:
    grid, chosen, metrics = place
    found = [record for record in grids[grid] if set(chosen) <= set(record.overrides)]
    if len(found) != 1:
        raise UserError(f"{len(found)} points of the grid {grid} have {' '.join(chosen)}; one must")
    return sum(float(found[0].simulated[metric]) for metric in metrics.split("+"))


def _curves(found: Experiment, grids: Grids) -> Mapping[str, Sequence[tuple[float, float]]]:
    """Points (x, value) of each curve, by what else varies in the grid."""
    if found.curves is None:
        return {}
    grid, key, metric = found.curves
    lines: dict[str, list[tuple[float, float]]] = {}
    for record in grids[grid]:
        varying = dict(word.split("=", 1) for word in record.label.split())
        x = float(varying.pop(key))
        lines.setdefault(", ".join(varying.values()), []).append((x, float(record.simulated[metric])))
    return lines
