"""When each request was scheduled, got its tokens, and ended; and every gap between tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine.core.outcome import CommitReport, RequestStats
from engine.core.plan import FloatArray, StepPlan
from engine.core.request import Request
from harness.metrics.log import Outcome
from harness.sim.clock import NsArray, to_s

NEVER = -1


class RequestTimes:
    """Times of the requests of one replay in ns, one entry per request, in the order given.

    A gap is counted once per request and token, however many branches get a token at that moment.
    """

    def __init__(self, requests: Sequence[Request], arrival_ns: Sequence[int]) -> None:
        self._requests = requests
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._arrival = np.array(arrival_ns, dtype=np.int64)
        self._scheduled, self._first, self._last, self._finish = (
            np.full(len(requests), NEVER, dtype=np.int64) for _ in range(4)
        )
        self._gaps: list[NsArray] = []
        self._weights: list[NsArray] = []

    def step(self, plan: StepPlan, report: CommitReport, starts: NsArray, ends: NsArray) -> None:
        """A plan ran over one or several steps with these `starts` and `ends` in ns."""
        if plan.admitted:
            admitted = self._indices(plan.admitted)
            fresh = admitted[self._scheduled[admitted] == NEVER]
            self._scheduled[fresh] = starts[0]
        if report.emitted:
            self._tokens(self._indices(report.emitted), ends)
        if report.finished:
            self._finish[self._indices(report.finished)] = ends[-1]

    def _indices(self, request_ids: Sequence[int]) -> NsArray:
        return np.array([self._index[request_id] for request_id in request_ids], dtype=np.int64)

    def _tokens(self, emitted: NsArray, ends: NsArray) -> None:
        fresh = self._first[emitted] == NEVER
        self._first[emitted[fresh]] = ends[0]
        going = emitted[~fresh]
        if len(going):
            self._gaps.append(ends[0] - self._last[going])
            self._weights.append(np.ones(len(going), dtype=np.int64))
        if len(ends) > 1:
            self._gaps.append(np.diff(ends))
            self._weights.append(np.full(len(ends) - 1, len(emitted), dtype=np.int64))
        self._last[emitted] = ends[-1]

    def gaps(self) -> tuple[FloatArray, FloatArray]:
        """Every inter-token gap in seconds, equal ones merged, with how often it occurred."""
        if not self._gaps:
            return np.zeros(0), np.zeros(0)
        values, inverse = np.unique(np.concatenate(self._gaps), return_inverse=True)
        weights = np.bincount(inverse, weights=np.concatenate(self._weights)).astype(np.float64)
        return to_s(values), weights

    def columns(self, stats: Mapping[int, RequestStats]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """The request table of the run log."""
        requests = self._requests
        finished = self._finish != NEVER
        entries = [stats.get(request.request_id, RequestStats()) for request in requests]
        return {
            "request_id": np.array([request.request_id for request in requests], dtype=np.int64),
            "arrival_s": to_s(self._arrival),
            "first_scheduled_s": _seconds(self._scheduled),
            "first_token_s": _seconds(self._first),
            "finish_s": _seconds(self._finish),
            "prompt_tokens": np.array([request.prompt_tokens for request in requests], dtype=np.int64),
            "output_tokens": np.array([request.output_tokens for request in requests], dtype=np.int64),
            "width": np.array([request.width for request in requests], dtype=np.int64),
            "outcome": np.where(finished, Outcome.FINISHED, Outcome.UNFINISHED).astype(np.int64),
            **{
                name: np.array([getattr(entry, name) for entry in entries], dtype=np.int64)
                for name in ("hit_tokens", "resumed_hit_tokens", "recomputed_tokens", "preemptions")
            },
        }


def _seconds(ns: NsArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))
