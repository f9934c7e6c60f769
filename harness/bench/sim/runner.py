"""A run of `bench sim`: each simulation in a process of its own, so that its peak memory can be read.

Time is CPU time, because machines are shared. The workload can have any number of requests: it is never in memory as a
whole.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from engine.core.identity import KeyIdentity
from engine.core.request import Request
from harness.compiled.numba_edge import is_available
from harness.compiled.replay import PlainRequests
from harness.config.compose import compose_config
from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.console import remark, say
from harness.replay.arrivals import TimedRequest
from harness.sweep.plan import run_request
from harness.workload.compiled import plain_requests
from harness.workload.workload import Workload, build_workload
from traces.trace import TraceRequest

if TYPE_CHECKING:
    from harness.replay.cost_model import CostModel
    from harness.workload.simulate import Prediction


MILLION = 1_000_000


_GENERATED = 20_000  # requests drawn and then repeated; about as many as the public trace has
SETTINGS = (
    *("measure=false", "cost=roofline", "model=llama3_8b", "device=a100_80gb"),
    *("cache.block_size=16", "cache.pool_tokens=null", "cache.max_model_len=null"),
    *("scheduler.max_batched_tokens=8192", "scheduler.max_running=256"),
    *("workload.length_scale=1", "workload.prefix_share=null", "workload.oversize=drop", "replay=streamed"),
)
_WARM_UP = 200  # requests


def bench_config(trace: str | None, rate: float) -> RunConfig:
    """The configuration of the benchmark. With `trace` None it generates requests of the same statistics."""
    source = (
        ("trace=azure", "workload.num_requests=null")
        if trace
        else ("trace=azure_conv", f"workload.num_requests={_GENERATED}")
    )
    request = run_request((*SETTINGS, *source, f"workload.request_rate={rate}"))
    config = compose_config(axis.settings[0] for axis in request.axes)
    # set here and not by an override, whose grammar does not allow every file name
    return replace(config, trace=replace(config.trace, path=trace))


def bench_workload(config: RunConfig) -> Workload:
    """One pass over the trace; `endless` repeats it."""
    return build_workload(config)


def endless(workload: Workload, count: int) -> Iterator[TimedRequest]:
    """`count` requests: those of the workload, repeated pass after pass, with new ids."""
    rows = workload.trace.requests
    period_us = _period_us(rows)
    for number in range(count):
        lap, place = divmod(number, len(rows))
        row = rows[place]
        identity = KeyIdentity(number, row.segments)
        request = Request(number, row.prompt_tokens, row.output_tokens, identity=identity)
        yield TimedRequest(request, (row.arrival_us + lap * period_us) * 1000)


def endless_lengths(workload: Workload, count: int) -> PlainRequests:
    """The requests of `endless` as arrays of lengths."""
    rows = plain_requests(workload.trace.requests[:count])
    laps, numbers = -(-count // len(rows.request_id)), np.arange(count)
    lap_ns = numbers // len(rows.request_id) * _period_us(workload.trace.requests) * 1000
    prompt, output = (np.tile(column, laps)[:count] for column in (rows.prompt_tokens, rows.output_tokens))
    return PlainRequests(numbers, np.tile(rows.arrival_ns, laps)[:count] + lap_ns, prompt, output)


def _period_us(rows: Sequence[TraceRequest]) -> int:
    """Microseconds from the start of one pass to the next: its span and one mean gap."""
    span = rows[-1].arrival_us - rows[0].arrival_us
    return span + max(1, span // max(1, len(rows) - 1))


def small(workload: Workload, requests: int) -> Workload:
    """The first `requests` of the workload, for the warm-up."""
    trace = workload.trace
    return replace(workload, trace=replace(trace, requests=trace.requests[:requests]))


@dataclass(frozen=True)
class SimTiming:
    """One simulation: its counts, its CPU-seconds without building the workload, and the process's peak memory."""

    requests: int
    finished: int
    steps: int
    sequence_steps: int
    cpu_s: float
    wall_s: float
    peak_mb: float

    @property
    def requests_per_s(self) -> float:
        """Requests per CPU-second."""
        return self.requests / self.cpu_s

    @property
    def sequence_steps_per_s(self) -> float:
        """Sequence-steps (rows of steps) per CPU-second."""
        return self.sequence_steps / self.cpu_s


def bench(flags: argparse.Namespace) -> int:
    """Measure and print every size; returns the exit code, which says whether every request finished."""
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
    """Run the simulations in new processes, one after the other."""
    found = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            found.append(process.submit(simulate_once, trace, rate, requests, core).result())
    return found


def simulate_once(trace: str | None, rate: float, requests: int, core: bool) -> SimTiming:
    """Build the workload, warm up, simulate."""
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
    from harness.replay.arrivals import OpenLoop
    from harness.workload.simulate import predict

    return predict(workload, OpenLoop(endless(workload, requests), requests), cost)


def _compiled(workload: "Workload", cost: "CostModel", requests: int) -> "Prediction":
    from harness.workload.compiled import replay_of
    from harness.workload.simulate import predict_compiled

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
