"""Public traces in the user's cache: where they lie, and which of them are there whole."""

import os
from pathlib import Path

from harness.config.errors import UserError
from traces.catalogue import CatalogueEntry, catalogue, public_trace
from traces.synth.generator import GENERATORS


def cache_folder() -> Path:
    """Where fetched traces lie: $PAGETWIN_TRACES, or `pagetwin/traces` in the user's cache folder."""
    chosen = os.environ.get("PAGETWIN_TRACES")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pagetwin" / "traces"


def folder_of(entry: CatalogueEntry) -> Path:
    """The folder of one trace."""
    return cache_folder() / entry.name


def trace_path(entry: CatalogueEntry) -> Path:
    """What to read: the file, or the folder where there are several."""
    return folder_of(entry) / entry.files[0].path if len(entry.files) == 1 else folder_of(entry)


def is_fetched(entry: CatalogueEntry) -> bool:
    """Whether all its files are there."""
    return bool(entry.files) and all((folder_of(entry) / file.path).is_file() for file in entry.files)


def cached_trace(name: str) -> Path:
    """The path that a name stands for: a file or folder, else a public trace that was fetched. Raises UserError."""
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
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
