"""Strict parsing of numbers, CSV lines and JSON objects: each wrong value becomes a `RowError` that names the field.

CSV: one record per line, and columns are found by name. JSON: no repeated keys, and decimal numbers stay exact.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from decimal import Decimal
from math import inf, isfinite, nan
from typing import Any

from traces.errors import RowError
from traces.formats.rows import note

MAX_INTEGER = 2**53 - 1  # milliseconds up to it still fit 63 bits as microseconds
_FLOAT_NOISE_US = Decimal("0.001")  # a double printed in full is less than 1e-9 s off
_SECONDS = re.compile(r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_KINDS = {bool: "boolean", str: "string", list: "list", dict: "object", type(None): "null"}


def plain_integer(text: str, field: str, lowest: int) -> int:
    """An integer in plain ASCII digits, as CSV fields must have. Raises RowError."""
    if not text:
        raise RowError(field, "is empty")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        hint = "ASCII digits expected, " if digits.isdigit() else ""
        raise RowError(field, f'{hint}"{text[:40]}" is not a plain integer')
    if len(digits) > 16:
        raise RowError(field, f"integer too large, at most {MAX_INTEGER} is allowed")
    return in_range(int(text), field, lowest)


def in_range(value: int, field: str | None, lowest: int, highest: int = MAX_INTEGER) -> int:
    """The value, if it is from `lowest` to `highest` (default 2^53 - 1). Raises RowError."""
    if value < lowest:
        raise RowError(field, f"{value} is below {lowest}")
    if value > highest:
        raise RowError(field, f"integer too large, at most {highest} is allowed")
    return value


def seconds_us(text: str, field: str, noted: dict[str, int]) -> int:
    """Seconds in decimal digits as whole microseconds, exactly. Raises RowError.

    Errors of binary floats below a nanosecond (5.8926549999999995) are rounded away and noted.
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
    """The fields of one line; a quoted field may contain commas, but no line end. Raises RowError."""
    if '"' not in text:
        return text.split(",")
    if text.count('"') % 2:
        raise RowError("line", "unterminated quoted field")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        raise RowError("line", f"not CSV: {error}") from error


class Columns:
    """Positions of the columns that a format needs, found in the header line. Raises RowError."""

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
        """The wanted fields of one data line, in the order of `wanted`. Raises RowError."""
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


def read_object(text: str) -> dict[str, object]:
    """The JSON object in a text. Raises RowError."""
    return require_object(read_value(text), "line")


def read_value(text: str) -> object:
    """Any JSON value, with exact decimal numbers. Raises RowError."""
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
    except ArithmeticError as error:  # an exponent out of the range of Decimal
        raise RowError("line", "number out of range") from error
    return value


def kind(value: object) -> str:
    """A JSON value for a message: the number itself, or the name of its type."""
    return _KINDS.get(type(value), str(value))


def integer(record: dict[str, object], key: str, unit: str = "") -> int:
    """A JSON integer, not a boolean and not 5.0. Raises RowError."""
    value = record[key]
    if type(value) is int:
        return value
    if isinstance(value, float):  # NaN or infinity: all other decimals are read exactly
        raise RowError(key, f"not a finite number: {value}")
    wanted = f"integer {unit}" if unit and isinstance(value, Decimal) else "integer"
    raise RowError(key, f"{wanted} expected, found {kind(value)}")


def count(record: dict[str, object], key: str, lowest: int = 0, highest: int = MAX_INTEGER) -> int:
    """An integer from `lowest` to `highest`. Raises RowError."""
    return in_range(integer(record, key), key, lowest, highest)


def as_number(value: object, field: str | None, lowest: float = -inf, highest: float = inf) -> float:
    """A finite number from a JSON value, from `lowest` to `highest`. Raises RowError."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise RowError(field, f"number expected, found {kind(value)}")
    try:
        found = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        found = inf
    if not isfinite(found):
        raise RowError(field, f"finite number expected, found {str(value)[:40]}")
    if not lowest <= found <= highest:
        bound = f"below {lowest:g}" if found < lowest else f"above {highest:g}"
        raise RowError(field, f"{found:g} is {bound}")
    return found


def as_whole(value: object, field: str | None, lowest: int = 0) -> int:
    """A whole number from `lowest` to 2^53 - 1 from a JSON value; 5.0 counts as 5. Raises RowError."""
    found = as_number(value, field)
    if found != int(found):
        raise RowError(field, f"whole number expected, found {found:g}")
    return in_range(int(found), field, lowest)


def number(record: Mapping[str, Any], key: str, lowest: float = -inf, highest: float = inf) -> float:
    """The same of a key, which is named where it is missing. Raises RowError."""
    return as_number(_member(record, key), key, lowest, highest)


def maybe_number(
    record: Mapping[str, Any], key: str, lowest: float = -inf, highest: float = inf
) -> float | None:
    """The same; None where the key is absent or null."""
    return None if record.get(key) is None else number(record, key, lowest, highest)


def whole(record: Mapping[str, Any], key: str, lowest: int = 0) -> int:
    """A whole number of a key. Raises RowError."""
    return as_whole(_member(record, key), key, lowest)


def maybe_whole(record: Mapping[str, Any], key: str) -> int | None:
    """The same; None where the key is absent or null."""
    return None if record.get(key) is None else whole(record, key)


def _member(record: Mapping[str, Any], key: str) -> Any:
    if key not in record:
        raise RowError(key, f"missing key {key}; found {', '.join(map(str, record))[:200]}")
    return record[key]


def text_number(fields: Mapping[str, str], key: str, lowest: float = -inf, highest: float = inf) -> float:
    """A finite number in the field of a CSV row. Raises RowError."""
    text = fields[key].strip()
    if not text:
        raise RowError(key, "is empty")
    try:
        found = float(text)
    except ValueError:
        found = nan
    if not isfinite(found) or "_" in text or not text.isascii():
        raise RowError(key, f'finite number expected, found "{text[:40]}"')
    return as_number(found, key, lowest, highest)


def microseconds(record: dict[str, object], key: str, noted: dict[str, int]) -> int:
    """A number of seconds, not negative, as exact microseconds. Raises RowError."""
    value = record[key]
    if type(value) is int or isinstance(value, Decimal):
        return seconds_us(str(value), key, noted)
    if isinstance(value, float):
        raise RowError(key, f"not a finite number: {value}")
    raise RowError(key, f"number of seconds expected, found {kind(value)}")


def text(record: dict[str, object], key: str) -> str:
    """A string. Raises RowError."""
    value = record[key]
    if isinstance(value, str):
        return value
    raise RowError(key, f"string expected, found {kind(value)}")


def integers(value: object, field: str, highest: int = 2**63 - 1) -> list[int]:
    """A list of integers from 0 to `highest`. Raises RowError that names the first wrong item."""
    value = require_list(value, field)
    if set(map(type, value)) - {int}:
        index, item = next((i, item) for i, item in enumerate(value) if type(item) is not int)
        raise RowError(f"{field}[{index}]", f"integer expected, found {kind(item)}")
    if value and (min(value) < 0 or max(value) > highest):
        index, item = next((i, item) for i, item in enumerate(value) if not 0 <= item <= highest)
        above = "does not fit 64 bits (63 without sign)" if highest == 2**63 - 1 else f"is above {highest}"
        raise RowError(f"{field}[{index}]", f"{item} {'is below 0' if item < 0 else above}")
    return value


def check_best_of(values: Mapping[str, Any]) -> None:
    """Raise RowError if both `n` and `best_of` are given and `best_of` is less than `n`."""
    wanted, sampled = values.get("n"), values.get("best_of")
    if wanted is not None and sampled is not None and sampled < wanted:
        raise RowError("best_of", f"{sampled} is less than n {wanted}")


def require_keys(record: dict[str, object], wanted: tuple[str, ...]) -> None:
    """Raise RowError if a key is missing. The message also names unknown keys."""
    missing = [key for key in wanted if key not in record]
    if missing:
        unknown = [key for key in record if key not in wanted]
        hint = f", unknown key {', '.join(unknown)[:200]}" if unknown else ""
        raise RowError(missing[0], f"missing key {', '.join(missing)}{hint}")


@contextmanager
def within(place: str) -> Iterator[None]:
    """Put a place in a document before the field of every RowError that is raised inside."""
    try:
        yield
    except RowError as error:
        raise RowError(f"{place}.{error.field}", error.reason) from error


def note_unknown(noted: dict[str, int], record: dict[str, object], known: tuple[str, ...]) -> None:
    """Note each key of a record that its format does not use."""
    for key in record.keys() - set(known):
        note(noted, f"unknown key {key}")


def require_object(value: object, place: str) -> dict[str, object]:
    """An object inside of a document. Raises RowError that names the place."""
    if not isinstance(value, dict):
        raise RowError(place, f"expected an object, found {kind(value)}")
    return value


def require_list(value: object, place: str) -> list[Any]:
    """A list inside of a document. Raises RowError that names the place."""
    if not isinstance(value, list):
        raise RowError(place, f"list expected, found {kind(value)}")
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(twice, f'key "{twice}" twice')
    return record


def _syntax_reason(text: str, error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Extra data"):
        return f"extra data after the object (one is expected), column {error.colno}"
    if text.lstrip().startswith("["):
        return "expected one object a line, found the start of a list"
    if error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()):
        return f"JSON ends early (cut file), column {error.colno}"
    return f"JSON syntax: {error.msg}, column {error.colno}"
