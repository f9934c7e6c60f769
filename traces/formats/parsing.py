"""Strict parsing of numbers, CSV lines and JSON objects: each wrong value becomes a `RowError` that names the field.

CSV: one record per line, and columns are found by name. JSON: no repeated keys, and decimal numbers stay exact.
"""

import csv
import json
import re
from decimal import Decimal

from traces.errors import RowError
from traces.formats.rows import note

MAX_INTEGER = 2**53 - 1  # milliseconds up to it still fit 63 bits as microseconds


_FLOAT_NOISE_US = Decimal("0.001")  # writers of shortest doubles stray by less than 1e-9 s


_SECONDS = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)


def plain_integer(text: str, field: str, lowest: int) -> int:
    """An integer written in ASCII digits alone, as CSV fields must be; raises RowError."""
    if not text:
        raise RowError(field, "is empty")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        hint = "ASCII digits expected, " if digits.isdigit() else ""
        raise RowError(field, f'{hint}"{text[:40]}" is not a plain integer')
    if len(digits) > 16:
        raise RowError(field, f"integer too large, at most {MAX_INTEGER} is allowed")
    return in_range(int(text), field, lowest)


def in_range(value: int, field: str, lowest: int, highest: int = MAX_INTEGER) -> int:
    """The value itself, if it lies between `lowest` and `highest` (2^53 - 1); raises RowError."""
    if value < lowest:
        raise RowError(field, f"{value} is below {lowest}")
    if value > highest:
        raise RowError(field, f"integer too large, at most {highest} is allowed")
    return value


def seconds_us(text: str, field: str, noted: dict[str, int]) -> int:
    """Seconds in decimal digits as whole microseconds, exactly; raises RowError.

    What a writer's binary floats added below a nanosecond (5.8926549999999995) is rounded away, and noted.
    """
    if not _SECONDS.fullmatch(text):
        raise RowError(field, f'finite, not negative number expected, found "{text[:40]}"')
    exact = Decimal(text) * 1_000_000
    if exact > MAX_INTEGER:
        raise RowError(field, f"too large: {text[:40]} s")
    nearest = exact.to_integral_value()
    if abs(exact - nearest) > _FLOAT_NOISE_US:
        raise RowError(field, f"more than 6 decimals (finer than 1 us): {text[:40]}")
    if exact != nearest:
        note(noted, "binary float noise rounded")
    return int(nearest)


def split_fields(text: str) -> list[str]:
    """The fields of one line; a quoted field may hold commas, never a line end. Raises RowError."""
    if '"' not in text:
        return text.split(",")
    if text.count('"') % 2:
        raise RowError("line", "unterminated quoted field")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise RowError("line", f"not CSV: {error}") from error


class Columns:
    """Positions of the columns that a format needs, learnt from the header line."""

    def __init__(self, wanted: tuple[str, ...], header: str) -> None:
        names = split_fields(header)
        for name in wanted:
            if names.count(name) > 1:
                raise RowError(name, f"column {name} twice")
        missing = [name for name in wanted if name not in names]
        if missing:
            raise RowError(missing[0], _missing_reason(missing, names, header))
        self.extra = [name for name in names if name not in wanted]
        self._header = names
        self._positions = [names.index(name) for name in wanted]

    def pick(self, text: str) -> list[str]:
        """The wanted fields of one data line, in the order in which they were asked for; raises RowError."""
        fields = split_fields(text)
        if len(fields) != len(self._header):
            raise RowError("line", f"{len(self._header)} fields expected, found {len(fields)}")
        if fields == self._header:
            raise RowError("line", "header repeated inside the data (files joined?)")
        return [fields[position] for position in self._positions]


def _missing_reason(missing: list[str], names: list[str], header: str) -> str:
    if header[:1].isdigit():
        return "header expected on line 1, found data"
    if len(names) == 1 and ";" in header:
        return f"missing columns {', '.join(missing)}; the file looks semicolon separated, commas expected"
    unknown = f", found {', '.join(names)[:200]}"
    return f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}{unknown}"


_KINDS = {bool: "boolean", str: "string", list: "list", dict: "object", type(None): "null"}


def read_object(text: str) -> dict[str, object]:
    """The object on one line; raises RowError."""
    value = read_value(text)
    if not isinstance(value, dict):
        raise RowError("line", f"expected an object, found {kind(value)}")
    return value


def read_value(text: str) -> object:
    """Any JSON value, its decimal numbers exact; raises RowError."""
    try:
        value: object = json.loads(text, object_pairs_hook=_object, parse_float=Decimal)
    except json.JSONDecodeError as error:
        raise RowError("line", _syntax_reason(text, error), error.lineno) from error
    except RecursionError as error:
        raise RowError("line", "nesting too deep") from error
    except RowError:
        raise
    except ValueError as error:  # more digits than Python converts
        raise RowError("line", "integer too large") from error
    except ArithmeticError as error:  # an exponent that no decimal has
        raise RowError("line", "number out of range") from error
    return value


def kind(value: object) -> str:
    """What a JSON value is, in a reader's words: the number itself, or the name of its type."""
    return _KINDS.get(type(value), str(value))


def integer(record: dict[str, object], key: str, unit: str = "") -> int:
    """A JSON integer: no boolean, no 5.0; raises RowError."""
    value = record[key]
    if type(value) is int:
        return value
    if isinstance(value, float):  # NaN and the infinities: all others are read as exact decimals
        raise RowError(key, f"not a finite number: {value}")
    wanted = f"integer {unit}" if unit and isinstance(value, Decimal) else "integer"
    raise RowError(key, f"{wanted} expected, found {kind(value)}")


def count(record: dict[str, object], key: str, lowest: int = 0, highest: int = MAX_INTEGER) -> int:
    """An integer of at least `lowest`; raises RowError."""
    return in_range(integer(record, key), key, lowest, highest)


def microseconds(record: dict[str, object], key: str, noted: dict[str, int]) -> int:
    """A number of seconds, not negative, as exact microseconds; raises RowError."""
    value = record[key]
    if type(value) is int or isinstance(value, Decimal):
        return seconds_us(str(value), key, noted)
    if isinstance(value, float):
        raise RowError(key, f"not a finite number: {value}")
    raise RowError(key, f"number of seconds expected, found {kind(value)}")


def text(record: dict[str, object], key: str) -> str:
    """A string; raises RowError."""
    value = record[key]
    if isinstance(value, str):
        return value
    raise RowError(key, f"string expected, found {kind(value)}")


def integers(value: object, field: str, highest: int = 2**63 - 1) -> list[int]:
    """A list of integers from 0 to `highest`; raises RowError naming the first wrong place."""
    if not isinstance(value, list):
        raise RowError(field, f"list expected, found {kind(value)}")
    if set(map(type, value)) - {int}:
        index, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise RowError(f"{field}[{index}]", f"integer expected, found {kind(item)}")
    if value and (min(value) < 0 or max(value) > highest):
        index, item = next((i, item) for i, item in enumerate(value) if not 0 <= item <= highest)
        above = "does not fit 64 bits (63 without sign)" if highest == 2**63 - 1 else f"is above {highest}"
        raise RowError(f"{field}[{index}]", f"{item} {'is below 0' if item < 0 else above}")
    return value


def require_keys(record: dict[str, object], wanted: tuple[str, ...]) -> None:
    """Raise RowError for the first missing key, naming the keys that stand there instead."""
    missing = [key for key in wanted if key not in record]
    if missing:
        unknown = [key for key in record if key not in wanted]
        hint = f", unknown key {', '.join(unknown)[:200]}" if unknown else ""
        raise RowError(missing[0], f"missing key {', '.join(missing)}{hint}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(twice, f'key "{twice}" twice')
    return record


def _syntax_reason(text: str, error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Extra data"):
        return f"extra data after the object, column {error.colno}"
    if text.lstrip().startswith("["):
        return "expected one object a line, found the start of a list"
    if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
        return f"JSON ends early (cut file), column {error.colno}"
    return f"JSON syntax: {error.msg}, column {error.colno}"
