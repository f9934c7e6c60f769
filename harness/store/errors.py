"""Errors of a store, as sentences to print."""

import errno
from pathlib import Path

from harness.config.errors import UserError


class StoreError(Exception):
    """Results could not be written; what was committed before is safe. `str()` says where, why and what to do."""


class ForeignFileError(StoreError):
    """A file that is not what its name promises: truncated, edited, or from somewhere else. It is skipped."""


class StoreVersionError(UserError):
    """A record of another schema version than this program reads."""


class BusyStoreError(UserError):
    """Another process is writing to the store."""


_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and repeat the command",
    errno.EDQUOT: "the disk quota is used up; free some space and repeat the command",
    errno.EACCES: "permission denied; choose another folder with out=...",
    errno.EPERM: "not permitted; choose another folder with out=...",
    errno.EROFS: "the file system is read-only; choose another folder with out=...",
}


def write_failed(folder: Path, error: OSError) -> StoreError:
    """The error to raise when writing into `folder` failed."""
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    return StoreError(f"cannot write to {folder}: {remedy}")
