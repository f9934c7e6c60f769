"""Tiers below the pool. It does what `engine.core.memory.tiers` does, where the least recently used unit is evicted.

A table goes in from its end, so that its last units are evicted first. What a tier has no room for is evicted once all
is in: so the units of one table never make room for each other.
"""

from engine.core.memory.tiers import Tiers
from harness.compiled.lists import append_node, cut_run, drop_run, names_of, new_run, remove_node, run_of
from harness.compiled.numba_edge import called, inlined
from harness.compiled.state import Tiering
from harness.replay.arrivals import NEVER

HOST, DISK = range(2)
UNITS, WRITES, READS, HIT_BLOCKS = range(4)  # of `Tiering.counts`
LOADING, SPARED, WRITING, STEP = range(4)  # of `Tiering.seconds`

# -- filling -----------------------------------------------------------------------------------------------------------


@called
def write_table(tiers: Tiering, request: int, blocks: int) -> None:
    """A table of `request`, of which `blocks` leading blocks are cached, is about to be released."""
    before = tiers.counts[HOST, WRITES]
    renew(tiers, HOST, request, min(blocks // tiers.chunk, tiers.units[HOST]), True)
    settle(tiers, before)


@called
def spill(tiers: Tiering, count: int) -> None:
    """The pool evicts the first `count` of `victims` together: write them, as many as fit. Those evicted last are
    written, and of equal ones the last one.
    """
    victims, seen = tiers.victims, tiers.seen
    first, room, before = count, tiers.units[HOST], tiers.counts[HOST, WRITES]
    seen[-1] += 1
    while first and room:
        first -= 1
        name, end = victims[first, 0], victims[first, 2]
        if end == NEVER:
            room -= seen[name] != seen[-1]
            seen[name] = seen[-1]
        else:
            victims[first, 2] = min(end, victims[first, 1] + room)
            room -= victims[first, 2] - victims[first, 1]
    for number in range(first, count):
        if victims[number, 2] == NEVER:
            renew_name(tiers, HOST, victims[number, 0], True)
        else:
            renew_run(tiers, HOST, victims[number, 0], victims[number, 1], victims[number, 2], True)
    settle(tiers, before)


@called
def renew(tiers: Tiering, tier: int, request: int, units: int, enters: bool) -> None:
    """The first `units` units of `request` are of use again; with `enters` those that `tier` lacks are written."""
    chunk, place = tiers.chunk, tiers.first_name[request] - 1
    named = names_of(tiers, request) // chunk
    renew_run(tiers, tier, request, named, units, enters)
    for unit in range(min(named, units), 0, -1):
        renew_name(tiers, tier, tiers.names[place + unit * chunk], enters)


@inlined
def renew_name(tiers: Tiering, tier: int, name: int, enters: bool) -> None:
    """The same for the unit `name`."""
    order, node = tiers.order, 2 * name + tier
    if order.after[node] != NEVER:
        remove_node(order, node)
    elif enters:
        tiers.counts[tier, UNITS] += 1
        tiers.counts[tier, WRITES] += 1
    else:
        return
    append_node(order, node, tier)


@called
def renew_run(tiers: Tiering, tier: int, request: int, first: int, end: int, enters: bool) -> None:
    """The same for units `first` to `end - 1` of `request`, which have no name."""
    runs, order, owner, place, written = tiers.runs, tiers.order, 2 * request + tier, end, end - first
    while place > first and runs.oldest[owner] != NEVER:
        run = run_of(runs, owner, place - 1)
        if run == NEVER:
            place -= 1
            continue
        run = cut_run(runs, order, run, first, place)
        place = runs.first[run]
        written -= runs.blocks[run]
        if enters:
            drop_run(runs, order, run)
        else:
            remove_node(order, runs.node + run)
            append_node(order, runs.node + run, tier)
    if not enters or first >= end:
        return
    tiers.counts[tier, UNITS] += written
    tiers.counts[tier, WRITES] += written
    last = order.before[len(order.before) - 1 - tier] - runs.node
    if 0 <= last < len(runs.blocks) and runs.request[last] == owner and runs.first[last] == end:
        runs.first[last] = first
        runs.blocks[last] += end - first
    else:
        append_node(order, new_run(runs, owner, first, end - first), tier)


@called
def settle(tiers: Tiering, before: int) -> None:
    """Units were written to the host, which had `before` of them: what it has no room for goes to the disk."""
    for tier in range(2):
        tiers.seconds[WRITING] += (tiers.counts[tier, WRITES] - before) * tiers.unit_s[tier, 1]
        before = tiers.counts[DISK, WRITES]
        trim(tiers, tier, tiers.units[DISK] if tier == HOST else 0)


@called
def trim(tiers: Tiering, tier: int, room: int) -> None:
    """Evict from `tier` what it has no room for. The last of that goes to the disk, as much as `room`."""
    runs, order, lost = tiers.runs, tiers.order, tiers.counts[tier, UNITS] - tiers.units[tier]
    skipped = lost - room
    while lost > 0:
        node, gone = order.after[len(order.after) - 1 - tier], 1
        if node < runs.node:
            remove_node(order, node)
            order.after[node] = NEVER
            if skipped <= 0:
                renew_name(tiers, DISK, node // 2, True)
        else:
            run = node - runs.node
            request, end = runs.request[run] // 2, runs.first[run] + runs.blocks[run]
            gone = min(lost, runs.blocks[run])
            if skipped > 0:
                gone = min(gone, skipped)
            runs.blocks[run] -= gone
            if not runs.blocks[run]:
                drop_run(runs, order, run)
            if skipped <= 0:
                renew_run(tiers, DISK, request, end - gone, end, True)
        tiers.counts[tier, UNITS] -= gone
        lost -= gone
        skipped -= gone


# -- reading -----------------------------------------------------------------------------------------------------------


@inlined
def tier_of(tiers: Tiering, request: int, unit: int) -> int:
    """The first tier that has number `unit` of `request`; NEVER: none has it."""
    last = (unit + 1) * tiers.chunk - 1
    for tier in range(2):
        if last >= names_of(tiers, request):
            if run_of(tiers.runs, 2 * request + tier, unit) != NEVER:
                return tier
        elif tiers.order.after[2 * tiers.names[tiers.first_name[request] + last] + tier] != NEVER:
            return tier
    return NEVER


@called
def loadable(tiers: Tiering, request: int, found: int, asked: int, reads: bool) -> int:
    """How many blocks, behind the `found` ones that the pool has of the first `asked`, are to be read from tiers.

    With `reads` all that tiers have are read, and counted.
    """
    chunk, place, reading_s, best_s, worth, part = tiers.chunk, found, 0.0, 0.0, found, NEVER
    start, units = found, 0
    while True:
        tier = tier_of(tiers, request, place // chunk) if place < asked else NEVER
        if tier != part:
            if units:
                read_s = units * tiers.unit_s[part, 0]
                if reads:
                    tiers.counts[part, READS] += units
                    tiers.counts[part, HIT_BLOCKS] += place - start
                    tiers.seconds[LOADING] += read_s
                    tiers.seconds[STEP] += read_s
                reading_s += read_s
                saved_s = tiers.prefix_s[place] - tiers.prefix_s[found] - reading_s
                if saved_s > best_s:
                    best_s, worth = saved_s, place
            part, start, units = tier, place, 0
        if tier == NEVER:
            break
        units += 1
        place = min((place // chunk + 1) * chunk, asked)
    if reads and place > found:
        tiers.seconds[SPARED] += tiers.prefix_s[place] - tiers.prefix_s[found]
    return int((worth if tiers.cheaper and not reads else place) - found)


@called
def read(tiers: Tiering, request: int, found: int, asked: int) -> int:
    """A request enters with `found` blocks of the pool, and reads what tiers have of the first `asked`. Returns how
    many blocks it reads.
    """
    if tiers.cheaper:
        asked = found + loadable(tiers, request, found, asked, False)
    loaded = loadable(tiers, request, found, asked, True)
    for tier in range(2):
        renew(tiers, tier, request, (found + loaded) // tiers.chunk, False)
    return int(loaded)


@called
def with_reading(tiers: Tiering, seconds: float) -> float:
    """Seconds of the step under way, which computes for `seconds`, with what it reads from tiers."""
    read_s = tiers.seconds[STEP]
    tiers.seconds[STEP] = 0.0
    return float(max(seconds, read_s) if tiers.overlaps else seconds + read_s)


def note_counts(tiering: Tiering, tiers: Tiers) -> None:
    """Let `tiers` count what those of the replay did."""
    for number, tier in enumerate(tiers.tiers):
        _, tier.written, tier.read, tiers.counts.hit_blocks[number] = tiering.counts[number].tolist()
    tiers.counts.load_s, tiers.counts.saved_s, tiers.counts.write_s, _ = tiering.seconds.tolist()
