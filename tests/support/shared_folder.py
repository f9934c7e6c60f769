"""What one worker of a test run makes and all of them read."""

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` that `make` has filled: by the first worker that asks, while the others wait for it."""
    base = factory.getbasetemp()
    if base.name.startswith("popen-gw"):
        base = base.parent  # each worker has a folder of its own in that of the run
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir()  # a second attempt, after the first failed, fails too
            make(folder)
            done.touch()
    return folder
