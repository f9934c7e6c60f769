"""Trace files as bytes: lines, whole documents, the items of one large JSON array, and checksums.

Row readers see text only. Files that are clearly no trace (an HTML page, a Git LFS pointer) are refused here, before
the format is known. `ArrayItems` reads a file that is one JSON array and keeps only the current item in memory.
"""

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from traces.errors import RowError, TraceError, placed

MAX_LINE_BYTES = 64 << 20  # the longest published row has 0.2 MB; a longer line is no row
MAX_DOCUMENT_BYTES = 2 << 30  # of a file that is one value, unpacked; a small .gz can hold more
_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CHUNK = 1 << 20
_NEAR = 64  # characters; a JSON error this close to the end may only mean that more must be read
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class SourceFile:
    """A readable file: its path as the user wrote it, its checksum and its first line."""

    path: str
    sha256: str
    first_line: str
    has_byte_order_mark: bool

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return self.path.replace("\\", "/").rpartition("/")[2]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Physical lines, numbered from 1, without line ends and byte-order mark. Raises TraceError on a cut file."""
        number = 0
        try:
            with closing(open_bytes(self.path)) as stream:
                while raw := stream.readline(MAX_LINE_BYTES + 1):
                    number += 1
                    if len(raw) > MAX_LINE_BYTES:
                        raise TraceError(self.path, number, "line", _too_long())
                    line = raw.removeprefix(_BYTE_ORDER_MARK) if number == 1 else raw
                    yield number, line.rstrip(b"\r\n")
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(self.path, number + 1, None, f"cannot be read on: {error}") from error


def open_source(path: str | Path, expect_sha256: str | None = None) -> SourceFile:
    """Open a file: check it and compute its checksum. Raises TraceError if it is missing, empty or not data."""
    name = str(path)
    try:
        with open(path, "rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        with closing(open_bytes(name)) as text:
            first = text.readline(MAX_LINE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(name, None, None, f"cannot be read: {reason}") from error
    _refuse_foreign_bytes(name, first)
    if expect_sha256 is not None and sha256 != expect_sha256.lower():
        raise TraceError(name, 1, "sha256", f"expected {expect_sha256}, found {sha256}")
    with placed(name, 1):
        line = decode(first.removeprefix(_BYTE_ORDER_MARK).rstrip(b"\r\n"))
    return SourceFile(name, sha256, line, first.startswith(_BYTE_ORDER_MARK))


def decode(raw: bytes) -> str:
    """A line's text. Raises RowError for bytes that are not UTF-8 text."""
    if b"\0" in raw:
        raise RowError("line", f"NUL byte at byte {raw.index(0) + 1}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("line", f"not UTF-8 at byte {error.start + 1}") from error


def read_document(file: SourceFile) -> str:
    """The whole text of a file that is one document. Raises TraceError with the line of bytes that are not text."""
    texts, size = [], 0
    for line, raw in file.lines():
        size += len(raw) + 1
        with placed(file.path, line):
            if size > MAX_DOCUMENT_BYTES:
                raise RowError("line", f"beyond {MAX_DOCUMENT_BYTES >> 20:,} MiB of one document: not read")
            texts.append(decode(raw))
    return "\n".join(texts)


def open_bytes(path: str) -> IO[bytes]:
    """The file's bytes, unpacked if its name ends in .gz."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.endswith(".gz") else open(path, "rb")


def _too_long() -> str:
    return f"longer than {MAX_LINE_BYTES >> 20} MiB: not a row of a trace"


def _refuse_foreign_bytes(name: str, first: bytes) -> None:
    start = first[:1024].removeprefix(_BYTE_ORDER_MARK).lstrip().lower()
    reason = None
    if not first:
        reason = "empty file"
    elif first.startswith(_GZIP_MAGIC):
        reason = "gzip data: decompress the file, or let its name end in .gz"
    elif first.startswith(_LFS_POINTER):
        reason = "a Git LFS pointer, not the data: fetch the object with `git lfs pull`"
    elif first.startswith(_UTF16):
        reason = "UTF-16 text: convert the file to UTF-8"
    elif start.startswith((b"<!doctype html", b"<html")):
        reason = "an HTML page, not the data: download the raw file"
    elif len(first) > MAX_LINE_BYTES:
        reason = _too_long()
    if reason is not None:
        raise TraceError(name, 1, None, reason)


class ArrayItems:
    """Iterate over (line, value) of the array's items. Raises TraceError if the text is no JSON array."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._text, self._place, self._line, self._ended = "", 0, 1, False
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._parser = json.JSONDecoder()

    def __iter__(self) -> Iterator[tuple[int, object]]:
        """Items in order."""
        with closing(open_bytes(self._file.path)) as stream:
            self._read = stream.read
            self._expect("[")
            if self._sign() == "]":
                return
            while True:
                self._skip_space()
                line = self._line
                yield line, self._item()
                if self._expect(",]") == "]":
                    break
            if self._sign():
                raise self._error("extra data after the array")

    def _item(self) -> object:
        size = _CHUNK
        while True:
            try:
                value, end = self._parser.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                near = error.pos >= len(self._text) - _NEAR or error.msg.startswith("Unterminated string")
                if not near:
                    raise self._error(f"JSON syntax: {error.msg}", error.pos) from error
                if self._ended or len(self._text) - self._place > MAX_LINE_BYTES:
                    raise self._error("JSON ends early (cut file)") from error
            except RecursionError as error:
                raise self._error("nesting too deep") from error
            except ValueError as error:  # more digits than Python converts
                raise self._error("integer too large") from error
            else:
                if end < len(self._text) or self._ended:  # a number at the end may continue
                    self._advance(end)
                    return value
            self._more(size)
            size *= 2

    def _expect(self, signs: str) -> str:
        sign = self._sign()
        if not sign:
            raise self._error("JSON ends early (cut file)")
        if sign not in signs:
            raise self._error(f"{' or '.join(signs)} expected, found {sign}")
        self._advance(self._place + 1)
        return sign

    def _sign(self) -> str:
        """The next character that is not white space, "" at the end."""
        self._skip_space()
        return self._text[self._place : self._place + 1]

    def _skip_space(self) -> None:
        while True:
            place = self._place
            while place < len(self._text) and self._text[place] in _SPACE:
                place += 1
            self._advance(place)
            if place < len(self._text) or self._ended:
                return
            self._more(_CHUNK)

    def _advance(self, place: int) -> None:
        self._line += self._text.count("\n", self._place, place)
        self._place = place

    def _more(self, size: int) -> None:
        """Drop the used text and read more."""
        try:
            raw = self._read(size)
            text = self._decode(raw, not raw)
        except UnicodeDecodeError as error:
            raise TraceError(self._file.path, self._line, "line", f"not UTF-8: {error.reason}") from error
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(self._file.path, self._line, None, f"cannot be read on: {error}") from error
        self._ended = not raw
        self._text = self._text[self._place :] + text
        self._place = 0

    def _error(self, reason: str, place: int | None = None) -> TraceError:
        line = self._line + self._text.count("\n", self._place, self._place if place is None else place)
        return TraceError(self._file.path, line, "line", reason)
