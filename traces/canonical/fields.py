"""Which fields a canonical record has, of what type, and which values are allowed; the same for JSONL and Parquet."""

from dataclasses import fields
from typing import Any

from traces.errors import RowError
from traces.jsonl import kind, require_keys
from traces.rows import MAX_INTEGER
from traces.trace import AFTER, AT, CHAINED, CONTENT, Segment, TraceHeader, TraceRequest

VERSION = 1
NEEDED = ("request_id", "arrival_us", "prompt_tokens", "output_tokens", "segments")
INTEGERS: dict[str, tuple[int, int]] = {  # name -> lowest and highest value
    "request_id": (0, MAX_INTEGER),
    "arrival_us": (0, MAX_INTEGER),
    "prompt_tokens": (1, MAX_INTEGER),
    "output_tokens": (1, MAX_INTEGER),
    "turn": (1, MAX_INTEGER),
    "parent": (0, MAX_INTEGER),
    "think_us": (0, MAX_INTEGER),
    "output_key": (0, 2**64 - 1),
    "n": (1, MAX_INTEGER),
    "best_of": (1, MAX_INTEGER),
    "beam_width": (1, MAX_INTEGER),
    "priority": (-MAX_INTEGER, MAX_INTEGER),
}
TEXTS = ("session", "salt", "model", "kind")
DEFAULTS = {field.name: field.default for field in fields(TraceRequest) if field.name not in NEEDED}
_HEADER = {field.name for field in fields(TraceHeader)}
_HEADER_COUNTS = ("rows_read", "rows_kept", "clock_quantum_us")


def header_record(header: TraceHeader) -> dict[str, Any]:
    """The header as plain data, with the version of the form."""
    plain = {field.name: getattr(header, field.name) for field in fields(header)}
    plain |= {name: dict(plain[name]) for name in ("dropped", "noted", "calibration")}
    return {"pagetwin_trace": VERSION, **plain, "changes": list(header.changes)}


def read_header(record: dict[str, Any]) -> TraceHeader:
    """The header of a record; raises RowError."""
    values = dict(record)
    version = values.pop("pagetwin_trace", None)
    if version != VERSION:
        raise RowError("pagetwin_trace", f"version {VERSION} expected, found {kind(version)}")
    if values.get("key_kind") not in (CHAINED, CONTENT):
        raise RowError("key_kind", f"{CHAINED} or {CONTENT} expected, found {kind(values.get('key_kind'))}")
    unknown = values.keys() - _HEADER
    if unknown:
        raise RowError(sorted(unknown)[0], f"unknown header field; allowed are {', '.join(sorted(_HEADER))}")
    require_keys(values, ("name", "format", "source", "sha256", "source_block_tokens", *_HEADER_COUNTS))
    for name in _HEADER_COUNTS:
        _check_integer(values[name], name, 0, MAX_INTEGER)
    if values["source_block_tokens"] is not None:
        _check_integer(values["source_block_tokens"], "source_block_tokens", 1, MAX_INTEGER)
    for name in ("name", "format", "source", "sha256", "licence"):
        if not isinstance(values.get(name, ""), str):
            raise RowError(name, f"string expected, found {kind(values[name])}")
    for name in ("dropped", "noted", "calibration"):
        _check_mapping(values.get(name, {}), name)
    changes = values.get("changes", [])
    if not (isinstance(changes, list) and all(isinstance(change, str) for change in changes)):
        raise RowError("changes", "list of strings expected")
    _check_counts(values)
    calibration = {name: plain_number(value) for name, value in values.get("calibration", {}).items()}
    return TraceHeader(**{**values, "changes": tuple(changes), "calibration": calibration})


def plain_number(value: Any) -> Any:
    """JSON decimals of a header are measurements: floats again."""
    return value if isinstance(value, (str, int)) else float(value)


def make_request(record: dict[str, Any]) -> TraceRequest:
    """A request from plain data, every field checked; raises RowError."""
    require_keys(record, NEEDED)
    unknown = record.keys() - DEFAULTS.keys() - set(NEEDED)
    if unknown:
        raise RowError(sorted(unknown)[0], f"unknown field; allowed are {', '.join((*NEEDED, *DEFAULTS))}")
    for name, (lowest, highest) in INTEGERS.items():
        if record.get(name) is not None or name in NEEDED:
            _check_integer(record[name], name, lowest, highest)
    for name in TEXTS:
        if record.get(name) is not None and not isinstance(record[name], str):
            raise RowError(name, f"string expected, found {kind(record[name])}")
    segments = _segments(record["segments"], record["prompt_tokens"])
    more = {name: record[name] for name in DEFAULTS if record.get(name) is not None}
    more["after"] = _after(record.get("after", ()))
    _check_release(more)
    _check_widths(record)
    lengths = {name: record[name] for name in NEEDED[:4]}
    return TraceRequest(**lengths, segments=segments, **more)


def _segments(value: Any, prompt_tokens: int) -> tuple[Segment, ...]:
    if not isinstance(value, list):
        raise RowError("segments", f"list of [key, tokens] expected, found {kind(value)}")
    segments = []
    for index, pair in enumerate(value):
        place = f"segments[{index}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise RowError(place, f"[key, tokens] expected, found {kind(pair)}")
        if pair[0] is not None:
            _check_integer(pair[0], f"{place} key", 0, 2**64 - 1)
        _check_integer(pair[1], place, 1, MAX_INTEGER)
        segments.append(Segment(*pair))
    total = sum(tokens for _, tokens in segments)
    if total != prompt_tokens:
        raise RowError("segments", f"sum to {total}, prompt_tokens {prompt_tokens}")
    return tuple(segments)


def _after(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise RowError("after", f"list of request ids expected, found {kind(value)}")
    for index, item in enumerate(value):
        _check_integer(item, f"after[{index}]", 0, MAX_INTEGER)
    return tuple(value)


def _check_release(more: dict[str, Any]) -> None:
    release = more.get("release", AT)
    if release not in (AT, AFTER):
        raise RowError("release", f"{AT} or {AFTER} expected, found {kind(release)}")
    if release == AFTER and not more["after"]:
        raise RowError("after", "release after needs at least one request in after")


def _check_widths(record: dict[str, Any]) -> None:
    wanted, sampled = record.get("n"), record.get("best_of")
    if wanted is not None and sampled is not None and sampled < wanted:
        raise RowError("best_of", f"{sampled} is less than n {wanted}")


def _check_integer(value: Any, name: str, lowest: int, highest: int) -> None:
    if type(value) is not int:
        raise RowError(name, f"integer expected, found {kind(value)}")
    if not lowest <= value <= highest:
        raise RowError(name, f"{value} is not from {lowest} to {highest}")


def _check_mapping(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise RowError(name, f"object expected, found {kind(value)}")
    if name != "calibration":
        for key, count in value.items():
            _check_integer(count, f"{name}.{key}", 0, MAX_INTEGER)


def _check_counts(values: dict[str, Any]) -> None:
    dropped = sum(values.get("dropped", {}).values())
    if values["rows_read"] != values["rows_kept"] + dropped:
        reason = f"{values['rows_read']} is not rows_kept {values['rows_kept']} + dropped {dropped}"
        raise RowError("rows_read", reason)
