import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.core.identity import KeyIdentity, TokenIdentity

SEGMENTS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 13)), min_size=1, max_size=5
)


def tokens_of(request_id: int, segments: list[tuple[int | None, int]]) -> np.ndarray:
    """Tokens that depend on (key, position in the segment) alone, unique ones on the request too."""
    parts = []
    for index, (key, tokens) in enumerate(segments):
        stream = (key + 1) * 1_000 if key is not None else 1_000_000 + request_id * 10_000 + index * 100
        parts.append(stream + np.arange(tokens))
    return np.concatenate(parts)


def shared_blocks(one: list, other: list) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(SEGMENTS, SEGMENTS, st.sampled_from([1, 2, 4, 8]))
def test_keys_and_tokens_share_the_same_blocks(one: list, other: list, block_size: int) -> None:
    by_key = [KeyIdentity(i, s).prompt_names(block_size) for i, s in enumerate((one, other))]
    by_token = [
        TokenIdentity(i, tokens_of(i, s)).prompt_names(block_size) for i, s in enumerate((one, other))
    ]
    assert shared_blocks(*by_key) == shared_blocks(*by_token)


@given(SEGMENTS, st.sampled_from([1, 3, 16]))
def test_a_prompt_has_one_name_per_full_block(segments: list, block_size: int) -> None:
    total = sum(tokens for _, tokens in segments)
    assert len(KeyIdentity(0, segments).prompt_names(block_size)) == total // block_size


def test_equal_blocks_behind_different_prefixes_have_different_names() -> None:
    one = TokenIdentity(0, np.array([1, 2, 9, 9])).prompt_names(2)
    other = TokenIdentity(1, np.array([3, 4, 9, 9])).prompt_names(2)
    assert one[1] != other[1]


def test_a_salt_isolates_tenants() -> None:
    tokens = np.arange(8)
    assert TokenIdentity(0, tokens, "a").prompt_names(4) != TokenIdentity(0, tokens, "b").prompt_names(4)
    assert KeyIdentity(0, [(5, 8)], "a").prompt_names(4) != KeyIdentity(0, [(5, 8)], "b").prompt_names(4)


def test_generated_blocks_are_private_to_request_and_branch() -> None:
    names = {
        KeyIdentity(request, [(1, 8)]).generated_name(branch, block)
        for request in range(3)
        for branch in range(3)
        for block in range(3)
    }
    assert len(names) == 27
