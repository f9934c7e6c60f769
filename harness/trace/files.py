"""Trace files: public traces in the user's cache, and traces that an action writes.

A trace is written completely or not at all. An existing file is replaced only with `--overwrite`.
"""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

from harness.config.errors import UserError
from harness.console import say
from traces.catalogue import CatalogueEntry, catalogue, public_trace
from traces.synth.generator import GENERATORS
from traces.trace import Trace

Write = Callable[[Trace, str | Path], None]


def cache_folder() -> Path:
    """The folder of fetched traces: $PAGETWIN_TRACES, or `pagetwin/traces` in the user's cache folder."""
    chosen = os.environ.get("PAGETWIN_TRACES")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pagetwin" / "traces"


def folder_of(entry: CatalogueEntry) -> Path:
    """The folder of one trace."""
    return cache_folder() / entry.name


def trace_path(entry: CatalogueEntry) -> Path:
    """The path to read: the trace's file, or its folder if it has several files."""
    return folder_of(entry) / entry.files[0].path if len(entry.files) == 1 else folder_of(entry)


def is_fetched(entry: CatalogueEntry) -> bool:
    """Whether all files of a public trace exist."""
    return bool(entry.files) and all((folder_of(entry) / file.path).is_file() for file in entry.files)


def cached_trace(name: str) -> Path:
    """The path for a name: a file or folder, or else a public trace that was fetched. Raises UserError."""
    path = Path(name).expanduser()
    try:
        if path.is_file() or path.is_dir():
            return path
        if path.exists():  # reading a pipe or device may never end
            raise UserError(f"'{name[:80]}' is a pipe or a device; name a trace file, or a folder")
    except OSError as error:
        raise UserError(f"cannot use '{name[:80]}': {error.strerror}") from error
    entry = public_trace(name)
    if entry is None:
        public = ", ".join(known.name for known in catalogue() if known.format != "generated")
        raise UserError(
            f"'{name}' is neither a file nor a generator ({', '.join(GENERATORS)}) nor a public trace ({public})"
        )
    if not is_fetched(entry):
        raise UserError(f"'{name}' is not in {cache_folder()}; fetch it: python -m harness trace get {name}")
    return trace_path(entry)


def _writers() -> dict[str, Write]:
    from traces.formats.pagetwin import write_jsonl, write_parquet

    return {".jsonl": write_jsonl, ".jsonl.gz": write_jsonl, ".parquet": write_parquet}


def checked_output(name: str, overwrite: bool) -> Path:
    """The path to write. Raises UserError before any work is done."""
    path = Path(name).expanduser()
    if not name.endswith(tuple(_writers())):
        raise UserError(f"--out: '{name}' must end in {', '.join(_writers())}")
    if path.exists() and not overwrite:
        raise UserError(f"--out: '{name}' exists; add --overwrite to replace it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out: no such folder: {path.absolute().parent}")
    return path


def write_trace(trace: Trace, path: Path, writer: Write | None = None) -> None:
    """Write through a temporary file and a rename, and print what was written. Raises UserError."""
    digest = trace.digest  # before a file is written: a trace without one is no trace
    end = next((end for end in (".jsonl.gz", ".jsonl", ".parquet") if path.name.endswith(end)), path.suffix)
    write = writer or _writers()[end]
    try:
        with NamedTemporaryFile(dir=path.absolute().parent, suffix=end, delete=False) as file:
            temporary = Path(file.name)
        try:
            write(trace, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot write '{path}': {error.strerror or error}") from error
    say(f"{path}: {len(trace.requests):,} requests, digest {digest}")
    for change in trace.header.changes:
        say(f"  {change}")
