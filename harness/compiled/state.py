"""The state of the compiled replay: arrays in named tuples, whose fields numba can access."""

from collections import namedtuple
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from engine.core.memory.tiers import Tiers
from engine.core.options import TierLoad, TierStore
from harness.metrics.log import STEP_RECORD, FloatArray, IntArray
from harness.replay.arrivals import NEVER, FrontTimes, varied_ns
from harness.replay.features import FEATURES
from traces.analysis.reuse import keyed_levels
from traces.trace import Client, SegmentColumns

NameArray = np.ndarray[Any, np.dtype[np.int32]]
WordArray = np.ndarray[Any, np.dtype[np.uint64]]

_ENTRIES = (
    "now",  # ns
    "arrived",  # requests that the scheduler knows
    "head",  # of the queue: requests that have entered the batch
    "tail",  # requests that have been queued
    "running",  # rows of the batch
    "steady",  # leading rows that are steady decoders
    "empty",  # free blocks without reusable content
    "cached",  # free blocks that hold a prefix
    "written",  # slots in use that are written
    "internal",  # slots in use that will never be written
    "voided",  # blocks whose content was discarded since the last plan
    "last_end",  # ns at which the last step ended
    "ended",  # requests that have ended
    "steps",  # steps in the log
    "gaps",  # gaps in the log
    "entries",  # table entries: a block that several rows share counts once for each
    "spare",  # numbers of named blocks that no block has
    "taken",  # blocks taken in the step under way
    "admitted",  # requests admitted in it
    "preempted",  # requests that lost their blocks in it
    "hits",  # slots that the admitted ones found in the cache
    "sequences",  # branches of the running requests; one that has not forked yet counts with its whole width
    "steady_rows",  # branches of the leading steady requests
    "copies",  # blocks copied in the step under way
    "slots",  # of `BeamTables` or `GroupArrays`: how many no request has
    "under_way",  # whether a step runs whose tokens are not known
    "seen",  # ns up to which the next step knows of arrivals
    "coming",  # requests in `RequestStates.lane`
    "due",  # requests in `ReplayState.arriving`
    "next",  # requests that were in it so far
    "pause_at",  # ns from which no step may begin before `advance` returns
    "budget",  # query tokens that the step under way can still take
    "swapped",  # requests whose blocks are in host memory
    "host",  # free blocks there
    "moved",  # blocks moved between device and host in the step under way
    "ending",  # requests that have all their tokens, and keep their blocks until the next step is scheduled
    "gone",  # of those, preempted in the step under way
    "entered",  # requests that have entered the batch
    "sent",  # requests that the client has sent, where they pass `ReplayState.entrance`
    "free",  # ns until which the thread of the front end is busy
    "inside",  # requests in `Entrance.inside`
)
ENTRY: Any = namedtuple("ENTRY", _ENTRIES)(*range(len(_ENTRIES)))
"""The place of each scalar in `ReplayState.at`, by its name: `ENTRY.now`."""

_UNKNOWN = ("scheduled", "first_token", "finish", "last_token")  # of `RequestStates`, at first


RECENT, TTL, PIN, PRIORITY = range(4)  # `Rules.keep`


class BlockNames(NamedTuple):
    """The names of request r are `names[first_name[r] : first_name[r + 1]]`, for its leading blocks that have one.

    Names are small integers: two blocks have equal ones where `KeyIdentity` gives them equal hashes. A hash covers the
    pieces of segments in a block and the hash before it. So a block is known by the segments before the one in which it
    ends, the key of that one, and its place; those that end in one segment have names in a row.
    """

    first_name: IntArray  # int64 [requests + 1]
    names: NameArray

    @classmethod
    def none(cls, requests: int) -> "BlockNames":
        """No block has a name."""
        return cls(np.zeros(requests + 1, dtype=np.int64), np.zeros(0, dtype=np.int32))

    @classmethod
    def of(cls, prompts: SegmentColumns, salts: Sequence[str], block_size: int) -> "BlockNames":
        """Names for the blocks of prompts, each with its salt."""
        path = np.unique(np.array(salts, dtype=np.str_), return_inverse=True)[1]
        stop, distinct = np.zeros(len(path), np.int64), 0
        # of each run of names its prompt, its first name, how many they are
        runs = [np.zeros((3, 0), np.int64)]
        for live, pair, tokens in keyed_levels(prompts, path):
            before = stop[live] // block_size
            stop[live] += tokens
            counts = stop[live] // block_size - before
            most = np.zeros(int(pair.max()) + 1, np.int64)
            np.maximum.at(most, pair, counts)
            runs.append(np.stack([live, (distinct + np.cumsum(most) - most)[pair], counts]))
            distinct += int(most.sum())
        found = np.hstack(runs)
        _, first, counts = found[:, np.argsort(found[0], kind="stable")]
        names = np.repeat((first - np.cumsum(counts) + counts).astype(np.int32), counts)
        names += np.arange(len(names), dtype=np.int32)
        return cls(np.concatenate([[0], np.cumsum(stop // block_size)]), names)


class RequestInputs(NamedTuple):
    """The requests in order of arrival, each int64 `[requests]`; `fits` is 0 for those that can never be served.

    Where requests wait for the ends of others, the order is that of the list, and `arrival_ns` is written when one is
    sent. `pause_ns` are then the pauses before them; elsewhere it is empty. In conversations `waits_for` counts the
    requests that each still waits for, and `follower[first_follower[r] : first_follower[r + 1]]` are those that wait
    for request r.

    `survivors` and `evenness`, float64, are what `BeamGenealogy` draws the parents of a beam request from: how many
    beams survive a step on average, and how evenly they get the other children.

    `names[first_name[r] : first_name[r + 1]]` are the names of the leading blocks of request r that others may share.
    """

    arrival_ns: IntArray
    pause_ns: IntArray
    waits_for: IntArray
    first_follower: IntArray  # int64 [requests + 1]
    follower: IntArray
    prompt: IntArray
    output: IntArray
    width: IntArray
    beam: IntArray  # 0 or 1
    drawn: IntArray  # 0 or 1: whether its tokens are drawn at random
    survivors: FloatArray
    evenness: FloatArray
    request_id: IntArray
    priority: IntArray
    rank: IntArray  # of its cached blocks, but for PIN: the lowest are evicted first
    fits: IntArray
    first_name: IntArray  # int64 [requests + 1]
    names: NameArray  # int32


class Rules(NamedTuple):
    """Limits of the scheduler and the pool. `prefill_cap` 0 is none; flags are 0 or 1.

    With `delayed` a step sees arrivals until the one before it began. With `ahead` it is scheduled then, so what that
    one ends keeps its blocks. With `by_priority` the request that is last in queue order is preempted, else that which
    was admitted last. With `ordered` requests may come back in another order than that of their preemptions. With
    `swaps` preempted ones are saved in host memory as far as there is room.
    """

    budget: int
    max_rows: int  # running requests
    max_running: int  # their branches
    chunked: int
    mixed: int  # whether prompts and decodes share a step; else prompts go first
    whole_prompt: int
    prefill_cap: int
    adaptive: int
    watermark_blocks: int
    block_size: int
    keeps: int  # whether released blocks stay findable until they are taken again
    delayed: int
    ahead: int
    ordered: int
    by_priority: int
    swaps: int
    keep: int  # the rule by which cached blocks are kept: RECENT, TTL, PIN, PRIORITY
    keep_ns: int  # of TTL
    pinned: int  # blocks, of PIN
    ranks: int
    window: int  # tokens, of the model's windowed layers; 0: none
    in_chunks: int  # 1: that is the chunk in which a token lies
    groups: int  # of layers with a block table each; 0: the model is plain
    token_slots: int  # slots that one token takes in all groups
    page_slots: int  # slots of a block
    segment: int  # blocks from one checkpoint to the next where they are regular; 0: they are those of the requests
    dense: int  # whether there are no others
    drafts: int  # draft tokens that a row verifies; 0: there are none
    longest: int  # tokens of the longest sequence that is served, which ends drafts; 0: any


class LayerArrays(NamedTuple):
    """Groups of layers with a block table each, int64 `[groups]`; NEVER is all. All have blocks of one size."""

    window: IntArray  # tokens that the next token sees, itself included
    chunk: IntArray  # tokens of a chunk of attention; NEVER: there are none
    needed: IntArray  # blocks that a prefix hit needs before its end
    whole: IntArray  # 1 where it needs all; else NEVER `needed` are those of its chunk
    like_first: IntArray  # 1 for those that say how long the longest hit of the first groups is
    token_slots: IntArray
    lost_slots: IntArray  # of a page, which no token can fill


class Drafting(NamedTuple):
    """How drafts are drawn (`DraftAcceptance`), and those of the running rows, in the order of `Batch`.

    A share below 0 accepts none; `seed` is a word, `[1]`. A row whose last step chose a token has `drafts` in the step
    under way, of which so many are `right`: int64 `[max_rows]`, where requests have drafts.
    """

    share: float
    seed: WordArray
    drafts: IntArray
    right: IntArray


class Prices(NamedTuple):
    """A cost model as numbers: `rates` of the kind `kind`, for a linear one over the features `columns`.

    The first `attention` terms are the attention's; everything is scaled by `ratio`. `reading` are a roofline's seconds
    of reading weights for 0, 1, 2, ... tokens; more tokens take as long as the last.
    """

    kind: int
    rates: FloatArray
    columns: IntArray
    attention: int
    ratio: float
    reading: FloatArray


class Batch(NamedTuple):
    """The running requests in order of admission, each int64 `[max_rows]`. Their branches have equally many tokens.

    Where steps are scheduled ahead there are as many rows more, for those that have ended (`ENDING`).

    But after a preemption branches compute their generated tokens again, one branch after the other: `behind` are those
    that they lack together. Until then `computed` and `blocks` are those of the prompt.
    """

    request: IntArray
    computed: IntArray
    generated: IntArray
    blocks: IntArray  # of each branch's table
    branches: IntArray  # 1 until the request forks
    distinct: IntArray  # blocks in all its tables, shared ones once
    copies: IntArray  # shared last blocks that its next step copies
    slot: IntArray  # of a beam request that has forked, in `BeamTables`
    named: IntArray  # leading blocks that have a name
    behind: IntArray
    query: IntArray  # query tokens in the step under way: of each branch, or of all that catch up
    last_token: IntArray  # ns
    entered: IntArray  # the place in the order of admission
    chose: IntArray  # whether the last step gave it a token
    unseen: IntArray  # tokens of the last step that the step before it chose


class RequestStates(NamedTuple):
    """The state of each request, int64 `[requests]`; times are in ns. `queue` and `ended` list requests in order.

    `lane` lists them in the order in which they come, and `place` is the place of each of them in it.

    The fields from `last_token` to `lost` keep what a preempted request had: the time of its last token, tokens
    generated, tokens computed before. The last fields count preemptions, what they cost, and hits.
    """

    scheduled: IntArray
    first_token: IntArray
    finish: IntArray
    lane: IntArray
    place: IntArray
    queue: IntArray
    ended: IntArray
    last_token: IntArray
    generated: IntArray
    lost: IntArray
    preemptions: IntArray
    hits: IntArray
    resumed_hits: IntArray
    recomputed: IntArray


class Heap(NamedTuple):
    """A binary heap of requests, int64 `[requests]`: the lowest key first, of equal keys the lowest `tie`."""

    key: IntArray
    tie: IntArray
    request: IntArray


class Entrance(NamedTuple):
    """How requests that are due come to the scheduler: the cap of a client (`Capped`), and a server's `FrontEnd`.

    A client has at most `most` in flight; `free_ns` is when each end makes room for one more, in order. What follows is
    of the front end, whose times are 0 where there is none: `varied_ns` (`harness.replay.arrivals`) by the order in
    which requests come to it, `token_ns` by request. Each is `[requests]`, or empty where all come at given times.
    `inside` has had its turn.
    """

    most: int
    pause_ns: int
    turn_ns: int
    varied_ns: FloatArray
    token_ns: FloatArray
    free_ns: IntArray
    inside: Heap


class NamedBlocks(NamedTuple):
    """Blocks with a name, by a number of their own, int64 `[blocks]`; NEVER is none.

    Blocks of equal name are linked in the order in which they got it. `oldest` and `newest` are the ends of that list
    by name, int32 `[names]`. `held[i]` is the block of entry i of `RequestInputs.names` in the table of a running
    request.
    """

    name: IntArray
    references: IntArray
    older: IntArray
    newer: IntArray
    spare: IntArray  # a stack of free numbers
    oldest: NameArray
    newest: NameArray
    held: NameArray


class BeamTables(NamedTuple):
    """What beams generated: `tables[slot, branch]` numbers its blocks, `references[slot]` counts each by its number.

    A slot is for one running request; `spare_slots` are a stack of free ones, also for `GroupArrays`.
    `spare[slot, : spares[slot]]` are free numbers. The fields from `before` on are scratch for one step: old tables,
    parents, and what parents are drawn with.
    """

    tables: NameArray  # int32 [slots, width, blocks]
    references: NameArray  # int32 [slots, numbers]
    spare: NameArray
    spares: IntArray  # int64 [slots]
    spare_slots: IntArray
    before: NameArray  # int32 [width, blocks]
    common: IntArray  # int64 [width], as the next four
    parents: IntArray
    order: IntArray
    children: IntArray
    given: IntArray


class GroupArrays(NamedTuple):
    """What running requests have in several groups of layers; all their tables are equally long.

    By slot, which is for one running request: `held[slot, group]`, how many leading blocks its window has left; `hits`,
    leading blocks that came from the cache; `junction`, where in tokens a longer hit of the first groups ended; `due`,
    from how many computed tokens on a window has left one more block.
    By group: `live` blocks, and `duplicates`, those that hold what another live block holds. `copies` are the live
    blocks by name. `seen` and `least` are scratch, by the number of a named block.
    """

    held: IntArray
    hits: IntArray
    junction: IntArray
    due: IntArray
    live: IntArray
    duplicates: IntArray
    copies: NameArray
    seen: IntArray
    least: IntArray


class Runs(NamedTuple):
    """Cached blocks without a name, by tables that were released, int64 `[runs]`; they are evicted from their end.

    They are blocks `first` to `first + blocks - 1` of a table of `request`, which alone finds them; NEVER: nobody does.
    `after` is its next run in order of release, `oldest` its first one, int64 `[requests]`. `spare` is a stack of free
    numbers, `spares[0]` how many there are. Run i is node `node + i` of an `EvictionList`. With groups of layers a
    request has a table in each: then group g of request r stands for a request, number r x groups + g.
    """

    blocks: IntArray
    first: IntArray
    request: IntArray
    after: IntArray
    oldest: IntArray
    spare: IntArray
    spares: IntArray
    node: int


class EvictionList(NamedTuple):
    """For each rank a circle of nodes in order of eviction, int64 `[nodes]`; its beginning and end is the last node
    for the lowest rank, the one before for the next, and so on.

    A node is a named block, by its number, or, behind those, one of `Runs`. `since` is when it came, ns, for TTL alone.
    """

    after: IntArray
    before: IntArray
    since: IntArray


class Tiering(NamedTuple):
    """Tiers below the pool, and their rules (`engine.core.memory.tiers`); 0 is the host, 1 the disk. A unit holds
    `chunk` blocks; 0: there are no tiers.

    Tier t holds `units[t]` units; to read and to write one takes it `unit_s[t]` seconds. `counts[t]` are units that it
    has, units written and read, and blocks that were hit. Rank t of `order` is its order of eviction. A node is a unit
    by the name of its last block, number 2 x name + t, which is linked to nothing (NEVER) where the tier does not have
    it, or one of `runs`, whose blocks are units of request r in tier t, number 2 x r + t.

    To compute the first n blocks of a prompt takes `prefix_s[n]` seconds. `seconds` are those of all reading, of
    computing that it spared, of all writing, and of reading for the step under way. With `spills` the pool writes what
    it evicts: `victims` are a name and NEVER, or a request and its places from a first to before a last one; `seen`
    numbers the last eviction in which a name was, and the last of all, behind them.
    """

    chunk: int
    spills: int
    cheaper: int
    overlaps: int
    units: IntArray  # int64 [tiers]
    unit_s: FloatArray  # [tiers, 2]
    prefix_s: FloatArray  # [blocks]
    counts: IntArray  # int64 [tiers, 4]
    seconds: FloatArray  # [4]
    order: EvictionList
    runs: Runs
    victims: IntArray  # int64 [victims, 3]
    seen: IntArray
    first_name: IntArray  # as in `RequestInputs`
    names: NameArray


class StepLog(NamedTuple):
    """Steps since the log was last emptied, and the gaps between tokens in them, with how often each occurred."""

    records: IntArray  # [steps, STEP_RECORD]; what plain requests do not have stays 0
    attention_s: FloatArray  # [steps]
    gap_ns: IntArray
    gap_weight: IntArray
    waste: IntArray  # [steps, groups, 3]: tokens behind windows, duplicates and live blocks of each group


class ReplayState(NamedTuple):
    """A replay under way. `at` holds the scalars of `ENTRY`, `after_prefill[0]` the feature of that name."""

    inputs: RequestInputs
    rules: Rules
    layers: LayerArrays
    prices: Prices
    at: IntArray
    after_prefill: FloatArray
    features: FloatArray
    word: WordArray  # [1], of the generator of random numbers
    drafting: Drafting
    batch: Batch
    requests: RequestStates
    # what is due, by its time, where requests pass the entrance
    arriving: Heap
    entrance: Entrance
    # in place of `RequestStates.queue` where requests are `ordered`, by their priority and place
    waiting: Heap
    swapped: Heap  # the same of those in host memory; `RequestStates.lost` are their computed tokens
    named: NamedBlocks
    runs: Runs
    evictable: EvictionList
    beams: BeamTables
    groups: GroupArrays
    tiers: Tiering
    log: StepLog


def members(columns: Iterable[IntArray]) -> Iterable[IntArray]:
    """The members of a named tuple, for a loop over them: compiled code knows the tuple by its address alone."""
    return columns


def new_state(
    inputs: RequestInputs,
    entrance: Entrance,
    rules: Rules,
    layers: LayerArrays,
    prices: Prices,
    drafting: Drafting,
    num_blocks: int,
    log_steps: int,
    below: Tiers,
) -> ReplayState:
    """A replay at its beginning, over an empty pool; its log holds `log_steps` steps.

    Where the pool holds all requests, nothing is evicted or preempted: no block gets a name a second time, and each
    request is released once, as one run, or two with PIN.
    """
    num_requests, rows, tables = len(inputs.prompt), rules.max_rows, max(1, rules.groups)
    most = int((-((1 - inputs.prompt - inputs.output) // rules.block_size) * inputs.width).sum()) * tables
    numbers = num_blocks if num_blocks <= most else min(num_blocks, len(inputs.names) * tables)
    runs = min(num_blocks, most if num_blocks <= most or rules.groups else 2 * num_requests)
    firsts = [NEVER if name in _UNKNOWN else 0 for name in RequestStates._fields]
    states = RequestStates(*(np.full(num_requests, first, dtype=np.int64) for first in firsts))
    at = np.zeros(len(_ENTRIES), dtype=np.int64)
    at[ENTRY.empty] = num_blocks
    at[ENTRY.spare] = numbers
    beams = beam_tables(inputs, rules)
    at[ENTRY.slots] = len(beams.spare_slots)
    nodes = numbers + runs + rules.ranks
    gaps = 2 * log_steps + rows
    return ReplayState(
        inputs,
        rules,
        layers,
        prices,
        at,
        np.zeros(1),
        np.zeros(len(FEATURES)),
        np.zeros(1, dtype=np.uint64),
        drafting,
        Batch(*_columns(len(Batch._fields), 2 * rows if rules.ahead else rows)),
        states,
        Heap(*_columns(3, len(entrance.free_ns))),
        entrance,
        Heap(*_columns(3, num_requests if rules.ordered else 0)),
        Heap(*_columns(3, num_requests if rules.swaps else 0)),
        _named_blocks(numbers, inputs.names, tables),
        _runs(runs, num_requests * tables, numbers),
        EvictionList(np.arange(nodes), np.arange(nodes), *_columns(1, nodes if rules.keep == TTL else 0)),
        beams,
        _group_tables(rules, numbers, inputs.names),
        _tiering(below, inputs, most, nodes),
        StepLog(  # type: ignore[call-arg]
            np.zeros((log_steps, len(STEP_RECORD)), dtype=np.int64),
            np.zeros(log_steps),
            *_columns(2, gaps),
            np.zeros((log_steps, rules.groups, 3), dtype=np.int64),
        ),
    )


def _named_blocks(numbers: int, names: NameArray, tables: int) -> NamedBlocks:
    distinct = (int(names.max()) + 1) * tables if len(names) else 0
    return NamedBlocks(
        name=np.full(numbers, NEVER, dtype=np.int64),
        references=np.zeros(numbers, dtype=np.int64),
        older=np.full(numbers, NEVER, dtype=np.int64),
        newer=np.full(numbers, NEVER, dtype=np.int64),
        spare=np.arange(numbers, dtype=np.int64),
        oldest=np.full(distinct, NEVER, dtype=np.int32),
        newest=np.full(distinct, NEVER, dtype=np.int32),
        held=np.zeros(len(names) * tables, dtype=np.int32),
    )


def _runs(count: int, owners: int, node: int) -> Runs:
    oldest, spares = np.full(owners, NEVER, dtype=np.int64), np.array([count], dtype=np.int64)
    return Runs(*_columns(4, count), oldest, np.arange(count), spares, node)  # type: ignore[call-arg]


def _tiering(below: Tiers, inputs: RequestInputs, most: int, nodes: int) -> Tiering:
    """Empty tiers; `most` blocks are in the tables of all requests, `nodes` in the order of the pool's eviction."""
    some, spills, facts = bool(below.tiers), below.store is TierStore.evicted, below.facts
    names, requests = some * (int(inputs.names.max(initial=-1)) + 1), some * len(inputs.prompt)
    longest = some * int((inputs.prompt + inputs.output).max(initial=0)) // facts.block_size
    units = np.array([*(tier.spec.units for tier in below.tiers), 0, 0][:2])
    runs = int(np.minimum(2 * units, most).sum()) + 4
    after, before = (np.full(2 * names + runs + 2, NEVER, dtype=np.int64) for _ in range(2))
    after[-2:] = before[-2:] = np.arange(len(after) - 2, len(after))
    return Tiering(
        chunk=some * below.chunk,
        spills=int(spills),
        cheaper=int(below.rule is TierLoad.cheaper),
        overlaps=int(below.overlaps),
        units=units,
        unit_s=np.array([*map(below.unit_s, below.tiers), (0.0, 0.0), (0.0, 0.0)][:2], dtype=np.float64),
        prefix_s=np.array([facts.seconds(blocks * facts.block_size) for blocks in range(longest + 1)]),
        counts=np.zeros((2, 4), dtype=np.int64),
        seconds=np.zeros(4),
        order=EvictionList(after, before, *_columns(1, 0)),
        runs=_runs(runs, 2 * requests, 2 * names),
        victims=np.zeros((spills * nodes, 3), dtype=np.int64),
        seen=np.zeros(spills * (names + 1), dtype=np.int64),
        first_name=inputs.first_name,
        names=inputs.names,
    )


def _group_tables(rules: Rules, numbers: int, names: NameArray) -> GroupArrays:
    groups, slots = rules.groups, rules.max_rows if rules.groups else 0
    named = numbers if groups else 0
    distinct = (int(names.max()) + 1) * groups if len(names) else 0
    return GroupArrays(  # type: ignore[call-arg]
        np.zeros((slots, groups), dtype=np.int64),
        *_columns(3, slots),
        *_columns(2, groups),
        np.zeros(distinct, dtype=np.int32),
        *_columns(2, named),
    )


def beam_tables(inputs: RequestInputs, rules: Rules) -> BeamTables:
    """Room for as many beam requests as can run at once."""
    which = np.flatnonzero((inputs.beam == 1) & (inputs.fits == 1))
    width, prompt = inputs.width[which], inputs.prompt[which]
    own = -((1 - prompt - inputs.output[which]) // rules.block_size) - prompt // rules.block_size
    widest, longest = int(width.max(initial=0)), int(own.max(initial=0))
    slots = min(len(which), rules.max_running // int(width.min(initial=max(1, rules.max_running))))
    if rules.groups:  # each running request has a slot of `GroupArrays`
        slots = rules.max_rows
    numbers = int((width * own).max(initial=0))
    return BeamTables(
        tables=np.zeros((slots, widest, longest), dtype=np.int32),
        references=np.zeros((slots, numbers), dtype=np.int32),
        spare=np.zeros((slots, numbers), dtype=np.int32),
        spares=np.zeros(slots, dtype=np.int64),
        spare_slots=np.arange(slots, dtype=np.int64),
        before=np.zeros((widest, longest), dtype=np.int32),
        common=np.zeros(widest, dtype=np.int64),
        parents=np.zeros(widest, dtype=np.int64),
        order=np.zeros(widest, dtype=np.int64),
        children=np.zeros(widest, dtype=np.int64),
        given=np.zeros(widest, dtype=np.int64),
    )


def new_entrance(inputs: RequestInputs, client: Client, front: FrontTimes | None) -> Entrance:
    """An entrance through which no request has come."""
    given = not len(inputs.pause_ns) and client.max_in_flight is None and front is None
    count, times = 0 if given else len(inputs.prompt), front or FrontTimes(0, 0.0)
    return Entrance(  # type: ignore[call-arg]
        client.max_in_flight or len(inputs.prompt),
        1000 * client.pause_us,
        times.turn_ns,
        np.fromiter(islice(varied_ns(times.request_ns), count), np.float64, count),
        times.token_ns * inputs.prompt[:count].astype(np.float64),
        *_columns(1, count),
        Heap(*_columns(3, count)),
    )


def _columns(count: int, length: int) -> tuple[Any, ...]:
    return tuple(np.zeros(length, dtype=np.int64) for _ in range(count))
