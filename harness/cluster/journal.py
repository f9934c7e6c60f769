"""The journal of a task: one line of JSON for what happens to each of its points, in the private folder.

The job appends, the driver reads. A point that began and neither ended nor was let go was cut off when its job died.
"""

import json
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED, BEGAN, DONE, FAILED, LET_GO, STOPPED = "started", "began", "done", "failed", "let_go", "stopped"


@dataclass
class Told:
    """What a journal tells, all starts of the task together."""

    starts: int = 0
    done: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)  # began in the last start, and not ended
    cut_off: Counter[str] = field(default_factory=Counter)  # how often a job ended with the point
    stopped: str | None = None  # why the task could not go on at all


class Journal:
    """The journal of one task. Several processes of a job may append to it."""

    def __init__(self, folder: Path, task: str) -> None:
        self.path = folder / f"{task}.jsonl"

    def add(self, what: str, value: str | bool = True) -> None:
        """Append a line, in one call of the system so that lines of several processes do not mix.

        Raises:
            OSError: the private folder cannot be written.
        """
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, json.dumps({what: value}).encode() + b"\n")
        finally:
            os.close(handle)

    def size(self) -> int:
        """Bytes; 0 where the task has not started."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self) -> Told:
        """What the journal tells so far. A line that is not whole yet is left for later."""
        told = Told()
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]
        except OSError:
            return told
        for line in lines:
            _take(told, line)
        return told


def _take(told: Told, line: bytes) -> None:
    try:
        entry: Any = json.loads(line)
        ((what, value),) = entry.items()
    except (ValueError, AttributeError):
        return  # cut off by a crash of the node
    name = str(value)
    if what == STARTED:
        told.cut_off.update(told.running)
        told.running.clear()
        told.starts += 1
    elif what == BEGAN:
        told.running.add(name)
    elif what in (DONE, FAILED):
        told.running.discard(name)
        (told.done if what == DONE else told.failed).add(name)
    elif what == LET_GO:
        told.running.clear()
    elif what == STOPPED:
        told.stopped = name
