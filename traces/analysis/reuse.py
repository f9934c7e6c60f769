"""How many prompt tokens a prefix cache can reuse: exact, from the segment keys, without tokens or an engine.

`shared_prefix_tokens` is for an unlimited cache and needs one pass. `reuse_profile` gives the hit ratio for every cache
size at once, at one block size. Its cache holds full blocks in LRU order. A hit is the first run of blocks that are in
the cache when the request arrives. Then all blocks of the request are touched, last to first, so a prefix stays longer
than what follows it. Insertion takes no time and outputs are left out: this is a property of the trace alone.

Blocks that always stand together form one extent, so smaller blocks do not make more work. The stack distance of a
block (Mattson et al. 1970) is the number of blocks touched since its last use, which gives every cache size at once.
`PrefixPaths` holds the prompts as paths in a tree: build it once, then ask it at any block size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.trace import Segment, Trace, TraceRequest


class PrefixTree:
    """All prompts seen so far, as paths of segments.

    A node is a path of exact segments. Under a node, prompts that continue with one key agree over the shorter of
    the two lengths, and part there: keys differ in their first token (but for chance in small vocabularies).
    """

    def __init__(self) -> None:
        self._longest: dict[tuple[int, int], int] = {}  # (node, key) -> tokens of the longest segment seen
        self._children: dict[tuple[int, int, int], int] = {}  # (node, key, tokens) -> node

    def seen_tokens(self, request: TraceRequest) -> int:
        """Leading prompt tokens that an earlier prompt began with; then remembers this prompt."""
        node, seen = 0, 0
        for key, tokens in request.segments:
            if key is None:
                break
            known = self._longest.get((node, key), 0)
            seen += min(known, tokens)
            if known < tokens:
                self._longest[node, key] = tokens
            node = self._children.setdefault((node, key, tokens), len(self._children) + 1)
        return seen


def shared_prefix_tokens(trace: Trace) -> list[int]:
    """For each request the leading prompt tokens that some earlier request of the trace has too."""
    tree = PrefixTree()
    return [tree.seen_tokens(request) for request in trace.requests]


def realised_prefix_share(trace: Trace) -> float:
    """Share of all prompt tokens that an unlimited, token-exact prefix cache would have seen before (0 to 1)."""
    total = sum(request.prompt_tokens for request in trace.requests)
    return sum(shared_prefix_tokens(trace)) / total if total else 0.0


_MANY_ENDS = 256  # one text used at more lengths than this is cut at multiples of _GRAIN tokens only
_GRAIN = 16
_Step = tuple[int, int, int, int]  # path before it, key, start, stop
Extent = tuple[int, int]  # name, number of blocks; equal names hold equal prefixes


class PrefixPaths:
    """The paths of all prompts of a trace, built once and asked for extents at any block size.

    Two prompts share a path as far as an unlimited, token-exact prefix cache would find them equal. (A text that is
    used at more than 256 lengths is compared in steps of 16 tokens.)
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        paths: dict[tuple[int, int, int], int] = {}
        walks = [list(_walk(request.segments, paths)) for request in trace.requests]
        self._cuts = _cuts(walks)
        self._names: dict[tuple[int, int, int], int] = {}
        self._uses: list[int] = []
        ways = [self._path(walk) for walk in walks]
        pairs = zip(ways, trace.requests, strict=True)
        self._ends = [self._merged(nodes, stops, request.prompt_tokens) for (nodes, stops), request in pairs]

    def extents(self, index: int, block_size: int, partial_block: bool = False) -> list[Extent]:
        """The full blocks of request number `index`, in order; then its partial block if asked for."""
        extents, done = [], 0
        prompt_tokens = self.trace.requests[index].prompt_tokens
        for name, stop in self._ends[index]:
            blocks = stop // block_size - done
            if blocks:
                extents.append((name, blocks))
                done += blocks
        if partial_block and prompt_tokens % block_size:
            extents.append((-1 - self._ends[index][-1][0], 1))
        return extents

    def _path(self, walk: list[_Step]) -> tuple[list[int], list[int]]:
        """Nodes of the keyed beginning, and where each ends in tokens."""
        nodes, stops, parent, ends = [], [], -1, self._cuts.ends
        for path, key, start, stop in walk:
            cuts = (*self._cuts.between(path, key, start, stop), stop) if (path, key) in ends else (stop,)
            for cut in cuts:
                parent = self._name(parent, key, cut)
                self._uses[parent] += 1
                nodes.append(parent)
                stops.append(cut)
        return nodes, stops

    def _merged(self, nodes: list[int], stops: list[int], total: int) -> list[tuple[int, int]]:
        """Nodes that the same requests pass are one extent; what one request alone has joins its unique end."""
        uses, ends = self._uses, []
        for place, (node, stop) in enumerate(zip(nodes, stops, strict=True)):
            last = place + 1 == len(nodes)
            if uses[node] > 1 and (last or uses[nodes[place + 1]] != uses[node]):
                ends.append((node, stop))
        if not ends or ends[-1][1] < total:
            self._uses.append(1)
            ends.append((len(self._uses) - 1, total))
        return ends

    def _name(self, parent: int, key: int, stop: int) -> int:
        name = self._names.setdefault((parent, key, stop), len(self._uses))
        if name == len(self._uses):
            self._uses.append(0)
        return name


class _Cuts:
    """Where segments of one key, behind one path, end: those that reach further are cut there."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, int], list[int]] = {}

    def between(self, path: int, key: int, start: int, stop: int) -> Iterator[int]:
        for cut in self.ends.get((path, key), ()):
            if cut >= stop:
                return
            if cut > start:
                yield cut


def _cuts(walks: Iterable[list[_Step]]) -> _Cuts:
    cuts = _Cuts()
    found: dict[tuple[int, int], int | set[int]] = {}
    for walk in walks:
        for path, key, _, stop in walk:
            known = found.setdefault((path, key), stop)
            if known != stop:
                stops = known if isinstance(known, set) else {known}
                stops.add(stop)
                found[path, key] = stops
    for place, ends in found.items():
        if isinstance(ends, set):
            coarse = {end // _GRAIN * _GRAIN for end in ends} if len(ends) > _MANY_ENDS else ends
            cuts.ends[place] = sorted(coarse)
    return cuts


def _walk(
    segments: Iterable[Segment], paths: dict[tuple[int, int, int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """Leading keyed segments: (path before it, key, start, stop)."""
    path, start = 0, 0
    for key, tokens in segments:
        if key is None:
            return
        stop = start + tokens
        yield path, key, start, stop
        path = paths.setdefault((path, key, tokens), len(paths) + 1)
        start = stop


Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReuseProfile:
    """Accesses to blocks that were seen before: arrays of equal length, one entry for each extent and request.

    `distance` blocks of others were touched since; the extent has `blocks` blocks; `gap_us` passed. `prompt_tokens`
    counts all prompts, `blocks_in_all` every block of every prompt.
    """

    block_size: int
    prompt_tokens: int
    blocks_in_all: int
    distinct_blocks: int
    distance: Ints
    blocks: Ints
    gap_us: Ints

    def hit_tokens(self, capacity_blocks: float) -> int:
        """Tokens hit by a cache of so many blocks; infinity for an unlimited one."""
        room = np.clip(capacity_blocks - self.distance.astype(np.float64), 0, self.blocks)
        return int(room.sum()) * self.block_size

    def hit_ratio(self, capacity_blocks: float) -> float:
        """The same as a share of all prompt tokens."""
        return self.hit_tokens(capacity_blocks) / max(self.prompt_tokens, 1)

    def curve(self, capacity_tokens: Iterable[float]) -> list[float]:
        """Hit ratios at capacities given in tokens; only whole blocks count."""
        return [self.hit_ratio(tokens // self.block_size) for tokens in capacity_tokens]

    def distances(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the stack distance in blocks over all blocks seen before; empty where there is none."""
        return _weighted_quantiles(self.distance + (self.blocks + 1) / 2, self.blocks, shares)

    def gaps_s(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the time since the block was last touched, in seconds."""
        return _weighted_quantiles(self.gap_us / 1e6, self.blocks, shares)


def reuse_profile(
    trace: Trace | PrefixPaths,
    block_size: int,
    *,
    spare_last_token: bool = False,
    partial_blocks: bool = False,
) -> ReuseProfile:
    """The profile at one block size, in tokens; give `PrefixPaths(trace)` where several sizes are wanted.

    `spare_last_token` caps hits as an engine does, which computes at least the last token. `partial_blocks` lets a
    partial last block occupy a block of the cache too, as published tables do; it never hits.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    requests = paths.trace.requests
    rows = [paths.extents(index, block_size, partial_blocks) for index in range(len(requests))]
    stack = _Stack(sum(map(len, rows)))
    found: list[tuple[int, int, int]] = []
    distinct = 0
    last_us: dict[int, int] = {}
    for request, extents in zip(requests, rows, strict=True):
        room = (request.prompt_tokens - spare_last_token) // block_size
        for name, blocks in extents:
            place = stack.place(name)
            if place is None:
                break
            if room > 0:
                found.append((stack.above(place), min(blocks, room), request.arrival_us - last_us[name]))
            room -= blocks
        distinct += sum(blocks for name, blocks in extents if stack.place(name) is None)
        for name, blocks in reversed(extents):
            stack.touch(name, blocks)
            last_us[name] = request.arrival_us
    columns = np.array(found, dtype=np.int64).reshape(-1, 3)
    return ReuseProfile(
        block_size=block_size,
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        blocks_in_all=sum(blocks for extents in rows for _, blocks in extents),
        distinct_blocks=distinct,
        distance=columns[:, 0],
        blocks=columns[:, 1],
        gap_us=columns[:, 2],
    )


class _Stack:
    """Extents in the order of their last touch, with a Fenwick tree over the blocks touched."""

    def __init__(self, touches: int) -> None:
        self._size = touches
        self._sums = [0] * (touches + 1)
        self._places: dict[int, tuple[int, int]] = {}  # extent -> place (later is more recent), blocks
        self._next = 1
        self._total = 0

    def place(self, name: int) -> int | None:
        known = self._places.get(name)
        return None if known is None else known[0]

    def above(self, place: int) -> int:
        """Blocks touched after the extent at this place."""
        below, sums = 0, self._sums
        while place:
            below += sums[place]
            place &= place - 1
        return self._total - below

    def touch(self, name: int, blocks: int) -> None:
        known = self._places.get(name)
        if known is not None:
            self._add(known[0], -known[1])
        self._add(self._next, blocks)
        self._places[name] = (self._next, blocks)
        self._next += 1

    def _add(self, place: int, blocks: int) -> None:
        self._total += blocks
        sums, size = self._sums, self._size
        while place <= size:
            sums[place] += blocks
            place += place & -place


def _weighted_quantiles(
    values: npt.NDArray[np.float64], weights: Ints, shares: Sequence[float]
) -> list[float]:
    if not values.size:
        return []
    order = np.argsort(values, kind="stable")
    places = np.cumsum(weights[order])
    picks = np.searchsorted(places, np.asarray(shares) * places[-1], "left")
    return [float(values[order][min(int(pick), values.size - 1)]) for pick in picks]
