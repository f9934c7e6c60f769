"""One point, from configuration to commit: the same in this process and in a worker."""

import importlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.plan.planning import PlannedPoint
from harness.store.commit import commit_failure, commit_point

Progress = Callable[[str, int, int], None]  # phase, requests done, requests in all


class PointResult(Protocol):
    """What running a point gives."""

    @property
    def record(self) -> dict[str, Any]:
        """The sections of `record.json` but for those that say which point it is."""
        ...

    @property
    def tables(self) -> Mapping[str, Mapping[str, Any]]:
        """`steps` and `requests`, columns by name."""
        ...


class PointRunner(Protocol):
    """Runs one point; named as `module:function`, so that a worker process can find it."""

    def __call__(self, config: RunConfig, *, progress: Progress | None = None) -> PointResult:
        """Run the point; anything it raises makes the point a failed one."""
        ...


@dataclass(frozen=True)
class Failed:
    """A point that did not finish: the last line of what went wrong, and the file with all of it."""

    label: str
    error: str
    file: Path


def find_runner(name: str) -> PointRunner:
    """The point runner called `module:function`. Imports it, and what it needs."""
    module, _, function = name.partition(":")
    runner: PointRunner = getattr(importlib.import_module(module), function)
    return runner


def run_and_commit(
    point: PlannedPoint, out: Path, runner: str, progress: Progress | None = None
) -> Failed | None:
    """Run a point and store its record, or store its failure and return it.

    Raises:
        StoreError: the store cannot be written, so that no further point would be kept either.
    """
    started = time.perf_counter()
    try:
        result = find_runner(runner)(point.config, progress=progress)
    except Exception as error:  # whatever a point does wrong must not take the others with it
        return _store_failure(point, out, error)
    seconds = {**result.record.get("seconds", {}), "point": time.perf_counter() - started}
    record = {**_which(point), **result.record, "seconds": seconds}
    commit_point(out, point.fingerprint, record, result.tables)
    return None


def store_failure(point: PlannedPoint, out: Path, error: str, lines: list[str]) -> Failed:
    """Store a failure that has `lines` to tell; the traceback is a list of lines so that a person can read it."""
    file = commit_failure(out, point.fingerprint, {**_which(point), "error": error, "traceback": lines})
    return Failed(point.label, error, file)


def _store_failure(point: PlannedPoint, out: Path, error: Exception) -> Failed:
    lines = "".join(traceback.format_exception(error)).splitlines()
    message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return store_failure(point, out, _one_line(message), lines)


def _one_line(message: str) -> str:
    """A message that other libraries wrote over several lines, for a list with one line a point."""
    return " ".join(message.split())


def _which(point: PlannedPoint) -> dict[str, Any]:
    return {
        "name": point.config.name,
        "label": point.label,
        "overrides": list(point.overrides),
        "config": asdict(point.config),
    }
