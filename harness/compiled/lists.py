"""What the pool and the tiers below it are made of: the order of eviction, and runs of blocks without a name."""

from harness.compiled.numba_edge import called, inlined
from harness.compiled.state import EvictionList, RequestInputs, Runs, Tiering
from harness.replay.arrivals import NEVER


@inlined
def names_of(inputs: RequestInputs | Tiering, request: int) -> int:
    """How many leading blocks of `request` others may share."""
    return int(inputs.first_name[request + 1] - inputs.first_name[request])


@inlined
def append_node(order: EvictionList, node: int, rank: int) -> None:
    """Let `node` be evicted as the last of its rank."""
    after, before = order.after, order.before
    end = len(after) - 1 - rank
    last = before[end]
    after[last], before[node] = node, last
    after[node], before[end] = end, node


@inlined
def remove_node(order: EvictionList, node: int) -> None:
    """Take `node` out of the order."""
    after, before = order.after, order.before
    after[before[node]], before[after[node]] = after[node], before[node]


@called
def new_run(runs: Runs, request: int, first: int, blocks: int) -> int:
    """The node of a new run, which is not in the order of eviction yet."""
    runs.spares[0] -= 1
    run, oldest = runs.spare[runs.spares[0]], runs.oldest
    runs.blocks[run], runs.first[run], runs.after[run], runs.request[run] = blocks, first, NEVER, request
    if request == NEVER:
        return int(runs.node + run)
    if oldest[request] == NEVER:
        oldest[request] = run
    else:
        before = oldest[request]
        while runs.after[before] != NEVER:
            before = runs.after[before]
        runs.after[before] = run
    return int(runs.node + run)


@called
def drop_run(runs: Runs, order: EvictionList, run: int) -> None:
    """`run` has no block any more."""
    remove_node(order, runs.node + run)
    runs.spare[runs.spares[0]] = run
    runs.spares[0] += 1
    request, oldest = runs.request[run], runs.oldest
    if request == NEVER:
        return
    if oldest[request] == run:
        oldest[request] = runs.after[run]
        return
    before = oldest[request]
    while runs.after[before] != run:
        before = runs.after[before]
    runs.after[before] = runs.after[run]


@called
def run_of(runs: Runs, request: int, place: int) -> int:
    """The oldest run that holds block number `place` of `request`; else NEVER."""
    run = runs.oldest[request]
    while run != NEVER and not runs.first[run] <= place < runs.first[run] + runs.blocks[run]:
        run = runs.after[run]
    return int(run)


@called
def take_run(runs: Runs, order: EvictionList, owner: int, first: int, end: int) -> None:
    """Blocks `first` to `end - 1` of `owner` are in use again: take them out of its runs, which have them."""
    place = first
    while place < end:
        run = cut_run(runs, order, run_of(runs, owner, place), place, end)
        place += runs.blocks[run]
        drop_run(runs, order, run)


@called
def cut_run(runs: Runs, order: EvictionList, run: int, first: int, end: int) -> int:
    """The part of `run` between `first` and `end`, as a run of its own."""
    if first > runs.first[run]:
        run = split_run(runs, order, run, first)
    if end < runs.first[run] + runs.blocks[run]:
        split_run(runs, order, run, end)
    return int(run)


@called
def split_run(runs: Runs, order: EvictionList, run: int, place: int) -> int:
    """The blocks of `run` from `place` on become a run of their own, which is evicted just before the rest."""
    after, before, since = order.after, order.before, order.since
    runs.spares[0] -= 1
    rest = runs.spare[runs.spares[0]]
    runs.request[rest], runs.first[rest] = runs.request[run], place
    runs.blocks[rest] = runs.first[run] + runs.blocks[run] - place
    runs.blocks[run] = place - runs.first[run]
    runs.after[rest], runs.after[run] = runs.after[run], rest
    node, own = runs.node + run, runs.node + rest
    after[before[node]], before[own], after[own], before[node] = own, before[node], node, own
    if len(since):
        since[own] = since[node]
    return int(rest)
