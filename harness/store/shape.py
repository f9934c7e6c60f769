"""What a record must look like before anything reads it: a file of the right name may still come from elsewhere."""

from collections.abc import Mapping
from typing import Any

_SECTIONS = (
    "trace",
    "pool",
    "environment",
    "cost",
    "outcome",
    "analytic",
    "simulated",
    "measured",
    "levels",
    "audit",
    "pace",
    "seconds",
)
_ROW = ("metric", "error", "spread")  # of `comparison`


def what_is_wrong(record: Mapping[str, Any]) -> str | None:
    """The first thing that makes this no record of a finished point, in words; None where nothing does."""
    if not isinstance(record.get("config"), Mapping):
        return "its section 'config' is missing"
    for name in _SECTIONS:
        if not isinstance(record.get(name), Mapping | None):
            return f"its section '{name}' is no table of keys and values"
    words, rows = record.get("overrides") or [], record.get("comparison") or []
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        return "its section 'overrides' is no list of texts"
    if not (isinstance(rows, list) and all(_is_row(row) for row in rows)):
        return f"its section 'comparison' is no list of rows with {', '.join(_ROW)}"
    return None


def _is_row(row: object) -> bool:
    return isinstance(row, Mapping) and all(key in row for key in _ROW)
