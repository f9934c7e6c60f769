"""What a serving engine left of a run: the times of each request, its state in each second, and its settings.

All times are seconds on one clock that starts at the first arrival. `harness.twin.reading` makes these values
from files. The i-th request of `workload` is the i-th row of `requests`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.twin.settings import EngineSettings
from harness.twin.steps import LoggedSteps
from traces.trace import OPEN, Trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


WRITTEN_TWICE = "written twice, with the same times"
_WORTH_SAYING = 0.01  # of the requests


def tpot_s(
    first_token_s: FloatArray, last_token_s: FloatArray, output_tokens: FloatArray | IntArray
) -> FloatArray:
    """Mean seconds between the tokens of each request; nan for a request of one token."""
    gaps = output_tokens - 1
    return np.where(gaps > 0, (last_token_s - first_token_s) / np.maximum(gaps, 1), np.nan)


@dataclass(frozen=True)
class LoggedRequests:
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
        return tpot_s(self.first_token_s, self.last_token_s, self.output_tokens)

    @property
    def latency_s(self) -> FloatArray:
        """Seconds from `entered_s` to the last token."""
        return self.last_token_s - self.entered_s

    def take(self, chosen: slice | IntArray) -> "LoggedRequests":
        """The requests of a slice or at places, on the same clock."""
        columns: dict[str, Any] = {
            name: column[chosen] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        places = np.arange(len(self))[chosen]
        return LoggedRequests(**columns, request_id=tuple(self.request_id[place] for place in places))

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

    def held(self, at_s: FloatArray, starts_s: FloatArray) -> FloatArray:
        """Tokens of the requests that have started and not ended at each instant: whole prompts, and answers so far."""
        begin, end = self.first_token_s, self.last_token_s
        total = np.zeros(len(at_s))
        for place, at in enumerate(at_s):
            runs = (starts_s <= at) & (at < end)
            done = np.clip((at - begin[runs]) / np.maximum(end[runs] - begin[runs], 1e-9), 0, 1)
            total[place] = float((self.prompt_tokens[runs] + done * self.output_tokens[runs]).sum())
        return total


@dataclass(frozen=True)
class Timeseries:
    """The engine's state at instants `at_s`, as it logged it; every column has one entry for each instant.

    `kv_use` is the share of the KV pool in use, from 0 to 1; None: not logged. `hits` is the share of prompt tokens
    that the prefix cache had lately, as the engine printed it; 0 where it did not. `began_s` is the first instant on
    the wall clock of a server that printed it, as a date of the year 2000 in seconds; None: not known.
    """

    at_s: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_use: FloatArray | None = None
    hits: FloatArray | None = None
    began_s: float | None = None

    def kept(self, rows: npt.NDArray[np.bool_]) -> "Timeseries":
        """These instants alone."""
        kv_use, hits = (None if column is None else column[rows] for column in (self.kv_use, self.hits))
        return Timeseries(self.at_s[rows], self.running[rows], self.waiting[rows], kv_use, hits)

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True)
class EngineLog:
    """A run of a serving engine. `sources` names the files that were read, `notes` says what was assumed or left out.

    `workload` has the requests as a trace that can be replayed: request i is row i of `requests` and arrives at its
    `entered_s`, or where its client held it back, when the client's own schedule would have sent it. The trace's
    header names that client, `client` is a sentence on it. `dropped` counts the rows of the log that are no finished
    request, by reason.
    """

    name: str
    settings: EngineSettings
    requests: LoggedRequests
    workload: Trace
    series: Timeseries | None = None
    sources: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    client: str = f"The client is {OPEN}."
    steps: LoggedSteps | None = None
    # Of the client between an answer and its next turn, which the log does not tell.
    assumes_pauses: bool = False
    warnings: tuple[str, ...] = ()  # of what no simulation of the log follows

    @property
    def scope(self) -> str:
        """What is simulated of what: the first line of every answer."""
        rows = len(self.requests) + sum(self.dropped.values())
        left = [f"Left out: {n:,} ({100 * n / rows:.3g} %), {reason}." for reason, n in self.dropped.items()]
        return " ".join([f"Simulated: {len(self.requests):,} of {rows:,} requests of {self.name}.", *left])

    @property
    def lost(self) -> str:
        """What to say where requests that the engine served in part are not in the log's rows; empty where not."""
        dropped = {reason: count for reason, count in self.dropped.items() if reason != WRITTEN_TWICE}
        lost = sum(dropped.values())
        rows = lost + len(self.requests)
        if lost < _WORTH_SAYING * rows:
            return ""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        which = f"{100 * lost / rows:.0f} % of the log's requests ({lost:,} of {rows:,}: {reasons})"
        return f"Warning: {which} are not simulated, and the engine had their load."
