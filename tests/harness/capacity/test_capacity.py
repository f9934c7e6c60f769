"""Capacity searches find edges that are known, say how sure they are, and name what stands against the answer."""

import json
import re
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import cases

from harness.capacity import (
    CapacityAnswer,
    Figure,
    _rate_edge,
    best_block_size,
    device_blocks,
    estimate,
    highest,
    highest_rate,
    smallest,
    smallest_pool,
    with_bounds,
)
from harness.capacity.advice import advise, rate_text
from harness.capacity.case import (
    MOST_COMPILED,
    MOST_IN_CORE,
    LoadCase,
    Trial,
    busiest_window,
    growth,
    in_the_same_memory,
)
from harness.capacity.page import CapacityStudy, answer_text, notes, write_study
from harness.capacity.slo import broken_goals, parse_slo
from harness.cli.main import main
from harness.cli.workload import _capacity_config
from harness.config.compose import compose_config
from harness.config.errors import UserError
from harness.config.overrides import parse_overrides
from harness.config.schema import Compiled, CostKind, DecodingMode, Oversize, RunConfig
from harness.config.values import replaced
from harness.point.cost import cost_model
from harness.workload.deployment import WINDOWS_KEPT, deployment_of
from harness.workload.simulate import predict
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest


@given(st.floats(1e-2, 1e5), st.floats(1e-2, 1e5))
def test_bisection_brackets_a_known_edge_from_any_start(edge: float, start: float) -> None:
    tried: list[float] = []

    def figure(value: float) -> Figure:
        tried.append(value)
        return Figure(value <= edge, inf if value > edge else 0.0)

    found = highest(figure, start, precision=0.01, low=1e-3, high=1e6)
    assert found.good is not None
    assert found.bad is not None
    assert found.good <= edge < found.bad <= found.good * 1.01
    assert len(tried) < 50


def test_a_search_that_never_fails_or_never_meets_says_so() -> None:
    limits = {"precision": 0.1, "low": 0.1, "high": 100.0}
    assert highest(lambda value: Figure(True, 0.5), 1.0, **limits).bad is None
    assert highest(lambda value: Figure(False, 2.0), 1.0, **limits).good is None


@given(st.floats(1, 1e3), st.floats(0.3, 12), st.floats(0, 1), st.floats(0.02, 0.2))
def test_guesses_from_figures_of_any_steepness_end_at_the_edge(
    edge: float, steep: float, served: float, precision: float
) -> None:
    """Overloaded from some rate on, where the server says what it serves, which may be far below the edge or above."""
    tried: list[float] = []

    def figure(value: float) -> Figure:
        tried.append(value)
        most = edge * (0.7 + served)
        worst = (value / edge) ** steep * (1e3 if value > most else 1.0)
        return Figure(value <= edge, worst, most if value > max(most, edge) else 0.0)

    found = highest(figure, 30.0, precision=precision, low=1e-3, high=1e6)
    assert found.good is not None
    assert found.bad is not None
    assert found.good <= edge < found.bad <= found.good * (1 + precision) * (1 + 1e-6)
    assert len(tried) == len(set(tried)) < 40


@given(st.floats(1, 1e3), st.floats(0.2, 12))
def test_a_figure_that_grows_slowly_far_from_the_edge_does_not_tell_where_it_is(
    edge: float, steep: float
) -> None:
    """A figure of 0.7 of the bound from far below the edge on, whose steepness at the edge is known."""

    def figure(value: float) -> Figure:
        return Figure(value <= edge, max(0.7, (value / edge) ** steep))

    limits = {"precision": 0.1, "low": 1e-3, "high": 1e6, "steep": steep}
    found = highest(figure, edge / 30, **limits)
    assert found.good is not None
    assert found.bad is not None
    assert edge / 1.11 <= found.good <= edge * 1.06
    assert edge / 1.06 <= found.bad <= edge * 1.11
    cautious = highest(figure, edge / 30, flat=0.0, **limits)
    assert cautious.good is not None
    assert cautious.good <= edge * 1.06


def test_figures_near_their_bound_save_trials() -> None:
    tried: list[float] = []

    def figure(value: float) -> Figure:
        tried.append(value)
        return Figure(value <= 100, (value / 100) ** 3)

    highest(figure, 900.0, precision=0.02, low=1e-3, high=1e6)
    assert len(tried) <= 6


def test_a_figure_that_hardly_falls_with_the_value_leads_to_the_lowest_one_at_once() -> None:
    tried: list[float] = []

    def figure(value: float) -> Figure:
        tried.append(value)
        return Figure(False, 7 + value)

    assert highest(figure, 10.0, precision=0.05, low=1e-3, high=1e6).good is None
    assert len(tried) <= 4
    assert tried[-1] == 1e-3


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_the_smallest_that_meets_is_found_from_any_start(edge: int, start: int) -> None:
    assert smallest(lambda value: value >= edge, start=start, high=1000) == edge


@given(st.integers(1, 12))
def test_nothing_meets_where_the_largest_does_not(start: int) -> None:
    assert smallest(lambda value: False, start=start, high=10) is None


def test_the_interval_of_an_estimate_covers_the_mean_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    found = [estimate(draw.normal(5, 1, 5).tolist()) for _ in range(400)]
    covered = sum(one.low is not None and one.low <= 5 <= (one.high or 0) for one in found)
    assert covered / 400 == pytest.approx(0.95, abs=0.03)


def test_one_seed_has_no_interval() -> None:
    assert estimate([3.0]).low is None


def test_goals_are_bounds_on_metrics() -> None:
    slo = parse_slo("ttft_p99<2, output_throughput>=100")
    assert not broken_goals(slo, {"ttft_p99": 1.9, "output_throughput": 100})
    assert broken_goals(slo, {"ttft_p99": 2.1, "output_throughput": 100}) == slo[:1]
    assert broken_goals(slo, {"ttft_p99": 1.9, "output_throughput": 99}) == slo[1:]


def test_a_goal_of_none_is_met_by_none_alone() -> None:
    (goal,) = parse_slo("preemptions<=0")
    assert goal.share({"preemptions": 0.0}) == 0
    assert goal.share({"preemptions": 1.0}) > 1


def test_a_run_without_the_metric_has_less_of_it_than_any_goal_asks() -> None:
    least, most = parse_slo("hit_ratio>0.5,tpot_p99<1")
    assert broken_goals((least, most), {}) == (least,)
    assert least.share({}) > 1 > most.share({})


def test_a_run_without_tiers_meets_no_goal_on_their_seconds() -> None:
    """They are seconds as latencies are, which a run without them has below any bound."""
    goals = parse_slo("tier_load_s<1,tier_write_s<1")
    assert broken_goals(goals, {"ttft_p99": 0.1}) == goals
    assert not broken_goals(goals, {"tier_load_s": 0.5, "tier_write_s": 0.0})
    assert goals[0].share({}) == float("inf")


def test_a_goal_on_a_figure_that_no_run_has_is_met_by_none() -> None:
    """Shares of pools in groups, without groups: every run met it, and the rate was that of the other goals."""
    case = LoadCase(single_server(), parse_slo("waste_tail<0.5"))
    said = advise(case, lambda _: None).answers
    assert re.search(r"no rate meets it \(seed 0\)\. At \S+ requests/s there is no waste_tail", said[0])


def rate_for(slo: str, places: int = 1) -> tuple[LoadCase, CapacityAnswer]:
    config = single_server()
    config.scheduler.max_running, config.cache.prefix_caching = places, False
    case = LoadCase(config, parse_slo(slo))
    return case, highest_rate(case, 1, 0.1, lambda _: None)


@cases("tokens", [5, 30, 80], day=1)
def test_a_goal_of_at_least_so_much_holds_from_some_rate_on(tokens: int) -> None:
    """An open loop serves what comes: so many tokens a second are there from a rate on, below or above the trace's."""
    case, answer = rate_for(f"output_throughput>{tokens}")
    assert answer.value is not None
    assert answer.bad is not None
    assert answer.bad.growth  # it holds up to the rate that lasts
    assert 0 < answer.least < answer.value.mean
    assert case.run(rate=answer.least).met
    assert case.run(rate=answer.value.mean).met
    assert not case.run(rate=answer.least / 1.15).met
    assert f"holds from {answer.least:.3g} up to {answer.value.mean:.3g} requests/s" in rate_text(
        case, answer
    )


def test_a_goal_of_at_least_more_than_is_served_is_met_by_no_rate_that_was_tried() -> None:
    _, answer = rate_for("output_throughput>500")
    assert answer.value is None
    found = re.match(
        r"no rate that was tried meets it \(seed 0\)\. At ([\d.]+) requests/s output_", answer.reason
    )
    assert found
    assert float(found[1]) > 8  # of the rates that last the highest says most


def test_a_goal_of_at_least_so_much_may_be_met_where_requests_are_few() -> None:
    """Free slots become fewer with the rate, before a queue grows."""
    case, answer = rate_for("free_share>0.95", places=16)
    assert answer.value is not None
    assert answer.bad is not None
    assert not answer.bad.growth
    assert case.run(rate=answer.value.mean).met
    assert not case.run(rate=1.2 * answer.value.mean).met
    assert answer.least == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft_p98<2", "did you mean ttft_p9"),
        ("ttft_p99=2", "is no goal"),
        ("ttft_p99<.", "is no number"),
        ("ttft_p99<0", "can be met by no run"),
        ("output_throughput>-1", "or by every run"),
        ("ttft_p99<1e999", "by every run"),
    ],
)
def test_a_wrong_goal_is_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_slo(text)


def single_server() -> RunConfig:
    """One place, constant steps of 10 ms, so that a request of 20 tokens takes 0.2 s: capacity is known."""
    config = RunConfig(name="queue")
    config.cost.kind = CostKind.roofline
    config.device.step_overhead_us, config.device.layer_overhead_us = 10_000.0, 0.0
    config.device.bandwidth_gbs, config.device.tflops = 1e6, 1e6
    config.scheduler.max_running = 1
    config.workload.num_requests, config.workload.request_rate = 100, 1.0
    config.workload.length_scale = 0.05
    config.cache.pool_tokens, config.cache.max_model_len = 4096, 1024
    return config


def test_the_rate_of_a_single_server_is_below_one_over_its_service_time() -> None:
    """A mean wait of one service time is met up to a utilisation of 2/3 by M/D/1, below that with ragged service."""
    config = single_server()
    service = LoadCase(config, ()).run(rate=1e-3).metrics["e2e_mean"]
    answer = highest_rate(LoadCase(config, parse_slo(f"queue_mean<{service:.4f}")), 2, 0.1, lambda _: None)
    assert answer.value is not None
    assert 0.25 / service < answer.value.mean < 0.9 / service
    assert answer.value.low is not None


@pytest.mark.nightly
def test_the_interval_over_seeds_is_no_narrower_than_the_search_is_precise() -> None:
    """Seeds may all end at one tried rate, and each edge lies anywhere up to the next."""
    answer = highest_rate(LoadCase(single_server(), parse_slo("ttft_p99<8")), 3, 0.1, lambda _: None)
    assert answer.value is not None
    assert answer.value.low is not None
    assert answer.value.high is not None
    assert answer.value.high >= 1.1 * answer.value.mean
    assert answer.value.low <= answer.value.mean


def test_a_rate_that_only_a_short_trace_holds_is_no_answer() -> None:
    """Thirty requests of 0.2 s each wait 6 s at most at any rate; one place serves 5 a second."""
    config = single_server()
    config.workload.num_requests = 30
    service = LoadCase(config, ()).run(rate=1e-3).metrics["e2e_mean"]
    answer = highest_rate(LoadCase(config, parse_slo("ttft_p99<8")), 1, 0.2, lambda _: None)
    assert answer.value is not None
    assert 0.8 / service < answer.value.mean < 1.1 / service


def test_a_number_in_the_server_that_grows_with_time_is_growth() -> None:
    config = single_server()
    config.workload.num_requests = 400
    case = LoadCase(config, ())
    service = case.run(rate=1e-3).metrics["e2e_mean"]
    assert case.run(rate=0.5 / service).growth == 0
    assert case.run(rate=1.2 / service).growth == pytest.approx(1 / 6, abs=0.08)


def case_of_a_load(first_us: int, last_us: int, slo: str, **most: int) -> LoadCase:
    """Sixty requests on a server that has time left; the gap between them changes from the first to the last."""
    config = single_server()
    config.scheduler.max_running = 64
    at_us = np.cumsum(np.linspace(first_us, last_us, 60)).astype(int).tolist()
    rows = tuple(TraceRequest(n, at, 20, 20, (Segment(None, 20),)) for n, at in enumerate(at_us))
    header = TraceHeader("t", "simple", "t", CONTENT, None, 1, "", len(rows), len(rows))
    return LoadCase(config, parse_slo(slo), Trace(header, rows), **most)


@pytest.mark.parametrize(("most", "sent"), [(60, 120), (20_000, 240)])  # requests of a trial
def test_a_load_that_rises_within_the_trace_is_no_queue_that_grows(most: int, sent: int) -> None:
    """Three times as many arrive at the end as at the start."""
    case = case_of_a_load(37_500, 12_500, "ttft_p99<0.07", requests=most)
    sent_once = case.served
    assert sent_once is not None
    assert growth(predict(sent_once, cost_model(sent_once.deployment), rows=True).log) > 0.01
    found = case.run(rate=40.0)
    assert found.met
    assert found.outcome["finished"] == sent


@cases("gaps_us", [(37_500, 12_500), (25_000, 25_000), (12_500, 37_500)], day=1)
@cases("above", [0.9, 1.1, 1.5], day=2)
def test_a_queue_grows_by_what_arrives_beyond_what_is_served_however_the_load_changes(
    gaps_us: tuple[int, int], above: float
) -> None:
    """Eight places, each of which takes so long for a request: the number at the end of each copy says by how much."""
    case = case_of_a_load(*gaps_us, "ttft_p99<1e6")
    case.config.scheduler.max_running = 8
    served = 8 / case.run(rate=1e-3).metrics["e2e_mean"]
    found = case.run(rate=above * served)
    assert found.growth == pytest.approx(max(0.0, 1 - 1 / above), abs=0.03)


@pytest.mark.parametrize("gaps_us", [(37_500, 12_500), (25_000, 25_000), (12_500, 37_500)])
def test_a_rate_lasts_however_the_load_changes_within_few_requests(gaps_us: tuple[int, int]) -> None:
    """Where the load falls, a queue that is left at the end is none that grows, and yet too much for the server."""
    case = case_of_a_load(*gaps_us, "ttft_p99<60", requests=60)
    case.config.scheduler.max_running = 8
    served = 8 / case.run(rate=1e-3).metrics["e2e_mean"]
    answer = highest_rate(case, 1, 0.05, lambda _: None)
    assert answer.value is not None
    assert answer.value.mean == pytest.approx(served, rel=0.06)


def test_flags_are_compared_by_latency_in_the_busiest_window() -> None:
    """A load that rises within it counts for nothing: it ends."""
    case = case_of_a_load(37_500, 12_500, "ttft_p99<9")
    assert case.run(rate=40.0, busiest=True).met


def test_the_busiest_window_serves_at_its_own_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its throughput is over its own time; the time before its first request is none of it."""
    monkeypatch.setattr("harness.capacity.case._LEAST_BUSY", 10)
    case = case_of_a_load(37_500, 12_500, "output_throughput>1")
    window = busiest_window(case.trace).columns.arrival_us
    arriving_s = float(window[-1] - window[0]) / 1e6
    assert window[0] > 10 * (window[-1] - window[0]) / len(window)
    found = case.run(busiest=True).metrics
    assert arriving_s < found["span"] < arriving_s + 2 * found["e2e_p99"]
    assert found["request_throughput"] == pytest.approx(len(window) / found["span"])


def test_a_rate_that_rests_on_the_lengths_of_few_requests_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of_a_load(25_000, 25_000, "ttft_p99<2")
    found = highest_rate(case, 1, 0.2, lambda _: None)
    assert "It rests on the lengths of 60 requests alone: others may need another rate" in rate_text(
        case, found
    )
    monkeypatch.setattr("harness.capacity.advice._FEW", 60)
    assert "lengths" not in rate_text(case, found)


@pytest.mark.nightly
def test_a_rate_that_rests_on_too_short_a_time_says_so() -> None:
    """More arrive at first than the server serves, and fewer later: sent once, no number grows."""
    short = [case_of_a_load(12_500, 37_500, "ttft_p99<2", requests=most) for most in (60, 20_000)]
    found = [highest_rate(case, 1, 0.05, lambda _: None) for case in short]
    said = [rate_text(case, answer) for case, answer in zip(short, found, strict=True)]
    assert re.search("That rests on (60|120) requests in ", said[0])
    assert "That rests on " not in said[1]
    least = re.search(r"over more time up to (\d+) % less may be served", said[0])
    assert least is not None
    once, lasting = (answer.value.mean for answer in found if answer.value is not None)
    assert 0.8 * lasting <= once <= lasting / (1 - int(least[1]) / 100)


@cases("slo", ["queue_mean<0.2", "ttft_p99<8", "e2e_p90<1.5"], day=1)
def test_the_edge_of_a_search_is_between_two_rates_that_were_tried(slo: str) -> None:
    case = LoadCase(single_server(), parse_slo(slo))
    answer = highest_rate(case, 1, 0.02, lambda _: None)
    assert answer.value is not None
    assert answer.good is not None
    assert answer.bad is not None
    again = LoadCase(single_server(), parse_slo(slo))
    assert again.run(rate=answer.value.mean).met
    assert not again.run(rate=answer.bad.rate).met
    assert answer.good.rate == answer.value.mean
    assert answer.bad.rate == pytest.approx(answer.value.mean, rel=0.0201)


def test_drawn_requests_differ_by_seed() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1"))
    assert case.draws
    assert case.run(rate=1.0).metrics != case.run(rate=1.0, seed=1).metrics


@pytest.mark.parametrize("groups", ["off", "uniform"])
def test_another_block_size_is_tried_in_the_same_memory(groups: str) -> None:
    words = ("cache.pool_blocks=500", "cache.pool_tokens=null", f"cache.groups={groups}", "measure=false")
    axes = parse_overrides(("model=gpt_oss_20b", "device=h100", "cost=roofline", *words))
    config = compose_config(axis.settings[0] for axis in axes)
    held = deployment_of(config).pool
    for size in (16, 32):
        changes = in_the_same_memory(config, {"cache.block_size": size})
        pool = deployment_of(replaced(config, changes)).pool
        assert pool.tokens * pool.slot_bytes == held.tokens * held.slot_bytes


@pytest.mark.parametrize("pool", ["cache.pool_blocks=20", "cache.pool_tokens=320", "cache.pool_tokens=null"])
def test_what_a_device_holds_is_no_pool_that_was_given(pool: str) -> None:
    words = ("measure=false", "model=llama31_8b", "device=h100", pool)
    held = device_blocks(compose_config(axis.settings[0] for axis in parse_overrides(words)))
    assert held is not None
    assert held > 20_000


def test_memory_beside_a_pool_does_nothing_unless_a_pool_is_searched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("model=llama31_8b", "device=h100", "cache.pool_tokens=4096", "device.memory_utilization=0.5")
    said = {find: (_capacity_config(words, find), capsys.readouterr().err)[1] for find in ("rate", "pool")}
    assert "without effect beside the other settings: device.memory_utilization" in said["rate"]
    assert "without effect" not in said["pool"]


@pytest.mark.parametrize("word", ["out=somewhere", "report.title=mine"])
def test_a_key_of_a_runs_folder_is_refused_by_a_search_which_has_its_own(word: str) -> None:
    with pytest.raises(UserError, match=f"{word}: not read by capacity; its folder is --out DIR"):
        _capacity_config(["model=llama31_8b", "device=h100", word], "rate")


def test_the_smallest_pool_meets_and_one_block_less_does_not() -> None:
    config = single_server()
    config.scheduler.max_running, config.workload.request_rate = 16, 2.0
    config.workload.num_requests = 60
    case = LoadCase(config, parse_slo("preemptions<1"))
    answer = smallest_pool(case, 1, lambda _: None)
    assert answer.value is not None
    tokens = int(answer.value.mean)
    assert tokens < 4096
    assert case.run({"cache.pool_tokens": tokens}).met
    assert not case.run({"cache.pool_tokens": tokens - 16}).met


def test_a_pool_that_no_size_helps_has_no_answer_but_a_reason() -> None:
    answer = smallest_pool(LoadCase(single_server(), parse_slo("ttft_mean<1e-6")), 1, lambda _: None)
    assert answer.value is None
    assert "8 times what is there. There ttft_mean is" in answer.reason


def test_a_pool_is_sought_above_the_configured_one() -> None:
    config = single_server()
    config.scheduler.max_running, config.workload.request_rate, config.cache.pool_tokens = 16, 40.0, 256
    config.workload.num_requests = 60
    assert not LoadCase(config, parse_slo("preemptions<0.5")).run().met
    answer = smallest_pool(LoadCase(config, parse_slo("preemptions<0.5")), 1, lambda _: None)
    assert answer.value is not None
    assert answer.value.mean > 256


def test_a_pool_larger_than_the_devices_memory_is_an_answer_that_says_so() -> None:
    config = single_server()
    config.scheduler.max_running, config.workload.request_rate = 16, 40.0
    config.workload.num_requests, config.cache.pool_tokens = 60, 256
    config.device.memory_gb, config.device.memory_utilization = 0.02, 1.0
    answer = smallest_pool(LoadCase(config, parse_slo("preemptions<0.5")), 1, lambda _: None)
    assert answer.value is not None
    assert "tokens that cpu holds" in answer.reason


def test_a_request_that_cannot_fit_the_pool_breaks_every_slo() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1e9"))
    assert not case.run({"cache.pool_tokens": 16}).met
    assert case.made[0].lost


def test_requests_longer_than_the_model_are_named_first_and_break_no_goal() -> None:
    config = single_server()
    config.cache.max_model_len = 100
    case = LoadCase(config, parse_slo("queue_mean<1e9"))
    assert case.run().met
    assert "longer than the 100 tokens that tiny-llama takes here; cache.max_model_len=" in str(case.scope)


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 100)), min_size=1, max_size=30),
    st.integers(16, 500),
    st.integers(16, 400),
    st.none() | st.integers(1, 40),
)
def test_nothing_is_left_out_without_being_named(
    lengths: list[tuple[int, int]], longest: int, pool: int, most: int | None
) -> None:
    rows = tuple(
        TraceRequest(index, index * 1000, prompt, output, (Segment(None, prompt),))
        for index, (prompt, output) in enumerate(lengths)
    )
    config = single_server()
    config.cache.max_model_len, config.cache.pool_tokens = longest, pool
    header = TraceHeader("t", "simple", "t", CONTENT, None, 1, "", len(rows) + 2, len(rows), {"bad rows": 2})
    scope = LoadCase(config, (), Trace(header, rows), most).scope
    tokens = sum(prompt + output for prompt, output in lengths)
    assert (
        scope.requests
        == len(rows) + 2
        == scope.simulated + sum(count for count, _ in scope.left_out.values())
    )
    known = sum(tokens for _, tokens in scope.left_out.values() if tokens >= 0)
    assert scope.tokens == tokens == scope.simulated_tokens + known
    assert all(
        f"{count:,}" in str(scope) and reason in str(scope) for reason, (count, _) in scope.left_out.items()
    )
    assert ("of the tokens" in str(scope)) == (scope.simulated < scope.requests)


def test_a_smaller_pool_never_meets_by_leaving_requests_out() -> None:
    config = single_server()
    config.workload.oversize = Oversize.drop
    assert not LoadCase(config, parse_slo("queue_mean<1e9")).run({"cache.pool_tokens": 64}).met


def test_block_sizes_are_compared_by_the_rates_that_they_hold() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1"))
    answer = best_block_size(case, [16, 512], 1, 0.2, lambda _: None)
    assert [size for size, _ in answer.choices] == [16, 512]
    assert answer.value is not None


def test_no_share_of_hits_is_a_figure_without_a_cache_as_in_a_record() -> None:
    """It was 0, and `run` has none: the same goal was broken by a figure here and by a missing one there."""
    config = single_server()
    config.cache.prefix_caching = False
    trial = LoadCase(config, parse_slo("hit_ratio>0.5")).run(rate=0.1)
    assert trial.why() == "there is no hit_ratio"
    assert trial.metrics.keys() >= {"hit_tokens", "ttft_p50"}


def test_too_few_requests_are_no_answer_and_the_page_says_so(tmp_path: Path) -> None:
    config = single_server()
    config.workload.num_requests = 20
    case = LoadCase(config, parse_slo("queue_mean<1"))
    answer = highest_rate(case, 1, 0.1, lambda _: None)
    assert answer.reason == "20 requests are too few to answer from; give 30 or more"
    several = deepcopy(case.config)
    several.device.data_parallel = 2  # each has a pool
    found = [smallest_pool(LoadCase(one, ()), 1, lambda _: None).question for one in (case.config, several)]
    assert found == [f"smallest pool{of} that meets the SLO" for of in ("", " of each replica")]
    page = write_study(CapacityStudy([("model", "m")], case, "rate", answer, []), tmp_path).read_text()
    assert "No answer: see the reason below." in page
    assert "Simulated: all 20 requests" in page
    assert json.loads((tmp_path / "capacity.json").read_text())["simulations"] == len(case.made)
    assert (tmp_path / "capacity.csv").read_text().count("\n") == len(case.made) + 1


def test_windows_that_a_pool_keeps_are_said_beside_a_rate() -> None:
    """`advise` predicts such a model with groups of layers, `capacity` and `run` do not unless they are asked for."""
    config = single_server()
    config.model.window, config.model.windowed_layers = 16, 2
    study = CapacityStudy([], LoadCase(config, ()), "rate", CapacityAnswer("", "", None), [])
    assert any(note.startswith(f"Of the pool: {WINDOWS_KEPT}") for note in notes(study))


def test_a_rate_says_over_which_load_it_was_found_to_last() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1"))
    answer = highest_rate(case, 1, 0.3, lambda _: None)
    said = notes(CapacityStudy([], case, "rate", answer, []))
    assert any(note.startswith("It lasts: ") for note in said)


def test_drafts_read_the_kv_once_for_all_tokens_of_a_step() -> None:
    """Else no rate would be tried above what steps of one token could serve: 1.1 instead of 2.0 requests/s at 8 B."""
    config = single_server()
    config.device.name, config.device.bandwidth_gbs, config.device.tflops = "gpu", 1e-3, 1e3
    (plain, what), drafts = LoadCase(config, ()).most_rate, deepcopy(config)
    drafts.decoding.draft_tokens = 3
    assert what == "bytes/s"
    assert LoadCase(drafts, ()).most_rate == (pytest.approx(4 * plain), "bytes/s")


def test_the_peak_bounds_a_rate_whatever_is_found_again_or_ends_early() -> None:
    """`advise` tries the prefix cache where it is off: on an H200, with 9 of 10 prompt tokens shared, it said 48.0
    requests/s where 52.6 hold."""
    config = single_server()
    config.device.name, config.workload.prefix_share = "gpu", 0.6
    config.cache.prefix_caching, config.scheduler.max_running, config.device.tflops = False, 2, 1e3
    (most, _), found = LoadCase(config, ()).most_rate, deepcopy(config)
    found.cache.prefix_caching = True
    assert LoadCase(found, ()).most_rate[0] == most
    ends, again = deepcopy(config), deepcopy(config)
    ends.decoding.mode, ends.decoding.n, ends.decoding.branch_hazard = DecodingMode.sample, 2, 0.2
    assert LoadCase(ends, ()).most_rate[0] > 1.1 * most
    again.cache.answers = again.cache.prefix_caching = True
    case = LoadCase(again, ())
    assert case.served is not None
    decoded = case.served.deployment.shape.token_weights * 2.0 * (case.trace.columns.output_tokens - 1).mean()
    assert case.most_rate == (pytest.approx(1e15 / decoded), "FLOP/s")


def test_the_peak_bounds_no_rate_of_another_seed_whose_requests_are_shorter() -> None:
    """The first seed's 30 requests have 81 tokens each in the mean, and no rate above 0.264 was tried of any seed."""
    config = single_server()
    config.device.name, config.device.tflops, config.device.step_overhead_us = "gpu", 1e-4, 1.0
    config.cache.prefix_caching, config.scheduler.max_running = False, 64
    config.workload.num_requests, config.workload.seed = 30, 1
    case = LoadCase(config, parse_slo("ttft_p99<100"), requests=1500)
    edge = _rate_edge(0.1, {}, case, 2, case.most_rate[0])  # 63 tokens each
    assert edge.good is not None
    assert edge.good > 1.05 * case.most_rate[0]


def test_a_rate_that_needs_more_than_the_peak_of_the_device_is_not_even_simulated() -> None:
    config = single_server()
    config.device.name, config.device.tflops = "gpu", 1e-6
    case = LoadCase(config, ())
    most, what = case.most_rate
    assert what == "FLOP/s"
    answer = highest_rate(case, 1, 0.05, lambda _: None)
    assert answer.value is None or answer.value.mean <= most
    assert all((trial.rate or 0.0) <= most for trial in case.made if not trial.end)


def test_no_end_of_a_device_serves_more_than_its_peak() -> None:
    """Where turns wait for answers every rate meets a generous SLO: the band went up to 1e+06 requests/s."""
    asked = list[float]()

    def run(changes: object, *, rate: float, seed: int, end: str) -> Trial:
        asked.append(rate)
        return Trial(rate, {}, seed, {}, {}, None, (), end=end)

    case = SimpleNamespace(has_ends=True, most_rate=(31.5, "FLOP/s"), slo=(), run=run)
    answer = CapacityAnswer("", "requests/s", estimate([30.9]))
    assert with_bounds(case, answer, {}).band == (30.9, 31.5)  # type: ignore[arg-type]
    assert max(asked) <= 31.5


def test_the_command_finds_writes_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["capacity", "--slo", "ttft_p99<0.04", "--seeds", "2", "--precision", "0.3", "--out", "cap"]
    code = main([*words, "cost=roofline", "workload.num_requests=30"])
    said, progress = capsys.readouterr()
    assert "sends them up to 666 times one after the other" in progress
    assert code == 0
    assert said.startswith("Simulated: all 30 requests")
    assert "The SLO (ttft_p99 ≤ 0.04 s) holds up to" in said
    assert " Of the first seed: What breaks first, at " in said or " Of the first seed: When the load" in said
    assert (tmp_path / "cap" / "capacity.html").exists()


def test_fewer_requests_are_simulated_where_the_core_alone_may() -> None:
    config = single_server()
    assert LoadCase(config, parse_slo("ttft_p99<2")).most == MOST_COMPILED[0]
    config.replay.compiled = Compiled.never
    assert LoadCase(config, parse_slo("ttft_p99<2")).most == MOST_IN_CORE[0]


def test_the_command_refuses_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "cache.block_size=8,16"]) == 2
    assert "capacity takes one configuration" in capsys.readouterr().err


@pytest.mark.nightly
def test_where_any_wait_meets_the_slo_the_rate_is_what_lasts() -> None:
    case = LoadCase(single_server(), parse_slo("ttft_p99<1e9"))
    answer = best_block_size(case, [16, 512], 1, 0.2, lambda _: None)
    assert all(rate is not None and rate.mean < 100 for _, rate in answer.choices)


@pytest.mark.parametrize("sizes", [["0", "16"], ["16", "16"]])
def test_block_sizes_that_are_no_choice_are_refused(
    sizes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capacity", "cost=roofline", "--find", "block", "--block-sizes", *sizes]) == 2
    assert "at least two sizes to choose from, of 1 token or more" in capsys.readouterr().err


def test_block_sizes_that_nothing_tries_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "cost=roofline", "--block-sizes", "8", "16"]) == 2
    assert "--block-sizes: only --find block tries several" in capsys.readouterr().err


def test_a_file_in_the_place_of_the_results_folder_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadCase, "run", None)
    (tmp_path / "there").write_text("")
    assert main(["capacity", "cost=roofline", "--out", str(tmp_path / "there")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_best_block_size_without_a_clear_lead_says_so() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1"))
    answer = best_block_size(case, [16, 32], 2, 0.2, lambda _: None)
    assert answer.value is not None
    assert "not clearly better than 32: the intervals overlap" in answer_text(case, answer)


def test_a_choice_of_blocks_that_the_cost_model_does_not_price_is_noted() -> None:
    case = LoadCase(single_server(), parse_slo("queue_mean<1"))
    answer = best_block_size(case, [16, 32], 1, 0.3, lambda _: None)
    said = [("not priced", "block size: attention takes as long at any block size")]
    study = CapacityStudy(said, case, "block", answer, case.made)
    assert any("does not price block size" in note for note in notes(study))


@pytest.mark.nightly
def test_the_answer_does_not_depend_on_the_number_of_workers() -> None:
    slo = parse_slo("queue_mean<1")
    found = []
    for workers in (1, 2):
        case = LoadCase(replace(single_server(), workers=workers), slo)
        found.append((highest_rate(case, 3, 0.2, lambda _: None), case.made))
    assert found[0] == found[1]
    assert {trial.seed for trial in found[0][1]} == {0, 1, 2}
