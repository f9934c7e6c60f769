"""Files that appear whole or not at all, and the lock of a store.

A file is written to a temporary name in the same folder, flushed to disk and renamed. The lock allows one sweep at a
time in a store: two sweeps would run the same points twice and overwrite each other's report.
"""

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.store.errors import BusyStoreError, write_failed

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,9})\.tmp")


def write_files(folder: Path, files: Mapping[str, bytes], *, last: str | None = None) -> None:
    """Write several files of one folder; all are safely on disk under temporary names before any gets its own.

    Args:
        folder: created if need be.
        files: content by file name, renamed in this order.
        last: the file whose presence says that the others are complete: an older one goes away before the first
            rename, so that no mixture of old and new can pass for a whole.

    Raises:
        StoreError: a write failed (disk full, no permission); the folder is as it was, without temporary files.
    """
    fresh = not folder.exists()
    staged = {name: folder / f".{name}.{os.getpid()}.tmp" for name in files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            _write(staged[name], data)
        if last is not None:
            (folder / last).unlink(missing_ok=True)
        for name, temporary in staged.items():
            os.replace(temporary, folder / name)
        _sync_folder(folder)
        if fresh:
            _sync_folder(folder.parent)
    except OSError as error:
        _discard(folder, staged.values(), fresh)
        raise write_failed(folder, error) from error
    except BaseException:  # Ctrl-C: leave nothing half-written behind
        _discard(folder, staged.values(), fresh)
        raise


def check_writable(folder: Path) -> None:
    """Create a folder and prove that it can be written.

    Raises:
        StoreError: it cannot; says why.
    """
    probe = f"probe-{os.getpid()}"
    write_files(folder, {probe: b"pagetwin"})
    (folder / probe).unlink()


def remove_leftovers(folder: Path) -> int:
    """Delete temporary files of processes that are gone (killed while writing); returns how many."""
    gone = [path for path in folder.rglob(".*.tmp") if _is_abandoned(path)]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _discard(folder: Path, temporaries: Iterable[Path], fresh: bool) -> None:
    """Best effort: the error that brought us here is the one to report, not one of the clean-up."""
    with suppress(OSError):
        for path in temporaries:
            path.unlink(missing_ok=True)
        if fresh:
            folder.rmdir()


def _is_abandoned(path: Path) -> bool:
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    try:
        os.kill(int(match["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return int(match["pid"]) == os.getpid()


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
