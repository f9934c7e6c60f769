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

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traces.trace import Ints, SegmentColumns, Trace

_MANY_ENDS = 256  # a text used at more lengths than this is cut at multiples of _GRAIN tokens only
_GRAIN = 16
Block = tuple[int, int]


class Extents(NamedTuple):
    """Blocks of many prompts, those that always occur together in one; equal names hold equal prefixes."""

    prompt: Ints
    name: Ints
    blocks: Ints


def prompt_paths(prompts: SegmentColumns, roots: Ints | None = None) -> tuple[Ints, Ints]:
    """How many leading tokens of each prompt an earlier one began with, and the path of its keyed segments.

    Equal paths are equal prompts, up to the first segment without a key. Two prompts that go on from one path with the
    same key are equal over the shorter of the two lengths, and differ after it: different keys differ in their first
    token (except by chance in small vocabularies). Prompts of different `roots` share nothing.
    """
    count = len(prompts.first) - 1
    seen, path = np.zeros(count, np.int64), np.zeros(count, np.int64) if roots is None else roots.copy()
    for live, pair, tokens in keyed_levels(prompts, path):
        seen[live] += np.minimum(tokens, _longest_before(pair, tokens))
    return seen, path


def keyed_levels(prompts: SegmentColumns, path: Ints) -> Iterator[tuple[Ints, Ints, Ints]]:
    """Segment by segment: the prompts that still have a keyed one, a number for its path and key, and its tokens.

    `path` has the root of each prompt, and becomes the path behind its keyed segments.
    """
    prompts = joined(prompts)
    live, paths, depth = np.arange(len(path)), int(path.max(initial=0)) + 1, 0
    keys = np.unique(prompts.key, return_inverse=True)[1]
    while True:
        live = live[prompts.first[live] + depth < prompts.first[live + 1]]
        live = live[prompts.is_keyed[prompts.first[live] + depth]]
        if not len(live):
            return
        place = prompts.first[live] + depth
        tokens = prompts.tokens[place]
        pair = _numbered(path[live], keys[place])
        yield live, pair, tokens
        path[live] = paths + _numbered(pair, tokens)
        paths, depth = paths + len(live), depth + 1


def joined(prompts: SegmentColumns) -> SegmentColumns:
    """The same prompts, with a segment of a text and the next one as one segment where they only occur together: the
    one always followed by the other and always as long, and the other never behind anything else.
    """
    if len(prompts.key) < 2:
        return prompts
    keys = np.unique(prompts.key, return_inverse=True)[1] + 1
    keys[~prompts.is_keyed] = 0
    inside = (keys[1:] > 0) & (keys[:-1] > 0)
    starts = prompts.first[(prompts.first > 0) & (prompts.first < len(keys))]
    inside[starts - 1] = False
    following, before = np.zeros_like(keys), np.zeros_like(keys)
    following[:-1][inside], before[1:][inside] = keys[1:][inside], keys[:-1][inside]
    is_led = _one_value(keys, following) & _one_value(keys, prompts.tokens)
    is_next = _one_value(keys, before)
    begins = np.ones(len(keys), np.bool_)
    begins[1:] = ~(inside & is_led[:-1] & is_next[1:])
    places = np.flatnonzero(begins)
    first = np.concatenate([[0], np.cumsum(begins)])[prompts.first]
    tokens = np.add.reduceat(prompts.tokens, places)
    return SegmentColumns(first, prompts.key[places], tokens, prompts.is_keyed[places])


def _one_value(keys: Ints, values: Ints) -> npt.NDArray[np.bool_]:
    """For each place whether all those of its key have the same value."""
    count = int(keys.max()) + 1
    one = np.zeros(count, values.dtype)
    one[keys] = values
    differs = np.zeros(count, np.bool_)
    differs[keys[values != one[keys]]] = True
    return ~differs[keys]


def _numbered(first: Ints, second: Ints) -> Ints:
    """A number for each pair of numbers, equal for equal ones, from 0."""
    pairs = first * (int(second.max()) + 1) + second
    found: Ints = np.unique(pairs, return_inverse=True)[1]
    return found


def _longest_before(group: Ints, tokens: Ints) -> Ints:
    """The most tokens of an earlier one of the same group; 0 where there is none."""
    order = np.argsort(group, kind="stable")
    above = group[order] * (int(tokens.max()) + 1)
    longest = np.maximum.accumulate(above + tokens[order]) - above
    found = np.empty_like(tokens)
    found[order] = np.where(np.diff(group[order], prepend=-1) != 0, 0, np.roll(longest, 1))
    return found


def shared_prefix_tokens(trace: Trace) -> list[int]:
    """For each request, the leading prompt tokens that it shares with an earlier one of the trace and of its salt."""
    found: list[int] = prompt_paths(trace.columns.segments, trace.tenants)[0].tolist()
    return found


def realised_prefix_share(trace: Trace) -> float:
    """Share of all prompt tokens (0 to 1) that an unlimited, token-exact prefix cache has seen before."""
    total = int(trace.columns.prompt_tokens.sum())
    return sum(shared_prefix_tokens(trace)) / total if total else 0.0


class PrefixPaths:
    """The paths of all prompts of a trace: built once, gives extents at any block size.

    Two prompts of equal salt share a path as far as an unlimited, token-exact prefix cache finds them equal. (A text
    that is used at more than 256 lengths is compared in steps of 16 tokens.)
    """

    def __init__(self, trace: Trace) -> None:
        self.trace, rows = trace, trace.columns
        count = len(rows)
        levels = list(_nodes(rows.segments, trace.tenants)) or [Extents(*np.zeros((3, 0), np.int64))]
        prompt, node, stop = _in_order(Extents(*map(np.concatenate, zip(*levels, strict=True))))
        uses = np.bincount(node, minlength=1)[node]
        last = np.diff(prompt, append=-1) != 0
        # nodes with the same requests become one extent; those of one request alone join its own end
        kept = (uses > 1) & (last | (np.roll(uses, -1) != uses))
        shared = np.zeros(count, np.int64)
        shared[prompt[kept]] = stop[kept]
        own = np.flatnonzero(shared < rows.prompt_tokens)
        ends = (prompt[kept], own), (node[kept], len(prompt) + own), (stop[kept], rows.prompt_tokens[own])
        self._ends = _in_order(Extents(*map(np.concatenate, ends)))

    def extents(self, block_size: int, partial_blocks: bool = False) -> Extents:
        """The full blocks of all prompts, and each prompt's partial one behind them if `partial_blocks`."""
        prompt, name, stop = self._ends
        full, first = stop // block_size, np.diff(prompt, prepend=-1) != 0
        blocks = full - np.where(first, 0, np.roll(full, 1))
        found = Extents(*(column[blocks > 0] for column in (prompt, name, blocks)))
        if not partial_blocks:
            return found
        last = np.diff(prompt, append=-1) != 0
        last &= self.trace.columns.prompt_tokens[prompt] % block_size > 0
        more = Extents(prompt[last], -1 - name[last], np.ones(int(last.sum()), np.int64))
        return _in_order(Extents(*map(np.concatenate, zip(found, more, strict=True))))

    def named_blocks(self, block_size: int) -> list[list[Block]]:
        """The full blocks of each prompt, one by one; equal names hold equal prefixes."""
        found: list[list[Block]] = [[] for _ in self.trace.columns.request_id]
        for prompt, name, blocks in zip(
            *(column.tolist() for column in self.extents(block_size)), strict=True
        ):
            found[prompt] += [(name, number) for number in range(blocks)]
        return found


def _in_order(extents: Extents) -> Extents:
    """By prompt; those of one prompt stay in their order."""
    order = np.argsort(extents.prompt, kind="stable")
    return Extents(*(column[order] for column in extents))


def _nodes(prompts: SegmentColumns, roots: Ints) -> Iterator[Extents]:
    """The places of the prompts' tree at which some prompt leaves it: prompt, number of the place, and token.

    They are where segments with one key after one path end; longer segments are cut there.
    """
    start, nodes = np.zeros(len(prompts.first) - 1, np.int64), 0
    for live, pair, tokens in keyed_levels(prompts, roots.copy()):
        begin, end = start[live], start[live] + tokens
        far = int(end.max()) + 1
        ends = np.unique(pair * far + end)
        group, at = np.divmod(ends, far)
        many = np.bincount(group)[group] > _MANY_ENDS
        cuts = np.unique(np.where(many, group * far + at // _GRAIN * _GRAIN, ends))
        low = np.searchsorted(cuts, pair * far + begin, "right")
        counts = np.searchsorted(cuts, pair * far + end) - low + 1  # the end itself comes last
        prompt = np.repeat(live, counts)
        last = np.cumsum(counts) - 1
        inner = np.repeat(low + counts - 1 - last, counts) + np.arange(len(prompt))
        found = cuts[np.minimum(inner, len(cuts) - 1)]
        found[last] = pair * far + end
        yield Extents(prompt, nodes + np.searchsorted(every := np.union1d(cuts, ends), found), found % far)
        nodes += len(every)
        start[live] = end


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
    until another request needs one. (It is computed again only in pools that still have it: an extent behind it may
    come in two entries.) That is exact, but an engine without `deduplicate` keeps two copies of a last block that is
    computed again: of prompts that end on a block's edge and stood whole in the cache. With `partial_blocks`
    a partial last block also occupies a block of the cache, as in published tables; it is never hit.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    rows = paths.trace.columns
    prompt, name, blocks = paths.extents(block_size, partial_blocks)
    count = len(prompt)
    first = np.searchsorted(prompt, np.arange(len(rows) + 1))
    # a request touches its extents last to first: `turned` is the place of each in the order of touches
    turned = (first[prompt] + first[prompt + 1] - 1) - np.arange(count)
    before = _last_touch(name[turned])[turned]
    known = before >= 0
    summed = np.concatenate([[0], np.cumsum(blocks)])
    left = (rows.prompt_tokens[prompt] - spare_last_token) // block_size - (
        summed[:-1] - summed[first[prompt]]
    )
    distance = _blocks_between(before[turned], blocks[turned])[turned] - (
        summed[first[prompt + 1]] - summed[1:]
    )
    hit, found = np.flatnonzero(known & (left > 0)), np.minimum(blocks, left)
    more, cut = np.zeros_like(known), np.zeros_like(blocks)
    if spare_last_token:
        partial, again = rows.prompt_tokens % block_size > 0, known & (left < blocks)
        takes_more = partial.copy()
        takes_more[prompt[again]] = True
        more = _spare(prompt, before + 1, takes_more)[prompt] > before + 1
        latest = np.maximum.accumulate(np.where(takes_more, np.arange(len(rows)), -1))
        latest = np.concatenate([[-1], latest])[prompt]
        # so many blocks a pool takes that block of the prompt; last: no prompt
        above = np.full(len(rows) + 1, -1)
        for place in np.flatnonzero(again & ~partial[prompt]).tolist():
            full = distance[place] + blocks[place]
            above[prompt[place]] = full - 1 + (more[place] and full > above[latest[place]])
        cut[hit] = np.where(more, np.clip(above[latest] - distance, 0, found), 0)[hit]
    both = np.concatenate([np.flatnonzero(cut), hit])
    is_cut = np.arange(len(both)) < len(both) - len(hit)
    return ReuseProfile(
        block_size=block_size,
        prompt_tokens=int(rows.prompt_tokens.sum()),
        blocks_in_all=int(blocks.sum()),
        distinct_blocks=int(blocks[~known].sum()),
        distance=np.where(is_cut, distance[both], (distance + cut + more)[both]),
        blocks=np.where(is_cut, cut[both], (found - cut)[both]),
        gap_us=(rows.arrival_us[prompt] - rows.arrival_us[prompt[before]])[both],
    )


def _last_touch(names: Ints) -> Ints:
    """For each touch the place of the one before it of the same name; -1 where it is the first."""
    order = np.argsort(names, kind="stable")
    found = np.full(len(names), -1)
    again = np.flatnonzero(names[order][1:] == names[order][:-1])
    found[order[again + 1]] = order[again]
    return found


def _blocks_between(before: Ints, blocks: Ints) -> Ints:
    """The blocks of other names that were touched between each touch and the one of its name `before`.

    Touches j < i that came after `before[i]`, each name once, are those with `before[j] < before[i]`, less all up to
    `before[i]`. They are counted as in a merge sort, from the whole down to pairs: of touches in the order of `before`
    each in the right half of a part counts those in its left half that stand in front of it.
    """
    count, size = len(before), 1 << max(len(before) - 1, 1).bit_length()
    weights = np.zeros(size, np.int64)
    weights[:count] = blocks
    order = np.concatenate([np.argsort(before, kind="stable"), np.arange(count, size)])
    found = np.zeros(size, np.int64)
    half = size // 2
    while half:
        is_right = order & half != 0
        summed = np.cumsum(np.where(is_right, 0, weights[order]))
        starts = np.concatenate([[0], summed[2 * half - 1 :: 2 * half][:-1]])
        right = order[is_right]
        found[right] += summed[is_right] - np.repeat(starts, half)
        order = np.hstack([order[~is_right].reshape(-1, half), right.reshape(-1, half)]).ravel()
        half //= 2
    summed = np.concatenate([[0], np.cumsum(blocks)])
    between: Ints = found[:count] - summed[before + 1]
    return between


def _spare(prompt: Ints, places: Ints, takes_more: npt.NDArray[np.bool_]) -> Ints:
    """For each prompt the lowest place that was touched again since one took a block beside its full ones; 0: none has.

    What lies below that place outlasted that block, too.
    """
    never = len(prompt) + 2
    lowest = np.full(len(takes_more), never)
    np.minimum.at(lowest, prompt, places)
    lowest[takes_more] = never
    since = np.cumsum(takes_more)
    state = np.minimum.accumulate(lowest - since * (never + 1)) + since * (never + 1)
    return np.concatenate([[0], np.where(since, state, 0)[:-1]])


def _weighted_quantiles(
    values: npt.NDArray[np.float64], weights: Ints, shares: Sequence[float]
) -> list[float]:
    if not values.size:
        return []
    order = np.argsort(values, kind="stable")
    places = np.cumsum(weights[order])
    picks = np.searchsorted(places, np.asarray(shares) * places[-1], "left")
    return [float(values[order][min(int(pick), values.size - 1)]) for pick in picks]


def optimal_hit_tokens(
    trace: Trace | PrefixPaths, block_size: int, capacity_blocks: int, *, spare_last_token: bool = True
) -> int:
    """Hit tokens of the optimum in a cache of `capacity_blocks` blocks.

    `spare_last_token` limits lookups as an engine does, which always computes the last token of a prompt. Pass
    `PrefixPaths(trace)` to compute several sizes.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    lookups = ((paths.trace.columns.prompt_tokens - spare_last_token) // block_size).tolist()
    return optimal_hits(paths.named_blocks(block_size), lookups, capacity_blocks) * block_size


def optimal_hits(prompts: list[list[Block]], lookups: list[int], capacity: int) -> int:
    """Hits of the optimum: request i has the blocks `prompts[i]`, and looks the first `lookups[i]` of them up."""
    asked = [blocks[:count] for blocks, count in zip(prompts, lookups, strict=True)]
    one_by_one = ((enters, index) for index in range(len(prompts)) for enters in (True, False))
    return optimal_hits_of_run(asked, prompts, one_by_one, capacity)


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
