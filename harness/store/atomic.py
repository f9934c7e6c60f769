"""Files that are written whole or not at all, and the lock of a store.

A file is written to a temporary name in the same folder, flushed to disk and renamed. The lock allows one sweep at a
time in a store: two sweeps would run the same points twice and overwrite each other's report.
"""

import fcntl
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from harness.store import BusyStoreError, StoreError, write_failed

_LOCK = ".lock"
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<owner>[\w-]+)\.tmp")
_PROBE = re.compile(r"probe-(?P<owner>[\w-]+)")
_MAYBE = re.compile(r"\..+\.tmp$|probe-")
_OWNER = re.compile(r"(?:(?P<host>\w+)-)?(?P<pid>\d{1,9})(?:-(?P<start>\d+))?")


def write_files(folder: Path, files: Mapping[str, bytes], *, last: str | None = None) -> None:
    """Write several files of one folder; all are on disk under temporary names before the first is renamed.

    Args:
        folder: created where it is missing.
        files: content by file name, renamed in this order.
        last: the file whose presence marks the others as complete. An older one is deleted before the first rename,
            so that a mixture of old and new files is never taken for complete.

    Raises:
        StoreError: a write failed (disk full, no permission); the folder is as it was, without temporary files.
    """
    fresh = not folder.exists()
    staged = {name: folder / f".{name}.{owner()}.tmp" for name in files}
    with _or_nothing(folder, staged.values(), fresh):
        for name, data in files.items():
            _write(staged[name], data)
        if last is not None:
            (folder / last).unlink(missing_ok=True)
        for name, temporary in staged.items():
            os.replace(temporary, folder / name)
        _sync_folder(folder)
        if fresh:
            _sync_folder(folder.parent)


@contextmanager
def growing(folder: Path, name: str) -> Iterator[TextIO]:
    """A UTF-8 text file that is written piece by piece, and has its name when the block ends without an error.

    Raises:
        StoreError: a write failed; an earlier file of the name is as it was.
    """
    temporary = folder / f".{name}.{owner()}.tmp"
    with _or_nothing(folder, [temporary]):
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / name)
        _sync_folder(folder)


def check_writable(folder: Path) -> None:
    """Create a folder and write a file to it, to check that it can be written.

    Raises:
        StoreError: it cannot be written; says why.
    """
    probe = f"probe-{owner()}"
    write_files(folder, {probe: b"pagetwin"})
    (folder / probe).unlink()


def remove_leftovers(folder: Path) -> int:
    """Delete the files that processes left behind when they were killed while writing; returns their number."""
    files = (Path(top, name) for top, _, names in os.walk(folder) for name in names if _MAYBE.match(name))
    gone = [path for path in files if _is_abandoned(path)]
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


@contextmanager
def _or_nothing(folder: Path, temporaries: Iterable[Path], fresh: bool = False) -> Iterator[None]:
    """Write in a folder, which is created where it is missing. An error or Ctrl-C deletes what is half written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        with suppress(OSError):  # the error that led here is told
            for path in temporaries:
                path.unlink(missing_ok=True)
            if fresh:
                folder.rmdir()
        if isinstance(error, OSError):
            raise write_failed(folder, error) from error
        raise


def owner() -> str:
    """This process as part of a file name: machine, process id and start, so that a later process is not mistaken."""
    return f"{_host()}-{os.getpid()}-{_start_of(os.getpid())}"


def _host() -> str:
    return re.sub(r"\W", "", platform.node()) or "here"


def _start_of(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where the system does not say, -1 where it has ended.

    One that has ended stays in the table of processes until its parent asks for it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # from field 3 on; the name in brackets may hold spaces
    return -1 if fields[0] in "ZX" else int(fields[19])


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes this file any more: its process has ended, or is this one."""
    named = _TEMPORARY.fullmatch(path.name) or _PROBE.fullmatch(path.name)
    return named is not None and (named["owner"] == owner() or has_ended(named["owner"]))


def has_ended(name: str) -> bool:
    """Whether the process of this name (`owner`) has ended. Of other machines nothing is known: False."""
    found = _OWNER.fullmatch(name)
    if found is None or found["host"] not in (None, _host()):
        return False
    pid = int(found["pid"])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    if found["start"] is None:
        return pid == os.getpid()
    return int(found["start"]) != _start_of(pid)


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Lock the store at `root`, which is created where it is missing. The lock ends with the process at the latest.

    Raises:
        BusyStoreError: another process holds the lock; names that process.
        StoreError: the folder cannot be created or written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_failed(root, error) from error
    try:
        refuse_links(root)
        _take(root, handle)
        yield
        os.ftruncate(handle, 0)  # it names no process any more
    finally:
        os.close(handle)


def refuse_links(root: Path) -> None:
    """Raise StoreError where a folder of the store is a link: one that was downloaded could lead writing anywhere."""
    folders = [root, root / "points", root / "report"]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                link = next((entry.path for entry in entries if entry.is_symlink()), None)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if link is not None:
            raise StoreError(
                f"{link} is a link, and what is written there would lie elsewhere; put a real folder there"
            )


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
        return  # a file system without locks (some network mounts): go on without one
    _sign(handle)


def _sign(handle: int) -> None:
    """Write our process id for the error message of a second process; a full disk is ignored here."""
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    except OSError:
        return
