"""Reshaping: what each change does, says and leaves alone; and that a window is reshaped like the whole."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.analysis.reuse import realised_prefix_share
from traces.errors import ParameterError
from traces.reshape import (
    drop_oversize,
    one_request_per_sample,
    repeated,
    scale_lengths,
    set_rate,
    share_prefixes,
    take,
)
from traces.synth.generator import generate_trace
from traces.trace import AFTER, Segment, Trace, TraceHeader, TraceRequest

lengths = st.integers(1, 3_000)
paths = st.lists(
    st.lists(st.tuples(st.integers(0, 3), lengths), min_size=1, max_size=5), min_size=1, max_size=6
)
factors = st.floats(0.01, 3)


def make_trace(prompts: list[list[tuple[int | None, int]]], gap_us: int = 1_000_000) -> Trace:
    requests = []
    for number, prompt in enumerate(prompts):
        segments = tuple(Segment(*segment) for segment in prompt)
        total = sum(segment.tokens for segment in segments)
        requests.append(TraceRequest(number, number * gap_us, total, 10 + number, segments))
    header = TraceHeader("made", "made", "test", "content", None, 1, "00", len(prompts), len(prompts))
    return Trace(header, tuple(requests))


def chained(prompts: list[list[tuple[int, int]]]) -> Trace:
    """Keys renamed after their path, as chained keys are."""
    names: dict[tuple, int] = {}
    renamed = []
    for prompt in prompts:
        path: tuple = ()
        row = []
        for key, tokens in prompt:
            path = (*path, (key, tokens))
            row.append((names.setdefault(path, len(names)), tokens))
        renamed.append(row)
    return make_trace(renamed)


def books_balance(trace: Trace) -> bool:
    header = trace.header
    return header.rows_read == header.rows_kept + sum(header.dropped.values())


AZURE = generate_trace("azure_conv", num_requests=600, seed=0)


def test_take_keeps_the_first_requests_and_says_of_how_many() -> None:
    taken = take(AZURE, 64)
    assert taken.requests == AZURE.requests[:64]
    assert taken.header.changes == ("the first 64 of 600 requests",)


@pytest.mark.parametrize("count", [600, 601])
def test_take_of_everything_changes_nothing(count: int) -> None:
    assert take(AZURE, count) is AZURE


def test_take_of_nothing_is_refused() -> None:
    with pytest.raises(ParameterError, match="num_requests: at least 1"):
        take(AZURE, 0)


@given(paths, factors)
def test_scaled_segments_still_sum_to_the_prompt(prompts, factor: float) -> None:
    for request in scale_lengths(make_trace(prompts), factor).requests:
        assert sum(segment.tokens for segment in request.segments) == request.prompt_tokens
        assert all(segment.tokens >= 1 for segment in request.segments)


@given(paths, factors)
def test_scaling_moves_every_length_to_the_nearest_token_but_never_below_one(prompts, factor: float) -> None:
    trace = make_trace(prompts)
    for before, after in zip(trace.requests, scale_lengths(trace, factor).requests, strict=True):
        for old, new in (
            (before.prompt_tokens, after.prompt_tokens),
            (before.output_tokens, after.output_tokens),
        ):
            assert new == 1 or abs(new - old * factor) <= 0.5


@given(paths, factors)
def test_scaled_chained_prefixes_keep_equal_boundaries(prompts, factor: float) -> None:
    ends: dict[int, int] = {}
    for request in scale_lengths(chained(prompts), factor).requests:
        end = 0
        for key, tokens in request.segments:
            end += tokens
            if request.prompt_tokens > 1:
                assert ends.setdefault(key, end) == end


def test_scaling_keeps_the_share_of_prefixes() -> None:
    trace = make_trace([[(1, 512), (2, 512), (None, 200)], [(1, 512), (2, 512), (None, 900)]])
    assert realised_prefix_share(scale_lengths(trace, 0.25)) == realised_prefix_share(trace)


def test_scaling_scales_the_known_granularity_of_sharing() -> None:
    trace = make_trace([[(1, 512)]])
    trace = Trace(type(trace.header)(**{**vars(trace.header), "source_block_tokens": 512}), trace.requests)
    assert scale_lengths(trace, 0.125).header.source_block_tokens == 64


def test_scaling_by_one_changes_nothing() -> None:
    assert scale_lengths(AZURE, 1.0) is AZURE


def test_scaling_names_its_factor() -> None:
    assert scale_lengths(AZURE, 0.1).header.changes == ("prompt and output lengths multiplied by 0.1",)


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_factor_that_is_no_factor_is_refused(factor: float) -> None:
    with pytest.raises(ParameterError, match="factor: above 0 expected"):
        scale_lengths(AZURE, factor)


@given(st.floats(0, 1), st.integers(1, 20), st.floats(0, 3), st.integers(0, 99), st.integers(1, 4))
def test_the_share_of_prompt_tokens_is_the_one_that_was_asked_for_or_refused(
    share: float, count: int, zipf: float, seed: int, tenants: int
) -> None:
    """Also where tenants have salts, so that each pays for the first use of a text."""
    few = take(AZURE, 40)
    salted = tuple(replace(row, salt=str(row.request_id % tenants)) for row in few.requests)
    few = replace(few, requests=salted)
    try:
        shared = share_prefixes(few, share, count, zipf, seed)
    except ParameterError as error:
        largest = float(re.search(r"largest share .* reach is ([\d.]+),", str(error))[1])
        assert largest < share - 0.018
        assert realised_prefix_share(share_prefixes(few, largest, count, zipf, seed)) >= largest - 0.001
        return
    assert abs(realised_prefix_share(shared) - share) <= 0.02
    assert [row.prompt_tokens for row in shared.requests] == [row.prompt_tokens for row in few.requests]


def test_a_share_between_two_steps_of_short_prompts_is_refused_with_the_nearest() -> None:
    with pytest.raises(ParameterError, match=r"the nearest share that 2 requests with 1 texts reach is 0\.5"):
        share_prefixes(make_trace([[(None, 1)], [(None, 1)]]), 0.3, 1, 1, 0)


def test_sharing_nothing_makes_all_prompts_unique() -> None:
    trace = share_prefixes(make_trace([[(1, 50)], [(1, 50)]]), 0, 8, 1, 0)
    assert realised_prefix_share(trace) == 0
    assert trace.header.changes == ("every prompt is unique: recorded sharing removed",)


def test_sharing_nothing_in_a_trace_without_sharing_changes_nothing() -> None:
    assert share_prefixes(AZURE, 0, 8, 1, 0) is AZURE


def test_prefix_popularity_follows_zipf() -> None:
    trace = share_prefixes(generate_trace("azure_conv", num_requests=12_000, seed=1), 0.5, 4, 1.0, 3)
    counts = Counter(request.segments[0].key for request in trace.requests)
    shares = [counts[key] / 12_000 for key in sorted(counts)]
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)


def test_prefix_popularity_is_uniform_at_exponent_zero() -> None:
    trace = share_prefixes(generate_trace("azure_conv", num_requests=12_000, seed=1), 0.5, 4, 0.0, 3)
    counts = Counter(request.segments[0].key for request in trace.requests)
    assert [count / 12_000 for count in counts.values()] == pytest.approx([0.25] * 4, abs=0.02)


def test_prefix_keys_cannot_meet_the_keys_of_a_file() -> None:
    trace = share_prefixes(AZURE, 0.5, 8, 1, 0)
    assert all(request.segments[0].key >= 2**63 for request in trace.requests)


def test_a_window_begins_with_the_same_texts() -> None:
    whole = share_prefixes(AZURE, 0.5, 8, 1, 0)
    window = share_prefixes(Trace(AZURE.header, AZURE.requests[200:300]), 0.5, 8, 1, 0)
    assert [row.segments[0].key for row in window.requests] == [
        row.segments[0].key for row in whole.requests[200:300]
    ]


def test_shared_prefixes_depend_on_the_seed() -> None:
    assert share_prefixes(AZURE, 0.5, 8, 1, 0).digest != share_prefixes(AZURE, 0.5, 8, 1, 1).digest


def test_sharing_names_itself() -> None:
    (sentence,) = share_prefixes(AZURE, 0.5, 8, 1, 0).header.changes
    assert re.fullmatch(
        r"0\.5 of the prompt tokens are shared: each prompt begins with 0\.5\d+ of its length from one of 8 texts "
        r"\(Zipf exponent 1\), the rest is unique",
        sentence,
    )


@pytest.mark.parametrize(
    ("share", "count", "zipf", "parameter"),
    [(1.5, 8, 1, "share"), (-0.1, 8, 1, "share"), (0.5, 0, 1, "num_prefixes"), (0.5, 8, -1, "zipf")],
)
def test_sharing_out_of_range_is_refused(share: float, count: int, zipf: float, parameter: str) -> None:
    with pytest.raises(ParameterError, match=f"^{parameter}: "):
        share_prefixes(AZURE, share, count, zipf, 0)


@given(st.floats(0.01, 1000))
def test_the_rate_is_reached_by_scaling_time(rate: float) -> None:
    arrivals = [request.arrival_us for request in set_rate(AZURE, rate).requests]
    assert 599 / (arrivals[-1] / 1e6) == pytest.approx(rate, rel=1e-3)
    assert arrivals == sorted(arrivals)


def test_a_rate_change_keeps_the_shape_of_the_gaps() -> None:
    doubled = set_rate(make_trace([[(1, 5)]] * 3, gap_us=1_000_000), 2.0)
    assert [request.arrival_us for request in doubled.requests] == [0, 500_000, 1_000_000]


def test_a_rate_change_leaves_lengths_alone() -> None:
    after = set_rate(AZURE, 1.0).requests
    assert [r.segments for r in after] == [r.segments for r in AZURE.requests]


def test_a_rate_change_names_both_rates() -> None:
    assert set_rate(make_trace([[(1, 5)]] * 3), 2.0).header.changes == ("time scaled from 1 to 2 requests/s",)


def test_the_rate_that_a_trace_has_changes_nothing() -> None:
    trace = make_trace([[(1, 5)]] * 3)
    assert set_rate(trace, 1.0) is trace


def test_one_request_has_no_rate_to_change() -> None:
    trace = make_trace([[(1, 5)]])
    assert set_rate(trace, 3.0) is trace


def test_a_rate_for_simultaneous_requests_is_refused() -> None:
    with pytest.raises(ParameterError, match="all requests arrive at one instant"):
        set_rate(make_trace([[(1, 5)]] * 2, gap_us=0), 1.0)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf")])
def test_a_rate_that_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ParameterError, match="requests_per_s: above 0"):
        set_rate(AZURE, rate)


@given(paths, st.integers(2, 4), st.data())
def test_each_copy_of_a_trace_has_requests_sessions_and_texts_of_its_own(prompts, times: int, data) -> None:
    trace = make_trace(prompts)
    rows = [
        replace(row, session="s", parent=0, after=(0,), output_key=5, salt="t")
        if data.draw(st.booleans())
        else row
        for row in trace.requests
    ]
    trace = replace(trace, requests=rows)
    found, count = repeated(trace, times).requests, len(rows)
    assert list(found[:count]) == rows
    texts = [{part.key for part in row.segments} | {row.output_key} for row in found]
    for copy in range(1, times):
        its_own, zero = found[copy * count : (copy + 1) * count], copy * count
        gaps = {new.arrival_us - old.arrival_us for old, new in zip(rows, its_own, strict=True)}
        assert len(gaps) == 1
        for old, new in zip(rows, its_own, strict=True):
            assert (new.prompt_tokens, new.output_tokens, new.salt) == (
                old.prompt_tokens,
                old.output_tokens,
                old.salt,
            )
            assert [part.tokens for part in new.segments] == [part.tokens for part in old.segments]
            assert (new.session is None) == (old.session is None)
            assert (new.session, new.after, new.parent) in (
                (f"s#{copy}", (zero,), zero),
                (None, (), None),
            )
        assert set.union(*texts[:zero]) & set.union(*texts[zero : zero + count]) <= {None}
    assert len({row.request_id for row in found}) == times * count


@given(st.integers(0, 50), st.sampled_from([0.0, 1e-9, 0.02, 0.3]))
def test_samples_that_are_requests_of_their_own_leave_what_different_requests_share(
    seed: int, share: float
) -> None:
    shared = share_prefixes(
        make_trace([[(None, 9 + 5 * number)] for number in range(8)]), share, 2, 1.0, seed
    )
    samples = one_request_per_sample(shared, dict.fromkeys(range(8), 2))
    first = [index for index, row in enumerate(samples.requests) if row.request_id % 2 == 0]
    alone = samples.changed(samples.columns.take(first), "the first sample of each request")
    assert realised_prefix_share(alone) == realised_prefix_share(shared)


def test_oversize_requests_are_dropped_and_counted_by_reason() -> None:
    trace = make_trace([[(1, 5)], [(1, 50)], [(1, 60)]])
    kept = drop_oversize(trace, dict.fromkeys((1, 2), "prompt_over_limit"))
    assert [request.request_id for request in kept.requests] == [0]
    assert kept.header.dropped == {"prompt_over_limit": 2}
    assert kept.header.changes == ("dropped 2 (prompt_over_limit)",)
    assert books_balance(kept)


def test_a_turn_behind_a_dropped_one_waits_for_the_turn_before_that() -> None:
    trace = make_trace([[(None, 5)], [(None, 50)], [(None, 9)]])
    turns = [
        replace(row, session="s", parent=number - 1, after=(number - 1,), release=AFTER) if number else row
        for number, row in enumerate(trace.requests)
    ]
    first, last = drop_oversize(trace.changed(tuple(turns), "turns"), {1: "prompt_over_limit"}).requests
    assert (first.request_id, last.request_id) == (0, 2)
    assert (last.parent, last.after, last.release) == (0, (0,), AFTER)


def test_dropping_nothing_changes_nothing() -> None:
    assert drop_oversize(AZURE, {}) is AZURE


def test_changes_are_listed_in_the_order_in_which_they_were_made() -> None:
    trace = set_rate(share_prefixes(scale_lengths(take(AZURE, 10), 0.5), 0.5, 2, 1, 0), 3.0)
    assert [sentence.split()[0] for sentence in trace.header.changes] == ["the", "prompt", "0.5", "time"]


@given(st.integers(1, 600))
def test_a_window_of_a_reshaped_trace_is_the_reshaped_window(count: int) -> None:
    def reshape(trace: Trace) -> Trace:
        return scale_lengths(trace, 0.3)

    assert reshape(take(AZURE, count)).requests == take(reshape(AZURE), count).requests
