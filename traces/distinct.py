"""Whether tokens made from different keys can be told apart: checked for a whole trace, not left to chance."""

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError
from traces.tokens import segment_ids, stream_of
from traces.trace import Trace

_DEEPEST = 4096


def separating_tokens(trace: Trace, *, seed: int, vocab_size: int, first_id: int) -> int:
    """The number of leading tokens within which all segments of different names differ (at least 1).

    From that block size on two blocks agree only where the trace says so. Raises ParameterError where segments that
    long agree and yet have different names, which a vocabulary of useful size does not let happen.
    """
    names: dict[tuple[int, int], int] = {}
    for request in trace.requests:
        for index, (key, tokens) in enumerate(request.segments):
            name = stream_of(request.request_id, index, key, seed)
            names[name] = max(names.get(name, 0), tokens)
    depth, together = 1, [list(names)]
    while together:
        together = [
            group for names_alike in together for group in _alike(names_alike, depth, vocab_size, first_id)
        ]
        together = [group for group in together if sum(names[name] > depth for name in group) > 1]
        if together and depth >= _DEEPEST:
            raise ParameterError(
                "vocab_size", f"{len(together)} pairs of keys make equal tokens; enlarge the vocabulary"
            )
        depth = depth * 2 if together else depth
    return depth


def _alike(
    names: list[tuple[int, int]], depth: int, vocab_size: int, first_id: int
) -> list[list[tuple[int, int]]]:
    """Groups of names whose first `depth` tokens are equal."""
    groups: dict[bytes, list[tuple[int, int]]] = {}
    for name in names:
        made: npt.NDArray[np.int64] = segment_ids(name, depth, vocab_size, first_id)
        groups.setdefault(made.tobytes(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
