"""Token ids made from segment keys, so that the real prefix cache finds exactly the sharing of the trace.

Stateless: token j of a segment depends on (seed, key, j) alone. The engine must be fed these ids, never text made
from them: decoding and encoding again does not round-trip. `tests/traces/test_tokens.py` holds fixed vectors.
"""

import hashlib

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError
from traces.streams import words
from traces.trace import TraceRequest

_LOW = np.uint64(32)


def token_ids(request: TraceRequest, *, seed: int, vocab_size: int, first_id: int) -> npt.NDArray[np.int64]:
    """The prompt's ids, shape [prompt_tokens], each in `first_id` .. `vocab_size - 1`; raises ParameterError.

    Ids below `first_id` are left to special tokens.
    """
    if not 0 <= first_id < vocab_size <= 2**32:
        raise ParameterError(
            "vocab_size", f"above first_id {first_id} and at most 2^32 expected, found {vocab_size}"
        )
    pieces = [
        segment_ids(
            stream_of(request.request_id, index, segment.key, seed), segment.tokens, vocab_size, first_id
        )
        for index, segment in enumerate(request.segments)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


def segment_ids(stream: tuple[int, int], count: int, vocab_size: int, first_id: int) -> npt.NDArray[np.int64]:
    """Scale the upper half of each word to the usable ids: multiply and shift, without a bias worth a draw again."""
    scaled = (words(*stream, count) >> _LOW) * np.uint64(vocab_size - first_id) >> _LOW
    return scaled.astype(np.int64) + first_id


def stream_of(request_id: int, index: int, key: int | None, seed: int) -> tuple[int, int]:
    """(seed, key) of a segment. Unique segments have another seed, so that no key of the trace can meet theirs."""
    if key is not None:
        return seed, key
    return _digest64(f"unique/{seed}"), _digest64(f"{request_id}/{index}")


def _digest64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
