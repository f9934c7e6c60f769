"""The sharing found from keys is the sharing of the tokens made from them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from traces.analysis.reuse import prompt_paths, realised_prefix_share
from traces.reshape import share_prefixes
from traces.synth.generator import generate_trace
from traces.tokens import token_ids
from traces.trace import Segment, SegmentColumns, TraceRequest

prompts = st.lists(
    st.lists(
        st.tuples(st.none() | st.integers(0, 2), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ).filter(lambda segments: all(a[0] is None or a[0] != b[0] for a, b in pairwise(segments))),
    min_size=1,
    max_size=8,
)


def agreeing(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def tokens_of(request: TraceRequest) -> list[int]:
    return token_ids(request, seed=1, vocab_size=2**32, first_id=0).tolist()


@given(prompts)
def test_shared_tokens_from_keys_equal_those_of_the_made_tokens(rows) -> None:
    earlier: list[list[int]] = []
    seen = prompt_paths(SegmentColumns.of(rows))[0].tolist()
    for number, row in enumerate(rows):
        segments = tuple(Segment(*segment) for segment in row)
        request = TraceRequest(number, 0, sum(s.tokens for s in segments), 1, segments)
        tokens = tokens_of(request)
        assert seen[number] == max((agreeing(tokens, other) for other in earlier), default=0)
        earlier.append(tokens)


def test_realised_share_of_shared_prefixes_is_that_of_their_tokens() -> None:
    trace = share_prefixes(generate_trace("azure_conv", num_requests=40, seed=2), 0.5, 3, 1, 0)
    rows = [tokens_of(request) for request in trace.requests]
    seen = sum(max((agreeing(row, other) for other in rows[:n]), default=0) for n, row in enumerate(rows))
    assert realised_prefix_share(trace) == seen / sum(map(len, rows))


def test_a_trace_without_keys_shares_nothing() -> None:
    assert realised_prefix_share(generate_trace("azure_conv", num_requests=40, seed=2)) == 0.0
