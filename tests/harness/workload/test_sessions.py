"""Conversations under every rule of ruleing cached blocks, and the optimum that none of them passes."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from tiers import cases

from engine.core.options import Eviction
from harness.cli.main import main
from harness.config.checks import check_config
from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.metrics.compute import compute_metrics
from harness.metrics.log import RunLog
from harness.point.cost import cost_model
from harness.report.style import Missing
from harness.report.write import FIGURES
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve
from harness.workload.simulate import simulate
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

BASE = (
    *("measure=false", "replay.optimum=true", "model=llama3_8b", "device=h100", "cost.kind=roofline"),
    *("cache.max_model_len=8192", "workload=as_recorded", "replay=sessions", "cache.answers=true"),
)


def config(*overrides: str) -> RunConfig:
    return compose_config(axis.settings[0] for axis in parse_overrides((*BASE, *overrides)))


def agent_trace(sessions: int = 6, rounds: int = 9) -> Trace:
    """Agents that drop the results of their tools: a turn has the text of all earlier ones, and results of its own.

    All begin with one system prompt. Half of the agents take part in every third round alone: they think longer.
    """
    rows: list[TraceRequest] = []
    turns = [0] * sessions
    for number in range(rounds):
        for session in range(sessions):
            if session % 2 and number % 3:
                continue
            turns[session] += 1
            name = 1000 * (session + 1)
            past = [Segment(name + turn, 32) for turn in range(1, turns[session] + 1)]
            result = Segment(name + 500 + turns[session], 160)  # dropped in the next turn
            segments = [Segment(1, 64), *past, result]
            total = sum(part.tokens for part in segments)
            rows.append(
                TraceRequest(
                    *(len(rows), len(rows) * 50_000, total, 8, segments),
                    session=str(session),
                    turn=turns[session],
                )
            )
    header = TraceHeader("made", "made", "test", "content", None, 1, "00", len(rows), len(rows))
    return Trace(header, tuple(rows))


@lru_cache
def run_of(rule: str, *overrides: str) -> RunLog:
    point = config(
        f"cache.eviction={rule}",
        "replay.mode=trace",
        "cache.answers=false",
        "cache.pool_tokens=2048",
        *overrides,
    )
    workload: Point = resolve(point, agent_trace())
    return simulate(workload, cost_model(deployment_of(point)))


def metrics(rule: str, *overrides: str) -> dict[str, float]:
    return compute_metrics(run_of(rule, *overrides))


@cases("rule", list(Eviction), day=4)
@cases("pool", [768, 1536, 4096], day=1)
def test_no_rule_finds_more_than_the_optimum(rule: Eviction, pool: int) -> None:
    found = metrics(
        rule, f"cache.pool_tokens={pool}", "cache.ttl_s=1" if rule is Eviction.ttl else "cache.answers=false"
    )
    assert 0 < found["hit_tokens"] <= found["optimal_hit_tokens"]


def test_a_time_to_live_alike_for_all_is_the_order_of_release() -> None:
    """What was released first is over first: where all requests are of sessions, a time to live changes nothing."""
    assert metrics("ttl", "cache.ttl_s=0.5")["hit_tokens"] == metrics("lru")["hit_tokens"]


def test_evicting_superseded_turns_first_finds_more_where_results_are_dropped() -> None:
    assert metrics("superseded")["hit_tokens"] > metrics("lru")["hit_tokens"]


def test_hits_are_what_is_not_computed_again() -> None:
    whole = sum(row.prompt_tokens + row.output_tokens - 1 for row in agent_trace().requests)
    for rule in Eviction:
        found = metrics(rule)
        assert found["hit_tokens"] + found["resumed_hit_tokens"] + found["computed_tokens"] - found[
            "recomputed_tokens"
        ] == pytest.approx(whole, abs=found["preemptions"] * 8192)


def test_answers_are_found_by_the_next_turn() -> None:
    sizes = ("trace=chat", "workload.num_requests=12", "cache.pool_tokens=20000")
    with_answers = config(*sizes)
    without = config(*sizes, "cache.answers=false")
    found, lost = (
        compute_metrics(simulate(resolve(point), cost_model(deployment_of(point))))
        for point in (with_answers, without)
    )
    assert found["hit_tokens"] > lost["hit_tokens"]
    assert found["hit_tokens"] <= found["optimal_hit_tokens"]


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("cache.eviction", ("cache.eviction=pin_all",)),
        ("cache.eviction", ("cache.eviction=pinned", "cache.groups=uniform")),
        ("cache.answers", ("measure=true", "decoding=speculative")),
        ("cache.answers", ("cache.groups=uniform",)),
        ("replay.optimum", ("scheduler.order=a:B",)),
        ("replay.optimum", ("cache.prefix_caching=false",)),
    ],
)
def test_what_a_rule_does_not_go_with_is_refused_by_its_key(key: str, overrides: tuple[str, ...]) -> None:
    assert any(str(error).startswith(f"{key}: ") for error in check_config(config(*overrides)))


def test_the_optimum_is_part_of_a_point_that_asks_for_it() -> None:
    log = run_of("lru")
    assert log.optimal_hit_tokens is not None
    assert "optimal_hit_ratio" not in compute_metrics(replace(log, optimal_hit_tokens=None))
    assert all(one <= two for one, two in pairwise([0, log.optimal_hit_tokens]))


@pytest.mark.nightly
def test_the_report_shows_each_rule_beside_the_optimum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {name: lambda *_, name=name: Missing(name, "not looked at") for name in FIGURES}
    monkeypatch.setattr("harness.report.write.FIGURES", drawn)
    sizes = (
        "workers=1",
        "trace=chat",
        "workload.num_requests=8",
        "cache.pool_tokens=9000",
        "report.figures=svg",
    )
    words = (*BASE, *sizes, "cache.eviction=lru,superseded", f"out={tmp_path}")
    assert main(["sweep", *words]) == 0
    assert (tmp_path / "report" / "figures" / "hits.svg").exists()
    assert "bound for any order" in (tmp_path / "report" / "index.html").read_text()


def test_sessions_without_a_turn_that_waits_are_said_to_be_none() -> None:
    said = "sessions: no request names one before it, so each comes at its own time"
    alone, chat = (
        resolve(
            config(f"trace={trace}", "workload.num_requests=9", "cache.answers=false")
        ).trace.header.changes
        for trace in ("azure_conv", "chat")
    )
    assert said in alone
    assert said not in chat


@pytest.mark.parametrize("mode", ["sessions", "trace"])
def test_a_rate_that_pauses_hold_back_is_said(mode: str) -> None:
    """Arrivals are scaled and pauses are not: at a hundred times the rate fewer requests/s come than are asked for."""
    asked = ("trace=chat", "workload.num_requests=40", "cache.answers=false", f"replay.mode={mode}")
    said = "turns wait for answers and pause as long as recorded: fewer requests/s come than times were scaled to"
    plain = resolve(config(*asked))
    assert any(plain.trace.columns.values("think_us"))
    assert not any(said in each for each in plain.trace.header.changes)
    point = resolve(config(*asked, f"workload.request_rate={100 * (plain.trace.mean_rate or 0.0)}"))
    came_s = simulate(point, cost_model(point.deployment)).requests["arrival_s"]
    slower = bool(max(came_s) > 2e-6 * max(point.trace.columns.arrival_us))
    assert slower is any(said in each for each in point.trace.header.changes) is (mode == "sessions")
