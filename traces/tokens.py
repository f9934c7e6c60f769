"""Token ids made from segment keys, so that the real prefix cache finds exactly the sharing of the trace.

Token j of a segment depends on (seed, key, j) only. Pass these ids to the engine, not text made from them: decoding and
encoding again does not give the same ids. `tests/traces/test_tokens.py` holds fixed vectors.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from traces.arrivals import words
from traces.errors import ParameterError
from traces.trace import TraceRequest

_LOW = np.uint64(32)


def token_ids(request: TraceRequest, *, seed: int, vocab_size: int, first_id: int) -> npt.NDArray[np.int64]:
    """The prompt's ids, shape [prompt_tokens], each in `first_id` .. `vocab_size - 1`.

    Ids below `first_id` are reserved for special tokens. Raises ParameterError.
    """
    if first_id < 0:
        raise ParameterError("first_id", f"at least 0 expected, found {first_id}")
    if not first_id < vocab_size <= 2**32:
        reason = f"above first_id {first_id} and at most 2^32 expected, found {vocab_size}"
        raise ParameterError("vocab_size", reason)
    pieces = [
        segment_ids(stream_of(request.request_id, index, key, seed), tokens, vocab_size, first_id)
        for index, (key, tokens) in enumerate(request.segments)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def answer_ids(
    request: TraceRequest, *, seed: int, vocab_size: int, first_id: int
) -> npt.NDArray[np.int64] | None:
    """The ids of the answer that later prompts may hold, shape [output_tokens]; None where they cannot find it.

    That is where the trace names no answer, or the prompt has text that is in no other.
    """
    if request.output_key is None or any(key is None for key, _ in request.segments):
        return None
    return segment_ids((seed, request.output_key), request.output_tokens, vocab_size, first_id)


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
