"""When requests arrive: arrival processes, and finer times for traces with a coarse clock.

An arrival process serves generators and traces without times. Its gaps come from a counter-based stream, so a shorter
list of arrivals is the beginning of a longer one. All processes have the mean rate that they are given. They differ in
how the arrivals cluster.

`spread_ticks` is for traces whose clock records many arrivals with the same time. Spreading them is an assumption, so
the trace header records it. The order within a tick is the order of the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from math import isfinite, pi

import numpy as np
import numpy.typing as npt

from traces.errors import ParameterError

FIRST_KEY = 2**63  # keys of generated texts start here; keys read from files lie below


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


@cache
def zipf_cumulative(count: int, exponent: float) -> npt.NDArray[np.float64]:
    """The probability of each of `count` texts and all before it, where that of rank k goes with k^-exponent."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    cumulated: npt.NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    return cumulated


KINDS = ("even", "poisson", "gamma", "diurnal", "modulated")
_STREAM = 3  # changing it changes every generated trace
_CHUNK = 4096
TICKS = ("keep", "even", "random")
_COARSE_US = 1_000_000
_JITTER_US = 5_000  # arrivals this much before a tick of a second or more still belong to it
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ArrivalProcess:
    """An arrival process whose gaps have the mean 1 / `rate_rps`.

    even: all equal. poisson: exponential. gamma: gamma distributed with this `shape`; below 1 is burstier than Poisson.
    diurnal: Poisson whose rate varies by `swing` (0 to 1) of its mean over `period_s`, lowest at the start.
    modulated: two-state Markov-modulated Poisson. The busy state has `burst` times the mean rate, a mean length of
    `busy_s`, and takes `busy_share` of the time.
    """

    kind: str
    rate_rps: float
    shape: float = 1.0
    swing: float = 0.8
    period_s: float = 86_400.0
    burst: float = 4.0
    busy_share: float = 0.1
    busy_s: float = 30.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError("arrivals", f'one of {", ".join(KINDS)} expected, found "{self.kind}"')
        for name in ("rate_rps", "shape", "period_s", "burst", "busy_s"):
            _check(name, getattr(self, name), isfinite(getattr(self, name)) and getattr(self, name) > 0)
        _check("swing", self.swing, 0 <= self.swing <= 1, "from 0 to 1")
        _check("busy_share", self.busy_share, 0 < self.busy_share < 1, "between 0 and 1")
        if self.kind == "modulated" and self.burst * self.busy_share > 1:
            raise ParameterError("burst", f"at most 1 / busy_share = {1 / self.busy_share:g} expected")

    def describe(self) -> str:
        """The process in words, for headers."""
        words = {
            "gamma": f", shape {self.shape:g}",
            "diurnal": f", swing {self.swing:g} over {self.period_s:g} s",
            "modulated": f", {self.burst:g} times as busy for {self.busy_share:g} of the time, {self.busy_s:g} s each",
        }
        return f"{self.kind} at {self.rate_rps:.4g} requests/s{words.get(self.kind, '')}"

    def times_us(self, count: int, seed: int) -> list[int]:
        """The first `count` arrivals in microseconds, from 0."""
        return list(islice(self.stream_us(seed), count))

    def stream_us(self, seed: int) -> Iterator[int]:
        """Endless arrivals, in microseconds from 0. Raises ParameterError on a seed out of range."""
        if not 0 <= seed < 2**64:
            raise ParameterError("seed", f"from 0 to 2^64 - 1 expected, found {seed}")
        yield 0
        last = 0.0
        for gaps in self._gaps(
            np.random.Generator(np.random.Philox(key=np.array([seed, _STREAM], np.uint64)))
        ):
            times = np.cumsum(np.concatenate([[last], gaps]))[1:]
            last = float(times[-1])
            yield from np.rint(times * 1e6).astype(np.int64).tolist()

    def _gaps(self, source: np.random.Generator) -> Iterator[Floats]:
        """Endless gaps in seconds, in chunks."""
        if self.kind == "modulated":
            yield from self._modulated(source)
        at = 0.0
        while True:
            if self.kind == "even":
                gaps = np.full(_CHUNK, 1 / self.rate_rps)
            elif self.kind == "diurnal":
                gaps = self._diurnal(source, at)
            else:
                shape = self.shape if self.kind == "gamma" else 1.0
                gaps = source.standard_gamma(shape, _CHUNK) / (shape * self.rate_rps)
            at += float(gaps.sum())
            yield gaps

    def _diurnal(self, source: np.random.Generator, at: float) -> Floats:
        """Exponential steps in operational time, mapped through the inverse of the integrated rate."""
        turn = 2 * pi / self.period_s
        target = self._integrated(np.array([at]))[0] + np.cumsum(source.standard_exponential(_CHUNK))
        low = np.full(_CHUNK, at)
        high = target / self.rate_rps + self.swing / turn + 1.0 / self.rate_rps
        for _ in range(60):  # bisection: the integrated rate never falls
            middle = (low + high) / 2
            below = self._integrated(middle) < target
            low, high = np.where(below, middle, low), np.where(below, high, middle)
        return np.diff(high, prepend=at)

    def _integrated(self, time_s: Floats) -> Floats:
        """Expected arrivals up to `time_s`: the rate is mean * (1 - swing * cos(2 pi t / period))."""
        turn = 2 * pi / self.period_s
        return self.rate_rps * (time_s - self.swing * np.sin(turn * time_s) / turn)

    def _modulated(self, source: np.random.Generator) -> Iterator[Floats]:
        """One chunk of gaps for each visit to a state. A gap that crosses a change of state is cut and drawn again."""
        calm_s = self.busy_s * (1 - self.busy_share) / self.busy_share
        busy_rate = self.rate_rps * self.burst
        calm_rate = (self.rate_rps - busy_rate * self.busy_share) / (1 - self.busy_share)
        busy, waited = False, 0.0
        while True:
            stay = source.exponential(self.busy_s if busy else calm_s)
            count = source.poisson((busy_rate if busy else calm_rate) * stay)
            if count:
                times = np.sort(source.uniform(0, stay, count))
                gaps = np.diff(times, prepend=-waited)
                waited = stay - float(times[-1])
                yield gaps
            else:
                waited += stay
            busy = not busy


def _check(name: str, value: float, holds: bool, allowed: str = "above 0") -> None:
    if not holds:
        raise ParameterError(name, f"{allowed} expected, found {value}")


def spread_ticks(times_us: list[int], quantum_us: int, ticks: str, seed: int) -> list[int]:
    """Arrival times in microseconds, with each tick's arrivals spread over the tick of `quantum_us`.

    `keep` changes nothing, `even` places the i-th of n arrivals i/n of a tick after its start, `random` sorts n
    uniform draws. Raises ParameterError on another `ticks`.
    """
    if ticks not in TICKS:
        raise ParameterError("ticks", f'one of {", ".join(TICKS)} expected, found "{ticks}"')
    if ticks == "keep" or quantum_us <= 1:
        return times_us
    jitter = _JITTER_US if quantum_us >= _COARSE_US else 0
    spread: list[int] = []
    for tick, group in groupby(times_us, key=lambda time: (time + jitter) // quantum_us):
        arrivals = len(list(group))
        if ticks == "even":
            offsets = [index * quantum_us // arrivals for index in range(arrivals)]
        else:
            offsets = sorted(int(word) * quantum_us >> 64 for word in words(seed, tick, arrivals))
        spread.extend(tick * quantum_us + offset for offset in offsets)
    return spread
