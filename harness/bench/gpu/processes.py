"""Start a command against the clock; when its time is up, end it with all that it started.

A benchmark runs in a process that a step's process started. Left alone it would go on using the GPU under the next
step, so a step has a process group of its own.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

GRACE_S = 8.0  # from the asking to the ending: a sweep keeps its points meanwhile


def run_for(
    words: Sequence[str], seconds: float, output: IO[str], folder: Path, environment: Mapping[str, str]
) -> int | None:
    """The exit code of the command, its output in `output`; None where it was ended because `seconds` were over."""
    process = subprocess.Popen(
        words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also when we are interrupted ourselves, and for what a finished command left behind
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal(process.pid, number):
            break
        deadline = time.monotonic() + GRACE_S
        while _signal(process.pid, 0) and time.monotonic() < deadline:
            process.poll()  # the leader stays a member of its group until it is waited for
            time.sleep(0.05)
    process.wait()


def _signal(group: int, number: int) -> bool:
    """Whether the group still had members to be told."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
