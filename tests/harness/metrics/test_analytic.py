"""Closed forms against brute force over every step, and against published examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.metrics import METRICS
from harness.metrics import analytic as forms
from harness.metrics.analytic import CacheShape, Lengths, analytic_metrics, ideal_hit_tokens
from traces.trace import SegmentColumns

REQUESTS = st.lists(st.tuples(st.integers(1, 90), st.integers(2, 60)), min_size=1, max_size=6)


def lengths(*requests: tuple[int, int], **options) -> Lengths:
    prompt, output = np.array(requests, dtype=np.int64).T
    return Lengths(prompt, output, **options)


def ideal_hits(prompts: list[tuple[int, list[tuple[int | None, int]]]], block_size: int) -> int:
    tokens = np.array([tokens for tokens, _ in prompts], dtype=np.int64)
    segments = SegmentColumns.of([segments for _, segments in prompts])
    return ideal_hit_tokens(Lengths(tokens, np.ones_like(tokens), segments), block_size)


def every_step(given_lengths: Lengths):
    """(prompt, tokens held, final tokens) at every decode step of one sequence of every request."""
    for prompt, output in zip(
        given_lengths.prompt_tokens.tolist(), given_lengths.output_tokens.tolist(), strict=True
    ):
        for held in range(prompt + 1, prompt + output):
            yield prompt, held, prompt + output - 1


def brute_split(given_lengths: Lengths, block: int) -> dict[str, float]:
    token = internal = allocated = 0
    for prompt, held, final in every_step(given_lengths):
        shared = (given_lengths.width - 1) * (prompt // block * block)
        blocks = -(-held // block)
        token += given_lengths.width * held - shared
        allocated += given_lengths.width * blocks * block - shared
        internal += given_lengths.width * max(0, blocks * block - final)
    return {"utilisation": token / allocated, "internal_of_allocated": internal / allocated}


@pytest.mark.nightly
@given(requests=REQUESTS, block=st.sampled_from([1, 4, 16, 32]), width=st.integers(1, 4))
def test_paged_split_equals_the_sum_over_steps(requests, block, width):
    workload = lengths(*requests, width=width)
    split = forms.paged_split(workload, block)
    for name, expected in brute_split(workload, block).items():
        assert split[name] == pytest.approx(expected)
    assert sum(split.values()) == pytest.approx(1.0)


@given(requests=REQUESTS, block=st.sampled_from([1, 4, 16, 32]))
def test_tail_waste_equals_the_mean_over_steps(requests, block):
    workload = lengths(*requests)
    expected = np.mean([-held % block for _, held, _ in every_step(workload)])
    assert forms.tail_waste(workload, block) == pytest.approx(expected)


def test_tail_waste_of_uniform_lengths_is_half_a_block():
    assert forms.tail_waste(lengths((16, 1601)), 16) == forms.expected_tail_waste(16) == 7.5


def test_block_size_one_wastes_nothing():
    assert forms.tail_waste(lengths((5, 9), (3, 2)), 1) == 0.0


@pytest.mark.parametrize(("width", "blocks"), [(1, 5), (4, 8)])
def test_blocks_of_the_published_beam_example(width, blocks):
    assert forms.blocks_allocated(lengths((64, 10), width=width), 16) == blocks


def test_a_single_output_token_never_forks():
    workload = lengths((20, 1), width=4)
    assert forms.blocks_allocated(workload, 16) == 2
    assert forms.forked_copies(workload, 16) == 0


def test_forks_copy_only_where_the_prompt_ends_inside_a_block():
    assert forms.forked_copies(lengths((40, 5), (32, 5), width=3), 16) == 2


@pytest.mark.parametrize(("width", "printed"), [(2, 6.09), (4, 8.53), (6, 9.79)])
def test_parallel_saving_is_near_the_published_figures(width, printed):
    assert 100 * forms.parallel_saving(0.12, width) == pytest.approx(printed, abs=0.5)


def test_forked_saving_counts_shared_blocks_once():
    """A 32-token prompt and 2 forks of 1 more step: 3 blocks each, 2 of them shared: 4 of 6 remain."""
    assert forms.forked_saving(lengths((32, 2), width=2), 16) == pytest.approx(1 / 3)


def test_reserve_max_of_the_published_waste_example():
    """80 of 2048 reserved slots in use leave 96.1 % dead."""
    split = forms.reserved_split(lengths((79, 2)), 2048)
    assert split["utilisation"] == pytest.approx(80 / 2048)
    assert split["internal_of_allocated"] == pytest.approx(1968 / 2048)


def test_final_internal_slots_ignore_the_token_that_is_never_fed_back():
    assert forms.final_internal_slots(lengths((10, 7), (10, 8)), 16).tolist() == [0, 15]


def test_ideal_hits_stop_one_token_short_of_the_prompt():
    prompts = [(48, [(7, 48)]), (48, [(7, 48)])]
    assert ideal_hits(prompts, 16) == 32


def test_ideal_hits_are_whole_blocks_of_the_common_prefix():
    prompts = [(100, [(1, 40), (None, 60)]), (100, [(1, 50), (None, 50)]), (100, [(2, 40), (None, 60)])]
    assert ideal_hits(prompts, 16) == 32


def test_nothing_is_shared_behind_a_difference():
    prompts = [(64, [(1, 32), (2, 32)]), (64, [(9, 32), (2, 32)]), (80, [(1, 16), (2, 64)])]
    assert ideal_hits(prompts, 16) == 16


@given(
    prompts=st.lists(
        st.lists(st.tuples(st.integers(1, 2), st.sampled_from([3, 8, 16])), max_size=4), max_size=8
    ),
    block=st.sampled_from([1, 4, 8]),
)
def test_ideal_hits_equal_those_of_a_cache_of_token_prefixes(prompts, block):
    seen: set[tuple[tuple[int, int], ...]] = set()
    expected = 0
    for segments in prompts:
        ids = [(key, position) for key, tokens in segments for position in range(tokens)] + [(0, 0)]
        names = [tuple(ids[: (i + 1) * block]) for i in range((len(ids) - 1) // block)]
        hit = next((i for i, name in enumerate(names) if name not in seen), len(names))
        expected += hit * block
        seen.update(names)
    asked = [(sum(t for _, t in segments) + 1, [*segments, (None, 1)]) for segments in prompts]
    assert ideal_hits(asked, block) == expected


def test_work_is_what_the_cache_does_not_hold():
    workload = lengths((48, 3), (48, 3), width=2, segments=SegmentColumns.of([[(7, 48)], [(7, 48)]]))
    figures = analytic_metrics(workload, CacheShape(16))
    assert figures["hit_tokens"] == 32
    assert figures["computed_tokens"] == 2 * (48 + 2 * 2) - 32


def test_prefix_caching_off_finds_nothing():
    workload = lengths((48, 3), (48, 3), segments=SegmentColumns.of([[(7, 48)], [(7, 48)]]))
    assert analytic_metrics(workload, CacheShape(16, prefix_caching=False))["hit_tokens"] == 0


def test_beams_have_no_closed_form_of_sharing():
    figures = analytic_metrics(lengths((48, 9), width=4, beam=True), CacheShape(16))
    assert "sharing_saving" not in figures
    assert "blocks_allocated" not in figures
    assert "tail_waste" in figures


def test_contiguous_reserves_the_maximum_for_everyone():
    figures = analytic_metrics(lengths((10, 3)), CacheShape(1, reserve_tokens=100))
    assert figures["utilisation"] == pytest.approx((11 + 12) / 200)
    assert figures["tail_waste"] == pytest.approx((89 + 88) / 2)
    assert figures["hit_tokens"] == 0


def test_no_requests_have_no_figures():
    empty = np.array([], dtype=np.int64)
    assert analytic_metrics(Lengths(empty, empty), CacheShape(16)) == {}


def test_every_analytic_figure_is_a_defined_metric():
    workload = lengths((48, 3), (50, 3), width=2)
    assert set(analytic_metrics(workload, CacheShape(16))) <= set(METRICS)
