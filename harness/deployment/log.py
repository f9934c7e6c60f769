"""What a serving engine left of a run: the times of each request, its state in each second, and its settings.

All times are seconds on one clock that starts at the first arrival. `harness.deployment.reading` makes these values
from files. The i-th request of `workload` is the i-th row of `requests`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.deployment.settings import EngineSettings
from traces.trace import Trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestTimes:
    """The requests that ended well, in order of `entered_s`; every column has one entry for each.

    `arrival_s` is when the client sent the request or the server took it, as the log has it. `queued_s` is when it
    entered the queue of the scheduler, `scheduled_s` when it was first scheduled. `last_token_s` is its end. A column
    that the log does not have is None.
    """

    request_id: tuple[str, ...]
    arrival_s: FloatArray
    first_token_s: FloatArray
    last_token_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    queued_s: FloatArray | None = None
    scheduled_s: FloatArray | None = None
    cached_tokens: IntArray | None = None  # prompt tokens found in the prefix cache

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def entered_s(self) -> FloatArray:
        """When each request entered the scheduler's queue; its arrival where that is not logged.

        A simulation starts there: what a server does before (HTTP, tokenisation) is not simulated.
        """
        return self.arrival_s if self.queued_s is None else self.queued_s

    @property
    def ttft_s(self) -> FloatArray:
        """Seconds from `entered_s` to the first token."""
        return self.first_token_s - self.entered_s

    @property
    def tpot_s(self) -> FloatArray:
        """Mean seconds between the tokens of a request; nan for a request of one token."""
        gaps = self.output_tokens - 1
        spans = self.last_token_s - self.first_token_s
        return np.where(gaps > 0, spans / np.maximum(gaps, 1), np.nan)

    @property
    def latency_s(self) -> FloatArray:
        """Seconds from `entered_s` to the last token."""
        return self.last_token_s - self.entered_s

    def take(self, chosen: slice) -> "RequestTimes":
        """The requests of a slice, on the same clock."""
        columns: dict[str, Any] = {}
        for one in fields(self):
            column = getattr(self, one.name)
            columns[one.name] = None if column is None else column[chosen]
        return replace(self, **columns)

    def under_way(self, at_s: FloatArray) -> tuple[IntArray, IntArray]:
        """Requests that run and that wait at each instant, counted from the times of the requests.

        A request waits from `entered_s` to `scheduled_s` and runs from there to its last token. Without `scheduled_s`
        it runs from its first token on. A preempted request counts as running.
        """
        starts = self.first_token_s if self.scheduled_s is None else self.scheduled_s

        def before(times: FloatArray) -> IntArray:
            return np.searchsorted(np.sort(times), at_s, side="right").astype(np.int64)

        entered, started, ended = before(self.entered_s), before(starts), before(self.last_token_s)
        return started - ended, entered - started


@dataclass(frozen=True)
class Timeseries:
    """The engine's state at instants `at_s`, as it logged it; every column has one entry for each instant.

    `kv_use` is the share of the KV pool in use, from 0 to 1. A column that was not logged is None. `preemptions` and
    the token counters are totals since the first instant.
    """

    at_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_use: FloatArray | None = None
    prompt_tokens_per_s: FloatArray | None = None
    generated_tokens_per_s: FloatArray | None = None
    preemptions: FloatArray | None = None
    hit_tokens: FloatArray | None = None
    queried_tokens: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True)
class Deployment:
    """A run of a serving engine. `sources` names the files that were read, `notes` says what was assumed or left out.

    `workload` has the requests as a trace that can be replayed: request i is row i of `requests` and arrives at its
    `entered_s`. `dropped` counts the rows of the log that are no finished request, by reason.
    """

    name: str
    settings: EngineSettings
    requests: RequestTimes
    workload: Trace
    series: Timeseries | None = None
    sources: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
