"""How long the points of a sweep take, learned from the points that a store holds, and what is shown while they run.

The seconds of a point are a fixed part and a part for each request and run: one simulated and, of a measured point,
`replay.repeats` measured. Both are fitted by least squares of relative errors to earlier points of the same kind
(measured or not, cache policy, model, device, cost model, beams or not), or, where there are none, to all points that
were measured or not alike. The interval holds the scatter of the points about the fit and the few points that it was
fitted to (Student's t, 95 %). Where nothing was learned nothing is said: a guess would be taken for a measurement.
The same fit groups points into jobs of Slurm, and says during a sweep what is left.

Progress is one live line on a terminal, one line for each tenth of the work everywhere else.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from harness.config.checks import value_of
from harness.config.schema import Place, RunConfig
from harness.metrics.record import PointRecord
from harness.sweep.plan import PlannedPoint, SweepPlan

_CONFIDENCE = 0.975  # of one side
_UNKNOWN = 1000  # requests of a trace in a file without a limit
# points at a time: after so many this sweep's own speed counts as much as that of earlier points
_TRUSTED = 2

Kind = tuple[Any, ...]
Sample = tuple[float, float]  # requests times runs, seconds


@dataclass(frozen=True)
class Span:
    """Seconds with their 95 % interval; None where one earlier point says nothing of the scatter."""

    seconds: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class TimeFit:
    """Seconds of a kind of point, and how far they scatter about the fit."""

    fixed: float
    each: float  # seconds a request and run
    scatter: float | None  # relative standard deviation of a point
    points: int
    known: int  # parameters that were fitted

    def seconds(self, work: float) -> float:
        """Seconds of a point with `work` requests times runs."""
        return self.fixed + self.each * work

    def variance(self, took: float, alone: float) -> float | None:
        """Of `took` seconds in all: of the fit itself, and of points whose squared seconds sum up to `alone`."""
        if self.scatter is None:
            return None
        return self.scatter**2 * (took**2 * self.known / self.points + alone)


@dataclass(frozen=True)
class TimeModel:
    """What was learned from earlier points: a fit for each kind of point, and for measured points or not."""

    fits: Mapping[Kind, TimeFit]
    points: int

    def seconds(self, config: RunConfig) -> float | None:
        """Seconds of one point; None: not known."""
        fit = self._fit(config)
        return None if fit is None else fit.seconds(work_of(config))

    def duration(self, todo: Iterable[PlannedPoint], workers: int) -> Span | None:
        """Seconds that `todo` takes: measured points one after the other, the others on `workers`. None: not known."""
        took: dict[tuple[bool, TimeFit], list[float]] = {}
        for point in todo:
            fit = self._fit(point.config)
            if fit is None:
                return None
            took.setdefault((point.config.measure, fit), []).append(fit.seconds(work_of(point.config)))
        total, variance = 0.0, 0.0
        for (measured, fit), seconds in took.items():
            share = 1 if measured else 1 / workers
            total += share * sum(seconds)
            part = fit.variance(sum(seconds), sum(each**2 for each in seconds))
            variance = float("nan") if part is None else variance + share**2 * part
        if variance != variance:
            return Span(total, None, None)
        if not took:
            return Span(0.0, 0.0, 0.0)
        from scipy.special import stdtrit

        freedom = min(fit.points - fit.known for _, fit in took)
        half = float(stdtrit(freedom, _CONFIDENCE)) * sqrt(variance)
        return Span(total, max(0.0, total - half), total + half)

    def _fit(self, config: RunConfig) -> TimeFit | None:
        kind = _kind(partial(value_of, config))
        return self.fits.get(kind) or self.fits.get(kind[:1])


class TimeLeft:
    """How long the rest of a sweep takes: the cost model, corrected by how fast this sweep goes.

    Args:
        times: what was learned from earlier points; where it does not know a point, work stands for seconds.
        todo: the points that run.
        workers: that run simulation-only points at the same time.
        clock: seconds; a test passes its own.
    """

    def __init__(
        self,
        times: TimeModel,
        todo: Sequence[PlannedPoint],
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = None not in [times.seconds(point.config) for point in todo]
        self._cost = times.seconds if self._known else work_of
        self._workers, self._clock = max(1, min(workers, len(todo))), clock
        self._left = sum(map(self._share, todo))
        self._prior = _TRUSTED * self._left / len(todo) if todo and self._known else 0.0
        self._begun = self._last = clock()
        self._done = 0.0
        self._runs: dict[str, int] = {}  # that are done, of points that run in stages

    def ran(self, point: PlannedPoint) -> None:
        """A point is ready for its first measured run, or one of its runs is done."""
        runs = self._runs.get(point.fingerprint)
        if runs is None and not self._done:  # start-up and calibrations, which later points do not repeat
            self._begun = self._last = self._clock()
        self._runs[point.fingerprint] = 0 if runs is None else runs + 1
        if runs is not None:
            self._less(self._share(point) / point.config.replay.repeats)

    def ended(self, point: PlannedPoint) -> None:
        """A point is committed or has failed."""
        runs, repeats = self._runs.pop(point.fingerprint, 0), point.config.replay.repeats
        self._less(self._share(point) * (1 - runs / repeats if repeats else 1.0))

    @property
    def share(self) -> float:
        """The share of the work that is done."""
        return self._done / (self._done + self._left) if self._done + self._left else 1.0

    def _less(self, work: float) -> None:
        self._done, self._left, self._last = self._done + work, max(0.0, self._left - work), self._clock()

    def seconds(self) -> float | None:
        """Seconds from now to the end; None while nothing is known."""
        weight = self._done + self._prior
        if not weight:
            return None
        left = self._left * (self._last - self._begun + self._prior) / weight
        return max(0.0, left - (self._clock() - self._last))

    def _share(self, point: PlannedPoint) -> float:
        return float(self._cost(point.config) or 0.0) / (1 if point.config.measure else self._workers)


def time_model(records: Iterable[PointRecord]) -> TimeModel:
    """The times of earlier points. Records of older versions, which hold no seconds, do not count."""
    seen: dict[Kind, list[Sample]] = {}
    count = 0
    for record in records:
        sample = _sample(record)
        if sample is not None:
            kind, count = _kind(record.setting), count + 1
            seen.setdefault(kind, []).append(sample)
            seen.setdefault(kind[:1], []).append(sample)
    return TimeModel({kind: fitted(samples) for kind, samples in seen.items()}, count)


def fitted(samples: Sequence[Sample]) -> TimeFit:
    """The fit of relative errors to (requests times runs, seconds); one part alone where both cannot be told apart."""
    work, seconds = np.array(samples, dtype=float).T
    parts = np.stack([1 / seconds, work / seconds], axis=1)
    fixed, each, known = 0.0, float(np.mean(seconds / work)), 1
    if len(set(work)) > 1 and len(work) > 2:
        found = np.linalg.lstsq(parts, np.ones(len(work)), rcond=None)[0]
        if found.min() >= 0:
            fixed, each, known = float(found[0]), float(found[1]), 2
        elif np.ptp(seconds / seconds.mean()) < np.ptp(work * each / seconds):
            fixed, each = float(np.mean(seconds)), 0.0  # larger points are not slower
    left = len(work) - known
    errors = seconds / (fixed + each * work) - 1
    scatter = sqrt(float(errors @ errors) / left) if left > 0 else None
    return TimeFit(fixed, each, scatter, len(work), known)


def at_once(sweep: SweepPlan) -> int:
    """Simulation-only points that run at the same time. A Ray cluster elsewhere counts as one core."""
    execute = sweep.points[0].config.execute
    if execute.place is Place.slurm:
        return execute.jobs * execute.cpus
    if (
        execute.place is Place.ray
        and (execute.address or os.environ.get("RAY_ADDRESS") or "local") != "local"
    ):
        return 1
    return sweep.workers or os.cpu_count() or 1


def work_of(config: RunConfig) -> int:
    """The size of a point: requests times runs; a trace in a file without a limit counts as 1,000 requests."""
    return (config.workload.num_requests or _UNKNOWN) * (1 + config.replay.repeats if config.measure else 1)


def _kind(setting: Callable[[str], Any]) -> Kind:
    """What kind of point it is, whether it is measured first; `setting` gives the value at a dotted key."""
    words = ("cache.policy", "model.name", "model.path", "device.name", "cost.kind")
    beams = (setting("decoding.beam_width") or 1) > 1
    return (bool(setting("measure")), *(str(setting(key)) for key in words), beams)


def _sample(record: PointRecord) -> Sample | None:
    seconds, requests = record.seconds.get("point"), record.trace.get("requests")
    if not isinstance(seconds, float) or not isinstance(requests, int) or requests < 1 or seconds <= 0:
        return None
    repeats = record.setting("replay.repeats") if record.setting("measure") else 0
    return float(requests * (1 + repeats if isinstance(repeats, int) else 1)), seconds


WORTH_SAYING_S = 30  # of time that a sweep takes
CALIBRATING = "calibrating"  # begins the phases that are no stage of a point
_CALIBRATION_S = 60.0  # of the calibration before a first measured point, on a quiet machine
_LEAST_COLUMNS_FOR_BAR = 60  # a narrower terminal gets no bar


@dataclass(frozen=True)
class Failed:
    """A point that did not finish: its error in one line, and the file that holds the traceback."""

    label: str
    error: str
    file: Path


class Reporter(Protocol):
    """Receives the events of a sweep."""

    def starts(self, point: PlannedPoint) -> None:
        """A point starts in this process, or goes on after other points ran."""

    def request(self, phase: str, done: int, total: int) -> None:
        """The running point has finished `done` of its `total` requests."""

    def ran(self, point: PlannedPoint) -> None:
        """A stage of a point is done: its preparation or one of its runs."""

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """A point is committed or has failed."""

    def says(self, text: str) -> None:
        """Something about the whole sweep, such as why nothing runs."""


@contextmanager
def reporting(total: int, done: int, console: Console, left: TimeLeft) -> Iterator[Reporter]:
    """A reporter for `total` points, of which `done` were finished by earlier runs; `left` times the others."""
    if not console.is_terminal or console.is_dumb_terminal:  # a dumb one cannot redraw a line
        yield PlainReporter(total, done, console, left)
        return
    with Progress(*_columns(console.width, left), console=console, transient=True, expand=True) as bar:
        yield LiveReporter(bar, total, done, left)


class _LeftColumn(ProgressColumn):
    """The time left."""

    max_refresh = 0.5

    def __init__(self, left: TimeLeft) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._time_left = left

    def render(self, task: Task) -> Text:
        """As words; dashes while nothing is known."""
        seconds = self._time_left.seconds()
        return Text("-- left" if seconds is None else f"{duration(seconds)} left", style="progress.remaining")


def _columns(width: int, left: TimeLeft) -> tuple[ProgressColumn, ...]:
    """The columns of the live line: counts and time left always, the bar where it fits, the description cut to fit."""
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return (
        *([TextColumn("points"), BarColumn(bar_width=20)] if width >= _LEAST_COLUMNS_FOR_BAR else []),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _LeftColumn(left),
        TextColumn("{task.description}", table_column=rest),
    )


class LiveReporter:
    """Points done, time left, and the running point with its request count, in one line that is redrawn."""

    def __init__(self, bar: Progress, total: int, done: int, left: TimeLeft) -> None:
        self._bar, self._left = bar, left
        self._task = bar.add_task("", total=total, completed=done)
        self._label = ""

    def starts(self, point: PlannedPoint) -> None:
        """Show the point's label."""
        self._label = escape(point.label)
        self._bar.update(self._task, description=self._label)

    def request(self, phase: str, done: int, total: int) -> None:
        """Show the request count."""
        self._bar.update(self._task, description=f"{done}/{total} requests, {phase}  {self._label}")

    def ran(self, point: PlannedPoint) -> None:
        """Less time is left."""
        self._left.ran(point)

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """Advance the count. A failure is printed above the live line."""
        self._left.ended(point)
        if failed is not None:
            self._bar.console.print(f"[red]failed[/red]  {escape(point.label)}: {escape(failed.error)}")
        self._bar.update(self._task, advance=1)

    def says(self, text: str) -> None:
        """Print the text above the live line."""
        self._bar.console.print(escape(text), highlight=False)


class PlainReporter:
    """A line for each tenth of the work, with what is left, for logs and for terminals that cannot redraw.

    A calibration, which comes before the points that need it, has tenths of its own; every failure has a line.
    """

    def __init__(self, total: int, done: int, console: Console, left: TimeLeft) -> None:
        self._total, self._done = total, done
        self._console, self._left = console, left
        self._tenth = self._calibrated = -1  # of the work, of the running calibration
        self._begun = 0.0

    def starts(self, point: PlannedPoint) -> None:
        """Say how long it will take, where earlier points tell."""
        del point
        self._tell()

    def request(self, phase: str, done: int, total: int) -> None:
        """Say how far a calibration is."""
        if not phase.startswith(CALIBRATING) or not total:
            return
        if not done:
            self._begun, self._calibrated = time.monotonic(), -1
        tenth = 10 * done // total
        if tenth > self._calibrated:
            self._calibrated = tenth
            left = (time.monotonic() - self._begun) * (total / done - 1) if done else _CALIBRATION_S
            self._print(f"{CALIBRATING} the cost model: {done} of {total} cases, about {duration(left)} left")

    def ran(self, point: PlannedPoint) -> None:
        """Less time is left."""
        self._left.ran(point)
        self._tell()

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """One more point is done; a failure has a line."""
        self._left.ended(point)
        self._done += 1
        if failed is not None:
            self._print(f"[{self._done}/{self._total}] {point.label}  FAILED: {failed.error}")
        self._tell()

    def says(self, text: str) -> None:
        """Print the text as a line."""
        self._print(text)

    def _tell(self) -> None:
        tenth, seconds = int(10 * self._left.share + 1e-9), self._left.seconds()
        if seconds is None or tenth <= self._tenth:
            return
        self._tenth = tenth
        rest = f", about {duration(seconds)} left" if tenth < 10 else ""
        self._print(f"[{self._done}/{self._total}] {10 * tenth} % of the work done{rest}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time as people say it: 40 s, 5 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
