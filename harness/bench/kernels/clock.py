"""Seconds per call on a device, and a clock that pytest-benchmark can read them from.

On CUDA the calls of a round are captured in one graph and timed between two events, so that neither Python nor the
launches are part of the figure; what cannot be captured is launched in a row between the same events, and says so. On a
CPU it is CPU time of this process. Each round walks through several sets of inputs, together larger than the cache.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Run = Callable[[], object]

LAUNCHES = 20  # calls a round on CUDA: short kernels would otherwise measure the events
ENOUGH_S = 5e-3  # CPU time a round at least: the clock ticks in about a microsecond
MOST_CALLS = 200
HEAD_START_CYCLES = 2_000_000  # about a millisecond: what the host needs to queue a round

_elapsed_s = 0.0


def seconds() -> float:
    """The clock of pytest-benchmark: it advances by the time per call of each round, and by nothing else."""
    return _elapsed_s


def advance(per_call_s: float) -> None:
    """Let one round have taken `per_call_s`."""
    global _elapsed_s
    _elapsed_s += per_call_s


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of one call: `round()` runs one and returns seconds per call; `how` is what was timed."""

    round: Callable[[], float]
    how: str


def prepare_rounds(runs: Sequence[Run], device: "torch.device", *, capturable: bool) -> Rounds:
    """Rounds over `runs`, the same call on different inputs; every one is run once first, to compile and allocate."""
    for run in runs:
        run()
    if device.type == "cpu":
        return Rounds(_cpu_round(runs), "CPU time")
    if capturable:
        return Rounds(_graph_round(runs), "CUDA graph")
    return Rounds(_event_round(runs), "events around launches")


def copies_past_cache(one_set_bytes: int, cache_bytes: int, most: int = 16) -> int:
    """Input sets so that a set is evicted before its turn comes again: together three times the cache."""
    return max(1, min(most, -(-3 * cache_bytes // max(1, one_set_bytes)))) if cache_bytes else 1


def cache_bytes(device: "torch.device") -> int:
    """The last-level cache that inputs are rotated past; 0 on a CPU, where other work evicts them anyway."""
    import torch

    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))


def _cpu_round(runs: Sequence[Run]) -> Callable[[], float]:
    start = time.process_time()
    runs[0]()
    calls = int(min(MOST_CALLS, max(len(runs), ENOUGH_S / max(1e-6, time.process_time() - start))))
    order = [runs[call % len(runs)] for call in range(calls)]

    def once() -> float:
        start = time.process_time()
        for run in order:
            run()
        return (time.process_time() - start) / calls

    return once


def _order(runs: Sequence[Run]) -> list[Run]:
    """Whole turns through the input sets, at least `LAUNCHES` calls."""
    return list(runs) * -(-LAUNCHES // len(runs))


def _graph_round(runs: Sequence[Run]) -> Callable[[], float]:
    import torch

    order = _order(runs)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture wants one warm-up on a stream that is not the default one
        for run in order[: len(runs)]:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in order]  # outputs stay alive: none may share the memory of another
    replay: Any = graph.replay

    def once() -> float:
        seconds = _between_events(replay) / len(order)
        assert kept
        return seconds

    once()
    return once


def _event_round(runs: Sequence[Run]) -> Callable[[], float]:
    order = _order(runs)

    def all_of_them() -> None:
        for run in order:
            run()

    return lambda: _between_events(all_of_them) / len(order)


def _between_events(work: Callable[[], object]) -> float:
    """Device time of `work`. The device sleeps first, so that all of it is queued before the first event passes."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3
