"""Hit tokens from the segment keys of a trace: exact, without tokens or an engine.

`shared_prefix_tokens` is for an unlimited cache and needs one pass. `reuse_profile` computes the hit ratio for all
cache sizes at once, at one block size. Its cache holds full blocks in LRU order. The leading blocks of a prompt that
are in the cache when the request arrives are hits. Then all blocks of the request are touched, last to first, so a
prefix stays longer than its continuation. Insertion takes no time and outputs are not cached: the result depends on the
trace only.

Blocks that always occur together form one extent, so smaller blocks need no more work. The stack distance of a block
(Mattson et al. 1970) is the number of blocks touched since its last use; it gives the hits of every cache size.
`PrefixPaths` holds the prompts as paths in a tree. It is built once and serves any block size.

`optimal_hit_tokens` has the most that any eviction order can find: Belady's optimum, exact. A block that a request has
in its prompt can be kept until the next request that looks it up. Such an interval takes one block of the cache and
gives one hit. So the optimum is the largest set of intervals of which no more than the cache has blocks overlap, and
evicting the block whose next lookup is farthest away finds it (Belady 1966; for intervals: Carlisle and Lloyd 1995). A
prefix stays whole by itself, because a block is looked up no earlier than those before it. Requests are taken in the
order of the trace, and nothing else takes memory. So no engine with this many blocks that admits requests in this order
finds more in their prompts, whatever it evicts, pins or keeps.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.trace import Ints, Segment, SegmentColumns, Trace

_MANY_ENDS = 256  # a text used at more lengths than this is cut at multiples of _GRAIN tokens only
_GRAIN = 16
_NEVER = 1 << 60
_Step = tuple[int, int, int, int]  # path before it, key, start, stop
Extent = tuple[int, int]  # name, number of blocks; equal names hold equal prefixes


def prompt_paths(prompts: SegmentColumns, roots: Ints | None = None) -> tuple[Ints, Ints]:
    """How many leading tokens of each prompt an earlier one began with, and the path of its keyed segments.

    Equal paths are equal prompts, up to the first segment without a key. Two prompts that go on from one path with the
    same key are equal over the shorter of the two lengths, and differ after it: different keys differ in their first
    token (except by chance in small vocabularies). Prompts of different `roots` share nothing.
    """
    count = len(prompts.first) - 1
    seen, path = np.zeros(count, np.int64), np.zeros(count, np.int64) if roots is None else roots.copy()
    live, paths, depth = np.arange(count), int(path.max(initial=0)) + 1, 0
    while True:
        live = live[prompts.first[live] + depth < prompts.first[live + 1]]
        live = live[prompts.is_keyed[prompts.first[live] + depth]]
        if not len(live):
            return seen, path
        place = prompts.first[live] + depth
        tokens = prompts.tokens[place]
        pair = _numbered(path[live], prompts.key[place])
        seen[live] += np.minimum(tokens, _longest_before(pair, tokens))
        path[live] = paths + _numbered(pair, tokens)
        paths, depth = paths + len(live), depth + 1


def _numbered(first: Ints, second: npt.NDArray[Any]) -> Ints:
    """A number for each pair, equal for equal ones, from 0."""
    order = np.lexsort((second, first))
    is_new = (np.diff(first[order], prepend=-1) != 0) | (second[order] != np.roll(second[order], 1))
    numbers = np.empty(len(first), np.int64)
    numbers[order] = np.cumsum(is_new) - 1
    return numbers


def _longest_before(group: Ints, tokens: Ints) -> Ints:
    """The most tokens of an earlier one of the same group; 0 where there is none."""
    order = np.argsort(group, kind="stable")
    above = group[order] * (int(tokens.max()) + 1)
    longest = np.maximum.accumulate(above + tokens[order]) - above
    found = np.empty_like(tokens)
    found[order] = np.where(np.diff(group[order], prepend=-1) != 0, 0, np.roll(longest, 1))
    return found


def shared_prefix_tokens(trace: Trace) -> list[int]:
    """For each request, the leading prompt tokens that it shares with some earlier request of the trace."""
    found: list[int] = prompt_paths(trace.columns.segments)[0].tolist()
    return found


def realised_prefix_share(trace: Trace) -> float:
    """Share of all prompt tokens (0 to 1) that an unlimited, token-exact prefix cache has seen before."""
    total = int(trace.columns.prompt_tokens.sum())
    return int(prompt_paths(trace.columns.segments)[0].sum()) / total if total else 0.0


class PrefixPaths:
    """The paths of all prompts of a trace: built once, gives extents at any block size.

    Two prompts share a path as far as an unlimited, token-exact prefix cache finds them equal. (A text that is used at
    more than 256 lengths is compared in steps of 16 tokens.)
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
        """The full blocks of request number `index`, in order, then its partial block if `partial_block`."""
        extents, done = [], 0
        prompt_tokens = int(self.trace.columns.prompt_tokens[index])
        for name, stop in self._ends[index]:
            blocks = stop // block_size - done
            if blocks:
                extents.append((name, blocks))
                done += blocks
        if partial_block and prompt_tokens % block_size:
            extents.append((-1 - self._ends[index][-1][0], 1))
        return extents

    def _path(self, walk: list[_Step]) -> tuple[list[int], list[int]]:
        """Nodes of the leading keyed segments, and the token at which each ends."""
        nodes, stops, parent = [], [], -1
        for path, key, start, stop in walk:
            ends = self._cuts.get((path, key), ())
            for cut in (*ends[bisect_right(ends, start) : bisect_left(ends, stop)], stop):
                parent = self._names.setdefault((parent, key, cut), len(self._uses))
                if parent == len(self._uses):
                    self._uses.append(0)
                self._uses[parent] += 1
                nodes.append(parent)
                stops.append(cut)
        return nodes, stops

    def _merged(self, nodes: list[int], stops: list[int], total: int) -> list[tuple[int, int]]:
        """Nodes with the same requests become one extent. Nodes of one request only join its unique end."""
        uses, ends = self._uses, []
        for place, (node, stop) in enumerate(zip(nodes, stops, strict=True)):
            last = place + 1 == len(nodes)
            if uses[node] > 1 and (last or uses[nodes[place + 1]] != uses[node]):
                ends.append((node, stop))
        if not ends or ends[-1][1] < total:
            self._uses.append(1)
            ends.append((len(self._uses) - 1, total))
        return ends


def _cuts(walks: Iterable[list[_Step]]) -> dict[tuple[int, int], list[int]]:
    """The ends of segments with one key after one path, where they differ. Longer segments are cut there."""
    known: dict[tuple[int, int], int | set[int]] = {}
    for walk in walks:
        for path, key, _, stop in walk:
            ends = known.setdefault((path, key), stop)
            if isinstance(ends, set):
                ends.add(stop)
            elif ends != stop:
                known[path, key] = {ends, stop}
    return {
        place: sorted({end // _GRAIN * _GRAIN for end in ends} if len(ends) > _MANY_ENDS else ends)
        for place, ends in known.items()
        if isinstance(ends, set)
    }


def _walk(
    segments: Iterable[Segment], paths: dict[tuple[int, int, int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """The leading keyed segments as (path before the segment, key, start, stop)."""
    path, start = 0, 0
    for key, tokens in segments:
        if key is None:
            return
        stop = start + tokens
        yield path, key, start, stop
        path = paths.setdefault((path, key, tokens), len(paths) + 1)
        start = stop


@dataclass(frozen=True)
class ReuseProfile:
    """Accesses to blocks that were seen before: arrays of equal length, one entry per extent and request.

    Since the last access `distance` other blocks were touched and `gap_us` passed; the extent has `blocks` blocks.
    `prompt_tokens` is the sum over all prompts, `blocks_in_all` the number of blocks of all prompts.
    """

    block_size: int
    prompt_tokens: int
    blocks_in_all: int
    distinct_blocks: int
    distance: Ints
    blocks: Ints
    gap_us: Ints

    def hit_tokens(self, capacity_blocks: float) -> int:
        """Tokens hit in a cache of `capacity_blocks` blocks; infinity means unlimited."""
        hits = np.clip(capacity_blocks - self.distance.astype(np.float64), 0, self.blocks)
        return int(hits.sum()) * self.block_size

    def hit_ratio(self, capacity_blocks: float) -> float:
        """The hit tokens as a share of all prompt tokens."""
        return self.hit_tokens(capacity_blocks) / max(self.prompt_tokens, 1)

    def curve(self, capacity_tokens: Iterable[float]) -> list[float]:
        """Hit ratios at capacities in tokens, rounded down to whole blocks."""
        return [self.hit_ratio(tokens // self.block_size) for tokens in capacity_tokens]

    def distances(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the stack distance, in blocks, over all blocks seen before. Empty if there are none."""
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
    """The profile at one block size, in tokens. Pass `PrefixPaths(trace)` to compute it at several sizes.

    With `spare_last_token` it is an engine that serves one request after the other, from a pool that each of them fits:
    the last token is always computed, and a last block that is partial, or computed again, takes a block of the pool
    until another request needs one. That is exact, but for prompts that end on a block's edge and stood whole in the
    cache, of whose last block an engine without `deduplicate` keeps two copies. With blocks of one token that is every
    prompt that comes again: 5 of 3,000 random traces differ by a hit then, 4 of them by the copy. With `partial_blocks`
    a partial last block also occupies a block of the cache, as in published tables; it is never hit.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    requests = paths.trace.requests
    rows = [paths.extents(index, block_size, partial_blocks) for index in range(len(requests))]
    stack = _Stack(sum(map(len, rows)))
    found: list[tuple[int, int, int]] = []
    distinct = 0
    last_us: dict[int, int] = {}
    spare = 0  # the lowest place that was touched again since a request took a block beside its full ones; 0: none has
    for request, extents in zip(requests, rows, strict=True):
        left = (request.prompt_tokens - spare_last_token) // block_size
        takes_more = spare_last_token and request.prompt_tokens % block_size > 0
        for name, blocks in extents:
            place = stack.place(name)
            if place is None:
                break
            if left > 0:
                more = spare > place  # it outlasted that block too
                found.append(
                    (stack.above(place) + more, min(blocks, left), request.arrival_us - last_us[name])
                )
            takes_more |= spare_last_token and left < blocks
            left -= blocks
        distinct += sum(blocks for name, blocks in extents if stack.place(name) is None)
        spare = min([spare, *(stack.place(name) or 0 for name, _ in extents)])
        for name, blocks in reversed(extents):
            stack.touch(name, blocks)
            last_us[name] = request.arrival_us
        spare = _NEVER if takes_more else spare
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


Block = tuple[int, int]


def optimal_hit_tokens(
    trace: Trace | PrefixPaths, block_size: int, capacity_blocks: int, *, spare_last_token: bool = True
) -> int:
    """Hit tokens of the optimum in a cache of `capacity_blocks` blocks.

    `spare_last_token` limits lookups as an engine does, which always computes the last token of a prompt. Pass
    `PrefixPaths(trace)` to compute several sizes.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    prompts, lookups = [], []  # the full blocks of each prompt, and how many of them are looked up
    for index, request in enumerate(paths.trace.requests):
        extents = paths.extents(index, block_size)
        prompts.append([(name, number) for name, blocks in extents for number in range(blocks)])
        lookups.append((request.prompt_tokens - spare_last_token) // block_size)
    return optimal_hits(prompts, lookups, capacity_blocks) * block_size


def optimal_hits(prompts: list[list[Block]], lookups: list[int], capacity: int) -> int:
    """Hits of the optimum: request i has the blocks `prompts[i]`, and looks the first `lookups[i]` of them up."""
    ahead: dict[Block, int] = {}
    next_use: list[list[int]] = []
    for index in range(len(prompts) - 1, -1, -1):
        next_use.append([ahead.get(block, _NEVER) for block in prompts[index]])
        ahead.update(dict.fromkeys(prompts[index][: lookups[index]], index))
    next_use.reverse()
    kept: dict[Block, int] = {}  # block: the request that looks it up next
    farthest: list[tuple[int, int, Block]] = []  # entries that are no longer kept stay until they come up
    hits = 0
    for blocks, looked_up, uses in zip(prompts, lookups, next_use, strict=True):
        hits += sum(block in kept for block in blocks[:looked_up])
        for place, (block, use) in enumerate(zip(blocks, uses, strict=True)):
            kept.pop(block, None)
            if use != _NEVER:
                kept[block] = use
                heappush(farthest, (-use, -place, block))
        while len(kept) > capacity:
            use, _, block = heappop(farthest)
            if kept.get(block) == -use:
                del kept[block]
    return hits


def optimal_hits_of_run(
    asked: Sequence[Sequence[Hashable]],
    held: Sequence[Sequence[Hashable]],
    events: Iterable[tuple[bool, int]],
    capacity: int,
) -> int:
    """The most hits of any order of eviction in a run that has admitted and ended its requests in a given order.

    Request i looks the blocks `asked[i]` up when it is admitted, and has `held[i]` in use until its end, its answer
    included. An event is (True, i) for the admission of i, (False, i) for its end. Blocks in use by a request that has
    not ended are hit, and take nothing of `capacity`: so no run with these events finds more, whatever it evicts.
    Evicting the block whose next lookup is farthest away is best, as each kept block is an interval from an end to the
    next lookup.
    """
    order = list(events)
    looked_up = [set(blocks) for blocks in asked]
    users: dict[Hashable, deque[int]] = {}  # block: the places of the admissions that come to use it
    for place, (enters, index) in enumerate(order):
        for block in held[index] if enters else ():
            users.setdefault(block, deque()).append(place)
    in_use: Counter[Hashable] = Counter()
    kept: dict[Hashable, int] = {}
    farthest: list[tuple[int, int, Hashable]] = []  # entries that are no longer kept stay until they come up
    hits = 0
    for place, (enters, index) in enumerate(order):
        if enters:
            hits += sum(block in kept or in_use[block] > 0 for block in asked[index])
            for block in held[index]:
                users[block].popleft()
                kept.pop(block, None)
                in_use[block] += 1
            continue
        for number, block in enumerate(held[index]):
            in_use[block] -= 1
            use = users[block][0] if users[block] else None
            if in_use[block] or use is None or block not in looked_up[order[use][1]]:
                continue  # in use, never used again, or computed again by its next user in any case
            kept[block] = use
            heappush(farthest, (-use, -(place << 32) - number, block))
        while len(kept) > capacity:
            use, _, block = heappop(farthest)
            if kept.get(block) == -use:
                del kept[block]
    return hits
