"""The bytes of a trace file: physical lines, their checksum, and what is visibly not a trace at all.

Row readers see text only; whatever can be said of a file before its format is known is said here.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from traces.errors import RowError, TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class SourceFile:
    """A readable file: its path as the user wrote it, its checksum and its first line."""

    path: str
    sha256: str
    first_line: str
    has_byte_order_mark: bool

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Physical lines from 1, without line ends and byte-order mark; raises TraceError when bytes end early."""
        number = 0
        try:
            with closing(_open(self.path)) as stream:
                for number, raw in enumerate(stream, start=1):
                    line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                    yield number, line.rstrip(b"\r\n")
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(self.path, number + 1, None, f"cannot be read on: {error}") from error


def open_source(path: str | Path, expect_sha256: str | None = None) -> SourceFile:
    """Check a file and take its checksum; raises TraceError for what is missing, empty or not data."""
    name = str(path)
    try:
        with open(path, "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        with closing(_open(name)) as text:
            first = text.readline(1 << 20)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(name, None, None, f"cannot be read: {reason}") from error
    _refuse_foreign_bytes(name, first)
    if expect_sha256 is not None and sha256 != expect_sha256.lower():
        raise TraceError(name, 1, "sha256", f"expected {expect_sha256}, found {sha256}")
    marked = first.startswith(_BYTE_ORDER_MARK)
    return SourceFile(name, sha256, _first_text(name, first.removeprefix(_BYTE_ORDER_MARK)), marked)


def decode(raw: bytes) -> str:
    """A line's text; raises RowError for bytes that are not text."""
    if b"\0" in raw:
        raise RowError("line", f"NUL byte at byte {raw.index(0) + 1}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("line", f"not UTF-8 at byte {error.start + 1}") from error


def _open(path: str) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _refuse_foreign_bytes(name: str, first: bytes) -> None:
    start = first.removeprefix(_BYTE_ORDER_MARK).lstrip().lower()
    reason = None
    if not first:
        reason = "empty file"
    elif first.startswith(_GZIP_MAGIC):
        reason = "gzip data: decompress the file, or let its name end in .gz"
    elif first.startswith(_LFS_POINTER):
        reason = "a Git LFS pointer, not the data: fetch the object with `git lfs pull`"
    elif start.startswith((b"<!doctype html", b"<html")):
        reason = "an HTML page, not the data: download the raw file"
    if reason is not None:
        raise TraceError(name, 1, None, reason)


def _first_text(name: str, first: bytes) -> str:
    try:
        return decode(first.rstrip(b"\r\n"))
    except RowError as error:
        raise TraceError(name, 1, error.field, error.reason) from error
