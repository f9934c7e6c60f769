"""Digests of what a store holds, written at commit and compared at every reading.

A record names the digest of each of its tables, and its own: that of its bytes, with zeros in the place of the digest.
So a file that a disk, a copy or an editor has changed is never taken for a result. A record of an older version of
PageTwin has none, and its tables are judged by their length and ends alone.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SIZE = 16  # bytes
_EMPTY = "0" * 2 * _SIZE
_OWN = re.compile(rb'"digest": "([0-9a-f]{32})"')
_HEAD = 512  # bytes at the beginning of a record in which its digest stands
_PARQUET = b"PAR1"
_LARGEST = 2**63 - 1  # what a column of whole numbers holds


def digest_of(data: bytes) -> str:
    """The digest of a file's bytes: 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=_SIZE).hexdigest()


def sealed(plain: Mapping[str, Any]) -> bytes:
    """A record as indented JSON with its own digest at its beginning. `plain` holds plain JSON values."""
    first = {name: plain[name] for name in ("schema", "fingerprint")}
    text = json.dumps({**first, "digest": _EMPTY, **plain}, indent=1, ensure_ascii=False) + "\n"
    data = text.encode()
    return data.replace(_EMPTY.encode(), digest_of(data).encode(), 1)


def read_sealed(data: bytes) -> Any:
    """The JSON value of a record.

    Raises:
        ValueError: not JSON, with a number that no table can hold, or changed after it was written; says which.
    """
    found = _OWN.search(data, 0, _HEAD)
    value = json.loads(data, parse_int=_integer, parse_constant=_no_number)
    if found is not None:
        start, end = found.span(1)
        if digest_of(data[:start] + _EMPTY.encode() + data[end:]) != found[1].decode():
            raise ValueError("its content does not match its digest, so it was changed after it was written")
    return value


def _integer(text: str) -> int:
    value = int(text) if len(text) < 20 else math.inf
    if not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"a whole number beyond 64 bits: {text[:24]}")
    return int(value)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def file_fault(file: Path, digest: str | None) -> str | None:
    """Why a file beside a record is not as it was committed, or None; an older record has no digest of it."""
    kind = "table" if file.suffix == ".parquet" else "file"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return f"its {kind} {file.name} is missing"
    except OSError as error:
        return f"its {kind} {file.name} cannot be read: {error.strerror}"
    if kind == "table" and (len(data) <= 2 * len(_PARQUET) or not data[:4] == _PARQUET == data[-4:]):
        return f"its table {file.name} is truncated"
    if digest is not None and digest_of(data) != digest:
        return f"its {kind} {file.name} does not match its digest, so it was changed after it was written"
    return None
