"""ServeGen client models: a generator, not a log. Requests are drawn from what the files say about each client.

A client's `chunk-N-trace.csv` gives, for windows of 600 s, its rate and the family of its gaps; `chunk-N-dataset.json`
gives length distributions for windows of 6 h. Drawn gaps are rescaled to each window's rate, because the published
Weibull parameters do not reproduce it.
"""

import hashlib
import heapq
from collections.abc import Iterator
from math import gamma
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.books import Books
from traces.errors import TraceError
from traces.formats.servegen_client import WINDOW_S, Window, read_client
from traces.rows import Numbered, Row
from traces.trace import CONTENT, Segment, TraceHeader

_PATTERN = "chunk-*-trace.csv"
_CHUNK = 1024
Floats = npt.NDArray[np.float64]


class ServeGenSource:
    """Requests of all clients in a folder (or of one client's trace file), in order of time, without end in memory."""

    format = "servegen"
    key_kind = CONTENT
    source_block_tokens: int | None = None
    has_clock = True
    is_ordered = True
    takes_arrivals = False
    embedded: TraceHeader | None = None

    def __init__(self, path: Path, seed: int) -> None:
        self.clients = [read_client(file) for file in client_files(path)]
        self.source = path.name
        sums = "".join(f"{client.sha256}  {client.name}\n" for client in self.clients)
        self.sha256 = hashlib.sha256(sums.encode()).hexdigest()
        self.noted: dict[str, int] = {}
        self.assumed = [
            f"drawn from the models of {len(self.clients)} ServeGen clients, seed {seed}; gaps scaled to each window's "
            "rate; prompt and output lengths drawn independently"
        ]
        self._seed = seed

    def clock_quantum_us(self) -> int:
        """Drawn times have no coarser clock."""
        return 1

    def rows(self, books: Books, sort: bool) -> Numbered:
        """Requests window by window, the clients' streams merged by time."""
        for number in range(max(len(client.windows) for client in self.clients)):
            streams = [self._window(index, number) for index in range(len(self.clients))]
            for time_us, prompt, output, client in heapq.merge(*streams):
                if books.is_full():
                    return
                books.read += 1
                more = {"kind": self.clients[client].name}
                yield books.read - 1, Row(time_us * 1000, prompt, output, (Segment(None, prompt),), more)

    def _window(self, index: int, number: int) -> Iterator[tuple[int, int, int, int]]:
        """(time in us, prompt, output, client) of one client in one window; the same draws in every run."""
        client = self.clients[index]
        if number >= len(client.windows) or not client.windows[number].rate_rps:
            return
        window = client.windows[number]
        name = hashlib.blake2b(f"{client.name}/{number}".encode(), digest_size=8).digest()
        key = np.array([self._seed, int.from_bytes(name, "little")], dtype=np.uint64)
        source = np.random.Generator(np.random.Philox(key=key))
        for times_s in _arrivals(window, source):
            prompts, outputs = client.lengths(window.start_s, source, len(times_s))
            for time_s, prompt, output in zip(times_s.tolist(), prompts, outputs, strict=True):
                yield round((window.start_s + time_s) * 1e6), prompt, output, index


def _arrivals(window: Window, source: np.random.Generator) -> Iterator[Floats]:
    """Times within the window, in chunks: a renewal process that is caught somewhere inside its first gap."""
    scale = 1 / (window.rate_rps * _mean_gap(window))
    last = -source.uniform() * float(_unit_gaps(window, source, 1)[0]) * scale
    while last < WINDOW_S:
        times = last + np.cumsum(_unit_gaps(window, source, _CHUNK) * scale)
        last = float(times[-1])
        yield times[(times >= 0) & (times < WINDOW_S)]


def _unit_gaps(window: Window, source: np.random.Generator, count: int) -> Floats:
    if window.family == "Gamma":
        return source.standard_gamma(window.shape, count) * window.scale
    return source.weibull(window.shape, count) * window.scale


def _mean_gap(window: Window) -> float:
    factor = window.shape if window.family == "Gamma" else gamma(1 + 1 / window.shape)
    return window.scale * factor


def client_files(path: Path) -> list[Path]:
    """The trace files of all clients; raises TraceError where there is none."""
    if path.is_file():
        return [path]
    found = sorted(path.rglob(_PATTERN)) if path.is_dir() else []
    if not found:
        raise TraceError(str(path), None, None, f"no ServeGen client ({_PATTERN}) here")
    return found
