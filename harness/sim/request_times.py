"""When each request was scheduled, got its tokens, and ended; and every gap between tokens."""

from collections.abc import Mapping, Sequence
from functools import cached_property
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

    While the replay runs, only who got a token in which plan is noted; times and gaps are worked out when it is over. A
    gap is counted once per request and token, however many branches get a token at that moment.
    """

    def __init__(self, requests: Sequence[Request], arrival_ns: Sequence[int]) -> None:
        self._requests = requests
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._arrival = np.array(arrival_ns, dtype=np.int64)
        self._scheduled = [NEVER] * len(requests)
        self._finish = [NEVER] * len(requests)
        self._emitted: list[int] = []  # indices of requests, plan after plan
        self._counts: list[int] = []  # how many of them belong to each plan
        self._first_end: list[int] = []  # of each plan: when its first and its last step ended
        self._last_end: list[int] = []
        self._stretches: list[
            tuple[list[int], int]
        ] = []  # gaps within fast-forwards, and how many requests had them

    def add(self, now_ns: int, plan: StepPlan, report: CommitReport, ns: list[int]) -> None:
        """A plan ran from `now_ns` on, its steps taking `ns`."""
        for request_id in plan.admitted:
            index = self._index[request_id]
            if self._scheduled[index] == NEVER:
                self._scheduled[index] = now_ns
        end = now_ns + sum(ns)
        if report.emitted:
            self._emitted.extend([self._index[request_id] for request_id in report.emitted])
            self._counts.append(len(report.emitted))
            self._first_end.append(now_ns + ns[0])
            self._last_end.append(end)
            if len(ns) > 1:
                self._stretches.append((ns[1:], len(report.emitted)))
        for request_id in report.finished:
            self._finish[self._index[request_id]] = end

    @cached_property
    def _tokens(self) -> tuple[NsArray, NsArray, NsArray]:
        """Request, first end and last end of every (request, plan) pair with a token, by request, then by time."""
        who = np.array(self._emitted, dtype=np.int64)
        order = np.argsort(who, kind="stable")
        ends = (
            np.repeat(np.array(times, dtype=np.int64), self._counts)
            for times in (self._first_end, self._last_end)
        )
        first, last = ends
        return who[order], first[order], last[order]

    def _first_tokens(self) -> NsArray:
        who, first, _ = self._tokens
        found = np.full(len(self._requests), NEVER, dtype=np.int64)
        requests, position = np.unique(who, return_index=True)
        found[requests] = first[position]
        return found

    def gaps(self) -> tuple[FloatArray, FloatArray]:
        """Every inter-token gap in seconds, equal ones merged, with how often it occurred."""
        who, first, last = self._tokens
        same = who[1:] == who[:-1]
        gaps = [(first[1:] - last[:-1])[same]]
        weights = [np.ones(len(gaps[0]), dtype=np.int64)]
        for stretch, requests in self._stretches:
            gaps.append(np.array(stretch, dtype=np.int64))
            weights.append(np.full(len(stretch), requests, dtype=np.int64))
        values, inverse = np.unique(np.concatenate(gaps), return_inverse=True)
        return to_s(values), np.bincount(inverse, weights=np.concatenate(weights)).astype(np.float64)

    def columns(self, stats: Mapping[int, RequestStats]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """The request table of the run log."""
        requests = self._requests
        finish = np.array(self._finish, dtype=np.int64)
        entries = [stats.get(request.request_id, RequestStats()) for request in requests]
        return {
            "request_id": np.array([request.request_id for request in requests], dtype=np.int64),
            "arrival_s": to_s(self._arrival),
            "first_scheduled_s": _seconds(np.array(self._scheduled, dtype=np.int64)),
            "first_token_s": _seconds(self._first_tokens()),
            "finish_s": _seconds(finish),
            "prompt_tokens": np.array([request.prompt_tokens for request in requests], dtype=np.int64),
            "output_tokens": np.array([request.output_tokens for request in requests], dtype=np.int64),
            "width": np.array([request.width for request in requests], dtype=np.int64),
            "outcome": np.where(finish != NEVER, Outcome.FINISHED, Outcome.UNFINISHED).astype(np.int64),
            **{
                name: np.array([getattr(entry, name) for entry in entries], dtype=np.int64)
                for name in ("hit_tokens", "resumed_hit_tokens", "recomputed_tokens", "preemptions")
            },
        }


def _seconds(ns: NsArray) -> FloatArray:
    return np.where(ns == NEVER, np.nan, to_s(ns))
