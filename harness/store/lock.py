"""One sweep at a time in a store: two would run the same points twice and write each other's report."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.store.errors import BusyStoreError, write_failed

_NAME = ".lock"


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Hold the store at `root`, created if need be. The system lets go of it when the process ends, however it ends.

    Raises:
        BusyStoreError: another process holds it; names that process.
        StoreError: the folder cannot be created, or nothing written in it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_failed(root, error) from error
    try:
        _take(root, handle)
        yield
    finally:
        os.close(handle)


def _take(root: Path, handle: int) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 20).decode("ascii", "replace").strip()
        raise BusyStoreError(
            f"another sweep (process {holder or 'unknown'}) is writing to '{root}'; "
            "wait for it, or choose another folder with out=..."
        ) from None
    except OSError:
        return  # a file system without locks (some network mounts): as before there were any
    _sign(handle)


def _sign(handle: int) -> None:
    """Leave our process id for the message of whoever comes second; a full disk must not stop us here."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        return
