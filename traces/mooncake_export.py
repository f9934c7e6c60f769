"""Writing Mooncake JSONL, the form that other tools read. It holds arrivals in ms, lengths and ids of 512-token blocks.

Blocks are named by what they hold from the start of the prompt on, so sharing is kept to whole blocks; a partial last
block gets an id of its own, as in the published files.
"""

import json
from pathlib import Path

from traces.formats.mooncake import BLOCK_TOKENS
from traces.trace import Trace, TraceRequest

Piece = tuple[int | None, int, int]  # key, where in the segment, tokens


def write_mooncake(trace: Trace, path: str | Path) -> None:
    """Write the fields that the form can hold; sessions and links are lost. Raises OSError."""
    names: dict[tuple[int, tuple[Piece, ...]], int] = {}
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for request in trace.requests:
            record = {
                "timestamp": request.arrival_us // 1000,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": _ids(request, names),
            }
            file.write(json.dumps(record) + "\n")


def _ids(request: TraceRequest, names: dict[tuple[int, tuple[Piece, ...]], int]) -> list[int]:
    """One id a begun block; equal exactly where the prompt is equal up to and including the block."""
    ids: list[int] = []
    parent = -1
    for pieces in _blocks(request):
        unique = any(key is None for key, _, _ in pieces)
        name = (parent, (*pieces, (-1, request.request_id, 0)) if unique else pieces)
        parent = names.setdefault(name, len(names))
        ids.append(parent)
    return ids


def _blocks(request: TraceRequest) -> list[tuple[Piece, ...]]:
    blocks: list[list[Piece]] = []
    room = 0
    for key, tokens in request.segments:
        start = 0
        while start < tokens:
            if not room:
                blocks.append([])
                room = BLOCK_TOKENS
            taken = min(room, tokens - start)
            blocks[-1].append((key, start, taken))
            start += taken
            room -= taken
    return [tuple(block) for block in blocks]
