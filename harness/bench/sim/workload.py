"""What the simulator's benchmark simulates: one workload, of any number of requests, that is never in memory whole."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from engine.core.identity import KeyIdentity
from engine.core.request import Request
from harness.config.compose import compose_config
from harness.config.schema import RunConfig
from harness.plan.request import run_request
from harness.point.compiled import plain_requests
from harness.point.workload import Workload, build_workload
from harness.sim.arrivals import TimedRequest
from harness.sim.compiled.replay import PlainRequests
from traces.trace import TraceRequest

_GENERATED = 20_000  # requests drawn, and then repeated: about as many as the public trace has
SETTINGS = (
    *("measure=false", "cost=roofline", "model=llama3_8b", "device=a100_80gb"),
    *("cache.block_size=16", "cache.pool_tokens=null", "cache.max_model_len=null"),
    *("scheduler.max_batched_tokens=8192", "scheduler.max_running=256"),
    *("workload.length_scale=1", "workload.prefix_share=null", "workload.oversize=drop", "replay=streamed"),
)


def bench_config(trace: str | None, rate: float) -> RunConfig:
    """The benchmark's point; `trace` None generates requests of the same statistics."""
    source = (
        ("trace=azure", "workload.num_requests=null")
        if trace
        else ("trace=azure_conv", f"workload.num_requests={_GENERATED}")
    )
    request = run_request((*SETTINGS, *source, f"workload.request_rate={rate}"))
    config = compose_config(axis.settings[0] for axis in request.axes)
    return replace(
        config, trace=replace(config.trace, path=trace)
    )  # as an override it could not hold every name


def bench_workload(config: RunConfig) -> Workload:
    """One pass over the trace; `endless` repeats it."""
    return build_workload(config)


def endless(workload: Workload, count: int) -> Iterator[TimedRequest]:
    """`count` requests: the workload's, again and again, each pass after the one before, under fresh ids."""
    rows = workload.trace.requests
    period_us = _period_us(rows)
    for number in range(count):
        lap, place = divmod(number, len(rows))
        row = rows[place]
        identity = KeyIdentity(number, row.segments)
        request = Request(number, row.prompt_tokens, row.output_tokens, identity=identity)
        yield TimedRequest(request, (row.arrival_us + lap * period_us) * 1000)


def endless_lengths(workload: Workload, count: int) -> PlainRequests:
    """The same requests as lengths."""
    rows = plain_requests(workload.trace.requests[:count])
    laps, numbers = -(-count // len(rows.request_id)), np.arange(count)
    lap_ns = numbers // len(rows.request_id) * _period_us(workload.trace.requests) * 1000
    prompt, output = (np.tile(column, laps)[:count] for column in (rows.prompt_tokens, rows.output_tokens))
    return PlainRequests(numbers, np.tile(rows.arrival_ns, laps)[:count] + lap_ns, prompt, output)


def _period_us(rows: Sequence[TraceRequest]) -> int:
    """One pass, and one mean gap before the next."""
    span = rows[-1].arrival_us - rows[0].arrival_us
    return span + max(1, span // max(1, len(rows) - 1))


def small(workload: Workload, requests: int) -> Workload:
    """The beginning of the workload, to warm up with."""
    trace = workload.trace
    return replace(workload, trace=replace(trace, requests=trace.requests[:requests]))
