"""One simulation a process, so that peak memory is its own; CPU-seconds, because machines are shared."""

import argparse
import json
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from harness.bench.sim import MILLION
from harness.cli.say import remark, say
from harness.config.errors import UserError
from harness.sim.compiled.compiling import is_available

if TYPE_CHECKING:
    from harness.point.simulate import Prediction
    from harness.point.workload import Workload
    from harness.sim.cost import CostModel

_WARM_UP = 200  # requests


@dataclass(frozen=True)
class SimTiming:
    """One simulation: what it did, its CPU-seconds without building the workload, and the process's peak memory."""

    requests: int
    finished: int
    steps: int
    sequence_steps: int
    cpu_s: float
    wall_s: float
    peak_mb: float

    @property
    def requests_per_s(self) -> float:
        """Requests a CPU-second."""
        return self.requests / self.cpu_s

    @property
    def sequence_steps_per_s(self) -> float:
        """Sequence-steps (rows of steps) a CPU-second."""
        return self.sequence_steps / self.cpu_s


def bench(flags: argparse.Namespace) -> int:
    """Measure every size, and say whether every request finished."""
    sizes = sorted({*flags.requests, *([MILLION] if flags.million else [])})
    if min(sizes) < 1 or flags.repeats < 1 or not 0 < flags.rate < inf:
        raise UserError("bench sim: --requests and --repeats must be at least 1, --rate greater than 0")
    if flags.trace and not Path(flags.trace).is_file():
        raise UserError(f"bench sim: --trace: there is no file '{flags.trace}'")
    if flags.json and not Path(flags.json).absolute().parent.is_dir():
        raise UserError(f"bench sim: --json: there is no folder '{Path(flags.json).parent}'")
    if not flags.core and not is_available():
        raise UserError(
            "bench sim: numba is not installed: pip install numba, or measure the policy core (--core)"
        )
    way = "through the policy core" if flags.core else "compiled"
    say(
        f"Azure conversation requests, {flags.trace or 'generated'}, at {flags.rate:g} requests/s, replayed {way}"
    )
    say(
        f"{'requests':>10} {'CPU s':>9} {'requests/CPU-s':>15} {'seq-steps/CPU-s':>16} {'batch':>6} {'peak MB':>8}"
    )
    measured: list[SimTiming] = []
    for size in sizes:
        timings = timed(
            flags.trace, flags.rate, size, 1 if size >= MILLION else flags.repeats, core=flags.core
        )
        measured.append(_middle(timings))
        say(_line(measured[-1]))
    _say_linearity(measured)
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(timing) for timing in measured], indent=1))
        say(f"written to {flags.json}")
    lost = [timing for timing in measured if timing.finished < timing.requests]
    for timing in lost:
        remark(f"error: of {timing.requests:,} requests only {timing.finished:,} finished")
    return 1 if lost else 0


def timed(trace: str | None, rate: float, requests: int, repeats: int, *, core: bool) -> list[SimTiming]:
    """Runs in fresh processes, one after the other."""
    found = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found.append(process.submit(simulate_once, trace, rate, requests, core).result())
    return found


def simulate_once(trace: str | None, rate: float, requests: int, core: bool) -> SimTiming:
    """Build the workload, warm up, simulate."""
    from harness.bench.sim.workload import bench_config, bench_workload
    from harness.point.cost import cost_model

    config = bench_config(trace, rate)
    workload, cost = bench_workload(config), cost_model(config)
    play = _through_the_core if core else _compiled
    play(workload, cost, _WARM_UP)
    cpu, wall = time.process_time(), time.perf_counter()
    result = play(workload, cost, requests)
    return SimTiming(
        requests=requests,
        finished=result.outcome["finished"],
        steps=int(result.totals["steps"]),
        sequence_steps=int(result.totals["rows"]),
        cpu_s=time.process_time() - cpu,
        wall_s=time.perf_counter() - wall,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _through_the_core(workload: "Workload", cost: "CostModel", requests: int) -> "Prediction":
    from harness.bench.sim.workload import endless
    from harness.point.simulate import predict
    from harness.sim.arrivals import OpenLoop

    return predict(workload, OpenLoop(endless(workload, requests), requests), cost)


def _compiled(workload: "Workload", cost: "CostModel", requests: int) -> "Prediction":
    from harness.bench.sim.workload import endless_lengths
    from harness.point.compiled import replay_of
    from harness.point.simulate import predict_compiled

    return predict_compiled(
        workload, replay_of(workload, endless_lengths(workload, requests), cost), cost.source
    )


def _middle(timings: Sequence[SimTiming]) -> SimTiming:
    """The run whose CPU time is the (lower) median."""
    middle = median([timing.cpu_s for timing in timings])
    return min(timings, key=lambda timing: (abs(timing.cpu_s - middle), timing.cpu_s))


def _line(timing: SimTiming) -> str:
    return (
        f"{timing.requests:>10,} {timing.cpu_s:>9.2f} {timing.requests_per_s:>15,.0f} "
        f"{timing.sequence_steps_per_s:>16,.0f} {timing.sequence_steps / timing.steps:>6.1f} {timing.peak_mb:>8,.0f}"
    )


def _say_linearity(measured: Sequence[SimTiming]) -> None:
    if len(measured) < 2:
        return
    first, last = measured[0], measured[-1]
    growth = (last.cpu_s / last.requests) / (first.cpu_s / first.requests)
    say(
        f"CPU time a request at {last.requests:,} requests is {growth:.2f} times that at {first.requests:,}; "
        f"peak memory grew by {last.peak_mb - first.peak_mb:,.0f} MB"
    )
