"""Counter-based random words: word j of stream (seed, key) is the same in every run, process and window of a trace.

The generator is Philox4x64-10, as numpy's `random_raw` returns it. numpy keeps this stream stable.
"""

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError


def words(seed: int, key: int, count: int) -> npt.NDArray[np.uint64]:
    """The first `count` 64-bit words of stream (seed, key), both unsigned 64-bit. Raises ParameterError."""
    if not 0 <= seed < 2**64:
        raise ParameterError("seed", f"from 0 to 2^64 - 1 expected, found {seed}")
    source = np.random.Philox(key=np.array([seed, key], dtype=np.uint64))
    drawn: npt.NDArray[np.uint64] = source.random_raw(count)
    return drawn


def uniform(seed: int, key: int, count: int) -> npt.NDArray[np.float64]:
    """The same stream as numbers in [0, 1), of 53 bits each."""
    return (words(seed, key, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
