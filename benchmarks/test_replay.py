"""Simulated requests per CPU-second, by what the requests need: through the policy core, and in machine code.

Generated requests with the lengths of Azure's conversations, Llama 3 8B on one GPU, blocks of 16, metrics on. Drawing
the requests is not timed. `--requests 1000000 -k "compiled and plain"` shows how time and memory grow: `peak MB` is of
the whole process, so it stands for one replay only where one was chosen.
"""

import resource
import time
from typing import Any

import pytest

from harness.compiled.numba_edge import MachineCode
from harness.config.compose import compose_config
from harness.point.cost import cost_model
from harness.replay.folds import Prediction
from harness.sweep.plan import run_request
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict

pytestmark = pytest.mark.benchmark(timer=time.process_time, disable_gc=True)
ROUNDS, WARM_UP = 3, 200  # requests of the warm-up, which compiles what is compiled
SETTINGS = (
    *("measure=false", "cost=roofline", "model=llama3_8b", "trace=azure_conv", "replay=streamed"),
    *("cache.block_size=16", "cache.pool_tokens=null", "cache.max_model_len=null"),
    *("scheduler.max_batched_tokens=8192", "scheduler.max_running=256"),
    *("workload.length_scale=1", "workload.prefix_share=null", "workload.oversize=drop"),
)
PLAIN = ("device=a100_80gb", "workload.request_rate=6.45")
SHARED = ("device=h100", "workload.request_rate=20", "workload.prefix_share=0.5")
FULL = (*SHARED, "workload.request_rate=60", "cache.pool_tokens=131072")  # more than the pool can hold
FAMILIES = {
    "plain": PLAIN,
    "shared": SHARED,
    "samples": ("decoding=sample", *SHARED),
    "beams": ("decoding=beam", *SHARED),
    "samples, preempted": ("decoding=sample", *FULL, "cache.pool_tokens=49152"),
    "beams, preempted": ("decoding=beam", *FULL, "cache.pool_tokens=49152"),
    "async": (*SHARED, "scheduler.async_scheduling=true"),
    "closed loop": (*SHARED, "replay=closed", "replay.users=64"),
    "priority": (*FULL, "scheduler.policy=priority"),
    "kept by ttl": (*FULL, "cache.eviction=ttl", "cache.ttl_s=30"),
    "pinned": (*FULL, "cache.eviction=pinned"),
    "swap": (*FULL, "scheduler.preemption=swap", "cache.host_tokens=65536"),
    "host tier": (*FULL, "cache.tier_tokens=2000000"),
    "evicted to host and disk": (
        *FULL,
        "cache.tier_tokens=262144",
        "cache.disk_tokens=2000000",
        "cache.tier_store=evicted",
    ),
    "4 replicas": (*SHARED, "device.data_parallel=4", "workload.request_rate=80"),
    "drafts": (*SHARED, "decoding=speculative", "decoding.acceptance=0.7"),
    "groups of gpt-oss": (*SHARED, "model=gpt_oss_20b", "cache.groups=uniform"),
    "groups of Gemma 3": (*SHARED, "model=gemma3_12b", "cache.groups=uniform"),
}


def workload(family: str, requests: int, way: str) -> tuple[Point, Any]:
    """The requests of a family with its pool and policies, and their cost model."""
    words = (*SETTINGS, *FAMILIES[family], f"workload.num_requests={requests}", f"replay.compiled={way}")
    config = compose_config(axis.settings[0] for axis in run_request(words).axes)
    point = resolve(config)
    return point, cost_model(point.deployment)


def replayed(benchmark: Any, family: str, requests: int, way: str) -> None:
    """Time the replay; every request must finish."""
    benchmark.group = f"replay: {family}"
    predict(*workload(family, min(WARM_UP, requests), way), rows=False)
    drawn, cost = workload(family, requests, way)
    found: Prediction = benchmark.pedantic(predict, args=(drawn, cost), kwargs={"rows": False}, rounds=ROUNDS)
    assert found.outcome["finished"] == len(drawn.trace.requests)
    if benchmark.enabled:
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(
            {
                "requests per CPU-second": len(drawn.trace.requests) / seconds,
                "sequence-steps per CPU-second": found.totals["rows_sum"] / seconds,
                "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )


@pytest.fixture
def requests(pytestconfig: pytest.Config, small: bool) -> int:
    """How many requests are replayed."""
    return 30 if small else int(pytestconfig.getoption("--requests"))


@pytest.mark.parametrize("family", FAMILIES)
def test_core(benchmark: Any, requests: int, family: str) -> None:
    """Through the policy core."""
    replayed(benchmark, family, requests, "never")


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled(benchmark: Any, requests: int, family: str) -> None:
    """In machine code."""
    pytest.importorskip("numba")
    replayed(benchmark, family, requests, "always")


@pytest.mark.parametrize("family", ["shared", "async", "priority", "groups of Gemma 3"])
def test_arrays_in_python(
    benchmark: Any, requests: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `test_compiled` times, as Python runs it: what a policy over arrays would cost without a compiler."""
    pytest.importorskip("numba")
    monkeypatch.setattr(MachineCode, "__call__", lambda code, state, number: code._function(state, number))
    replayed(benchmark, family, requests, "always")
