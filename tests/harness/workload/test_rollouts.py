"""Samples and beams of one prompt under each engine's way of sharing: blocks, copies and tokens computed twice."""

from dataclasses import replace
from functools import lru_cache

import pytest

from engine.core.options import Sharing
from harness.config.checks import check_config
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.metrics.compute import compute_metrics
from harness.point.cost import cost_model
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict, simulate
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

PROMPT, OUTPUT, SIZE = 100, 24, 16  # six full blocks of the prompt and 4 tokens in a tail


def config(*overrides: str) -> RunConfig:
    words = (
        *("measure=false", "model=llama3_8b", "device=h100", "cost.kind=roofline", "cache.max_model_len=512"),
        *("cache.pool_tokens=60000", "scheduler.max_running=512", "scheduler.max_batched_tokens=2048"),
        *("decoding=sample", "workload=as_recorded", "replay.mode=offline", *overrides),
    )
    return compose_config(axis.settings[0] for axis in parse_overrides(words))


def one_prompt(rows: int = 1, prompt: int = PROMPT, **fields: int) -> Trace:
    made = [
        TraceRequest(rid, 0, prompt, OUTPUT, (Segment(None, prompt),), **fields)  # type: ignore[arg-type]
        for rid in range(rows)
    ]
    header = TraceHeader("made", "made", "test", "content", None, 1, "00", rows, rows)
    return Trace(header, tuple(made))


def workload_of(*overrides: str, trace: Trace | None = None) -> Point:
    """The workload of `config`, whose trace is replaced before the samples become requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.workload.point.reshaped_trace", lambda config: trace or one_prompt())
        return resolve(config(*overrides))


@lru_cache
def found(sharing: Sharing, n: int, *overrides: str) -> dict[str, float]:
    words = (f"decoding.n={n}", f"decoding.sharing={sharing}", *overrides)
    log = simulate(workload_of(*words), cost_model(deployment_of(config(*words))))
    slots = log.steps["token"] + log.steps["reserved"] + log.steps["internal"]
    return {**compute_metrics(log), "blocks": float(slots.max() / SIZE)}


@pytest.mark.parametrize("n", [8, 16, 32, 64])
def test_samples_share_the_full_blocks_of_their_prompt_however_they_share(n: int) -> None:
    own = -(-(PROMPT + OUTPUT - 1) // SIZE) - PROMPT // SIZE
    for sharing in Sharing:
        assert found(sharing, n)["blocks"] == PROMPT // SIZE + n * own, sharing


@pytest.mark.parametrize("n", [8, 64])
def test_a_fork_computes_the_prompt_once(n: int) -> None:
    for sharing in (Sharing.copy_on_write, Sharing.tail_at_fork):
        assert found(sharing, n)["computed_tokens"] == PROMPT + n * (OUTPUT - 1)


@pytest.mark.parametrize("n", [8, 64])
def test_the_prefix_cache_computes_the_tail_of_the_prompt_for_each_sample(n: int) -> None:
    tail = PROMPT % SIZE
    assert found(Sharing.prefix_cache, n)["computed_tokens"] == PROMPT + (n - 1) * tail + n * (OUTPUT - 1)
    assert found(Sharing.prefix_cache, n)["hit_tokens"] == (n - 1) * (PROMPT - tail)


def test_a_fork_copies_the_tail_and_the_prefix_cache_does_not() -> None:
    copies = {sharing: found(sharing, 8)["copies_per_token"] * 8 * OUTPUT for sharing in Sharing}
    assert copies[Sharing.copy_on_write] == pytest.approx(7)
    assert copies[Sharing.tail_at_fork] == pytest.approx(7)
    assert copies[Sharing.prefix_cache] == 0


@pytest.mark.parametrize("sharing", list(Sharing))
def test_all_generate_the_same_tokens(sharing: Sharing) -> None:
    metrics = found(sharing, 8)
    assert metrics["generated_throughput"] * metrics["span"] == pytest.approx(8 * OUTPUT)


def test_beams_that_keep_their_blocks_hold_more_and_copy_nothing_after_the_fork() -> None:
    beams = ("decoding.beam_width=8", "decoding.mode=greedy", "decoding.beam_churn=0.5")
    shared = found(Sharing.copy_on_write, 1, *beams)
    kept = found(Sharing.tail_at_fork, 1, *beams)
    assert kept["blocks"] > shared["blocks"]
    assert kept["copies_per_token"] * 8 * OUTPUT == pytest.approx(7)
    assert shared["copies_per_token"] > kept["copies_per_token"]


def test_samples_of_two_requests_do_not_find_each_others_prompts() -> None:
    workload = workload_of("decoding.n=4", "decoding.sharing=prefix_cache", trace=one_prompt(rows=2))
    assert [row.request_id for row in workload.trace.requests] == list(range(8))
    texts = {row.segments for row in workload.trace.requests}
    assert len(texts) == 2


def test_a_request_waits_for_all_samples_of_the_one_before_it() -> None:
    first, second = one_prompt(rows=2).requests
    follower = TraceRequest(
        1, 0, PROMPT, OUTPUT, second.segments, after=(0,), parent=0, release="after", think_us=0
    )
    trace = one_prompt(rows=2)
    workload = workload_of(
        "decoding.n=2", "decoding.sharing=prefix_cache", trace=trace.changed((first, follower), "a follower")
    )
    assert [row.after for row in workload.trace.requests] == [(), (), (0, 1), (0, 1)]


def test_the_trace_says_that_its_samples_are_requests() -> None:
    workload = workload_of("decoding.n=8", "decoding.sharing=prefix_cache")
    assert any(
        "8 samples of 1 requests are requests of their own" in text for text in workload.trace.header.changes
    )


BEAMS = ("decoding.beam_width=4", "decoding.mode=greedy", "decoding.sharing=prefix_cache")


@pytest.mark.parametrize("prompt", [96, 100, 111])
def test_each_token_of_each_beam_computes_what_lies_behind_its_full_blocks(prompt: int) -> None:
    trace = one_prompt(prompt=prompt)
    log = simulate(workload_of(*BEAMS, trace=trace), cost_model(deployment_of(config(*BEAMS))))
    metrics = compute_metrics(log)
    hits = [(prompt + token - 1) // SIZE * SIZE for token in range(1, OUTPUT)]
    behind = [prompt + token - hit for token, hit in enumerate(hits, 1)]
    assert metrics["hit_tokens"] == 4 * sum(hits)
    assert metrics["computed_tokens"] == prompt + 4 * sum(behind)
    assert metrics["finished"] == 1 + 4 * (OUTPUT - 1)


def test_beams_sent_as_requests_hold_their_shared_blocks_and_a_tail_each() -> None:
    def blocks(churn: float) -> float:
        words = (*BEAMS, f"decoding.beam_churn={churn}")
        log = simulate(workload_of(*words), cost_model(deployment_of(config(*words))))
        return float((log.steps["token"] + log.steps["reserved"] + log.steps["internal"]).max() / SIZE)

    full = PROMPT // SIZE
    assert blocks(0) == full + 4 * 2  # behind the prompt's full blocks each beam has one more, and a tail
    assert blocks(0.75) == full + 1 + 4  # beams of one parent share that block


def test_the_next_token_is_sent_when_all_beams_have_answered() -> None:
    log = simulate(workload_of(*BEAMS), cost_model(deployment_of(config(*BEAMS))))
    by_length: dict[int, list[int]] = {}
    for place, tokens in enumerate(log.requests["prompt_tokens"].tolist()):
        by_length.setdefault(tokens, []).append(place)
    for tokens in range(PROMPT + 1, PROMPT + OUTPUT):
        ends = log.requests["finish_s"][by_length[tokens - 1]]
        assert (log.requests["arrival_s"][by_length[tokens]] == ends.max()).all()


def test_beams_of_equal_prompts_find_each_others_blocks() -> None:
    segments = (Segment(7, PROMPT),)
    first, second = (TraceRequest(rid, rid * 10**9, PROMPT, OUTPUT, segments) for rid in range(2))
    trace = one_prompt(rows=2)
    words = (*BEAMS, "decoding.beam_churn=0", "replay.mode=trace")
    workload = workload_of(*words, trace=trace.changed((first, second), "equal prompts"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.replay.beams.BeamGenealogy.parents", lambda *_: [0, 1, 2, 3])
        log = simulate(workload, cost_model(deployment_of(config(*words))))
    late = log.requests["arrival_s"] > 500
    length = log.requests["prompt_tokens"][late]
    assert (log.requests["hit_tokens"][late] == (length - 1) // SIZE * SIZE).all()
    assert log.requests["hit_tokens"][~late][0] == 0


def test_a_prediction_without_rows_has_the_figures_of_one_with_rows() -> None:
    workload, cost = workload_of(*BEAMS, trace=one_prompt(rows=5)), cost_model(deployment_of(config(*BEAMS)))
    kept = compute_metrics(simulate(workload, cost))
    folded = predict(workload, cost, rows=False).metrics
    for name in ("finished", "hit_tokens", "computed_tokens", "span", "internal_share"):
        assert folded[name] == pytest.approx(kept[name]), name


def test_a_prediction_without_rows_takes_a_point_that_samples_its_blocks() -> None:
    """`capacity` predicts so whatever the point would keep; residency needs the clock of the replay."""
    sampled, plain = (
        replace(workload_of(), replay=replace(workload_of().replay, residency=rate)) for rate in (1.0, None)
    )
    cost = cost_model(deployment_of(config()))
    assert predict(sampled, cost, rows=False).metrics == predict(plain, cost, rows=False).metrics


def test_beams_of_the_trace_are_sent_as_requests() -> None:
    workload = workload_of(
        "decoding.sharing=prefix_cache", "decoding.mode=greedy", trace=one_prompt(beam_width=4)
    )
    log = simulate(workload, cost_model(deployment_of(config())))
    assert len(log.requests["request_id"]) == 1 + 4 * (OUTPUT - 1)


def test_measured_beams_of_the_trace_are_refused_where_beams_keep_their_blocks() -> None:
    words = ("decoding.sharing=tail_at_fork", "measure=true", "decoding.mode=greedy")
    with pytest.raises(ConfigError, match="no indirection table"):
        workload_of(*words, trace=one_prompt(beam_width=4))


def test_samples_beside_beams_are_refused_for_the_prefix_cache() -> None:
    rows = (*one_prompt(beam_width=4).requests, replace(one_prompt(n=4).requests[0], request_id=1))
    with pytest.raises(ConfigError, match="have samples and beams"):
        workload_of("decoding.sharing=prefix_cache", trace=one_prompt().changed(rows, "both"))


@pytest.mark.parametrize(
    "override", ["device.data_parallel=2", "cache.answers=true", "cache.eviction=ttl", "replay.optimum=true"]
)
def test_what_does_not_know_the_requests_for_beams_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{override.partition('=')[0]}: .* none of the trace"):
        workload_of(*BEAMS, override)


@pytest.mark.parametrize(
    "overrides",
    [
        ("decoding.sharing=tail_at_fork", "measure=true", "decoding.beam_width=4"),
        ("decoding.sharing=prefix_cache", "cache.prefix_caching=false"),
        ("decoding.sharing=prefix_cache", "decoding.branch_hazard=0.1"),
        ("decoding.sharing=tail_at_fork", "cache.copy_at_fork=true"),
        ("decoding.sharing=tail_at_fork", "cache=contiguous_max"),
    ],
)
def test_what_a_way_of_sharing_does_not_go_with_is_refused(overrides: tuple[str, ...]) -> None:
    errors = [str(error) for error in check_config(config("decoding.n=4", *overrides))]
    assert any(error.startswith("decoding.sharing: ") for error in errors)
