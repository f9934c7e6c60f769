"""One JSON object a line, read strictly: no repeated keys, and every parser complaint becomes a RowError."""

import json

from traces.errors import RowError

_KINDS = {bool: "boolean", str: "string", list: "list", dict: "object", type(None): "null"}


def read_object(text: str) -> dict[str, object]:
    """The object on one line; raises RowError."""
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise RowError("line", _syntax_reason(text, error)) from error
    except RecursionError as error:
        raise RowError("line", "nesting too deep") from error
    except RowError:
        raise
    except ValueError as error:  # more digits than Python converts
        raise RowError("line", "integer too large") from error
    if not isinstance(value, dict):
        raise RowError("line", f"expected an object, found {kind(value)}")
    return value


def kind(value: object) -> str:
    """What a JSON value is, in a reader's words: the number itself, or the name of its type."""
    return _KINDS.get(type(value), str(value))


def integer(record: dict[str, object], key: str, unit: str = "") -> int:
    """A JSON integer: no boolean, no 5.0; raises RowError."""
    value = record[key]
    if type(value) is int:
        return value
    if isinstance(value, float) and value - value != 0:
        raise RowError(key, f"not a finite number: {value}")
    wanted = f"integer {unit}" if unit and isinstance(value, float) else "integer"
    raise RowError(key, f"{wanted} expected, found {kind(value)}")


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
