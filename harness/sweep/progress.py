"""What a user sees while points run: a live line on a terminal, one line for each point everywhere else."""

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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from harness.sweep.plan import PlannedPoint


@dataclass(frozen=True)
class Failed:
    """A point that did not finish: the last line of what went wrong, and the file with all of it."""

    label: str
    error: str
    file: Path


_ROOM_FOR_A_BAR = 60  # columns of a terminal


class Reporter(Protocol):
    """Is told what happens to the points of a sweep."""

    def starts(self, point: PlannedPoint) -> None:
        """A point begins in this process."""
        ...

    def request(self, phase: str, done: int, total: int) -> None:
        """The running point has finished `done` of its `total` requests."""
        ...

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """A point is committed or has failed."""
        ...


@contextmanager
def reporting(total: int, done: int, console: Console) -> Iterator[Reporter]:
    """A reporter for `total` points of which `done` were there already."""
    if not console.is_terminal:
        yield PlainReporter(total, done, console)
        return
    with Progress(*_columns(console.width), console=console, transient=True, expand=True) as bar:
        yield LiveReporter(bar, total, done)


def _columns(width: int) -> tuple[ProgressColumn, ...]:
    """Counts and time left always show; the bar goes on a narrow terminal, and the description is cut as it must."""
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return (
        *([TextColumn("points"), BarColumn(bar_width=20)] if width >= _ROOM_FOR_A_BAR else []),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        TextColumn("{task.description}", table_column=rest),
    )


class LiveReporter:
    """Points done, time left, and the running point with its request count, in one line that is redrawn."""

    def __init__(self, bar: Progress, total: int, done: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total, completed=done)
        self._label = ""

    def starts(self, point: PlannedPoint) -> None:
        """Show the point's label."""
        self._label = escape(point.label)
        self._bar.update(self._task, description=self._label)

    def request(self, phase: str, done: int, total: int) -> None:
        """Show the request count."""
        self._bar.update(self._task, description=f"{done}/{total} requests, {phase}  {self._label}")

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """Advance; a failure is printed above the bar."""
        if failed is not None:
            self._bar.console.print(f"[red]failed[/red]  {escape(point.label)}: {escape(failed.error)}")
        self._bar.update(self._task, advance=1)


class PlainReporter:
    """One line a point, for logs."""

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._total, self._done, self._console = total, done, console

    def starts(self, point: PlannedPoint) -> None:
        """Nothing: the line comes when the point ends."""

    def request(self, phase: str, done: int, total: int) -> None:
        """Nothing: a log is no place for a count that changes."""

    def ends(self, point: PlannedPoint, failed: Failed | None) -> None:
        """Print the point's line."""
        self._done += 1
        outcome = "done" if failed is None else f"FAILED: {failed.error}"
        line = f"[{self._done}/{self._total}] {point.label}  {outcome}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
