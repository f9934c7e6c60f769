"""One ServeGen client: its windows and its length distributions, checked as they are read."""

import ast
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from traces.csvrow import split_fields
from traces.errors import RowError, TraceError
from traces.jsonl import kind, read_object
from traces.source import SourceFile, decode, open_source, read_document

WINDOW_S = 600
_PMF_WINDOW_S = 21_600
_FAMILIES = ("Gamma", "Weibull")
_SIDES = ("input_tokens", "output_tokens")
_SUM_ERROR = 1e-6
_SHAPES = (0.01, 10_000.0)  # outside, gaps of zero or all alike: no traffic looks so


@dataclass(frozen=True)
class Window:
    """600 s of a client: mean rate in requests/s, and the gaps' family with its parameters."""

    start_s: int
    rate_rps: float
    family: str
    shape: float
    scale: float


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: values and their cumulated probabilities."""

    tokens: tuple[int, ...]
    cumulated: tuple[float, ...]

    def draw(self, source: np.random.Generator, count: int) -> list[int]:
        """`count` independent lengths by inverse CDF."""
        places = np.searchsorted(self.cumulated, source.uniform(0, self.cumulated[-1], count), "right")
        drawn: list[int] = np.asarray(self.tokens)[np.minimum(places, len(self.tokens) - 1)].tolist()
        return drawn


@dataclass(frozen=True)
class Client:
    """What the two files say about a client."""

    name: str
    sha256: str
    windows: tuple[Window, ...]
    pmfs: dict[int, tuple[Lengths, Lengths] | None]  # start of 6 h in seconds -> prompts, outputs

    def lengths(self, start_s: int, source: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Prompt and output lengths of `count` requests in the window that starts at `start_s`."""
        pair = self.pmfs[start_s // _PMF_WINDOW_S * _PMF_WINDOW_S]
        assert pair is not None  # read_client refuses an active window without distributions
        return pair[0].draw(source, count), pair[1].draw(source, count)


def read_client(trace_file: Path) -> Client:
    """Read `chunk-N-trace.csv` and `chunk-N-dataset.json` beside it; raises TraceError."""
    file = open_source(trace_file)
    data = open_source(trace_file.with_name(trace_file.name.replace("-trace.csv", "-dataset.json")))
    windows, pmfs = _read_windows(file), _read_pmfs(data)
    for line, window in enumerate(windows, start=1):
        start = window.start_s // _PMF_WINDOW_S * _PMF_WINDOW_S
        if window.rate_rps and pmfs.get(start) is None:
            raise TraceError(file.path, line, "rate", f"no length distribution for window {start}")
    name = trace_file.name.removesuffix("-trace.csv")
    return Client(name, f"{file.sha256}{data.sha256}", windows, pmfs)


def _read_windows(file: SourceFile) -> tuple[Window, ...]:
    windows: list[Window] = []
    for line, raw in file.lines():
        try:
            window = _window(split_fields(decode(raw)))
            if window.start_s != (windows[-1].start_s + WINDOW_S if windows else window.start_s):
                raise RowError(
                    "window", f"{window.start_s} follows {windows[-1].start_s}; they are {WINDOW_S} s apart"
                )
            if window.start_s % WINDOW_S:
                raise RowError("window", f"{window.start_s} is no multiple of {WINDOW_S}")
        except RowError as error:
            raise TraceError(file.path, line, error.field, error.reason) from error
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
        if not family:
            raise RowError("family", "Gamma or Weibull expected, found nothing in a window with a rate")
        if family not in _FAMILIES:
            raise RowError("family", f"Gamma or Weibull expected, found {family[:40]}")
        if not (_SHAPES[0] <= shape <= _SHAPES[1] and scale > 0):
            reason = f"shape from {_SHAPES[0]:g} to {_SHAPES[1]:g} and scale above 0 expected"
            raise RowError("shape", f"{reason}, found {shape:g} and {scale:g}")
    return Window(int(start), rate, family, shape, scale)


_NUMBERS = ((0, "window"), (1, "rate"), (2, "cv"), (4, "shape"), (5, "scale"))


def _number(text: str, field: str) -> float:
    try:
        value = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and 0 <= value <= 1e12):
        raise RowError(field, f'finite, not negative number expected, found "{text[:40]}"')
    return value


def _read_pmfs(file: SourceFile) -> dict[int, tuple[Lengths, Lengths] | None]:
    pmfs: dict[int, tuple[Lengths, Lengths] | None] = {}
    try:
        for start, sides in read_object(read_document(file)).items():
            if not (start.isascii() and start.isdigit()) or not isinstance(sides, dict):
                raise RowError(start[:40], f"window start with an object expected, found {kind(sides)}")
            pair = [_pmf(sides.get(side), f"{start}.{side}") for side in _SIDES]
            pmfs[int(start)] = (pair[0], pair[1]) if pair[0] and pair[1] else None
    except RowError as error:
        raise TraceError(file.path, error.text_line, error.field, error.reason) from error
    return pmfs


def _pmf(value: object, place: str) -> Lengths | None:
    """A literal dict of probabilities by length; None where it is empty."""
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
    return Lengths(tuple(tokens), tuple(np.cumsum([table[length] for length in tokens]).tolist()))


def _is_pair(length: object, probability: object) -> bool:
    return (
        type(length) is int
        and 0 <= length < 2**31
        and isinstance(probability, (int, float))
        and not isinstance(probability, bool)
        and 0 <= probability <= 1
    )
