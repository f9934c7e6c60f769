"""ServeGen client models: a generator, not a log. Requests are drawn from the distributions of each client.

A client's `chunk-N-trace.csv` has its rate and the distribution of its gaps for windows of 600 s;
`chunk-N-dataset.json` has length distributions for windows of 6 h. The gaps are scaled to the rate of each window,
because the published Weibull parameters do not give that rate.
"""

import ast
import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import gamma, isfinite
from pathlib import Path

import numpy as np
import numpy.typing as npt

from traces.errors import RowError, TraceError, placed
from traces.formats.files import SourceFile, decode, open_source, read_document
from traces.formats.parsing import kind, read_object, split_fields
from traces.formats.rows import Numbered, RowCounts, RowSource, TraceRow
from traces.trace import CONTENT, Segment

WINDOW_S = 600
_PMF_WINDOW_S = 21_600
_FAMILIES = ("Gamma", "Weibull")
_SIDES = ("input_tokens", "output_tokens")
_SUM_ERROR = 1e-6
_SHAPES = (0.01, 10_000.0)  # outside this range gaps are 0 or all equal, unlike any traffic
_NUMBERS = ((0, "window"), (1, "rate"), (2, "cv"), (4, "shape"), (5, "scale"))
_PATTERN = "chunk-*-trace.csv"
_LEVELS = (_PATTERN, f"*/{_PATTERN}", f"*/*/{_PATTERN}")  # of a client, a model, a category
_CHUNK = 1024
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """600 s of a client: mean rate in requests/s, and the family and parameters of the gaps."""

    start_s: int
    rate_rps: float
    family: str
    shape: float
    scale: float


@dataclass(frozen=True)
class LengthDistribution:
    """A distribution of lengths in tokens: values and their cumulative probabilities."""

    tokens: tuple[int, ...]
    cumulated: tuple[float, ...]

    def draw(self, source: np.random.Generator, count: int) -> list[int]:
        """`count` independent lengths by inverse CDF."""
        places = np.searchsorted(self.cumulated, source.uniform(0, self.cumulated[-1], count), "right")
        drawn: list[int] = np.asarray(self.tokens)[np.minimum(places, len(self.tokens) - 1)].tolist()
        return drawn


@dataclass(frozen=True)
class ServeGenClient:
    """A client: the content of its two files."""

    name: str
    sha256: str
    windows: tuple[Window, ...]
    # start of 6 h in seconds -> prompts, outputs
    pmfs: dict[int, tuple[LengthDistribution, LengthDistribution] | None]

    def lengths(self, start_s: int, source: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Prompt and output lengths of `count` requests in the window that starts at `start_s`."""
        pair = self.pmfs[start_s // _PMF_WINDOW_S * _PMF_WINDOW_S]
        assert pair is not None  # `read_client` refuses an active window without distributions
        return pair[0].draw(source, count), pair[1].draw(source, count)


def read_client(trace_file: Path, folder: Path) -> ServeGenClient:
    """Read `chunk-N-trace.csv` and `chunk-N-dataset.json` beside it. Raises TraceError.

    Its name, from which its draws come, begins below `folder`: clients of several models are called alike.
    """
    file = open_source(trace_file)
    data = open_source(trace_file.with_name(trace_file.name.replace("-trace.csv", "-dataset.json")))
    windows, pmfs = _read_windows(file), _read_pmfs(data)
    for line, window in enumerate(windows, start=1):
        start = window.start_s // _PMF_WINDOW_S * _PMF_WINDOW_S
        if window.rate_rps and pmfs.get(start) is None:
            raise TraceError(file.path, line, "rate", f"no length distribution for window {start}")
    name = trace_file.relative_to(folder).as_posix().removesuffix("-trace.csv")
    return ServeGenClient(name, f"{file.sha256}{data.sha256}", windows, pmfs)


def _read_windows(file: SourceFile) -> tuple[Window, ...]:
    windows: list[Window] = []
    for line, raw in file.lines():
        with placed(file.path, line):
            window = _window(split_fields(decode(raw)))
            if windows and window.start_s != windows[-1].start_s + WINDOW_S:
                apart = f"follows {windows[-1].start_s}; they are {WINDOW_S} s apart"
                raise RowError("window", f"{window.start_s} {apart}")
            if window.start_s % WINDOW_S:
                raise RowError("window", f"{window.start_s} is no multiple of {WINDOW_S}")
        windows.append(window)
    return tuple(windows)


def _window(fields: list[str]) -> Window:
    if len(fields) != 6:
        raise RowError("line", f"6 fields expected, found {len(fields)}")
    start, rate, _, shape, scale = (_number(fields[i], name) for i, name in _NUMBERS)
    family = fields[3]
    if start != int(start):
        raise RowError("window", f"whole seconds expected, found {start:g}")
    if rate > 0:
        if family not in _FAMILIES:
            shown = family[:40] or "nothing in a window with a rate"
            raise RowError("family", f"Gamma or Weibull expected, found {shown}")
        if not (_SHAPES[0] <= shape <= _SHAPES[1] and scale > 0):
            reason = f"shape from {_SHAPES[0]:g} to {_SHAPES[1]:g} and scale above 0 expected"
            raise RowError("shape", f"{reason}, found {shape:g} and {scale:g}")
    return Window(int(start), rate, family, shape, scale)


def _number(text: str, field: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and 0 <= value <= 1e12):
        raise RowError(field, f'finite, not negative number expected, found "{text[:40]}"')
    return value


def _read_pmfs(file: SourceFile) -> dict[int, tuple[LengthDistribution, LengthDistribution] | None]:
    pmfs: dict[int, tuple[LengthDistribution, LengthDistribution] | None] = {}
    with placed(file.path):
        for start, sides in read_object(read_document(file)).items():
            if not (start.isascii() and start.isdigit()) or not isinstance(sides, dict):
                raise RowError(start[:40], f"window start with an object expected, found {kind(sides)}")
            pair = [_pmf(sides.get(side), f"{start}.{side}") for side in _SIDES]
            pmfs[int(start)] = (pair[0], pair[1]) if pair[0] and pair[1] else None
    return pmfs


def _pmf(value: object, place: str) -> LengthDistribution | None:
    """A literal dict of probabilities by length, None if it is empty."""
    try:
        table = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        table = None
    if not isinstance(table, dict) or not all(_is_pair(*pair) for pair in table.items()):
        raise RowError(place, "literal dict of lengths and probabilities expected")
    if not table:
        return None
    total = float(sum(table.values()))
    if abs(total - 1) > _SUM_ERROR:
        raise RowError(place, f"probabilities sum to {total:g}")
    tokens = sorted(table)
    return LengthDistribution(tuple(tokens), tuple(np.cumsum([table[length] for length in tokens]).tolist()))


def _is_pair(length: object, probability: object) -> bool:
    is_length = type(length) is int and 0 <= length < 2**31
    is_number = isinstance(probability, (int, float)) and not isinstance(probability, bool)
    return is_length and is_number and 0 <= probability <= 1  # type: ignore[operator]


class ServeGenSource(RowSource):
    """Requests of all clients in a folder (or of one client's trace file), in order of time and in constant memory."""

    format = "servegen"
    key_kind = CONTENT

    def __init__(self, path: Path, seed: int) -> None:
        folder = path if path.is_dir() else path.parent
        self.clients = [read_client(file, folder) for file in client_files(path)]
        sums = "".join(f"{client.sha256}  {client.name}\n" for client in self.clients)
        super().__init__(path.name, hashlib.sha256(sums.encode()).hexdigest())
        self.assumed = [
            f"drawn from the models of {len(self.clients)} ServeGen clients, seed {seed}; gaps scaled to each window's "
            "rate; prompt and output lengths drawn independently"
        ]
        self._seed = seed

    def rows(self, counts: RowCounts, sort: bool) -> Numbered:
        """Requests window by window, with the streams of all clients merged by time."""
        for start_s in sorted({window.start_s for client in self.clients for window in client.windows}):
            streams = [self._window(index, start_s) for index in range(len(self.clients))]
            for time_us, prompt, output, client in heapq.merge(*streams):
                if counts.limit_reached():
                    return
                counts.read += 1
                more = {"kind": self.clients[client].name}
                yield (
                    counts.read - 1,
                    TraceRow(time_us * 1000, prompt, output, (Segment(None, prompt),), more),
                )

    def _window(self, index: int, start_s: int) -> Iterator[tuple[int, int, int, int]]:
        """(time in us, prompt, output, client) of one client in one window. The draws are the same in every run."""
        client = self.clients[index]
        number = (start_s - client.windows[0].start_s) // WINDOW_S
        if not 0 <= number < len(client.windows) or not client.windows[number].rate_rps:
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
    """Times within the window, in chunks: a renewal process whose first gap began before the window."""
    unit = window.shape if window.family == "Gamma" else gamma(1 + 1 / window.shape)
    scale = 1 / (window.rate_rps * (window.scale * unit))
    last = -source.uniform() * float(_unit_gaps(window, source, 1)[0]) * scale
    while last < WINDOW_S:
        times = last + np.cumsum(_unit_gaps(window, source, _CHUNK) * scale)
        last = float(times[-1])
        yield times[(times >= 0) & (times < WINDOW_S)]


def _unit_gaps(window: Window, source: np.random.Generator, count: int) -> Floats:
    if window.family == "Gamma":
        return source.standard_gamma(window.shape, count) * window.scale
    return source.weibull(window.shape, count) * window.scale


def has_clients(folder: Path) -> bool:
    """Whether trace files of clients lie in a folder or at most two levels below."""
    return any(next(folder.glob(level), None) for level in _LEVELS)


def client_files(path: Path) -> list[Path]:
    """The trace files of all clients. Raises TraceError if there are none."""
    if path.is_file():
        return [path]
    found = sorted(file for level in _LEVELS for file in path.glob(level)) if path.is_dir() else []
    if not found:
        raise TraceError(str(path), None, None, f"no ServeGen client ({_PATTERN}) here")
    return found
