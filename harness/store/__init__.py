"""The store: one folder for each point, committed whole or not at all. All else in it is derived and can be rebuilt.

Here are its errors. Each message is a sentence that is printed to the user.
"""

import errno
from pathlib import Path

from harness.config.errors import UserError


class StoreError(Exception):
    """Results could not be written; earlier results are unchanged. `str()` says where, why and what to do."""


class ForeignFileError(StoreError):
    """A file with wrong content: truncated, edited, or not written by PageTwin. It is skipped."""


class StoreVersionError(UserError):
    """A record with a schema version that this program does not read."""


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
