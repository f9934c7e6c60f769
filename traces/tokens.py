"""Token ids made from segment keys, so that the real prefix cache finds exactly the sharing of the trace.

Token j of a segment depends on (seed, key, j) only. Pass these ids to the engine, not text made from them: decoding and
encoding again does not give the same ids. `tests/traces/test_tokens.py` holds fixed vectors.
`separating_tokens` computes for a whole trace after how many tokens any two keys differ.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from traces.arrivals import words
from traces.errors import ParameterError
from traces.trace import Trace, TraceRequest

_LOW = np.uint64(32)
_DEEPEST = 4096  # tokens that are compared at most


def token_ids(request: TraceRequest, *, seed: int, vocab_size: int, first_id: int) -> npt.NDArray[np.int64]:
    """The prompt's ids, shape [prompt_tokens], each in `first_id` .. `vocab_size - 1`.

    Ids below `first_id` are reserved for special tokens. Raises ParameterError.
    """
    _check_ids(vocab_size, first_id)
    pieces = [
        segment_ids(stream_of(request.request_id, index, key, seed), tokens, vocab_size, first_id)
        for index, (key, tokens) in enumerate(request.segments)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def _check_ids(vocab_size: int, first_id: int) -> None:
    if first_id < 0:
        raise ParameterError("first_id", f"at least 0 expected, found {first_id}")
    if not first_id < vocab_size <= 2**32:
        reason = f"above first_id {first_id} and at most 2^32 expected, found {vocab_size}"
        raise ParameterError("vocab_size", reason)


def segment_ids(stream: tuple[int, int], count: int, vocab_size: int, first_id: int) -> npt.NDArray[np.int64]:
    """`count` ids of a stream. Multiply and shift scales the upper half of each word; its bias is negligible."""
    scaled = (words(*stream, count) >> _LOW) * np.uint64(vocab_size - first_id) >> _LOW
    return scaled.astype(np.int64) + first_id


def stream_of(request_id: int, index: int, key: int | None, seed: int) -> tuple[int, int]:
    """(seed, key) of a segment. Unique segments use another seed, so they never collide with a key of the trace."""
    if key is not None:
        return seed, key
    return _digest64(f"unique/{seed}"), _digest64(f"{request_id}/{index}")


def _digest64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def separating_tokens(trace: Trace, *, seed: int, vocab_size: int, first_id: int) -> int:
    """The number of leading tokens (at least 1) after which all segments with different keys differ.

    With blocks of this size or larger, two blocks are equal only if the trace says so. Raises ParameterError if
    different keys still agree after 4,096 tokens, which happens only with a tiny vocabulary.
    """
    _check_ids(vocab_size, first_id)
    names: dict[tuple[int, int], int] = {}
    for request in trace.requests:
        for index, (key, tokens) in enumerate(request.segments):
            name = stream_of(request.request_id, index, key, seed)
            names[name] = max(names.get(name, 0), tokens)
    depth, together = 1, [list(names)]
    while together:
        # names whose first `depth` tokens are equal
        groups: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
        for number, group in enumerate(together):
            for name in group:
                made = segment_ids(name, depth, vocab_size, first_id).tobytes()
                groups.setdefault((number, made), []).append(name)
        together = [group for group in groups.values() if sum(names[name] > depth for name in group) > 1]
        if together and depth >= _DEEPEST:
            reason = f"{len(together)} pairs of keys make equal tokens; enlarge the vocabulary"
            raise ParameterError("vocab_size", reason)
        depth = depth * 2 if together else depth
    return depth
