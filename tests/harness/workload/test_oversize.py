"""Requests that never fit are found by the hardest ones alone, with the answer that a look at every one gives."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.options import Sharing
from harness.capacity.case import LoadCase
from harness.config.compose import compose_config
from harness.config.errors import ConfigError, UserError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.point.cost import cost_model
from harness.workload import point
from harness.workload.point import resolve
from harness.workload.simulate import predict
from traces.analysis.reuse import realised_prefix_share
from traces.errors import TraceError
from traces.formats.pagetwin import write_jsonl
from traces.synth.generator import generate_trace
from traces.trace import Requests, Segment, TraceRequest

POLICIES = ["paged", "contiguous_max", "contiguous_pow2", "contiguous_oracle"]


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(("measure=false", *texts))])


def answer(config: RunConfig) -> str:
    try:
        built = resolve(config)
    except (ConfigError, TraceError) as error:
        return str(error)
    return f"{len(built.trace.requests)} requests, {built.trace.header.dropped}"


@pytest.mark.nightly
@given(
    policy=st.sampled_from(POLICIES),
    pool=st.integers(64, 2000),
    block=st.sampled_from([1, 8, 16, 48]),
    chunked=st.booleans(),
    oversize=st.sampled_from(["error", "drop"]),
    seed=st.integers(0, 3),
)
def test_the_hardest_requests_give_the_answer_of_all(
    policy: str, pool: int, block: int, chunked: bool, oversize: str, seed: int
) -> None:
    config = composed(
        *(f"cache={policy}", f"cache.pool_tokens={pool}", f"cache.block_size={block}"),
        *(f"scheduler.chunked_prefill={str(chunked).lower()}", "scheduler.max_batched_tokens=300"),
        *("workload.num_requests=24", f"workload.oversize={oversize}", f"workload.seed={seed}"),
    )
    quick = answer(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point, "_all_fit", lambda whole: False)
        assert quick == answer(config)


@pytest.mark.parametrize("oversize", [(), ("cache.max_model_len=2000", "workload.oversize=drop")])
def test_the_time_before_the_first_request_that_is_left_counts_in_no_rate(
    oversize: tuple[str, ...], tmp_path: Path
) -> None:
    rows = [TraceRequest(i, 10**9 + i * 50_000, 64, 8, (Segment(None, 64),)) for i in range(20)]
    long = [TraceRequest(99, 0, 4000, 8, (Segment(None, 4000),))] if oversize else []
    spans = []
    for first, requests in enumerate((rows, [*long, *rows])):
        trace = generate_trace("azure_conv", num_requests=len(requests), seed=0)
        write_jsonl(replace(trace, requests=Requests.of(requests)), tmp_path / f"{first}.jsonl")
        named = ("trace=pagetwin", f"trace.path={tmp_path / f'{first}.jsonl'}", *oversize)
        built = resolve(composed(*named, "model=llama3_8b", "device=h100", "workload=as_recorded"))
        spans.append(predict(built, cost_model(built.deployment), rows=False).metrics["span"])
        assert "the 1000 s before it count in no rate" in built.trace.header.changes[-1]
    assert spans[0] == spans[1] < 2


def test_a_smaller_pool_is_not_taken_for_one_that_fits() -> None:
    texts = ("workload.num_requests=24", "cache.max_model_len=null")
    resolve(composed(*texts, "cache.pool_tokens=4096"))
    with pytest.raises(ConfigError, match="can never fit"):
        resolve(composed(*texts, "cache.pool_tokens=64"))


SERVED = [
    *("decoding.mode=greedy", "decoding.mode=sample decoding.n=3"),
    "decoding.mode=sample decoding.n=2 decoding.sharing=prefix_cache",
    "decoding.mode=greedy decoding.beam_width=2 decoding.sharing=prefix_cache",
]


@pytest.mark.nightly
@given(
    share=st.floats(0, 1),
    requests=st.integers(3, 60),
    most=st.none() | st.integers(3, 60),
    texts=st.integers(1, 12),
    longest=st.sampled_from([600, 1500, 8192]),
    sent=st.sampled_from(["replay=poisson", "replay=gamma", "replay.mode=closed", "replay=offline"]),
    served=st.sampled_from(SERVED),
    trace=st.sampled_from(["azure_conv", "sosp23_alpaca", "mooncake_conversation"]),
    seed=st.integers(0, 99),
)
def test_the_requests_that_are_left_share_what_was_asked_for_or_the_largest_share_is_named(
    share: float,
    requests: int,
    most: int | None,
    texts: int,
    longest: int,
    sent: str,
    served: str,
    trace: str,
    seed: int,
) -> None:
    """Also where windows of the trace are simulated. Samples that are sent one by one share their prompt besides."""
    words = [
        *("trace.format=generated", f"trace.name={trace}", "workload=as_recorded", "workload.request_rate=4"),
        *("workload.oversize=drop", f"workload.num_requests={requests}", f"workload.num_prefixes={texts}"),
        *(f"workload.seed={seed}", f"cache.max_model_len={longest}", "model=llama3_8b", "device=h100", sent),
        *served.split(),
    ]
    said = answer_of(words, share, most)
    # the whole trace names the largest share that it reaches, a window of it then its own
    while found := re.search(r"the (?:largest|nearest) share that .* reach is ([\d.]+),", said):
        assert abs(float(found[1]) - share) > 0.02
        share = float(found[1])
        said = answer_of(words, share, most)
    assert "no request " in said or abs(float(said) - share) <= 0.02


def answer_of(words: list[str], share: float, most: int | None) -> str:
    """The share that is reached, each request once, or why there is none."""
    config = composed(*words, f"workload.prefix_share={share}")
    try:
        whole = resolve(config).trace
        trace = whole if most is None else LoadCase(config, (), requests=most).trace
    except (ConfigError, UserError) as error:
        return str(error)
    rows, one_of = (
        trace.columns,
        2 if config.decoding.sharing is Sharing.prefix_cache and config.decoding.n > 1 else 1,
    )
    return str(
        realised_prefix_share(trace.changed(rows.take(np.flatnonzero(rows.request_id % one_of == 0)), "once"))
    )


def test_samples_of_requests_that_are_left_out_are_not_counted_for_requests() -> None:
    words = [
        "trace.format=generated",
        "trace.name=azure_conv",
        "workload=as_recorded",
        "workload.num_requests=40",
    ]
    words += [
        "cache.max_model_len=1500",
        "model=llama3_8b",
        "device=h100",
        "decoding.mode=sample",
        "decoding.n=3",
    ]
    shared, alone = (
        LoadCase(composed(*words, f"decoding.sharing={sharing}"), ()).scope
        for sharing in ("prefix_cache", "copy_on_write")
    )
    assert (shared.simulated, shared.simulated_tokens) == (alone.simulated, alone.simulated_tokens)
    assert shared.left_out == alone.left_out != {}
    assert f"sent as {3 * shared.simulated} requests of one sample each" in str(shared)
