"""Compiled replays of data-parallel replicas: requests are given out as `harness.replay.replicas` gives them.

The counts that decide are read at most once in `REFRESH_NS`. So requests between two readings are given out at once,
and each replica is replayed on its own from reading to reading.
"""

from collections.abc import Sequence
from typing import Any

from harness.compiled.arriving import FOREVER
from harness.compiled.replay import DONE, CompiledReplay
from harness.compiled.state import ENTRY
from harness.replay.folds import Fold
from harness.replay.replicas import REFRESH_NS, ReplicaLoad, ReplicaLoads


class _Replica:
    def __init__(self, replay: CompiledReplay, fold: Fold, first: CompiledReplay) -> None:
        self.replay, self.fold, self._idle = replay, fold, True
        own = replay.state.requests
        lists = {"lane": own.lane, "queue": own.queue, "ended": own.ended}
        replay.state = replay.state._replace(requests=first.state.requests._replace(**lists))
        self.at = replay.state.at
        self.at[ENTRY.coming] = 0

    def give(self, request: int) -> None:
        """`request` comes to this replica."""
        self.replay.state.requests.lane[self.at[ENTRY.coming]] = request
        self.at[ENTRY.coming] += 1
        self._idle = False

    def advance_to(self, pause_ns: int) -> None:
        """Run the steps that begin before `pause_ns`. Nothing is called where there is none."""
        if self._idle != (self.at[ENTRY.now] < pause_ns):
            self._idle = self.replay.advance_to(pause_ns, self.fold) == DONE

    @property
    def load(self) -> ReplicaLoad:
        """What it would publish now, with the requests that it has not seen."""
        at, blocks = self.at, self.replay.num_blocks
        waiting = int(at[ENTRY.tail] - at[ENTRY.head] + at[ENTRY.swapped])
        others = int(at[ENTRY.running] + at[ENTRY.ending] + at[ENTRY.coming] - at[ENTRY.arrived])
        return ReplicaLoad(waiting + others, waiting, 1 - int(at[ENTRY.empty] + at[ENTRY.cached]) / blocks)

    def next_ns(self, at_ns: int) -> tuple[int, int]:
        """When it schedules its next step, and up to when that sees arrivals, if a request comes at `at_ns`."""
        if self._idle:
            return max(int(self.at[ENTRY.now]), at_ns), max(int(self.at[ENTRY.now]), at_ns)
        return int(self.at[ENTRY.now]), int(self.at[ENTRY.seen])


def run_replicas(replays: Sequence[CompiledReplay], folds: Sequence[Fold]) -> list[dict[str, Any]]:
    """Run `replays`, one a replica, all made with the same requests, each into its fold; returns for each what it
    kept of the memory.

    Raises:
        TimeSpanError: the replay would last too long.
    """
    replicas = [_Replica(*each, replays[0]) for each in zip(replays, folds, strict=True)]
    refresh_ns, loads = 0, ReplicaLoads()
    for request, at_ns in enumerate(replays[0].state.inputs.arrival_ns.tolist()):
        if at_ns >= refresh_ns:
            _advance_before(replicas, at_ns)
            loads.of, refresh_ns = [each.load for each in replicas], at_ns + REFRESH_NS
        replicas[loads.choose()].give(request)
    for each in replicas:
        each.advance_to(FOREVER)
    return [each.replay.close(each.fold) for each in replicas]


def _advance_before(replicas: Sequence[_Replica], at_ns: int) -> None:
    """Run what happens before the first step that sees a request of `at_ns`: then the request is given out."""
    for each in replicas:
        each.advance_to(at_ns)
    while True:
        first = min(replicas, key=lambda each: each.next_ns(at_ns)[0])
        next_ns, seen_ns = first.next_ns(at_ns)
        if seen_ns >= at_ns:
            return
        first.advance_to(next_ns + 1)
