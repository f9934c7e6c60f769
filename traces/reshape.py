"""Changes to a trace, as pure functions. Each returns a new trace, whose header says what was changed.

The harness uses them in this order: take, scale_lengths, share_prefixes, set_rate, drop_oversize,
sampled, share_prefixes again for what is left, one_request_per_sample.
`slice_rows` and `slice_time` cut a window. Requests keep their ids and the times between them, and the first arrives
at 0. `Links` repairs `parent` and `after` when requests are dropped: a request that waited for a dropped one then waits
for what that one waited for.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import floor, isfinite
from typing import Any

import numpy as np

from traces.arrivals import FIRST_KEY, uniform, zipf_cumulative
from traces.errors import ParameterError
from traces.formats.rows import TraceRow
from traces.trace import AFTER, AT, CONTENT, Ints, Requests, Segment, SegmentColumns, Trace, TraceRequest

SHARE_TOLERANCE = 0.02  # by which the share of prompt tokens that is shared may miss what was asked for
_BISECTIONS = 24
_CHOICE_STREAM = 4
_OWN_TEXT = FIRST_KEY + (1 << 62)  # keys of text that one request has alone, above all generated ones
_LONGEST = 10**12  # tokens of one request; digests hold twice a length in 64 bits
_OTHER_COPY = 0x9E3779B97F4A7C15  # odd, so that keys of copies differ
_SAMPLES, _LEAST_SAMPLE = 16, 50  # windows of a sample, and requests of each at least
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9  # arrivals are whole microseconds in 64 bits


class Links:
    """Remembers dropped requests, and rewrites the links of those that come later."""

    def __init__(self) -> None:
        self._dropped: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def drop(self, request_id: int, linked: Mapping[str, Any]) -> None:
        """Remember that `request_id` is dropped, and its own links, which will replace it."""
        self._dropped[request_id] = self.resolved(linked.get("parent"), linked.get("after", ()))

    def relink(self, row: TraceRow) -> TraceRow:
        """The row with links to kept requests only."""
        if not self._dropped or row.more is None or not row.more.keys() & {"parent", "after"}:
            return row
        parent, after = self.resolved(row.more.get("parent"), row.more.get("after", ()))
        more = {**row.more, "parent": parent, "after": after}
        if not after:
            more["release"] = AT
        return row._replace(more=more)

    def resolved(self, parent: int | None, after: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
        """The links to kept requests that stand for these."""
        if not self._dropped:
            return parent, after
        waits: dict[int, None] = {}
        for request_id in after:
            waits |= dict.fromkeys(self._dropped.get(request_id, (None, (request_id,)))[1])
        return self._dropped[parent][0] if parent in self._dropped else parent, tuple(waits)


def keep_requests(requests: Iterable[TraceRequest], is_kept: Iterable[bool]) -> Requests:
    """The requests with a true flag in `is_kept`, with their links repaired."""
    links, kept = Links(), []
    for request, keep in zip(requests, is_kept, strict=True):
        if not keep:
            links.drop(request.request_id, {"parent": request.parent, "after": request.after})
            continue
        parent, after = links.resolved(request.parent, request.after)
        if (parent, after) != (request.parent, request.after):
            release = AFTER if after and request.release == AFTER else AT
            request = replace(request, parent=parent, after=after, release=release)
        kept.append(request)
    return Requests.of(kept)


def take(trace: Trace, num_requests: int) -> Trace:
    """The first `num_requests` requests, or all if there are fewer. Raises ParameterError below 1."""
    if num_requests < 1:
        raise ParameterError("num_requests", f"at least 1 expected, found {num_requests}")
    if num_requests >= len(trace.requests):
        return trace
    sentence = f"the first {num_requests:,} of {len(trace.requests):,} requests"
    return trace.changed(trace.requests[:num_requests], sentence)


def scale_lengths(trace: Trace, factor: float) -> Trace:
    """Multiply prompt and output lengths by `factor`. Each stays at least 1 token. Raises ParameterError.

    A segment's end moves to round(end * factor), so that equal chained prefixes keep equal boundaries. Segments
    that shrink to 0 tokens are removed.
    """
    if not (isfinite(factor) and factor > 0):
        raise ParameterError("factor", f"above 0 expected, found {factor}")
    rows = trace.columns
    longest = int(max(rows.prompt_tokens.max(initial=0), rows.output_tokens.max(initial=0)))
    if longest * factor > _LONGEST:
        raise ParameterError(
            "factor",
            f"{factor:g} makes a request of {longest:,} tokens longer than {_LONGEST:,}; take a smaller one",
        )
    lengths = (rows.prompt_tokens, rows.output_tokens, rows.segments.tokens)
    if factor == 1 and min(length.min(initial=1) for length in lengths) > 0:  # scaling mends a length of 0
        return trace
    requests = _scaled(rows, factor)
    if requests == rows:
        return trace
    block = trace.header.source_block_tokens
    return trace.changed(
        requests,
        f"prompt and output lengths multiplied by {factor:g}",
        source_block_tokens=None if block is None else max(1, _round(block * factor)),
    )


def share_prefixes(trace: Trace, share: float, num_prefixes: int, zipf: float, seed: int) -> Trace:
    """Begin each prompt with one of `num_prefixes` texts, so that `share` of all prompt tokens stood in an earlier one.

    Every prompt takes the same part of its length from its text. The first use of a text is new to the cache, so the
    part is larger than `share`; it is searched. The rest of each prompt is unique, and the trace's own sharing is
    removed. Text k is drawn with a probability proportional to k^-zipf. The draw depends on (seed, request_id) only.

    Raises:
        ParameterError: no part comes within 0.02 of `share`; names the nearest share that can be reached.
    """
    check_sharing(share, num_prefixes, zipf)
    rows = trace.columns
    numbers = rows.request_id
    drawn = uniform(seed, _CHOICE_STREAM, int(numbers.max(initial=-1)) + 1)[numbers]
    choices = np.minimum(
        np.searchsorted(zipf_cumulative(num_prefixes, zipf), drawn, "right"), num_prefixes - 1
    )
    texts = choices + num_prefixes * trace.tenants  # a text of another tenant is another one
    part = _part_for(share, rows.prompt_tokens, texts, num_prefixes)
    shared = _times(part, rows.prompt_tokens)
    tokens = np.stack([shared, rows.prompt_tokens - shared], axis=1)
    keys = np.stack(
        [choices.astype(np.uint64) + np.uint64(FIRST_KEY), np.zeros(len(rows), np.uint64)], axis=1
    )
    is_there, is_keyed = tokens > 0, np.broadcast_to([True, False], tokens.shape)
    first = np.concatenate([[0], is_there.sum(axis=1).cumsum()])
    pieces = SegmentColumns(first, keys[is_there], tokens[is_there], is_keyed[is_there])
    requests = replace(rows, segments=pieces)
    if requests == rows:
        return trace
    sentence = (
        f"{share:.3g} of the prompt tokens are shared: each prompt begins with {part:.3g} of its length from one of "
        f"{num_prefixes} texts (Zipf exponent {zipf:g}), the rest is unique"
        if share
        else "every prompt is unique: recorded sharing removed"
    )
    return trace.changed(requests, sentence, key_kind=CONTENT, source_block_tokens=None)


def _times(factor: float, lengths: Ints) -> Ints:
    """Lengths times `factor`, to the nearest token; halves are rounded up."""
    tokens: Ints = np.floor(factor * lengths + 0.5).astype(np.int64)
    return tokens


def _part_for(share: float, tokens: Ints, choices: Ints, num_prefixes: int) -> float:
    """The part of each prompt, 0 to 1, that makes `share` of all prompt tokens shared; raises ParameterError.

    A prompt shares with the longest earlier one of its text. What is shared grows with the part, in steps of a token.
    """
    order = np.argsort(choices, kind="stable")
    prompts = tokens[order]
    above = choices[order].astype(np.int64) * (int(prompts.max(initial=0)) + 1)
    first = np.diff(choices[order], prepend=-1) != 0
    total = max(1, int(prompts.sum()))

    def reached(part: float) -> float:
        taken = _times(part, prompts)
        longest = np.maximum.accumulate(above + taken) - above
        return float(np.where(first, 0, np.minimum(taken, np.roll(longest, 1))).sum()) / total

    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS if reached(high) > share else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) < share else (low, middle)
    part = min((high, low), key=lambda each: abs(reached(each) - share)) if share else 0.0
    nearest = reached(part)
    if abs(nearest - share) > SHARE_TOLERANCE:
        what = "largest" if part == 1 else "nearest"
        raise ParameterError(
            "share",
            f"{share:g} of the prompt tokens cannot be shared: the {what} share that {len(prompts):,} requests with "
            f"{num_prefixes} texts reach is {floor(1000 * nearest) / 1000:g}, because the first use of a text is new; "
            "ask for less, take more requests (workload.num_requests) or fewer texts (workload.num_prefixes)",
        )
    return part


def set_rate(trace: Trace, requests_per_s: float) -> Trace:
    """Scale time so that requests arrive at this mean rate, (requests - 1) / span. Raises ParameterError."""
    if not (isfinite(requests_per_s) and requests_per_s > 0):
        raise ParameterError("requests_per_s", f"above 0 expected, found {requests_per_s}")
    rows = trace.columns
    if len(rows) < 2:
        return trace
    times = rows.arrival_us.tolist()  # whole numbers of Python: their products exceed 64 bits
    first, last = times[0], times[-1]
    if first == last:
        raise ParameterError(
            "requests_per_s",
            "all requests arrive at one instant, so time cannot be scaled to a rate; take more requests, spread the "
            "clock's ticks (ticks=even), or keep the recorded times (null)",
        )
    if not _LEAST_RATE <= requests_per_s <= _MOST_RATE:
        reason = f"from {_LEAST_RATE:g} to {_MOST_RATE:,.0f} expected, found {requests_per_s:g}"
        raise ParameterError("requests_per_s", reason)
    target_us = _round((len(rows) - 1) / requests_per_s * 1e6)
    span_us = last - first
    if target_us == span_us and first == 0:
        return trace
    scaled = np.array([(at_us - first) * target_us // span_us for at_us in times], np.int64)
    return trace.changed(
        replace(rows, arrival_us=scaled),
        f"time scaled from {trace.mean_rate:.4g} to {requests_per_s:.4g} requests/s",
    )


def keyed_text(row: TraceRequest) -> tuple[Segment, ...]:
    """The segments of a prompt, with keys for text that no other request has: so requests made of this one find it."""
    return tuple(
        Segment(_OWN_TEXT + (row.request_id << 12) + index if part.key is None else part.key, part.tokens)
        for index, part in enumerate(row.segments)
    )


def one_request_per_sample(trace: Trace, widths: Mapping[int, int]) -> Trace:
    """The trace with a request for each sample, all with the same prompt: vLLM's parallel sampling.

    `widths` has the number of samples by request id. Text that no other request has is keyed, so that the samples of
    one request find it. Sample b of request i is request i x (the greatest width) + b.
    """
    most = max(widths.values(), default=1)

    def samples(request_id: int) -> tuple[int, ...]:
        return tuple(request_id * most + branch for branch in range(widths.get(request_id, 1)))

    rows = []
    for row in trace.requests:
        after = tuple(sample for each in row.after for sample in samples(each))
        parent = None if row.parent is None else row.parent * most
        alike = replace(
            row, segments=keyed_text(row), after=after, parent=parent, n=None, best_of=None, beam_width=None
        )
        rows += [
            replace(alike, request_id=sample, output_key=None if number else row.output_key)
            for number, sample in enumerate(samples(row.request_id))
        ]
    return trace.changed(
        tuple(rows),
        f"{len(rows):,} samples of {len(trace.requests):,} requests are requests of their own (decoding.sharing="
        "prefix_cache), which share their prompt besides: rates, hits and latencies are those of samples",
    )


def repeated(trace: Trace, times: int) -> Trace:
    """The trace `times` times, one after the other at the mean gap, for traffic that lasts longer.

    Each copy has requests, sessions and prefixes of its own, so that no copy finds its prompts in the cache.
    """
    rows = trace.columns
    if times < 2 or not rows:
        return trace
    sentence = f"sent {times:,} times, one after the other"
    count, stride = len(rows), 1 + int(rows.request_id.max())
    period_us = int(rows.arrival_us[-1] - rows.arrival_us[0]) * count // max(1, count - 1)
    numbers = np.repeat(np.arange(times), count)
    copies = rows.take(np.tile(np.arange(count), times))
    segments = copies.segments
    shift = np.repeat(numbers, np.diff(segments.first)).astype(np.uint64) * np.uint64(_OTHER_COPY)
    copies = replace(
        copies,
        request_id=copies.request_id + numbers * stride,
        arrival_us=copies.arrival_us + numbers * period_us,
        segments=segments._replace(key=np.where(segments.is_keyed, segments.key + shift, segments.key)),
    )
    if copies.others is None:
        return trace.changed(copies, sentence)

    def own(name: str, value_of: Callable[[Any, int], Any]) -> list[Any]:
        pairs = zip(copies.values(name), numbers.tolist(), strict=True)
        return [value if value is None or not copy else value_of(value, copy) for value, copy in pairs]

    of_copy = {
        "output_key": own("output_key", lambda key, copy: (key + copy * _OTHER_COPY) % 2**64),
        "session": own("session", lambda name, copy: f"{name}#{copy}"),
        "parent": own("parent", lambda number, copy: number + copy * stride),
        "after": own("after", lambda those, copy: tuple(number + copy * stride for number in those)),
    }
    return trace.changed(copies.with_values(of_copy), sentence)


def sampled(trace: Trace, num_requests: int) -> Trace:
    """About `num_requests` requests in equal windows over the whole trace; the time between the windows is left out.

    Raises ParameterError below 1.
    """
    if num_requests < 1:
        raise ParameterError("num_requests", f"at least 1 expected, found {num_requests}")
    count = len(trace.requests)
    if num_requests >= count:
        return trace
    windows = max(1, min(_SAMPLES, num_requests // _LEAST_SAMPLE))
    size = num_requests // windows
    starts = [round(place * (count - size) / max(1, windows - 1)) for place in range(windows)]
    inside = [False] * count
    for start in starts:
        inside[start : start + size] = [True] * size
    kept = keep_requests(trace.requests, inside)
    times = trace.columns.arrival_us
    gap_us = int(times[-1] - times[0]) // max(1, count - 1)
    gaps_us = np.diff(kept.arrival_us, prepend=kept.arrival_us[0])
    gaps_us[size::size] = np.minimum(gaps_us[size::size], gap_us)
    sentence = f"{len(kept):,} of {count:,} requests, in {windows} windows over the whole trace"
    return trace.changed(replace(kept, arrival_us=np.cumsum(gaps_us)), sentence)


def drop_oversize(trace: Trace, verdicts: Mapping[int, str]) -> Trace:
    """Drop the requests that have a reason in `verdicts`, by request id. The header counts them by reason."""
    reasons = Counter(verdicts.values())
    if not reasons:
        return trace
    dropped, rows = Counter(trace.header.dropped) + reasons, trace.columns
    kept = ~np.isin(rows.request_id, list(verdicts))
    linked = any(rows.values("after")) or any(parent is not None for parent in rows.values("parent"))
    return trace.changed(
        keep_requests(trace.requests, kept) if linked else rows.take(np.flatnonzero(kept)),
        "dropped " + ", ".join(f"{count:,} ({reason})" for reason, count in sorted(reasons.items())),
        dropped=dict(dropped),
        rows_kept=trace.header.rows_kept - reasons.total(),
    )


def _round(value: float) -> int:
    """Nearest integer, halves up. round() would round halves to the even neighbour."""
    return floor(value + 0.5)


def _scaled(rows: Requests, factor: float) -> Requests:
    """The requests with their lengths times `factor`, none below 1, and the ends of their segments likewise."""
    prompts, pieces = np.maximum(1, _times(factor, rows.prompt_tokens)), rows.segments
    ends = np.concatenate([[0], np.cumsum(pieces.tokens)])
    begins, counts = ends[pieces.first[:-1]], np.diff(pieces.first)  # of each prompt, among all tokens
    within = np.repeat(begins, counts)
    tokens = _times(factor, ends[1:] - within) - _times(factor, ends[:-1] - within)
    left = np.concatenate([[0], np.cumsum(tokens > 0)])[pieces.first]
    empty = np.flatnonzero(np.diff(left) == 0)  # their first segment is all that they have
    tokens[pieces.first[empty]] = prompts[empty]
    kept = tokens > 0
    first = np.concatenate([[0], np.cumsum(kept)])[pieces.first]
    segments = SegmentColumns(first, pieces.key[kept], tokens[kept], pieces.is_keyed[kept])
    outputs = np.maximum(1, _times(factor, rows.output_tokens))
    return replace(rows, prompt_tokens=prompts, output_tokens=outputs, segments=segments)


def check_sharing(share: float, num_prefixes: int, zipf: float) -> None:
    """Raise ParameterError unless `num_prefixes` texts can be shared by `share` of prompts, by Zipf's law."""
    if not 0 <= share <= 1:
        raise ParameterError("share", f"from 0 to 1 expected, found {share}")
    if num_prefixes < 1:
        raise ParameterError("num_prefixes", f"at least 1 expected, found {num_prefixes}")
    if not (isfinite(zipf) and zipf >= 0):
        raise ParameterError("zipf", f"0 or above expected, found {zipf}")


def slice_rows(trace: Trace, first: float, last: float, *, whole_sessions: bool = False) -> Trace:
    """Requests `first` to `last` - 1, counted from 0 in order of arrival. Raises ParameterError if there are none.

    `whole_sessions` keeps all turns of conversations whose first turn is inside, and no turn of others.
    """
    inside = [first <= number < last for number in range(len(trace.requests))]
    return _cut(trace, inside, whole_sessions, f"requests {first:g} to {last:g}")


def slice_time(trace: Trace, first: float, last: float, *, whole_sessions: bool = False) -> Trace:
    """Requests that arrive from `first` to before `last`, in seconds from the trace's start. Else as `slice_rows`."""
    start = trace.requests[0].arrival_us if trace.requests else 0
    inside = [first <= (at_us - start) / 1e6 < last for at_us in trace.columns.arrival_us.tolist()]
    return _cut(trace, inside, whole_sessions, f"arrivals from {first:g} to {last:g} s")


def _cut(trace: Trace, inside: list[bool], whole_sessions: bool, window: str) -> Trace:
    if whole_sessions:
        inside = _whole(trace.requests, inside)
    kept = keep_requests(trace.requests, inside)
    if not kept:
        reason = f"no request in the window ({window}); the trace has {len(trace.requests):,}"
        raise ParameterError("window", reason)
    moved = kept.from_first()
    if moved == trace.requests:
        return trace
    cut = sum(request.parent is None and (request.turn or 1) > 1 for request in moved)
    more = (
        "; conversations whole" if whole_sessions else f"; {cut:,} turns lost the turn before" if cut else ""
    )
    return trace.changed(moved, f"{window}: {len(moved):,} of {len(trace.requests):,} requests{more}")


def _whole(requests: Sequence[TraceRequest], inside: list[bool]) -> list[bool]:
    """For each request, whether the first request of its conversation is inside."""
    roots: dict[int, int] = {}
    sessions: dict[str, int] = {}
    chosen: dict[int, bool] = {}
    whole = []
    for request, is_inside in zip(requests, inside, strict=True):
        root = request.request_id if request.parent is None else roots.get(request.parent, request.request_id)
        if request.session is not None:
            root = sessions.setdefault(request.session, root)
        roots[request.request_id] = root
        whole.append(chosen.setdefault(root, is_inside))
    return whole
