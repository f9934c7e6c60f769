"""Data-parallel replicas behind one queue: who gets which request, and what the merged log says."""

import ast
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle_cases import PYTHON
from sim_cases import request
from tiers import cases

from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.scheduling.scheduler import Scheduler
from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.cost.roofline import RooflineCost
from harness.metrics.compute import compute_metrics
from harness.metrics.log import RunLog
from harness.point.cost import check_cost, cost_model
from harness.replay.arrivals import OpenLoop
from harness.replay.features import AT, StepFeatures
from harness.replay.replicas import Balancer, ReplicaLoad, ReplicaLoads
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict, simulate
from traces.trace import Segment, Trace

TEXTS = (
    *("measure=false", "cost=roofline", "model=llama31_8b", "device=h100", "workload.num_requests=60"),
    *(
        "workload.length_scale=0.1",
        "workload.request_rate=30",
        "cache.pool_blocks=2000",
        "cache.max_model_len=2048",
    ),
)


def config(*texts: str) -> RunConfig:
    return normalise(compose_config([axis.settings[0] for axis in parse_overrides((*TEXTS, *texts))]))


def run(*texts: str, fast_forward: bool = True) -> RunLog:
    point = config(*texts)
    return simulate(resolve(point), cost_model(deployment_of(point)), fast_forward=fast_forward)


def twice(workload: Point) -> Point:
    """Every request of the trace twice, at the same time; no request of this trace shares content."""
    trace = workload.trace
    rows = [
        replace(row, request_id=2 * number + copy)
        for number, row in enumerate(trace.requests)
        for copy in (0, 1)
    ]
    return workload.of_trace(Trace(trace.header, tuple(rows)))


def lane_of(counts: list[tuple[int, int]], blocks: int = 1000) -> list[int]:
    """Lanes of six requests that arrive together, where replicas begin with (waiting, running) requests.

    Each that runs has one of its replica's `blocks`.
    """
    schedulers = []
    for waiting, running in counts:
        scheduler = Scheduler(PagedManager(blocks, 16), SchedulerLimits(512, running or 1))
        for number in range(running):
            scheduler.submit(request(100 + number, 0, 10, 50).request)
        if running:
            plan = scheduler.schedule()
            scheduler.commit(plan, _result())
        for number in range(waiting):
            scheduler.submit(request(200 + number, 0, 10, 50).request)
        schedulers.append(scheduler)
    arrived = [request(number, 0, 10, 5) for number in range(6)]
    balancer = Balancer(OpenLoop(arrived, 6), schedulers)
    balancer.route(0)
    lanes = {
        timed.request.request_id: index for index, lane in enumerate(balancer.lanes) for timed in lane.queue
    }
    return [lanes[number] for number in range(6)]


def _result() -> Any:
    from engine.core.plan import StepResult

    return StepResult(num_steps=1)


def test_equal_replicas_take_turns_in_rank_order() -> None:
    assert lane_of([(0, 0), (0, 0), (0, 0)]) == [0, 1, 2, 0, 1, 2]


def test_a_request_that_waits_beside_free_blocks_counts_as_one_that_runs() -> None:
    """Requests 6 and 2: four go to the second. Of equals the first is that of the round, the first replica here."""
    assert lane_of([(0, 6), (1, 1)]) == [1, 1, 1, 1, 0, 1]


def test_waiting_beside_a_cache_that_is_used_by_more_than_half_counts_more() -> None:
    """Half and three quarters of the blocks are in use: 8 and 9, then 9 and 9, and 9 and 10 + 1 x 6 x 0.25."""
    assert lane_of([(2, 6), (0, 9)], blocks=12) == [0, 1, 0, 0, 0, 1]


def chosen(loads: Sequence[tuple[int, int, float]], count: int) -> list[int]:
    """Who gets so many requests that come at once."""
    ours = ReplicaLoads()
    ours.of = [ReplicaLoad(*each) for each in loads]
    return [ours.choose() for _ in range(count)]


def chosen_by_vllm(python: str, loads: Sequence[tuple[int, int, float]], count: int) -> list[int]:
    """The same by vLLM's own function, which is taken from the file of its class: importing that takes a minute."""
    file = next(Path(python).parents[1].glob("lib/python3*/site-packages/vllm/v1/engine/core_client.py"))
    classes = {one.name: one for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)}
    functions = {
        one.name: one for one in classes["DPLBAsyncMPClient"].body if isinstance(one, ast.FunctionDef)
    }
    own = functions["get_core_engine_for_request"]
    own.returns, own.args.args[1].annotation = None, None
    scope: dict[str, Any] = {"sys": sys, "get_late_interaction_engine_index": lambda *_: None}
    exec(compile(ast.Module([own], []), str(file), "exec"), scope)
    client = SimpleNamespace(
        lb_engines=[[waiting, requests - waiting, usage] for requests, waiting, usage in loads],
        engine_inflight=Counter({rank: requests for rank, (requests, _, _) in enumerate(loads)}),
        core_engines=range(len(loads)), reqs_in_flight={}, streaming_reqs=set(), client_count=1, eng_start_index=0,
    )  # fmt: skip
    plain = {"resumable": False, "data_parallel_rank": None, "pooling_params": None}
    asked = [SimpleNamespace(request_id=str(number), **plain) for number in range(count)]
    return [scope[own.name](client, each) for each in asked]


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ([(6, 0, 0.9), (2, 1, 0.9)], [1, 0, 1, 0, 1, 0, 1, 0]),
        ([(8, 4, 1.0), (14, 0, 1.0)], [1, 1, 0, 1, 0, 1, 0, 1]),
        ([(3, 2, 0.5), (4, 0, 0.5), (3, 0, 0.9)], [0, 2, 0, 1, 1, 0, 0, 1]),
    ],
)
def test_requests_go_where_vllm_sends_them(loads: list[tuple[int, int, float]], expected: list[int]) -> None:
    """As vLLM 0.32 and 0.33 chose (`chosen_by_vllm`)."""
    assert chosen(loads, 8) == expected


def test_random_loads_are_balanced_as_vllm_does() -> None:
    if not PYTHON:
        pytest.skip("PAGETWIN_VLLM=PATH/bin/python names an environment that has vLLM")
    for seed in range(200):
        draw, loads = Random(seed), []
        for _ in range(draw.randint(2, 6)):
            waiting = draw.choice((0, 0, draw.randint(0, 20)))
            loads.append((waiting + draw.randint(0, 30), waiting, draw.choice((0.2, 0.95, draw.random()))))
        assert chosen(loads, 20) == chosen_by_vllm(PYTHON, loads, 20), loads


def test_two_replicas_serve_every_request_once() -> None:
    log = run("device.data_parallel=2")
    assert sorted(log.requests["request_id"].tolist()) == list(range(60))
    assert (log.requests["outcome"] == 0).all()
    assert (np.diff(log.steps["start_s"]) >= 0).all()
    assert log.replicas == 2


def test_pairs_of_equal_requests_wait_as_one_of_them_waits_for_one_replica() -> None:
    """Closed form: two replicas that each get one of every pair are two copies of the system with one replica."""
    one, two = (
        config("cache.prefix_caching=false"),
        config("cache.prefix_caching=false", "device.data_parallel=2"),
    )
    single = simulate(resolve(one), cost_model(deployment_of(one)))
    double = simulate(twice(resolve(two)), cost_model(deployment_of(two)))
    by_id = dict(
        zip(double.requests["request_id"].tolist(), double.requests["finish_s"].tolist(), strict=True)
    )
    ids = single.requests["request_id"].tolist()
    for number, request_id in enumerate(sorted(ids)):
        expected = single.requests["finish_s"][ids.index(request_id)]
        assert by_id[2 * number] == pytest.approx(expected, rel=1e-8)
        assert by_id[2 * number + 1] == pytest.approx(expected, rel=1e-8)


def test_a_fast_forward_changes_no_time() -> None:
    fast, slow = (run("device.data_parallel=3", fast_forward=each) for each in (True, False))
    for name in ("request_id", "first_token_s", "finish_s"):
        assert np.array_equal(fast.requests[name], slow.requests[name]), name


FRONT_END = ("device.data_parallel=3", "device.frontend_turn_us=30000", "workload.request_rate=10")


def test_a_fast_forward_changes_no_turn_of_the_front_end() -> None:
    fast, slow = (run(*FRONT_END, fast_forward=each) for each in (True, False))
    for name in ("request_id", "first_scheduled_s", "finish_s"):
        assert np.array_equal(fast.requests[name], slow.requests[name]), name


@pytest.mark.parametrize("fast_forward", [True, False])
def test_one_front_end_serves_requests_and_the_answers_of_all_replicas_in_the_order_of_time(
    fast_forward: bool,
) -> None:
    """Its turns follow from the log: none is taken before one of what came earlier."""
    log = run(*FRONT_END, fast_forward=fast_forward)
    rows = log.requests
    came = sorted(
        [*((at, index) for index, at in enumerate(rows["arrival_s"])), *((at, -1) for at in rows["finish_s"])]
    )
    free_s, left_s = 0.0, np.zeros(len(rows["arrival_s"]))
    for at, index in came:
        free_s = max(free_s, at) + 0.03
        if index >= 0:
            left_s[index] = free_s
    waited = rows["first_scheduled_s"] - left_s
    assert waited.min() > -1e-8
    assert waited.max() < log.steps["seconds"].max()  # for the step under way, where no replica was idle


def test_replicas_shorten_the_wait_and_are_busy_for_a_share_of_the_time() -> None:
    one, four = (
        compute_metrics(run(f"device.data_parallel={n}", "workload.request_rate=200")) for n in (1, 4)
    )
    assert four["ttft_p50"] < one["ttft_p50"]
    assert 0 < four["busy_share"] <= 1
    assert 0 < four["utilisation"] <= 1


@cases("compiled", ["always", "never"], day=1)
def test_the_waste_of_groups_is_that_of_all_replicas_steps(compiled: str) -> None:
    """Two replicas that get the same requests at the same times waste what one does: the shares are equal."""
    texts = ("model=gemma3_12b", "cache.groups=uniform", f"replay.compiled={compiled}")
    point = config(*texts)
    one = run(*texts)
    both = simulate(
        twice(resolve(config(*texts, "device.data_parallel=2"))), cost_model(deployment_of(point))
    )
    assert one.waste is not None
    assert both.waste is not None
    assert {len(column) for column in both.waste.values()} == {len(both.steps["step"])}
    alone, shared = compute_metrics(one), compute_metrics(both)
    wasted = [name for name in alone if name.startswith("waste_")]
    assert len(wasted) > 3
    assert {name: shared[name] for name in wasted} == pytest.approx({name: alone[name] for name in wasted})


def test_metrics_without_rows_are_those_of_the_rows() -> None:
    point = config("device.data_parallel=2")
    workload, cost = resolve(point), cost_model(deployment_of(point))
    prediction = predict(workload, cost, rows=False)
    assert prediction.metrics == compute_metrics(simulate(workload, cost))
    assert not len(prediction.log.steps["step"])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("replay.mode=closed",), "requests wait for others"),
        (("replay.kv_events=true",), "is kept for one replica alone"),
    ],
)
def test_what_replicas_do_not_model_is_refused_by_name(texts: tuple[str, ...], words: str) -> None:
    replicated = config("device.data_parallel=2", *texts)
    with pytest.raises(ConfigError, match=words):
        resolve(replicated)


MOE = ("model=qwen3_30b_a3b", "device.data_parallel=2", "device.expert_parallel=true")


def moe_steps(*texts: str) -> tuple[RooflineCost, RunLog]:
    point = config(*MOE, "workload.num_requests=30", "workload.request_rate=60", *texts)
    cost = cost_model(deployment_of(point))
    assert isinstance(cost, RooflineCost)
    return cost, simulate(resolve(point), cost)


def test_replicas_of_a_mixture_of_experts_take_their_steps_together() -> None:
    """What begins together ends together, and nothing begins before it has."""
    _, log = moe_steps()
    start, took = (np.asarray(log.steps[name]) for name in ("start_s", "seconds"))
    begins, counts = np.unique(start, return_counts=True)
    assert (counts == 2).any()
    for begin in begins:
        assert len(set(took[start == begin].tolist())) == 1
    ends = [float(begin + took[start == begin][0]) for begin in begins]
    assert all(begin >= end - 1e-9 for begin, end in zip(begins[1:], ends[:-1], strict=True))


def lockstep_by_hand(cost: RooflineCost, prompts: tuple[int, int]) -> float:
    """The first step of two replicas, each with one prompt: the dearer of both, with the experts of all tokens."""
    cost.of_group(sum(prompts))
    seconds = []
    for tokens in prompts:
        features = [0.0] * len(StepFeatures._fields)
        features[AT.tokens] = features[AT.prefill_tokens] = features[AT.prefill_kv] = tokens
        features[AT.rows] = features[AT.prefill_rows] = features[AT.sampled_rows] = 1
        features[AT.prefill_work] = tokens * (tokens + 1) / 2
        seconds.append(float(cost.price(features).seconds))
    cost.of_group(None)
    return max(seconds)


def test_a_step_in_lockstep_is_as_long_as_that_of_the_slowest_replica() -> None:
    point = config(*MOE, "scheduler.max_batched_tokens=2048", "cache.prefix_caching=false")
    workload, cost = resolve(point), cost_model(deployment_of(point))
    assert isinstance(cost, RooflineCost)
    rows = [
        replace(workload.trace.requests[0], request_id=number, arrival_us=0, prompt_tokens=tokens,
                output_tokens=2, segments=(Segment(None, tokens),))
        for number, tokens in enumerate((1500, 40))
    ]  # fmt: skip
    log = simulate(workload.of_trace(Trace(workload.trace.header, tuple(rows))), cost)
    expected = lockstep_by_hand(cost, (1500, 40))
    assert log.requests["first_token_s"] == pytest.approx([expected, expected], rel=1e-6)


def test_experts_on_the_devices_of_two_replicas_are_read_by_half() -> None:
    """128 experts, all touched: each device reads its 64 of them, and holds 64 of them in memory."""
    one, two = (
        deployment_of(config(*MOE, f"device.data_parallel={n}", "cache.pool_blocks=null")) for n in (1, 2)
    )
    experts = 128 * one.shape.expert_bytes
    alone, shared = cost_model(one), cost_model(two)
    assert isinstance(alone, RooflineCost)
    assert isinstance(shared, RooflineCost)
    common = alone.reading[0]
    assert shared.reading[-1] - common == pytest.approx((alone.reading[-1] - common) / 2, rel=1e-6)
    assert one.pool.memory is not None
    assert two.pool.memory is not None
    assert one.pool.memory.weights - two.pool.memory.weights == pytest.approx(experts / 2)


def test_lockstep_is_refused_where_the_roofline_does_not_price_it() -> None:
    point = config(*MOE, "cost=published")
    with pytest.raises(ConfigError, match="run in lockstep, which the roofline alone prices"):
        check_cost(deployment_of(point))
