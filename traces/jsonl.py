"""One JSON object a line, read strictly: no repeated keys, and every parser complaint becomes a RowError."""

import json
from decimal import Decimal

from traces.errors import RowError
from traces.rows import MAX_INTEGER, in_range, seconds_us

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
