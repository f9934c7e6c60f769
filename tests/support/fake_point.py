"""A light stand-in for harness.point and harness.report. A test passes this module to `harness.cli.main.main`.

`trace.name` says what a point does; `cost.cache_dir`, which is no part of a point's identity, names a folder where
each run leaves a line in `runs.txt`, where a file `fixed` makes failing points work, and where a file `limit` holds
the number of runs that may go on: each run after them waits until the number is raised or the file is gone.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.metrics.record import PointRecord

LONGEST_WAIT_S = 120  # a safety net: no test rests on it


def heed_every_signal() -> None:
    """Undo what nohup, a shell's background or a supervisor hands down: signals that are ignored or blocked.

    A script calls it first. Before the script, in a fork of a process with threads, Python code can hang.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.default_int_handler if name is signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@dataclass(frozen=True)
class Result:
    record: PointRecord
    tables: dict[str, dict[str, Any]]
    files: dict[str, bytes] = field(default_factory=dict)


class ReportError(ValueError):
    pass


def check_point(config: Any) -> None:
    if config.trace.name == "never-fits":
        raise ConfigError("cache.pool_tokens", "request 3 needs 99 blocks, the pool has 9")


def point_identity(config: Any) -> dict[str, str]:
    return {"trace": config.trace.name}


def run_point(config: Any, *, progress: Any = None) -> Result:
    notes = Path(config.cost.cache_dir) if config.cost.cache_dir else None
    if notes is not None:
        _wait_below_the_limit(notes, _note_run(notes, f"{config.trace.name} {config.workload.seed}\n"))
    if progress is not None:
        progress("measuring", 1, 2)
    if config.trace.name == "fail" and not (notes and (notes / "fixed").exists()):
        raise RuntimeError("the point is broken")
    if config.trace.name == "die":
        os._exit(9)
    if config.trace.name == "interrupt" and not (notes and (notes / "fixed").exists()):
        raise KeyboardInterrupt
    record = PointRecord(simulated={"metric": config.workload.seed}, seconds={"all": 0.0})
    return Result(record, {"steps": {"step": list(range(1000))}, "requests": {"request_id": [0, 1]}})


def point_stages(config: Any, *, progress: Any = None, kept: Any = None) -> Generator[None, None, Result]:
    for _ in range(config.replay.repeats):
        yield
    return run_point(config, progress=progress)


def _note_run(notes: Path, line: str) -> int:
    """Append the line of a run, and return its number from 1, whatever other workers append meanwhile."""
    with (notes / "runs.txt").open("ab", buffering=0) as file:
        file.write(line.encode())
        end = file.tell()  # unbuffered: where this line ends
    return (notes / "runs.txt").read_bytes()[:end].count(b"\n")


def _wait_below_the_limit(notes: Path, number: int) -> None:
    end = time.monotonic() + LONGEST_WAIT_S
    while (notes / "limit").exists() and number > int((notes / "limit").read_text() or 0):
        if time.monotonic() > end:
            raise SystemExit("nobody raised the limit or stopped the process")  # it ends the sweep
        time.sleep(0.01)


def write_report(
    store_root: Path,
    *,
    tell: Callable[[str], None],
    out: Path | None = None,
    additions: Sequence[Any] = (),
    rows: Any = None,
    options: Any = None,
) -> Path:
    tell("prediction and measurement agree")
    page = (out or store_root) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(json.dumps(json.loads((store_root / "sweep.json").read_text())["points"]))
    return page


class Session:
    """The functions of this module as an object that is pickled for other processes."""

    check_point = staticmethod(check_point)
    point_identity = staticmethod(point_identity)
    run_point = staticmethod(run_point)
    point_stages = staticmethod(point_stages)
