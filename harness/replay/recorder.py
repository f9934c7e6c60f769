"""The recorder: it collects the run log of a replay step by step.

`StepTable` keeps a row for each step plan, `RequestTimes` the times of each request and every gap between tokens.
`Recorder` makes the run log from both, and keeps the plans too where that is asked for. `MeasuredRun` is the record of
a run on the engine.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.memory.manager import FastForwardColumns
from engine.core.options import Decoding
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.metrics.log import (
    GENERATED,
    REQUEST_COLUMNS,
    RETURNED,
    STEP_COLUMNS,
    Column,
    FloatArray,
    IntArray,
    Outcome,
    RunLog,
)
from harness.replay.cost_model import Amount
from harness.replay.executors import StepTiming
from harness.replay.features import FEATURES, FeatureMeter, feature_index
from harness.replay.virtual_time import to_s

PHASES = ("policy_s", "build_s", "forward_s", "sample_s")
_COMPUTED = ("step", "start_s", "seconds", "attention_s", "reserved")  # columns that `drain()` computes
_GIVEN = tuple(name for name in STEP_COLUMNS if name not in _COMPUTED)
_FIRST_ONLY = ("copies", "preempted", "admitted", "hit_tokens")
_GROWING = ("kv_read_tokens", "token")  # by one a row and step
_CHANGING = (
    *("new_blocks", "frees", "cached", "internal", "external", "free"),
    *("logical_blocks", "physical_blocks"),
)
NEVER = -1
_TIMES = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
_NO_STATS = RequestStats()
_COLUMNS = (*REQUEST_COLUMNS, GENERATED, RETURNED)
RequestTable = dict[str, np.ndarray[Any, np.dtype[Any]]]
_UNKNOWN = (np.nan,) * len(PHASES)
_ROWS, _DECODE, _PREFILL, _TOKENS, _DECODE_KV, _PREFILL_KV, _SAMPLED = feature_index(
    ("rows", "decode_rows", "prefill_tokens", "tokens", "decode_kv", "prefill_kv", "sampled_rows")
)


class StepTable:
    """Gathers plans; a fast-forward is one entry until `drain()` turns it into rows."""

    def __init__(self) -> None:
        self._forget()
        self._drained = 0
        self._end_ns = 0
        self._capacity = 0

    def _forget(self) -> None:
        self._values: list[tuple[Amount, ...]] = []
        self._starts: list[int] = []
        self._steps: list[int] = []
        self._ns: list[int] = []
        self._attention_s: list[float] = []
        self._fast_forwards: list[FastForwardColumns] = []

    @property
    def end_s(self) -> float:
        """End of the last step, in seconds."""
        return float(to_s(self._end_ns))

    @property
    def pending(self) -> int:
        """Steps that have not been drained."""
        return len(self._ns)

    def add(
        self,
        now_ns: int,
        plan: StepPlan,
        timing: StepTiming,
        fast_forward: FastForwardColumns | None,
        features: Sequence[Amount],
        took_ns: int,
    ) -> None:
        """A plan that began at `now_ns` and ran once, or as often as `timing` has entries, `took_ns` in all."""
        self._values.append(_values(plan, timing, features))
        self._starts.append(now_ns)
        self._steps.append(len(timing.ns))
        self._ns += timing.ns
        self._attention_s += timing.attention_s
        self._end_ns = now_ns + took_ns
        if fast_forward is not None:
            self._fast_forwards.append(fast_forward)
        if not self._capacity:
            self._capacity = plan.usage.capacity

    def drain(self) -> dict[str, Column]:
        """Every column of STEP_COLUMNS, one entry per step; counts int64, times float64 s. The table is empty then."""
        steps = np.array(self._steps, dtype=np.int64)
        facts = np.array(self._values, dtype=np.float64).reshape(-1, len(_GIVEN)).repeat(steps, axis=0)
        found: dict[str, Column] = {
            name: facts[:, index] if name in PHASES else facts[:, index].astype(np.int64)
            for index, name in enumerate(_GIVEN)
        }
        nth = np.arange(steps.sum()) - (np.cumsum(steps) - steps).repeat(steps)
        self._add_times(found, steps, nth)
        self._add_fast_forwards(found, nth)
        states = ("token", "cached", "internal", "external", "free")
        found["reserved"] = self._capacity - np.sum([found[name] for name in states], axis=0)
        self._drained += len(nth)
        self._forget()
        return {name: found[name] for name in STEP_COLUMNS}

    def _add_times(self, found: dict[str, Column], steps: IntArray, nth: IntArray) -> None:
        ns = np.array(self._ns, dtype=np.int64)
        before = np.cumsum(ns) - ns  # within all steps; of each plan's first step it is the plan's own offset
        begun = np.array(self._starts, dtype=np.int64).repeat(steps)
        found["step"] = self._drained + np.arange(len(ns))
        found["start_s"] = to_s(begun + before - before[nth == 0].repeat(steps))
        found["seconds"] = to_s(ns)
        found["attention_s"] = np.array(self._attention_s, dtype=np.float64)

    def _add_fast_forwards(self, found: dict[str, Column], nth: IntArray) -> None:
        """The further steps of a fast-forward: as the first, but for context and what the pool did."""
        further = nth > 0
        for name in _FIRST_ONLY:
            found[name][further] = 0
        for name in _GROWING:
            found[name] += found["rows"] * nth
        for name in _CHANGING:
            if self._fast_forwards:
                found[name][further] = np.concatenate([getattr(part, name) for part in self._fast_forwards])


def _values(plan: StepPlan, timing: StepTiming, features: Sequence[Amount]) -> tuple[Amount, ...]:
    """The plan's values in the order of STEP_COLUMNS, without `_COMPUTED`; `features` are those of its first step."""
    usage, phases = plan.usage, timing.phases
    return (
        *((phases.get(phase, np.nan) for phase in PHASES) if phases else _UNKNOWN),
        *_of_rows(features),
        plan.new_blocks,
        len(plan.copies),
        len(plan.frees),
        len(plan.preempted),
        len(plan.admitted),
        plan.hit_tokens,
        plan.running,
        plan.waiting,
        usage.token,
        usage.cached,
        usage.internal,
        usage.external,
        usage.free,
        usage.logical_blocks,
        usage.physical_blocks,
    )


def _of_rows(features: Sequence[Amount]) -> tuple[Amount, ...]:
    """Rows, decode rows, prefill tokens, query tokens, KV slots read, sampled rows."""
    return (
        features[_ROWS],
        features[_DECODE],
        features[_PREFILL],
        features[_TOKENS],
        features[_DECODE_KV] + features[_PREFILL_KV],
        features[_SAMPLED],
    )


@dataclass(slots=True)
class _LiveRequest:
    """A request that has arrived and not ended; times in ns."""

    place: int  # in order of arrival
    request: Request
    arrival: int
    scheduled: int = NEVER
    first_token: int = NEVER
    spared: int = 0  # tokens not generated by branches that ended early


class RequestTimes:
    """Times of the requests of one replay in ns, and the gaps between tokens.

    Call `arrived`, `rejected`, `ended_early` and `add` as the replay goes on, `close` at its end, and `drain` and
    `drain_gaps` for the results. A steady decoder gets a token from every plan, so no work is done for it between
    steps. Work is done only when a request arrives, is not steady yet, stops or resumes getting tokens, or ends. A gap
    counts once per request and token, for any number of branches.
    """

    def __init__(self) -> None:
        self._live: dict[int, _LiveRequest] = {}
        self._arrived = 0
        self._steady: Sequence[int] = ()  # requests that got a token from the last plan: steady decoders
        self._others: Sequence[int] = ()  # and all others
        # requests that got no token although they had one before, with the end of the step of their last token
        self._paused: dict[int, int] = {}
        self._last_end = 0  # end of the last plan that produced tokens
        self._ended: list[tuple[int, ...]] = []  # rows of the request table, in order of their ends
        self._gap_ns: list[int] = []
        self._gap_weight: list[int] = []

    def arrived(self, request: Request, arrival_ns: int) -> None:
        """A request arrived; `arrival_ns` is NEVER for one that did not arrive."""
        self._live[request.request_id] = _LiveRequest(self._arrived, request, arrival_ns)
        self._arrived += 1

    def rejected(self, request_id: int) -> None:
        """A request that can never be served ends at once."""
        self._close(self._live.pop(request_id), Outcome.REJECTED, NEVER, _NO_STATS)

    def add(
        self,
        now_ns: int,
        plan: StepPlan,
        report: CommitReport,
        ns: list[int],
        took_ns: int,
    ) -> None:
        """A plan ran from `now_ns` on for `took_ns` in all, its steps taking `ns`."""
        for request_id in plan.admitted:
            live = self._live[request_id]
            if live.scheduled == NEVER:
                live.scheduled = now_ns
        end = now_ns + took_ns
        for request_id in plan.preempted:
            self._pause(request_id)
        if report.emitted or self._steady or self._others:
            self._tokens(plan.steady_ids, report, now_ns + ns[0], ns)
            self._last_end = end
        if report.finished:
            self._finish(report, end)

    def ended_early(self, plan: StepPlan, ended: Mapping[int, Collection[int]]) -> None:
        """Record the branches that end with the plan's only step; call it before `add`."""
        sampling = {row.request_id: row for row in plan.rows if row.samples and row.request_id in ended}
        for request_id, row in sampling.items():
            request = self._live[request_id].request
            generated = row.context_len + row.query_len - request.prompt_tokens + 1
            spared = (request.output_tokens - generated) * len(ended[request_id])
            self._live[request_id].spared += spared

    def _pause(self, request_id: int) -> None:
        if request_id not in self._paused and self._live[request_id].first_token != NEVER:
            self._paused[request_id] = self._last_end

    def _tokens(self, steady: Sequence[int], report: CommitReport, first_end: int, ns: list[int]) -> None:
        others = report.emitted[len(steady) :]
        again = len(steady)
        if steady is not self._steady or others or self._others:
            again += self._changed(steady, others, first_end)
        if again:
            self._gap(first_end - self._last_end, again)
        for tokens in report.tokens.values():
            if tokens > 1:
                self._gap(0, tokens - 1)  # draft tokens that were verified together
        if len(ns) > 1:
            self._gap_ns += ns[1:]
            self._gap_weight += [len(report.emitted)] * (len(ns) - 1)
        self._steady, self._others = steady, others

    def _changed(self, steady: Sequence[int], others: Sequence[int], first_end: int) -> int:
        """Record first tokens and pauses; returns how many requests beside the steady ones got a token then and now."""
        for (
            request_id
        ) in self._others:  # a request that is no longer among them became steady, paused, or ended
            if request_id not in others and request_id in self._live and request_id not in steady:
                self._pause(request_id)
        again = 0
        for request_id in [rid for rid in self._paused if rid in steady]:
            again -= 1
            self._gap(first_end - self._paused.pop(request_id), 1)
        for request_id in others:
            live = self._live[request_id]
            if live.first_token == NEVER:
                live.first_token = first_end
            elif request_id in self._paused:
                self._gap(first_end - self._paused.pop(request_id), 1)
            else:
                again += 1
        return again

    def _gap(self, ns: int, weight: int) -> None:
        self._gap_ns.append(ns)
        self._gap_weight.append(weight)

    def _finish(self, report: CommitReport, end: int) -> None:
        for request_id in report.finished:
            self._paused.pop(request_id, None)
            self._close(self._live.pop(request_id), Outcome.FINISHED, end, report.stats[request_id])

    def _close(self, live: _LiveRequest, outcome: Outcome, end: int, stats: RequestStats) -> None:
        request = live.request
        generated = request.output_tokens * request.width - live.spared
        best_alone = request.decoding is Decoding.beam
        self._ended.append(
            (
                live.place,
                request.request_id,
                live.arrival,
                live.scheduled,
                live.first_token,
                end,
                request.prompt_tokens,
                request.output_tokens,
                request.width,
                stats.hit_tokens,
                stats.resumed_hit_tokens,
                stats.recomputed_tokens,
                stats.preemptions,
                outcome,
                generated,
                request.output_tokens if best_alone else generated,
            )
        )

    @property
    def ended(self) -> int:
        """Requests whose rows have not been drained."""
        return len(self._ended)

    def close(self, stats: Mapping[int, RequestStats]) -> None:
        """The replay is over: requests that have not ended are unfinished."""
        for request_id, live in self._live.items():
            self._close(live, Outcome.UNFINISHED, NEVER, stats.get(request_id, _NO_STATS))
        self._live = {}

    def drain(self, count: int | None = None) -> RequestTable:
        """The first `count` (None: all) rows of the request table, in order of arrival; they are removed here."""
        rows, self._ended = self._ended[:count], self._ended[len(self._ended) if count is None else count :]
        table = np.array(sorted(rows), dtype=np.int64).reshape(len(rows), len(_COLUMNS) + 1)
        found = dict(zip(_COLUMNS, table.T[1:].copy(), strict=True))
        return {name: _seconds(column) if name in _TIMES else column for name, column in found.items()}

    def drain_gaps(self) -> tuple[FloatArray, FloatArray]:
        """Every inter-token gap in seconds, equal ones merged, with the number of each; they are removed here."""
        values, inverse = np.unique(np.array(self._gap_ns, dtype=np.int64), return_inverse=True)
        weights = np.bincount(inverse, weights=self._gap_weight, minlength=len(values))
        self._gap_ns, self._gap_weight = [], []
        return to_s(values), weights.astype(np.float64)


def _seconds(ns: IntArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))


class Recorder:
    """Records one replay; `log()` gives its run log. `requests` by id may grow while the replay runs.

    With `keep_plans` it also keeps each step plan's digest, features and draft tokens by request, and the step result.
    They serve to compare two replays step by step, to price a measured run's plans, and to calibrate. `keep_plans` is
    only for replays without fast-forward. `window` is that of the model's windowed layers, in tokens.
    """

    def __init__(
        self,
        requests: Mapping[int, Request],
        block_size: int,
        *,
        keep_plans: bool = False,
        window: int | None = None,
    ) -> None:
        self._block_size = block_size
        self._meter = FeatureMeter(requests, block_size, window)
        self._steps = StepTable()
        self._times = RequestTimes()
        self._keep_plans = keep_plans
        self.digests: list[str] = []
        self.results: list[StepResult] = []
        self.drafted: list[Mapping[int, int]] = []
        self.step_ns: list[int] = []
        self._features: list[list[Amount]] = []

    @property
    def parents(self) -> list[Mapping[int, Sequence[int]]]:
        """Beam parents by step and request; with `keep_plans` only."""
        return [result.parents for result in self.results]

    @property
    def features(self) -> FloatArray:
        """Features of every step, `[steps, len(FEATURES)]`; with `keep_plans` only."""
        return np.array(self._features, dtype=np.float64).reshape(-1, len(FEATURES))

    def arrived(self, request: Request, arrival_ns: int) -> None:
        """A request arrived."""
        self._times.arrived(request, arrival_ns)

    def never_arrived(self, request: Request) -> None:
        """The replay stopped before the request arrived."""
        self._times.arrived(request, NEVER)

    def rejected(self, request_id: int) -> None:
        """An arrived request can never be served."""
        self._times.rejected(request_id)

    def record(
        self,
        now_ns: int,
        plan: StepPlan,
        result: StepResult,
        report: CommitReport,
        timing: StepTiming,
    ) -> int:
        """One plan, taken `result.num_steps` times, from `now_ns` on; returns how long all of it took, in ns."""
        features = timing.features or self._meter.first(plan, result.accepted)
        took_ns = sum(timing.ns)
        self._steps.add(now_ns, plan, timing, report.fast_forward, features, took_ns)
        if result.ended:
            self._times.ended_early(plan, result.ended)
        self._times.add(now_ns, plan, report, timing.ns, took_ns)
        if timing.features is None:
            self._meter.took(features, len(timing.ns))
        if self._keep_plans:
            self.digests.append(plan.digest())
            self.results.append(result)
            self.drafted.append({row.request_id: row.drafts for row in plan.other_rows if row.drafts})
            self.step_ns.append(timing.ns[0])
            self._features.append(features)
        return took_ns

    def log(self, stats: Mapping[int, RequestStats], capacity_slots: int, kv_bytes_per_token: int) -> RunLog:
        """The finished run's log."""
        self._times.close(stats)
        itl_s, itl_weight = self._times.drain_gaps()
        return RunLog(
            steps=self._steps.drain(),
            requests=self._times.drain(),
            itl_s=itl_s,
            itl_weight=itl_weight,
            block_size=self._block_size,
            capacity_slots=capacity_slots,
            kv_bytes_per_token=kv_bytes_per_token,
            span_s=self._steps.end_s,
        )


def digests_differ(one: Sequence[str], other: Sequence[str]) -> int | None:
    """The first step at which two replays decided differently, or None."""
    pairs: Iterable[tuple[str, str]] = zip(one, other, strict=False)
    first = next((step for step, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(one) != len(other):
        return min(len(one), len(other))
    return first


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run: its log, its recording, and the number of audits, which compare slots with counters."""

    log: RunLog
    recorder: Recorder
    audits: int
