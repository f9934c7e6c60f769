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
RATE, SHARED_RATE = 6.45, 20.0  # requests a second


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
    build_s: float | None = None  # CPU-seconds of drawing the requests, where all were drawn

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
    shared = _sharing(flags)
    flags.rate = (SHARED_RATE if shared else RATE) if flags.rate is None else flags.rate
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
        + "".join(f", {setting}" for setting in shared)
    )
    say(
        f"{'requests':>10} {'CPU s':>9} {'requests/CPU-s':>15} {'seq-steps/CPU-s':>16} {'batch':>6} {'peak MB':>8}"
    )
    measured: list[SimTiming] = []
    for size in sizes:
        repeats = 1 if size >= MILLION else flags.repeats
        timings = timed(flags.trace, flags.rate, size, repeats, core=flags.core, shared=shared)
        measured.append(_middle(timings))
        say(_line(measured[-1]))
        if measured[-1].build_s is not None:
            say(f"{'':>10} {measured[-1].build_s:>9.2f} CPU s more to draw these requests")
    _say_linearity(measured)
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(timing) for timing in measured], indent=1))
        say(f"written to {flags.json}")
    lost = [timing for timing in measured if timing.finished < timing.requests]
    for timing in lost:
        remark(f"error: of {timing.requests:,} requests only {timing.finished:,} finished")
    return 1 if lost else 0


def _sharing(flags: argparse.Namespace) -> tuple[str, ...]:
    """The settings of requests that share blocks; none where each is for itself."""
    if flags.share is not None and not 0 <= flags.share <= 1:
        raise UserError("bench sim: --share must be from 0 to 1")
    if min(flags.samples, flags.beams) < 1 or (flags.samples > 1 and flags.beams > 1):
        raise UserError("bench sim: --samples and --beams must be at least 1, and only one of them above 1")
    found = [] if flags.share is None else [f"workload.prefix_share={flags.share:g}"]
    found += [f"decoding.n={flags.samples}"] if flags.samples > 1 else []
    found += [f"decoding.beam_width={flags.beams}"] if flags.beams > 1 else []
    if found and flags.trace:
        raise UserError(
            "bench sim: --share, --samples and --beams take generated requests; leave out --trace"
        )
    return tuple(found)


def timed(
    trace: str | None, rate: float, requests: int, repeats: int, *, core: bool, shared: Sequence[str] = ()
) -> list[SimTiming]:
    """Run the simulations in new processes, one after the other."""
    found = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            if shared:
                asked = process.submit(simulate_sharing, rate, requests, core, shared)
            else:
                asked = process.submit(simulate_once, trace, rate, requests, core)
            found.append(asked.result())
    return found


def simulate_sharing(rate: float, requests: int, core: bool, shared: Sequence[str]) -> SimTiming:
    """Requests that share blocks on one H100: build the workload, warm up, simulate. All requests are in memory."""
    from harness.point.cost import cost_model
    from harness.workload.simulate import simulate_metrics

    def workload(count: int) -> tuple[RunConfig, Workload]:
        words = (*SETTINGS, "trace=azure_conv", "device=h100", f"workload.num_requests={count}", *shared)
        mode = "decoding=sample" if any("decoding.n=" in word for word in shared) else "decoding=greedy"
        way = f"replay.compiled={'never' if core else 'always'}"
        found = run_request((mode, *words, f"workload.request_rate={rate}", way))
        config = compose_config(axis.settings[0] for axis in found.axes)
        return config, build_workload(config)

    config, few = workload(_WARM_UP)
    cost = cost_model(config)
    simulate_metrics(few, cost)
    begun = time.process_time()
    _, whole = workload(requests)
    cpu, wall = time.process_time(), time.perf_counter()
    timing = _timing(simulate_metrics(whole, cost), len(whole.trace.requests), cpu, wall)
    return replace(timing, build_s=cpu - begun)


def simulate_once(trace: str | None, rate: float, requests: int, core: bool) -> SimTiming:
    """Build the workload, warm up, simulate."""
    from harness.point.cost import cost_model

    config = bench_config(trace, rate)
    workload, cost = bench_workload(config), cost_model(config)
    play = _through_the_core if core else _compiled
    play(workload, cost, _WARM_UP)
    cpu, wall = time.process_time(), time.perf_counter()
    return _timing(play(workload, cost, requests), requests, cpu, wall)


def _timing(result: "Prediction", requests: int, cpu: float, wall: float) -> SimTiming:
    """What began at these CPU and wall times, and has just ended."""
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
