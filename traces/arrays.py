"""A file that is one JSON array, read piece by piece: only the item at hand is in memory."""

import codecs
import json
import zlib
from collections.abc import Iterator
from contextlib import closing

from traces.errors import TraceError
from traces.source import MAX_LINE_BYTES, SourceFile, open_bytes

_CHUNK = 1 << 20
_NEAR = 64  # an error this close to the end of what was read may only mean that more must be read
_SPACE = " \t\r\n"


class ArrayItems:
    """Iterate over (line, value) of the array's items; raises TraceError where the text is no array."""

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
                if end < len(self._text) or self._ended:  # a number at the end may go on
                    self._advance(end)
                    return value
            self._more(size)
            size *= 2

    def _expect(self, signs: str) -> str:
        sign = self._sign()
        if not sign or sign not in signs:
            if not sign:
                raise self._error("JSON ends early (cut file)")
            raise self._error(f"{' or '.join(signs)} expected, found {sign}")
        self._advance(self._place + 1)
        return sign

    def _sign(self) -> str:
        """The next sign that is not white space; nothing at the end."""
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
        """Drop what was used and read on."""
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
