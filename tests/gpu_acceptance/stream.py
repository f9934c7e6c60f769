"""A pytest plugin that keeps each result at once: a test that hangs or ends its process loses nothing but itself.

`-p gpu_acceptance.stream --stream FILE.jsonl --test-limit 60` writes a line for each test, and a last one when the
tests have ended. A test that takes longer ends its process, which pytest-xdist replaces.
"""

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

_TRACES = os.dup(2)  # pytest takes the other one during a test


def append(file: IO[str], **facts: Any) -> None:
    """Write a line that survives the end of this process, and of the machine's."""
    file.write(json.dumps(facts) + "\n")
    file.flush()
    os.fsync(file.fileno())


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's two options."""
    parser.addoption("--stream", metavar="FILE", help="write a line for each test to this file")
    parser.addoption("--test-limit", type=float, default=60.0, metavar="S", help="seconds of a test at most")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist send their reports to the first process, which alone writes."""
    file = config.getoption("--stream")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Stream(Path(file)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """End the process of a test that has taken too long. A wait for a GPU cannot be interrupted in any other way."""
    faulthandler.dump_traceback_later(item.config.getoption("--test-limit"), exit=True, file=_TRACES)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


class _Stream:
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            append(self._file, test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        append(self._file, ended=int(exitstatus))
