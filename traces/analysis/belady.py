"""The most prompt tokens that any eviction order can find in a prefix cache: Belady's optimum, exact.

A block that a request has in its prompt can be kept until the next request that looks it up. Such an interval takes one
block of the cache and gives one hit. So the optimum is the largest set of intervals of which no more than the cache has
blocks overlap, and evicting the block whose next lookup is farthest away finds it (Belady 1966; for intervals: Carlisle
and Lloyd 1995). A prefix stays whole by itself, because a block is looked up no earlier than those before it.

Requests are taken in the order of the trace, and nothing else takes memory. So no engine with this many blocks that
admits requests in this order finds more in their prompts, whatever it evicts, pins or keeps.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from heapq import heappop, heappush

from traces.analysis.reuse import PrefixPaths
from traces.trace import Trace

_NEVER = 1 << 60
Block = tuple[int, int]


def optimal_hit_tokens(
    trace: Trace | PrefixPaths, block_size: int, capacity_blocks: int, *, spare_last_token: bool = True
) -> int:
    """Hit tokens of the optimum in a cache of `capacity_blocks` blocks.

    `spare_last_token` limits lookups as an engine does, which always computes the last token of a prompt. Pass
    `PrefixPaths(trace)` to compute several sizes.
    """
    paths = trace if isinstance(trace, PrefixPaths) else PrefixPaths(trace)
    prompts, lookups = _blocks(paths, block_size, spare_last_token)
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


def _blocks(
    paths: PrefixPaths, block_size: int, spare_last_token: bool
) -> tuple[list[list[Block]], list[int]]:
    """The full blocks of each prompt, and how many of them are looked up."""
    prompts, lookups = [], []
    for index, request in enumerate(paths.trace.requests):
        prompts.append(
            [(name, number) for name, blocks in paths.extents(index, block_size) for number in range(blocks)]
        )
        lookups.append((request.prompt_tokens - spare_last_token) // block_size)
    return prompts, lookups


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
