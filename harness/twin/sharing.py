"""What the prompts of a log share, as prefix keys: from token ids, block ids, named prefixes or hit counts.

The first of these that a log has is used, in this order. Hit counts (`cached_tokens`) alone do not say which earlier
prompt a request shares its beginning with; it is taken to be the one that fits the count best.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from harness.twin.log import LoggedRequests
from harness.twin.rows import LoggedRequest, RequestLog
from traces.errors import TraceError
from traces.formats.segments import Tokens, TokenTree
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

UNSAID = "the log does not say which prompts share a beginning"
_BLOCKS = (16, 32, 64, 128, 256, 512, 1024)  # tokens of an id of `hash_ids`, where the log does not say


@dataclass(frozen=True)
class Shared:
    """The segments and the key of the output of each request, and what to know of them.

    `block_tokens` is set where sharing is known at multiples of it only.
    """

    segments: tuple[tuple[Segment, ...], ...]
    outputs: tuple[int | None, ...]
    notes: tuple[str, ...]
    block_tokens: int | None = None


def trace_of_log(
    log: RequestLog,
    rows: Sequence[LoggedRequest],
    times: LoggedRequests,
    prompts: Mapping[str, tuple[int, ...]],
) -> tuple[Trace, tuple[str, ...]]:
    """The requests as a trace that arrives at `entered_s`, and notes on what is known of their sharing."""
    shared = _shared(log, rows, times, prompts)
    requests = tuple(
        TraceRequest(i, round(float(at_s) * 1e6), row.prompt_tokens, row.output_tokens, parts, output_key=key)
        for i, (row, at_s, parts, key) in enumerate(
            zip(rows, times.entered_s, shared.segments, shared.outputs, strict=True)
        )
    )
    file, more = log.file, (CHAINED, shared.block_tokens, 1, log.file.sha256)
    header = TraceHeader(file.name, log.format, file.name, *more, log.read, len(rows), log.dropped)
    return Trace(header, requests), shared.notes


def _shared(
    log: RequestLog,
    rows: Sequence[LoggedRequest],
    times: LoggedRequests,
    prompts: Mapping[str, tuple[int, ...]],
) -> Shared:
    ids = [_ids_of(row, prompts) for row in rows]
    if any(len(tokens) for tokens in ids):
        return _by_token_ids(rows, ids)
    if any(row.hash_ids for row in rows):
        return _by_block_ids(log, rows)
    if any(row.prefix is not None for row in rows):
        return _by_names(rows)
    if any(row.cached_tokens for row in rows):
        return _by_counts(rows, times)
    text = f"requests: {UNSAID}; none is assumed to."
    if all(row.cached_tokens == 0 for row in rows):
        text = "requests: no prompt token was found in the prefix cache: no prompts share a beginning."
    return Shared(_alone(rows), (None,) * len(rows), (text,))


def _alone(rows: Sequence[LoggedRequest]) -> tuple[tuple[Segment, ...], ...]:
    return tuple((Segment(None, row.prompt_tokens),) for row in rows)


def _whole(keyed: Sequence[Segment], prompt: int) -> tuple[Segment, ...]:
    """Segments of a whole prompt: what has no key yet is its own."""
    rest = prompt - sum(one.tokens for one in keyed)
    return (*keyed, Segment(None, rest)) if rest else tuple(keyed)


def cached_before(trace: Trace, pool_tokens: int) -> Trace | None:
    """The trace as if an earlier run had left its prompts in the cache; None where something is known of what they
    share, or the pool of `pool_tokens` cannot hold them all.

    All prompts are taken to begin with one text, up to their last token, which is always computed. The first of them
    is computed, and the pool holds one copy, where the engine had all of them.
    """
    rows = trace.requests
    known = any(segment.key is not None for row in rows for segment in row.segments)
    if known or sum(row.prompt_tokens for row in rows) > pool_tokens:
        return None
    key = _key("prompts of an earlier run")
    ends = (Segment(None, 1),)
    cached = (
        replace(row, segments=(Segment(key, row.prompt_tokens - 1), *ends) if row.prompt_tokens > 1 else ends)
        for row in rows
    )
    return trace.changed(tuple(cached), "its prompts were cached before it began")


# -- ids and names ----------------------------------------------------------------------------------------------------


def _ids_of(row: LoggedRequest, prompts: Mapping[str, tuple[int, ...]]) -> Tokens:
    """The token ids of a request, which a log may hold under its name with the number of the prompt behind it."""
    found = row.prompt_ids or prompts.get(row.request_id) or prompts.get(f"{row.request_id}-0") or ()
    return np.array(found[: row.prompt_tokens], np.int64)


def _by_token_ids(rows: Sequence[LoggedRequest], ids: Sequence[Tokens]) -> Shared:
    """Prompts are cut where they differ. Ids that a log cut short are the prompt's beginning."""
    tree = TokenTree()
    for tokens in ids:
        if len(tokens):
            tree.insert(tokens, (len(tokens),))
    segments = tuple(
        _whole(tree.segments(tokens) if len(tokens) else (), row.prompt_tokens)
        for row, tokens in zip(rows, ids, strict=True)
    )
    count = sum(bool(len(tokens)) for tokens in ids)
    some = f"requests: token ids of prompts are known of {count:,} of {len(rows):,} requests; the others are taken to "
    notes = (some + "share nothing.",) if count < len(rows) else ()
    return Shared(segments, (None,) * len(rows), notes)


def _by_block_ids(log: RequestLog, rows: Sequence[LoggedRequest]) -> Shared:
    """Ids of blocks, as in Mooncake's traces: equal ids mean that the prompt is equal up to the end of the block.

    A later prompt that goes on behind an answer whose ids are known has the keys of that answer as well.
    """
    size = _tokens_of_an_id(log, rows)
    owner: dict[int | str, int] = {}  # a block of an answer, and the first request that gave it
    for request, row in enumerate(rows):
        for block in row.answer_ids:
            owner.setdefault(block, request)
    returned = {owner[block] for row in rows for block in row.hash_ids or () if block in owner}
    segments: list[tuple[Segment, ...]] = []
    for request, row in enumerate(rows):
        keyed = _segments_of(row, size, rows, owner)
        rest = row.prompt_tokens - sum(one.tokens for one in keyed)
        if request in returned and rest:
            keyed.append(Segment(_tail(request), rest))
        segments.append(_whole(keyed, row.prompt_tokens))
    outputs = tuple(_answer(request) if request in returned else None for request in range(len(rows)))
    count = sum(bool(row.hash_ids) for row in rows)
    text = f"{log.file.name}: hash_ids of {size} tokens each say which prompts of {count:,} requests share a beginning"
    text += "." if count == len(rows) else f"; the other {len(rows) - count:,} are taken to share nothing."
    return Shared(tuple(segments), outputs, (text,), size)


def _segments_of(
    row: LoggedRequest, size: int, rows: Sequence[LoggedRequest], owner: Mapping[int | str, int]
) -> list[Segment]:
    """The keyed beginning of a prompt: blocks, and answers with the rest of the prompt before them."""
    found: list[Segment] = []
    left = row.prompt_tokens
    for before, blocks in groupby(row.hash_ids or (), owner.get):
        if before is None:
            for block in blocks:
                found += [Segment(_key(block), min(size, left))] if left > 0 else []
                left -= size
        else:
            tokens, tail = size * len(list(blocks)), rows[before].prompt_tokens % size
            found += [Segment(_tail(before), tail)] if tail else []
            found.append(Segment(_answer(before), tokens - tail))
            left -= tokens
    return found


def _tail(request: int) -> int:
    return _key(f"rest of prompt {request}")


def _answer(request: int) -> int:
    return _key(f"answer {request}")


def _tokens_of_an_id(log: RequestLog, rows: Sequence[LoggedRequest]) -> int:
    """The tokens of an id: as the log says, or the one usual size that fits all prompts. Raises TraceError."""
    tried = _BLOCKS if log.block_tokens is None else (log.block_tokens,)
    known = [(row, len(row.hash_ids)) for row in rows if row.hash_ids]

    def unfit(size: int) -> LoggedRequest | None:
        """The first row that this size does not fit, with ids of full blocks alone or with one of the rest."""
        full, rounded = (
            next((row for row, ids in known if ids != (row.prompt_tokens + more) // size), None)
            for more in (0, size - 1)
        )
        return None if full is None else rounded

    wrong = {size: unfit(size) for size in tried}
    fitting = [size for size in tried if wrong[size] is None]
    if len(fitting) == 1:
        return fitting[0]
    row = (None if fitting else wrong[tried[0]]) or known[0][0]
    why = (
        f"blocks of {' or '.join(map(str, fitting))} tokens fit all rows"
        if fitting
        else f"no blocks of {tried}"
    )
    reason = f"{len(row.hash_ids or ())} ids for {row.prompt_tokens} prompt tokens: {why}"
    more = "say how many tokens an id stands for in a column hash_block_tokens"
    raise TraceError(log.file.path, row.line, "hash_ids", f"{reason}; {more}")


def _by_names(rows: Sequence[LoggedRequest]) -> Shared:
    """Prompts that begin with so many tokens of a named text, as in traces of the format `simple`."""
    segments = []
    for row in rows:
        named = () if row.prefix is None else (Segment(_key(row.prefix), row.prefix_tokens or 0),)
        segments.append(_whole(named, row.prompt_tokens))
    return Shared(tuple(segments), (None,) * len(rows), ())


def _key(name: int | str) -> int:
    """A 64-bit key: the number itself, or a digest of a name."""
    if isinstance(name, str):
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    return name & 0xFFFF_FFFF_FFFF_FFFF


# -- counts of hits ---------------------------------------------------------------------------------------------------


def _by_counts(rows: Sequence[LoggedRequest], times: LoggedRequests) -> Shared:
    """A beginning of so many tokens as were found cached, taken from an earlier request that could have left it.

    That is a prompt which had its first token before this request was scheduled, or a prompt with its whole answer
    which had ended. Of several it is the one that is longer by the least (a conversation's last turn), then the latest.
    """
    began = times.first_token_s if times.scheduled_s is None else times.scheduled_s
    prompts = times.prompt_tokens
    wholes = prompts + times.output_tokens - 1  # the last token of an answer is never computed
    keyed: list[list[Segment]] = [[] for _ in rows]
    outputs: list[int | None] = [None] * len(rows)
    without = 0
    for request in np.argsort(began, kind="stable").tolist():
        cached = rows[request].cached_tokens or 0
        own: list[Segment] = []
        if cached:
            far = np.iinfo(np.int64).max
            ready = (times.first_token_s <= began[request]) & (prompts >= cached)
            ended = (times.last_token_s <= began[request]) & (prompts < cached) & (wholes >= cached)
            longer = np.where(ready, prompts, np.where(ended, wholes, far))
            longer[request] = far
            donors = np.flatnonzero(longer == longer.min())
            donor = int(donors[np.argmax(times.first_token_s[donors])])
            if longer[donor] == far:
                without += 1
            else:
                own = _beginning([*keyed[donor], Segment(_answer(donor), cached)], cached)
                if prompts[donor] < cached:
                    outputs[donor] = _answer(donor)
        rest = rows[request].prompt_tokens - sum(one.tokens for one in own)
        keyed[request] = [*own, Segment(_key(f"prompt {request}"), rest)] if rest else own
    count = sum(bool(row.cached_tokens) for row in rows)
    notes = [
        f"requests: cached_tokens of {count:,} requests says how much of a prompt was found in the prefix cache, not "
        "which earlier request it came from; the one that is longer by the least is assumed, the latest of these. Hits "
        "under other settings depend on it."
    ]
    if without:
        notes.append(
            f"requests: {without:,} of these found tokens that no earlier request of the log can have left (a cache "
            "from before the log); they are simulated without a hit."
        )
    return Shared(tuple(map(tuple, keyed)), tuple(outputs), tuple(notes))


def _beginning(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """The first tokens of a prompt."""
    found: list[Segment] = []
    for key, count in segments:
        take = min(count, tokens)
        found += [Segment(key, take)] if take else []
        tokens -= take
    return found
