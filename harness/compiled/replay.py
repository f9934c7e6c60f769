"""The interface of the compiled replay: it takes lengths and limits, and hands the rows of a run log to a fold.

`advance` is the loop that numba compiles. It runs step after step until the log is full or every request has ended.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.memory.eviction import PoolFacts
from engine.core.memory.tiers import Tiers
from engine.core.options import Eviction, Preemption, SchedulerLimits, Scheduling
from harness.compiled.arriving import FOREVER, next_arrival, open_lane, take_arrivals
from harness.compiled.committing import commit, log_step
from harness.compiled.grouping import Grouping, Waste, no_layers
from harness.compiled.numba_edge import MachineCode, called
from harness.compiled.pricing import note_prefill, price, write_features
from harness.compiled.scheduling import fill, has_rows, wait_for_end
from harness.compiled.state import (
    ENTRY,
    PIN,
    PRIORITY,
    RECENT,
    TTL,
    BlockNames,
    Drafting,
    Prices,
    ReplayState,
    RequestInputs,
    Rules,
    new_entrance,
    new_state,
)
from harness.compiled.tiers import note_counts, with_reading
from harness.metrics.log import BoolArray, Column, FloatArray, IntArray, Outcome, RequestRow
from harness.replay.arrivals import LATEST_NS, NEVER, NS_PER_S, FrontTimes, TimeSpanError, to_s
from harness.replay.beams import BeamGenealogy
from harness.replay.branches import DraftAcceptance, seed_word
from harness.replay.features import Sight
from harness.replay.folds import CHUNK, Fold
from harness.replay.memory import TierUse
from harness.replay.recorder import request_columns, step_columns
from traces.trace import OPEN, Client

LOG_STEPS = 2 * CHUNK  # steps in memory before they are handed on: few enough for the CPU's caches
FULL, DONE, PAUSED, TOO_LONG = range(4)  # what `advance` returns
_NS, _LATEST_NS = float(NS_PER_S), float(LATEST_NS)


def ended_requests(state: ReplayState, first: int, last: int) -> dict[str, Column]:
    """The requests that ended as number `first` to `last - 1`, sorted by arrival, as in `RunLog.requests`."""
    requests, inputs = state.requests, state.inputs
    ended = requests.ended[first : min(last, state.at[ENTRY.ended])]
    ended = ended[np.argsort(requests.place[ended])]
    generated = inputs.output[ended] * inputs.width[ended]
    row = RequestRow(
        request_id=inputs.request_id[ended],
        arrival_ns=inputs.arrival_ns[ended],
        scheduled_ns=requests.scheduled[ended],
        first_token_ns=requests.first_token[ended],
        finish_ns=requests.finish[ended],
        prompt_tokens=inputs.prompt[ended],
        output_tokens=inputs.output[ended],
        width=inputs.width[ended],
        hit_tokens=requests.hits[ended],
        resumed_hit_tokens=requests.resumed_hits[ended],
        recomputed_tokens=requests.recomputed[ended],
        preemptions=requests.preemptions[ended],
        outcome=np.where(inputs.fits[ended] == 1, Outcome.FINISHED, Outcome.REJECTED),
        generated=generated,
        returned=np.where(inputs.beam[ended] == 1, inputs.output[ended], generated),
    )
    return request_columns(row)


def advance(state: ReplayState, num_blocks: int) -> int:
    """Run steps; returns FULL, DONE, PAUSED, or TOO_LONG where the next one would end beyond what the clock counts."""
    at, log = state.at, state.log
    while at[ENTRY.steps] < len(log.records) and at[ENTRY.gaps] + state.rules.max_rows < len(log.gap_ns):
        if at[ENTRY.now] >= at[ENTRY.pause_at]:
            return PAUSED
        take_arrivals(state)
        if at[ENTRY.running] or at[ENTRY.head] < at[ENTRY.tail] or at[ENTRY.swapped]:
            if not step(state, num_blocks):
                return TOO_LONG
            continue
        if at[ENTRY.ending]:
            wait_for_end(state)
        due = next_arrival(state)
        if due == NEVER:
            return DONE
        at[ENTRY.now] = at[ENTRY.seen] = max(at[ENTRY.now], due)
    return FULL


@called
def step(state: ReplayState, num_blocks: int) -> bool:
    """Run one step; returns False, and logs nothing, where it would end after LATEST_NS."""
    preempted = 0
    for waits in range(2):
        fill(state)
        if waits or not state.at[ENTRY.ending] or has_rows(state):
            break
        preempted, state.at[ENTRY.preempted] = state.at[ENTRY.preempted], 0  # as the scheduler's `waited`
        wait_for_end(state)
        state.at[ENTRY.seen] = state.at[ENTRY.now]
        take_arrivals(state)
    state.at[ENTRY.preempted] += preempted
    write_features(state, num_blocks)
    seconds, attention_s = price(state)
    if state.tiers.chunk:
        seconds = with_reading(state.tiers, seconds)
    if not state.at[ENTRY.now] + seconds * _NS <= _LATEST_NS:
        return False
    took_ns = max(1, int(np.rint(seconds * _NS)))
    log_step(state, num_blocks, took_ns, attention_s)
    note_prefill(state)
    commit(state, state.at[ENTRY.now] + took_ns)
    state.at[ENTRY.seen] = state.at[ENTRY.now] if state.rules.delayed else state.at[ENTRY.now] + took_ns
    state.at[ENTRY.now] += took_ns
    return True


@dataclass(frozen=True)
class Branches:
    """How many branches the requests have, int64 `[requests]`, which are beams, and whose tokens are drawn (0 or 1).

    `genealogy` is the model that draws their parents.
    """

    width: IntArray
    beam: IntArray
    drawn: IntArray
    genealogy: BeamGenealogy

    def survivors(self) -> FloatArray:
        """Beams of each request that have a child on average, float64 `[requests]`."""
        return _by_width(self.width, lambda width: width * (1 - self.genealogy.churn_of(width)))

    def evenness(self) -> FloatArray:
        """The evenness of each request's beams, float64 `[requests]`."""
        return _by_width(self.width, self.genealogy.evenness_of)


def _by_width(width: IntArray, value_of: Callable[[int], float]) -> FloatArray:
    widths, inverse = np.unique(width, return_inverse=True)
    found: FloatArray = np.array([value_of(int(one)) for one in widths], dtype=np.float64)[inverse]
    return found


@dataclass(frozen=True)
class Waiting:
    """Requests that wait for the ends of others; `pause_ns`, int64 `[requests]`, are the pauses before each.

    Each of `users` takes the next request of the list when the one before has ended, and does not pause before the
    first (`harness.replay.arrivals.ClosedLoop`). With `after`, which has the places of those that each request waits
    for, they are turns of conversations (`Sessions`); those that wait for none arrive at their times.
    """

    pause_ns: IntArray
    users: int = 0
    after: Sequence[Collection[int]] | None = None

    def followers(self) -> tuple[IntArray, IntArray, IntArray]:
        """`waits_for`, `first_follower` and `follower` of `RequestInputs`."""
        count, none = len(self.pause_ns), np.zeros(0, dtype=np.int64)
        if self.after is None:
            return none, none, none
        pairs = sorted((parent, turn) for turn, parents in enumerate(self.after) for parent in parents)
        first = np.searchsorted(np.array([parent for parent, _ in pairs]), np.arange(count + 1))
        waits_for = np.array([len(parents) for parents in self.after], dtype=np.int64)
        return waits_for, first, np.array([turn for _, turn in pairs], dtype=np.int64)


@dataclass(frozen=True)
class Drafts:
    """Each request verifies `tokens` draft tokens a step, also past its end; `acceptance` draws which are right."""

    tokens: int
    acceptance: DraftAcceptance | None

    def drafting(self, max_rows: int) -> Drafting:
        """How they are drawn, as numbers, with room for those of `max_rows` rows."""
        drawn, rows = self.acceptance or DraftAcceptance(-1.0), max_rows if self.tokens else 0
        drafts, right = (np.zeros(rows, dtype=np.int64) for _ in range(2))
        return Drafting(drawn.share, np.array([seed_word(drawn.seed)], dtype=np.uint64), drafts, right)


@dataclass(frozen=True)
class PlainRequests:
    """Requests in order of arrival, int64 `[requests]` each; lengths in tokens.

    `names` says which leading blocks are shared; without it, none. Without `branches` each request has one. With
    `waiting` some are due after others have ended. `client` may hold back what is due, `front` delays what is
    sent.
    `priority`, int64 `[requests]`: a lower number goes first. Only requests of one branch have `drafts`.
    """

    request_id: IntArray
    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    names: BlockNames | None = None
    branches: Branches | None = None
    waiting: Waiting | None = None
    priority: IntArray | None = None
    drafts: Drafts | None = None
    client: Client = OPEN
    front: FrontTimes | None = None


@dataclass(frozen=True)
class Keeping:
    """Which cached blocks are evicted last (`engine.core.memory.eviction_rules`).

    `rank`, int64 `[requests]`, is 1 for requests of a session with `ttl`, and with `priority` the place of the
    request's priority, the least important first. `seconds` is of `ttl`, `pinned` blocks of `pinned`.
    """

    rule: Eviction
    rank: IntArray
    seconds: float = 0.0
    pinned: int = 0


_KEEP = {Eviction.ttl: TTL, Eviction.pinned: PIN, Eviction.priority: PRIORITY}


@dataclass(frozen=True)
class PlainPool:
    """A paged pool; `keeps` says whether released blocks stay cached until they are evicted. `host_blocks` are for
    swapping. `window` is that of the model's windowed layers.

    Without a prefix cache, give requests without names. With `grouping` blocks are pages of groups of layers. `tiers`
    are of empty ones, and count what the replay does with them.
    """

    num_blocks: int
    block_size: int
    keeps: bool
    host_blocks: int = 0
    keeping: Keeping | None = None
    window: Sight | None = None
    grouping: Grouping | None = None
    tiers: TierUse | None = None


class CompiledReplay:
    """A replay of plain requests by compiled code, from an empty pool to the end of the last request.

    It runs once. With `asynchronous`, a step is scheduled while the one before it runs (`harness.replay.loop`).
    `advance_with` replaces the compiled loop, for tests.
    """

    def __init__(
        self,
        requests: PlainRequests,
        limits: SchedulerLimits,
        pool: PlainPool,
        prices: Prices,
        *,
        asynchronous: bool = False,
        log_steps: int = LOG_STEPS,
        advance_with: Callable[[ReplayState, int], int] | None = None,
    ) -> None:
        self._pool, self.num_blocks = pool, pool.num_blocks
        ones = np.ones(len(requests.request_id), dtype=np.int64)
        branches = requests.branches or Branches(ones, 0 * ones, 0 * ones, BeamGenealogy({}))
        drafts = requests.drafts or Drafts(0, None)
        rules = _rules(limits, pool, branches.width, drafts.tokens, asynchronous)
        waiting = requests.waiting or Waiting(ones[:0])
        waits_for, first_follower, follower = waiting.followers()
        fits = _fits(requests, branches.width, drafts.tokens, limits, pool)
        first_name, names = requests.names or BlockNames.none(len(fits))
        inputs = RequestInputs(
            arrival_ns=requests.arrival_ns.copy(),
            pause_ns=waiting.pause_ns,
            waits_for=waits_for,
            first_follower=first_follower,
            follower=follower,
            prompt=requests.prompt_tokens,
            output=requests.output_tokens,
            width=branches.width,
            beam=branches.beam,
            drawn=branches.drawn,
            survivors=branches.survivors(),
            evenness=branches.evenness(),
            request_id=requests.request_id,
            priority=ones if requests.priority is None or not rules.by_priority else requests.priority,
            rank=pool.keeping.rank if pool.keeping else 0 * ones,
            fits=fits,
            first_name=first_name,
            names=names,
        )
        layers = pool.grouping.layers() if pool.grouping else no_layers()
        self._waste = Waste(pool.grouping) if pool.grouping else None
        self.state = new_state(
            inputs,
            new_entrance(inputs, requests.client, requests.front),
            rules,
            layers,
            prices,
            drafts.drafting(rules.max_rows),
            pool.num_blocks,
            log_steps,
            pool.tiers.tiers if pool.tiers else Tiers((), PoolFacts()),
        )
        self.state.at[ENTRY.host] = pool.host_blocks
        open_lane(self.state, waiting.users)
        self._advance = advance_with or MachineCode(advance)
        self._played = self._handed = 0  # steps and requests that a fold has got

    def run(self, fold: Fold) -> dict[str, Any]:
        """Run, and hand every step, gap and request to `fold`; for the errors see `advance_to`.

        Returns what `close` does.
        """
        self.advance_to(FOREVER, fold)
        return self.close(fold)

    def advance_to(self, pause_ns: int, fold: Fold) -> int:
        """Run the steps that begin before `pause_ns`; returns DONE where no request is left that is known to come.

        Raises:
            TimeSpanError: the replay would last too long.
        """
        self.state.at[ENTRY.pause_at] = pause_ns
        while (code := self._advance(self.state, self._pool.num_blocks)) == FULL:
            self._hand_over(fold)
        if code == TOO_LONG:
            raise TimeSpanError
        return code

    def close(self, fold: Fold) -> dict[str, Any]:
        """All requests have ended: hand over what is left.

        Returns what was kept of the memory, by its field of the run log; sums alone where `fold` keeps no rows.
        """
        self._hand_over(fold)
        fold.add_requests(ended_requests(self.state, self._handed, self.state.at[ENTRY.ended]))
        fold.close(float(to_s(int(self.state.at[ENTRY.last_end]))))
        kept: dict[str, Any] = {}
        if self._waste is not None:
            kept["waste"] = self._waste.value(keeps_rows=fold.keeps_rows)
        if (use := self._pool.tiers) is not None:
            note_counts(self.state.tiers, use.tiers)
            kept[use.field] = use.value()
        return kept

    def _hand_over(self, fold: Fold) -> None:
        log, at = self.state.log, self.state.at
        steps, gaps = at[ENTRY.steps], at[ENTRY.gaps]
        fold.add_steps(step_columns(log.records[:steps], log.attention_s[:steps].copy(), self._played))
        fold.add_gaps(to_s(log.gap_ns[:gaps]), log.gap_weight[:gaps].astype(np.float64))
        if self._waste is not None:
            self._waste.add(log.records[:steps], log.waste[:steps], keeps_rows=fold.keeps_rows)
        self._played += int(steps)
        at[ENTRY.steps] = at[ENTRY.gaps] = 0
        while at[ENTRY.ended] - self._handed >= fold.chunk:
            fold.add_requests(ended_requests(self.state, self._handed, self._handed + fold.chunk))
            self._handed += fold.chunk


def _rules(
    limits: SchedulerLimits, pool: PlainPool, width: IntArray, drafts: int, asynchronous: bool
) -> Rules:
    """The limits as numbers. Those of running requests are at most what there is, so that large ones cost no memory."""
    keeping, grouping, size = pool.keeping, pool.grouping, pool.block_size
    interval = grouping.interval if grouping else 0
    return Rules(
        budget=limits.max_batched_tokens,
        max_rows=min(limits.max_running, len(width)),
        max_running=min(limits.max_running, int(width.sum())),
        chunked=int(limits.chunked_prefill),
        mixed=int(limits.mixed_steps),
        whole_prompt=int(limits.admit_whole_prompt),
        prefill_cap=limits.long_prefill_tokens or 0,
        adaptive=int(limits.long_prefill_adaptive),
        watermark_blocks=int(limits.watermark * (pool.num_blocks + 1)),
        block_size=pool.block_size,
        keeps=int(pool.keeps),
        delayed=int(asynchronous),
        ahead=int(limits.ahead),
        ordered=int(limits.policy is Scheduling.priority or limits.preemption is Preemption.swap),
        by_priority=int(limits.policy is Scheduling.priority),
        swaps=int(limits.preemption is Preemption.swap),
        keep=_KEEP[keeping.rule] if keeping else RECENT,
        keep_ns=round(keeping.seconds * 1e9) if keeping else 0,
        pinned=keeping.pinned if keeping and keeping.rule is Eviction.pinned else 0,
        ranks=max(2, int(keeping.rank.max(initial=0)) + 1) if keeping else 1,
        window=pool.window.tokens if pool.window else 0,
        in_chunks=int(pool.window is not None and pool.window.chunked),
        groups=len(grouping.layout.groups) if grouping else 0,
        token_slots=int(grouping.layers().token_slots.sum()) if grouping else 1,
        page_slots=grouping.layout.page_slots(0) if grouping else size,
        segment=1 if interval is None else interval // size,
        dense=int(interval is None),
        drafts=drafts,
        longest=limits.max_model_len or 0,
    )


def _fits(
    requests: PlainRequests, width: IntArray, drafts: int, limits: SchedulerLimits, pool: PlainPool
) -> IntArray:
    """1 for requests that some schedule can serve (`Scheduler.never_fits`), else 0."""
    final = requests.prompt_tokens + requests.output_tokens - 1
    shared = np.where(width > 1, requests.prompt_tokens // pool.block_size, 0)
    budget = limits.max_batched_tokens - (drafts > 0)
    most = shared + width * (-(-(final + 2 * drafts) // pool.block_size) - shared)
    if pool.grouping:
        most = pool.grouping.most_blocks(final, limits.max_batched_tokens)
    at_once = min(limits.max_running, limits.max_batched_tokens)
    fits: BoolArray = (most <= pool.num_blocks) & (width <= at_once)
    if limits.max_model_len is not None:
        fits &= final < limits.max_model_len
    if not limits.chunked_prefill:
        fits &= final <= budget
    if drafts and 1 + drafts > min(budget, limits.long_prefill_tokens or budget):
        fits[:] = False
    return fits.astype(np.int64)
