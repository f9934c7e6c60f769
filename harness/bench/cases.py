"""The timed attention calls: a case as plain numbers, grids of cases, presets, and the options that choose them.

The presets are in presets.toml. Nothing heavy is imported.
"""

import argparse
import hashlib
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from harness.config.errors import UserError

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
LAYOUTS = ("NHD", "HND")
# Largest KV of one call, in bytes. With the copies that other providers make it takes a few times as much.
MOST_KV_BYTES = 4.4e9
# Largest queries x keys x heads of one sequence. The float64 reference of a prefill holds several such matrices.
MOST_SCORES = 2**29
_AXES: tuple[tuple[str, str, str, str], ...] = (  # option, field, kind, what it is
    ("batch", "batch", "int", "sequences"),
    ("context", "context", "int", "cached tokens per sequence, the queries' own included"),
    ("block-size", "block_size", "int", "tokens per block"),
    ("heads", "heads", "heads", "query/key heads, e.g. 32/8,32/32"),
    ("head-dim", "head_dim", "int", "width of a head"),
    ("dtype", "dtype", "str", "bf16, fp16, fp32, fp8_e4m3, fp8_e5m2"),
    ("ragged", "ragged", "bool", "no, yes or both: lengths from half to one and a half of the context"),
    ("prefix", "shared_prefix", "int", "leading tokens that all sequences share, in whole blocks"),
    ("queries", "queries", "int", "query tokens per sequence; 1 is a decode"),
    ("layout", "layout", "str", "NHD, HND"),
)


@dataclass(frozen=True)
class KernelCase:
    """One attention call over paged KV.

    `context` counts cached tokens per sequence, the queries' own included; in a ragged batch it is the mean (lengths
    run evenly from half of it to one and a half). `queries` is 1 for a decode. `shared_prefix` tokens lead every
    sequence and lie in the same blocks. `dtype` is the cache's; fp8 caches are queried in bf16.
    """

    batch: int = 8
    context: int = 1024
    block_size: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bf16"
    ragged: bool = False
    shared_prefix: int = 0
    queries: int = 1
    layout: str = "NHD"

    def __post_init__(self) -> None:
        wrong = next(self._complaints(), None)
        if wrong:
            raise UserError(f"case {self.name}: {wrong}")

    @property
    def name(self) -> str:
        """The stable, unique name. Baselines and reports use it as their key."""
        kind = "decode" if self.queries == 1 else f"prefill/q{self.queries}"
        parts = [kind, f"b{self.batch}", f"ctx{self.context}", f"bs{self.block_size}"]
        parts += [f"h{self.heads}-{self.kv_heads}", f"d{self.head_dim}", self.dtype]
        parts += ["ragged"] * self.ragged + [f"prefix{self.shared_prefix}"] * bool(self.shared_prefix)
        return "/".join(parts + [self.layout] * (self.layout != "NHD"))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached tokens of each sequence."""
        if not self.ragged or self.batch == 1:
            return (self.context,) * self.batch
        shares = (0.5 + place / (self.batch - 1) for place in range(self.batch))
        least = max(self.queries, self.shared_prefix + 1)
        return tuple(max(least, round(self.context * share)) for share in shares)

    @property
    def element_bytes(self) -> int:
        """Bytes of one cached element."""
        return 4 if self.dtype == "fp32" else 1 if self.dtype.startswith("fp8") else 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that all sequences refer to together."""
        return 2 * self.kv_heads * self.head_dim * self.element_bytes * sum(self.lengths)

    @property
    def distinct_kv_bytes(self) -> int:
        """Bytes of K and V with the shared prefix counted once: the bytes that must be in memory."""
        again = (self.batch - 1) * self.shared_prefix
        return self.kv_bytes - 2 * self.kv_heads * self.head_dim * self.element_bytes * again

    def values(self) -> dict[str, Any]:
        """The fields, for JSON; `KernelCase(**values)` gives the case again."""
        return asdict(self)

    def _complaints(self) -> Iterator[str]:
        for field in ("batch", "context", "block_size", "heads", "kv_heads", "head_dim", "queries"):
            if getattr(self, field) < 1:
                yield f"{field} is {getattr(self, field)}, must be at least 1"
        if self.heads % max(1, self.kv_heads):
            yield f"{self.heads} heads are no multiple of {self.kv_heads} KV heads"
        if self.dtype not in DTYPES:
            yield f"dtype {self.dtype!r} does not exist; choose {', '.join(DTYPES)}"
        if self.layout not in LAYOUTS:
            yield f"layout {self.layout!r} does not exist; choose {', '.join(LAYOUTS)}"
        if self.shared_prefix % max(1, self.block_size):
            yield f"a shared prefix of {self.shared_prefix} tokens is no whole number of {self.block_size}-token blocks"
        if self.shared_prefix >= self.context or self.queries > self.context - self.shared_prefix:
            yield f"context {self.context} must hold {self.shared_prefix} shared tokens and {self.queries} queries"


def expand(axes: Mapping[str, Sequence[Any]]) -> list[KernelCase]:
    """Every combination of the axes' values; `heads` is a sequence of (heads, kv_heads).

    Raises:
        UserError: a combination is impossible, or there is none.
    """
    names = list(axes)
    cases = [_case(dict(zip(names, values, strict=True))) for values in product(*axes.values())]
    if not cases:
        raise UserError("the grid has no case: an option has no value")
    return unique(cases)


def unique(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """The cases in order, repetitions left out."""
    return list({case.name: case for case in cases}.values())


def _case(values: dict[str, Any]) -> KernelCase:
    heads, kv_heads = values.pop("heads")
    return KernelCase(heads=heads, kv_heads=kv_heads, **values)


def presets() -> dict[str, Any]:
    """What presets.toml says, by the name of the prepared grid."""
    return tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def preset(name: str) -> list[KernelCase]:
    """The cases of a prepared grid."""
    found = presets()[name]
    every, *grids = (dict(it.split("=") for it in line.split()) for line in (found["every"], *found["grids"]))
    cases = unique(case for grid in grids for case in expand(_axes(every | grid)))
    if not found.get("spread"):
        return cases
    return sorted(filter(_fits, cases), key=lambda case: hashlib.blake2b(case.name.encode()).digest())


def _fits(case: KernelCase) -> bool:
    scores = case.queries * max(case.lengths) * case.heads
    return case.distinct_kv_bytes <= MOST_KV_BYTES and (case.queries == 1 or scores <= MOST_SCORES)


def gate() -> list[KernelCase]:
    """The cases of the latency gate."""
    return preset("gate")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every option."""
    axes = parser.add_argument_group("axes of the grid (lists with commas)")
    for option, field, _, what in _AXES:
        axes.add_argument(f"--{option}", dest=field, metavar="A,B", help=what)
    parser.add_argument("--preset", choices=sorted(presets()), help="a prepared grid; default: the device's")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--provider", metavar="A,B", help="only these (our own always runs)")
    parser.add_argument("--function", metavar="MODULE:NAME", help="a function of yours as one more provider")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds a case; default: 20")
    limit = "begin no case after so long; default: no limit"
    parser.add_argument("--seconds", type=float, metavar="S", help=limit)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (--device cpu); default: 1")
    parser.add_argument("--out", default="results/bench/kernels", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="list the cases, time nothing")


def chosen_device(flags: argparse.Namespace) -> str:
    """`cuda` or `cpu`; `auto` looks for a driver, without importing torch."""
    from harness.environment import gpu_names

    if flags.device != "auto":
        return str(flags.device)
    return "cuda" if gpu_names() else "cpu"


def chosen_cases(flags: argparse.Namespace) -> list[KernelCase]:
    """The preset, or the grid of the axes that were given.

    Raises:
        UserError: an axis has no or impossible values, or both a preset and axes were given.
    """
    for option in ("rounds", "threads"):
        if getattr(flags, option) < 1:
            raise UserError(f"--{option} is {getattr(flags, option)}, must be at least 1")
    if flags.seconds is not None and not flags.seconds > 0:
        raise UserError(f"--seconds is {flags.seconds:g}, must be above 0")
    given = {option: text for option, field, *_ in _AXES if (text := getattr(flags, field)) is not None}
    if given and flags.preset:
        other = next(iter(given))
        raise UserError(f"--preset {flags.preset} is a whole grid; leave out --{other}, or the preset")
    device = chosen_device(flags)
    if not given:
        return preset(flags.preset or ("gpu" if device == "cuda" else "cpu"))
    plain = KernelCase() if device == "cuda" else KernelCase(heads=16, kv_heads=4, head_dim=64, dtype="fp32")
    defaults: dict[str, list[Any]] = {"heads": [(plain.heads, plain.kv_heads)]}
    defaults |= {"head_dim": [plain.head_dim], "dtype": [plain.dtype]}
    return expand(defaults | _axes(given))


def _axes(given: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of each axis from texts by option."""
    return {field: _values(given[name], name, kind) for name, field, kind, _ in _AXES if name in given}


def _values(text: str, option: str, kind: str) -> list[Any]:
    try:
        return [value for part in text.split(",") for value in _KINDS[kind](part.strip())]
    except ValueError as error:
        raise UserError(f"--{option} {text}: {error}") from error


def _heads(part: str) -> list[tuple[int, int]]:
    heads, _, kv_heads = part.partition("/")
    return [(int(heads), int(kv_heads or heads))]


def _yes_or_no(part: str) -> list[bool]:
    answers = {"no": [False], "yes": [True], "both": [False, True]}
    if part not in answers:
        raise ValueError(f"{part!r} is none of no, yes, both")
    return answers[part]


_KINDS: dict[str, Callable[[str], list[Any]]] = {
    "int": lambda part: [int(part)],
    "str": lambda part: [part],
    "heads": _heads,
    "bool": _yes_or_no,
}
