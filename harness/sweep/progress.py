"""Progress of a sweep: one live line on a terminal, one line for each stage and each point everywhere else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from harness.sweep.estimate import TimeLeft
from harness.sweep.plan import PlannedPoint

WORTH_SAYING_S = 30  # of time left, on a line of a log
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
        ...

    def request(self, phase: str, done: int, total: int) -> None:
        """The running point has finished `done` of its `total` requests."""
        ...

    def ran(self, point: PlannedPoint) -> None:
        """A stage of a point is done: its preparation or one of its runs."""
        ...

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """A point is committed or has failed."""
        ...

    def says(self, text: str) -> None:
        """Something about the whole sweep, such as why nothing runs."""
        ...


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
    """One line for each point and each stage of a measured one, for logs and for terminals that cannot redraw."""

    def __init__(self, total: int, done: int, console: Console, left: TimeLeft) -> None:
        self._total, self._before, self._done = total, done, done
        self._console, self._left = console, left
        self._numbers: dict[str, int] = {}  # of the points that have begun
        self._label, self._phase = "", ""

    def starts(self, point: PlannedPoint) -> None:
        """Remember the point for the lines of its stages."""
        number = self._numbers.setdefault(point.fingerprint, self._before + len(self._numbers) + 1)
        self._label, self._phase = f"[{number}/{self._total}] {point.label}", ""

    def request(self, phase: str, done: int, total: int) -> None:
        """Print a line when a stage begins, with what is left of it."""
        if phase != self._phase:
            self._phase = phase
            self._print(f"{self._label}  {phase}, {done:,} of {total:,}")

    def ran(self, point: PlannedPoint) -> None:
        """Less time is left."""
        self._left.ran(point)

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """Print the point's line, and how long the rest will take if that is long."""
        self._left.ended(point)
        self._done += 1
        outcome = "done" if failed is None else f"FAILED: {failed.error}"
        self._print(f"[{self._done}/{self._total}] {point.label}  {outcome}{self._rest()}")

    def says(self, text: str) -> None:
        """Print the text as a line."""
        self._print(text)

    def _rest(self) -> str:
        seconds = self._left.seconds() or 0.0
        return f"  (about {duration(seconds)} left)" if seconds >= WORTH_SAYING_S else ""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """A time as people say it: 40 s, 5 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"
