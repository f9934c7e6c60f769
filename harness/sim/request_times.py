"""When each request was scheduled, got its tokens, and ended; and every gap between tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.core.plan import FloatArray, StepPlan
from engine.core.request import Request
from engine.core.scheduling.commit import CommitReport, RequestStats
from harness.metrics.log import GENERATED, REQUEST_COLUMNS, Outcome
from harness.sim.clock import NsArray, to_s

NEVER = -1
_TIMES = ("arrival_s", "first_scheduled_s", "first_token_s", "finish_s")
_NO_STATS = RequestStats()
_COLUMNS = (*REQUEST_COLUMNS, GENERATED)
RequestTable = dict[str, np.ndarray[Any, np.dtype[Any]]]


@dataclass(slots=True)
class _Life:
    """A request that has arrived and not ended; times in ns."""

    place: int  # in order of arrival
    request: Request
    arrival: int
    scheduled: int = NEVER
    first_token: int = NEVER
    spared: int = 0  # tokens that branches which ended early did not generate


class RequestTimes:
    """Times of the requests of one replay in ns.

    A request is looked at when it arrives, while it is no steady decoder yet, when it stops or starts again getting
    tokens, and when it ends: never in the steps between, since a steady decoder gets a token from every plan. A gap is
    counted once per request and token, however many branches get a token at that moment.
    """

    def __init__(self) -> None:
        self._live: dict[int, _Life] = {}
        self._arrived = 0
        self._steady: Sequence[int] = ()  # who got a token from the last plan: steady decoders
        self._others: Sequence[int] = ()  # and others
        self._paused: dict[
            int, int
        ] = {}  # who got none, though it had before, and the end of its last token's step
        self._last_end = 0  # when the last plan that gave tokens ended
        self._ended: list[tuple[int, ...]] = []  # rows of the request table, in order of their ends
        self._gap_ns: list[int] = []
        self._gap_weight: list[int] = []

    def arrived(self, request: Request, arrival_ns: int) -> None:
        """A request arrived, or never will (NEVER)."""
        self._live[request.request_id] = _Life(self._arrived, request, arrival_ns)
        self._arrived += 1

    def rejected(self, request_id: int) -> None:
        """It can never be served."""
        self._close(self._live.pop(request_id), Outcome.REJECTED, NEVER, _NO_STATS)

    def add(
        self,
        now_ns: int,
        plan: StepPlan,
        report: CommitReport,
        ns: list[int],
        took_ns: int,
        stats: Mapping[int, RequestStats],
    ) -> None:
        """A plan ran from `now_ns` on for `took_ns` in all, its steps taking `ns`."""
        for request_id in plan.admitted:
            life = self._live[request_id]
            if life.scheduled == NEVER:
                life.scheduled = now_ns
        end = now_ns + took_ns
        for request_id in plan.preempted:
            self._pause(request_id)
        if report.emitted or self._steady or self._others:
            self._tokens(plan.steady_ids, report, now_ns + ns[0], ns)
            self._last_end = end
        if report.finished:
            self._finish(report.finished, end, stats)

    def ended_early(self, plan: StepPlan, ended: Mapping[int, Collection[int]]) -> None:
        """Branches that end with the plan's only step; call it before `add`."""
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
                self._gap(0, tokens - 1)  # verified together
        if len(ns) > 1:
            self._gap_ns += ns[1:]
            self._gap_weight += [len(report.emitted)] * (len(ns) - 1)
        self._steady, self._others = steady, others

    def _changed(self, steady: Sequence[int], others: Sequence[int], first_end: int) -> int:
        """Notes first tokens and pauses; returns how many more than the steady ones got a token then and now."""
        for request_id in self._others:  # who is no longer among them became steady, paused, or ended
            if request_id not in others and request_id in self._live and request_id not in steady:
                self._pause(request_id)
        again = 0
        for request_id in [rid for rid in self._paused if rid in steady]:
            again -= 1
            self._gap(first_end - self._paused.pop(request_id), 1)
        for request_id in others:
            life = self._live[request_id]
            if life.first_token == NEVER:
                life.first_token = first_end
            elif request_id in self._paused:
                self._gap(first_end - self._paused.pop(request_id), 1)
            else:
                again += 1
        return again

    def _gap(self, ns: int, weight: int) -> None:
        self._gap_ns.append(ns)
        self._gap_weight.append(weight)

    def _finish(self, finished: Sequence[int], end: int, stats: Mapping[int, RequestStats]) -> None:
        for request_id in finished:
            self._paused.pop(request_id, None)
            self._close(self._live.pop(request_id), Outcome.FINISHED, end, stats[request_id])

    def _close(self, life: _Life, outcome: Outcome, end: int, stats: RequestStats) -> None:
        request = life.request
        self._ended.append(
            (
                life.place,
                request.request_id,
                life.arrival,
                life.scheduled,
                life.first_token,
                end,
                request.prompt_tokens,
                request.output_tokens,
                request.width,
                stats.hit_tokens,
                stats.resumed_hit_tokens,
                stats.recomputed_tokens,
                stats.preemptions,
                outcome,
                request.output_tokens * request.width - life.spared,
            )
        )

    @property
    def ended(self) -> int:
        """Requests whose rows have not been drained."""
        return len(self._ended)

    def close(self, stats: Mapping[int, RequestStats]) -> None:
        """The replay is over: whoever is left stays unfinished."""
        for request_id, life in self._live.items():
            self._close(life, Outcome.UNFINISHED, NEVER, stats.get(request_id, _NO_STATS))
        self._live = {}

    def drain(self, count: int | None = None) -> RequestTable:
        """The first `count` (None: all) rows of the request table, in order of arrival; they are forgotten."""
        rows, self._ended = self._ended[:count], self._ended[len(self._ended) if count is None else count :]
        table = np.array(sorted(rows), dtype=np.int64).reshape(len(rows), len(_COLUMNS) + 1)
        found = dict(zip(_COLUMNS, table.T[1:].copy(), strict=True))
        return {name: _seconds(column) if name in _TIMES else column for name, column in found.items()}

    def drain_gaps(self) -> tuple[FloatArray, FloatArray]:
        """Every inter-token gap in seconds, equal ones merged, with how often it occurred; they are forgotten."""
        values, inverse = np.unique(np.array(self._gap_ns, dtype=np.int64), return_inverse=True)
        weights = np.bincount(inverse, weights=self._gap_weight, minlength=len(values))
        self._gap_ns, self._gap_weight = [], []
        return to_s(values), weights.astype(np.float64)


def _seconds(ns: NsArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))
