"""Generated traces match the tables that they are drawn from, and the data behind the tables as closely as stated."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiers import tier

from traces.analysis.statistics import trace_statistics
from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError
from traces.reading import detect_format, read_trace
from traces.synth.generator import TABLES, LengthTable, generate_trace, load_table
from traces.trace import Segment, Trace

COUNT = tier(5_000, 20_000)
EXPECTED_LENGTHS = [(1465, 403), (1192, 111), (1111, 91), (1008, 186)]
KS_999 = 1.95 / COUNT**0.5  # Kolmogorov's 99.9 % point: what chance alone may add to a distance
SIDES = ("prompt_tokens", "output_tokens")
RECORDED = {
    "azure_conv": "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
    "azure_code": "azure-llm-2023/AzureLLMInferenceTrace_code.first4000.csv",
    "mooncake_conversation": "mooncake-fast25/conversation_trace.jsonl",
    "mooncake_synthetic": "mooncake-fast25/synthetic_trace.first1900.jsonl",
    "ragpulse": "ragpulse/0_trace.jsonl",
    "sharegpt_8k": "etalon-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    "bwb": "etalon-lengths/bwb_stats_llama2_tokenizer_filtered_v2.csv",
    "arxiv": "vidur-lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
}
CLOCK = ArrivalProcess("poisson", 1.0)


@pytest.fixture(scope="module", params=tier(TABLES[::3], TABLES))
def generated(request: pytest.FixtureRequest) -> Trace:
    return generate_trace(request.param, num_requests=COUNT, seed=11)


def column(trace: Trace, side: str) -> np.ndarray:
    return np.array([getattr(request, side) for request in trace.requests])


def empirical_cdf(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(values), at, "right") / len(values)


def length_table(name: str, side: str) -> LengthTable:
    return getattr(load_table(name), side)


@pytest.mark.parametrize("side", SIDES)
def test_lengths_follow_the_table(generated: Trace, side: str) -> None:
    lengths = column(generated, side)
    points = np.unique(lengths).astype(float)
    distance = np.abs(
        empirical_cdf(lengths, points) - length_table(generated.header.name, side).cdf(points)
    ).max()
    assert distance < KS_999


@pytest.mark.parametrize("side", SIDES)
def test_mean_length_is_that_of_the_data_as_closely_as_stated(generated: Trace, side: str) -> None:
    table = length_table(generated.header.name, side)
    lengths = column(generated, side)
    noise = 4 * lengths.std() / COUNT**0.5 / table.mean
    assert lengths.mean() / table.mean == pytest.approx(table.mean_ratio, abs=noise)


@pytest.mark.parametrize("generated", RECORDED, indirect=True)
def test_lengths_are_as_close_to_the_recorded_ones_as_stated(
    generated: Trace, published: Callable[[str], Path]
) -> None:
    name = generated.header.name
    path = published(RECORDED[name])
    clock = CLOCK if detect_format(path) == "lengths" else None
    trace = read_trace(path, arrivals=clock)
    for side in SIDES:
        recorded = column(trace, side)
        points = np.unique(recorded)
        distance = np.abs(
            empirical_cdf(column(generated, side), points) - empirical_cdf(recorded, points)
        ).max()
        assert distance < length_table(name, side).ks + KS_999, side


def test_prompt_and_output_lengths_depend_on_each_other_as_the_header_says(generated: Trace) -> None:
    stated = generated.header.calibration["generated_prompt_output_spearman"]
    assert trace_statistics(generated)["prompt_output_spearman"] == pytest.approx(stated, abs=0.03)


def test_a_table_whose_data_depend_is_drawn_with_their_rank_correlation() -> None:
    stated = {name: load_table(name).prompt_output_spearman for name in TABLES if load_table(name).copula}
    assert stated["bwb"] == pytest.approx(0.81, abs=0.01)
    assert stated["mooncake_synthetic"] == pytest.approx(-0.42, abs=0.01)


def test_mean_arrival_rate_is_the_table_s(generated: Trace) -> None:
    arrivals = load_table(generated.header.name).arrivals
    noise = 4 / (arrivals.gamma_shape * COUNT) ** 0.5
    assert trace_statistics(generated)["arrivals"]["rate_rps"] == pytest.approx(arrivals.rate_rps, rel=noise)


def test_gaps_have_the_coefficient_of_variation_of_the_gamma_shape(generated: Trace) -> None:
    shape = load_table(generated.header.name).arrivals.gamma_shape
    assert trace_statistics(generated)["arrivals"]["gap_cv"] == pytest.approx(shape**-0.5, rel=7 / COUNT**0.5)


def test_every_prompt_is_unique_unless_the_table_names_a_shared_prefix(generated: Trace) -> None:
    shared = load_table(generated.header.name).shared_prefix_tokens
    if shared:
        firsts = {request.segments[0] for request in generated.requests if request.prompt_tokens > shared}
        assert firsts == {Segment(generated.requests[0].segments[0].key, shared)}
        return
    assert all(request.segments == (Segment(None, request.prompt_tokens),) for request in generated.requests)


def test_the_header_names_source_licence_and_quality(generated: Trace) -> None:
    header = generated.header
    origin = str(header.calibration["calibrated_on"])
    assert "github.com" in origin or "calibrated to the" in origin
    assert "data" in header.licence or "published" in header.licence
    assert {
        "prompt_ks",
        "output_mean_ratio",
        "arrival_gamma_ks",
        "recorded_gap_cv",
    } <= header.calibration.keys()


def test_a_shorter_trace_is_the_beginning_of_a_longer_one() -> None:
    long, short = (generate_trace("azure_conv", num_requests=n, seed=5) for n in (500, 64))
    assert short.requests == long.requests[:64]


def test_seeds_give_different_traces() -> None:
    digests = {generate_trace("azure_conv", num_requests=50, seed=seed).digest for seed in (0, 1, 2)}
    assert len(digests) == 3


def test_the_default_trace_is_fixed() -> None:
    """A changed stream or table would change every stored result: this test is where that is noticed."""
    first = generate_trace("azure_conv", num_requests=4, seed=0).requests
    assert [(r.prompt_tokens, r.output_tokens) for r in first] == EXPECTED_LENGTHS


def test_one_request_arrives_at_zero() -> None:
    assert [r.arrival_us for r in generate_trace("azure_code", num_requests=1, seed=0).requests] == [0]


def test_an_unknown_table_is_refused_with_the_tables_there_are() -> None:
    with pytest.raises(ParameterError, match='no table "azure"; there are azure_conv, azure_code'):
        generate_trace("azure", num_requests=1, seed=0)


def test_no_requests_are_refused() -> None:
    with pytest.raises(ParameterError, match="num_requests: at least 1 expected, found 0"):
        generate_trace("azure_conv", num_requests=0, seed=0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ParameterError, match="seed: from 0"):
        generate_trace("azure_conv", num_requests=1, seed=-1)
