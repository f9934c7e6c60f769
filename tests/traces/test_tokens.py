"""Token ids from prefix keys: fixed vectors, and the sharing that they must and must not create."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.errors import ParameterError
from traces.tokens import token_ids
from traces.trace import Segment, TraceRequest

VECTORS = {
    (7, 12): [19108, 47341, 11936, 17017, 6984, 49957, 29391, 14613],
    (7, 13): [5145, 49964, 7628, 49592, 17937, 34608, 44504, 39103],
    (8, 12): [19735, 46261, 35757, 9902, 35720, 25079, 14038, 23520],
}

segment_lists = st.lists(
    st.tuples(st.none() | st.integers(0, 2**64 - 1), st.integers(1, 40)), min_size=1, max_size=5
)


def request(segments: list[tuple[int | None, int]], request_id: int = 0) -> TraceRequest:
    made = tuple(Segment(*segment) for segment in segments)
    return TraceRequest(request_id, 0, sum(segment.tokens for segment in made), 1, made)


def ids(segments: list[tuple[int | None, int]], *, request_id: int = 0, seed: int = 7) -> list[int]:
    return token_ids(request(segments, request_id), seed=seed, vocab_size=50_000, first_id=256).tolist()


@pytest.mark.parametrize(("seed", "key"), VECTORS)
def test_first_tokens_of_a_key_are_fixed(seed: int, key: int) -> None:
    assert ids([(key, 8)], seed=seed) == VECTORS[seed, key]


def test_late_tokens_of_a_key_are_fixed() -> None:
    assert ids([(12, 512)])[509:] == [11297, 41300, 11256]


@given(segment_lists, st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_there_is_one_usable_id_for_each_prompt_token(segments, seed: int, request_id: int) -> None:
    made = request(segments, request_id)
    tokens = token_ids(made, seed=seed, vocab_size=300, first_id=256)
    assert tokens.shape == (made.prompt_tokens,)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 256
    assert tokens.max() < 300


@given(st.integers(0, 2**64 - 1), st.integers(1, 60), st.integers(1, 60))
def test_a_shorter_segment_is_a_prefix_of_a_longer_one(key: int, short: int, more: int) -> None:
    assert ids([(key, short + more)])[:short] == ids([(key, short)])


@given(st.integers(0, 2**63), segment_lists)
def test_tokens_of_a_key_do_not_depend_on_what_stands_before(key: int, before) -> None:
    assert ids([*before, (key, 20)])[-20:] == ids([(key, 20)])


def test_unique_segments_of_two_requests_differ() -> None:
    assert ids([(None, 20)], request_id=1) != ids([(None, 20)], request_id=2)


def test_two_unique_segments_of_one_request_differ() -> None:
    tokens = ids([(None, 20), (None, 20)])
    assert tokens[:20] != tokens[20:]


def test_unique_segments_are_the_same_in_every_run() -> None:
    assert ids([(None, 20)], request_id=9) == ids([(None, 20)], request_id=9)


def test_unique_segments_depend_on_the_seed() -> None:
    assert ids([(None, 20)], seed=7) != ids([(None, 20)], seed=8)


def test_a_vocabulary_without_usable_ids_is_refused() -> None:
    with pytest.raises(ParameterError, match="vocab_size: above first_id 256"):
        token_ids(request([(1, 1)]), seed=0, vocab_size=256, first_id=256)
