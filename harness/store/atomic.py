"""Files that appear whole or not at all: temporary file in the same folder, fsync, rename, fsync of the folder."""

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from harness.store.errors import write_failed

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
