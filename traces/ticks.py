"""Spreading arrivals that a coarse clock lumps together: an assumption, so it is always a named change.

Order inside a tick is the file's. Draws depend on (seed, tick) alone, so every window of a file sees the same ones.
"""

from collections.abc import Callable
from itertools import groupby

from traces.errors import ParameterError
from traces.streams import words

TICKS = ("keep", "even", "random")
_COARSE_US = 1_000_000
_JITTER_US = 5_000  # around a tick of a second or more, arrivals this much too early still belong to it

Offsets = Callable[[int, int, int, int], list[int]]


def spread_ticks(times_us: list[int], quantum_us: int, ticks: str, seed: int) -> list[int]:
    """Arrival times in microseconds after spreading each tick's arrivals over the tick; raises ParameterError.

    `even` puts the i-th of n arrivals i/n of a tick after its start; `random` sorts n uniform draws.
    """
    if ticks not in TICKS:
        raise ParameterError("ticks", f'one of {", ".join(TICKS)} expected, found "{ticks}"')
    if ticks == "keep" or quantum_us <= 1:
        return times_us
    jitter = _JITTER_US if quantum_us >= _COARSE_US else 0
    offsets = _even if ticks == "even" else _random
    spread: list[int] = []
    for tick, group in groupby(times_us, key=lambda time: (time + jitter) // quantum_us):
        arrivals = len(list(group))
        spread.extend(tick * quantum_us + offset for offset in offsets(arrivals, quantum_us, tick, seed))
    return spread


def _even(arrivals: int, quantum_us: int, tick: int, seed: int) -> list[int]:
    return [index * quantum_us // arrivals for index in range(arrivals)]


def _random(arrivals: int, quantum_us: int, tick: int, seed: int) -> list[int]:
    return sorted(int(word) * quantum_us >> 64 for word in words(seed, tick, arrivals))
