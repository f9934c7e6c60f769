"""A file that is one JSON document: its value, and the line of a path inside it for messages."""

import json
from typing import Any

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, read_document
from traces.formats.parsing import kind, read_value

Path = tuple[str | int, ...]
_SPACE = " \t\r\n"


class JsonDocument:
    """The value of a document. `error` names a place inside it by line and path.

    Raises:
        TraceError: the file is no JSON.
    """

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._text = read_document(file)
        try:
            self.value: Any = read_value(self._text)
        except RowError as error:
            raise TraceError(file.path, error.text_line, error.field, error.reason) from error

    def error(self, path: Path, error: RowError) -> TraceError:
        """The error of a value at `path`, or of its member that `error` names."""
        place = (*path, error.field) if error.field is not None else path
        known = place if self._holds(place) else path
        return TraceError(self.file.path, self._line(known), written(place), error.reason)

    def items(self, path: Path) -> list[Any]:
        """The list at `path`. Raises TraceError."""
        value = self.at(path)
        if not isinstance(value, list):
            raise self.error(path, RowError(None, f"list expected, found {kind(value)}"))
        return value

    def at(self, path: Path) -> Any:
        """The value at `path`. Raises TraceError if there is none."""
        value = self.value
        for depth, step in enumerate(path):
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                raise self.error(path[:depth], RowError(str(step), "missing")) from None
        return value

    def _holds(self, path: Path) -> bool:
        value = self.value
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return False
        return True

    def _line(self, path: Path) -> int:
        place = self._skip(0)
        for step in path:
            place = self._member(place, step)
        return self._text.count("\n", 0, place) + 1

    def _member(self, place: int, step: str | int) -> int:
        """Where the value of a member of the object or list at `place` begins."""
        decode = json.JSONDecoder().raw_decode
        place, index = self._skip(place + 1), 0
        while True:
            name: str | int = index
            if self._text[place] == '"' and isinstance(step, str):
                name, place = decode(self._text, place)
                place = self._skip(self._skip(place) + 1)
            if name == step:
                return place
            place = self._skip(self._skip(decode(self._text, place)[1]) + 1)
            index += 1

    def _skip(self, place: int) -> int:
        while self._text[place] in _SPACE:
            place += 1
        return place


def written(path: Path) -> str:
    """A path as text: `benchmarks[0].requests`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
