"""Which format a file is in, from its first line alone: header names or JSON keys, never a file name."""

import json
from collections.abc import Callable

from traces.azure import AzureReader
from traces.mooncake import MooncakeReader
from traces.rows import RowReader
from traces.vidur import VidurReader

READERS: dict[str, Callable[[], RowReader]] = {
    "azure": AzureReader,
    "mooncake": MooncakeReader,
    "vidur": VidurReader,
}

_BY_COLUMN = {"TIMESTAMP": "azure", "ContextTokens": "azure", "arrived_at": "vidur"}
_FOREIGN = {  # a name that only one other public format has, and what that format is called
    "pd_ratio": "a table of lengths without arrivals",
    "Log Type": "BurstGPT",
    "parent_chat_id": "Qwen-Bailian",
    "input_toks": "LLMServingSim",
    "sub_requests": "LLMServingSim",
    "hash_id_scope": "kv-cache-tester",
}


def detect_format(first_line: str) -> str | None:
    """The format's name, or None where the first line belongs to no format that is read here."""
    text = first_line.strip()
    if foreign_format(text) is not None:
        return None
    if text.startswith(("{", "[")):
        return "mooncake"
    names = {name.strip().strip('"') for name in text.replace(";", ",").split(",")}
    return next((form for column, form in _BY_COLUMN.items() if column in names), None)


def foreign_format(first_line: str) -> str | None:
    """What another public format is called, if the first line shows one that is recognised but not read here."""
    try:
        parsed = json.loads(first_line)
    except (ValueError, RecursionError):
        parsed = first_line.split(",")
    if isinstance(parsed, dict) and isinstance(parsed.get("hash_ids"), dict):
        return "RAGPulse"
    names = parsed if isinstance(parsed, (dict, list)) else ()
    return next((title for name, title in _FOREIGN.items() if name in names), None)
