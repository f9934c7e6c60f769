"""The timed attention calls: a case as plain numbers, grids of cases, presets, and the options that choose them.

The presets `full-*` are the large grids for a GPU. Their order is fixed and looks random: a run that is stopped early
has then left out some of every axis. Nothing heavy is imported.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from harness.config.errors import UserError

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
LAYOUTS = ("NHD", "HND")
# Largest KV of one call, in bytes. With the copies that other providers make it takes a few times as much.
MOST_KV_BYTES = 4.4e9
# Largest queries x keys x heads of one sequence. The float64 reference of a prefill holds several such matrices.
MOST_SCORES = 2**29
# Query and KV heads: groups of 1, 4 and 8.
HEADS = ((32, 32), (32, 8), (64, 8))
CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
# Tokens of each sequence after a shared prefix.
OWN_TOKENS = 128
# Tokens of each beam after the shared text.
BEAM_TOKENS = 32
_BF16: Mapping[str, Sequence[Any]] = {"block_size": [16], "head_dim": [128], "dtype": ["bf16"]}
Axes = Mapping[str, Sequence[Any]]
MHA, GQA, MQA = (32, 32), (32, 8), (32, 1)
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


def full_decode() -> list[KernelCase]:
    """Batch 1 to 256, context 1k to 128k, groups 1, 4 and 8; neighbours of 12 rows for cliffs; ragged lengths."""
    grid = expand({"batch": [1, 8, 32, 64, 128, 256], "context": CONTEXTS, "heads": HEADS, **_BF16})
    cliffs = expand({"batch": [11, 12, 13], "context": [16_384], "heads": [(32, 8)], **_BF16})
    ragged = expand({"batch": [32], "context": [4096], "ragged": [True], "heads": HEADS, **_BF16})
    return _spread([*grid, *cliffs, *ragged])


def full_blocks() -> list[KernelCase]:
    """Block sizes 1 to 256 at two shapes; the kernels' tile does not depend on the block size."""
    sizes = [1, 8, 16, 32, 64, 128, 256]
    wide = expand({"batch": [32], "context": [4096], "heads": [(32, 8)], **_BF16, "block_size": sizes})
    long = expand({"batch": [8], "context": [16_384], "heads": [(32, 8)], **_BF16, "block_size": sizes})
    return [*wide, *long]


def full_prefill() -> list[KernelCase]:
    """Whole prompts, and chunks of prompts after a cached prefix."""
    sizes: Axes = {"batch": [1, 4], "heads": [(32, 32), (32, 8)], **_BF16}
    pairs = [(4096, 4096), (2048, 4096), (2048, 8192), (512, 4096), (512, 16_384), (512, 32_768), (128, 8192)]
    return _spread(
        case
        for queries, context in pairs
        for case in expand({**sizes, "queries": [queries], "context": [context]})
    )


def full_cascade() -> list[KernelCase]:
    """2 to 256 sequences that share 128 to 32k tokens, and 2 to 8 beams of one request."""
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 32_768)
    sequences = [case for shared in lengths for case in _sharing((2, 4, 8, 16, 64, 256), shared, OWN_TOKENS)]
    texts = (256, 1024, 4096, 16_384)
    beams = [case for shared in texts for case in _sharing((2, 4, 8), shared, BEAM_TOKENS)]
    return _spread([*sequences, *beams])


def full_flex() -> list[KernelCase]:
    """A few shapes for a provider that compiles each of them for about ten seconds."""
    wide = expand({"batch": [32], "context": [4096], "heads": [(32, 8)], **_BF16, "block_size": [16, 128]})
    long = expand({"batch": [8], "context": [16_384], "heads": [(32, 8)], **_BF16, "block_size": [64]})
    return [*wide, *long]


def _sharing(batches: Iterable[int], shared: int, own: int) -> list[KernelCase]:
    lengths = {"context": [shared + own], "shared_prefix": [shared]}
    return expand({"batch": list(batches), **lengths, "heads": [(32, 8)], **_BF16})


def _spread(cases: Iterable[KernelCase]) -> list[KernelCase]:
    """The cases that fit, each once, ordered by the digest of their names, so that a cut-off run covers all axes."""
    fitting = [case for case in unique(cases) if _fits(case)]
    return sorted(fitting, key=lambda case: hashlib.blake2b(case.name.encode()).digest())


def _fits(case: KernelCase) -> bool:
    scores = case.queries * max(case.lengths) * case.heads
    return case.distinct_kv_bytes <= MOST_KV_BYTES and (case.queries == 1 or scores <= MOST_SCORES)


FULL: Mapping[str, Callable[[], list[KernelCase]]] = {
    "full-decode": full_decode,
    "full-blocks": full_blocks,
    "full-prefill": full_prefill,
    "full-cascade": full_cascade,
    "full-flex": full_flex,
}


def cpu() -> list[KernelCase]:
    """The torch paths at sizes for a CPU; about a minute on two cores."""
    small: Axes = {"heads": [(16, 4)], "head_dim": [64], "dtype": ["fp32"]}
    sixteen: Axes = {"block_size": [16]}
    return unique(
        [
            *expand({"batch": [1, 8], "context": [256, 1024], "block_size": [16], **small}),
            *expand({"batch": [8], "context": [1024], "block_size": [8, 32, 64, 128], **small}),
            *expand({"batch": [8], "context": [1024], "block_size": [16], "ragged": [True], **small}),
            *expand({"batch": [8], "context": [1024], **sixteen, "shared_prefix": [512, 768], **small}),
            *expand({"batch": [1], "context": [512], "block_size": [16], "queries": [256], **small}),
        ]
    )


def gpu() -> list[KernelCase]:
    """Every axis once around a case that saturates the memory of a large GPU; takes some minutes."""
    model: Axes = {"heads": [GQA], "head_dim": [128], "dtype": ["bf16"]}
    wide: Axes = {"batch": [32], "context": [4096]}
    return unique(
        [
            *expand({**wide, "block_size": [1, 8, 16, 32, 64, 128, 256], **model}),
            *expand({**wide, "block_size": [16, 128], "layout": ["HND"], **model}),
            *expand({"batch": [1, 8, 11, 13, 64], "context": [1024, 8192], "block_size": [16], **model}),
            *expand({"batch": [1], "context": [32768, 131072], "block_size": [16], **model}),
            *expand({**wide, "block_size": [16], "ragged": [True], **model}),
            *expand({**wide, "block_size": [16], **model, "heads": [MHA, MQA]}),
            *expand({**wide, "block_size": [16], **model, "head_dim": [64, 256]}),
            *expand({**wide, "block_size": [16], **model, "dtype": ["fp16", "fp8_e4m3"]}),
            *expand({**wide, "block_size": [16], "shared_prefix": [256, 1024, 2048, 3584], **model}),
            *expand({"batch": [4], "context": [4096], "queries": [512, 4096], "block_size": [16], **model}),
        ]
    )


def gate() -> list[KernelCase]:
    """The cases of the latency gate: large ones that memory limits, small ones that launches limit."""
    model: Axes = {"heads": [GQA], "head_dim": [128], "dtype": ["bf16"]}
    return unique(
        [
            *expand({"batch": [32], "context": [4096], "block_size": [16, 64, 128], **model}),
            *expand({"batch": [1, 12], "context": [1024, 32768], "block_size": [16], **model}),
            *expand({"batch": [32], "context": [4096], "block_size": [16], "ragged": [True], **model}),
            *expand({"batch": [32], "context": [2048], "block_size": [16], **model, "heads": [MHA]}),
            *expand({"batch": [4], "context": [4096], "queries": [2048], "block_size": [16], **model}),
        ]
    )


PRESETS = {"cpu": cpu, "gpu": gpu, "gate": gate, **FULL}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Describe every option."""
    axes = parser.add_argument_group("axes of the grid (lists with commas)")
    for option, field, _, what in _AXES:
        axes.add_argument(f"--{option}", dest=field, metavar="A,B", help=what)
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a prepared grid; default: the device's")
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
    given = {field: getattr(flags, field) for _, field, _, _ in _AXES if getattr(flags, field) is not None}
    if given and flags.preset:
        other = next(iter(given))
        raise UserError(f"--preset {flags.preset} is a whole grid; leave out --{other}, or the preset")
    device = chosen_device(flags)
    if not given:
        return PRESETS[flags.preset or ("gpu" if device == "cuda" else "cpu")]()
    plain = KernelCase() if device == "cuda" else KernelCase(heads=16, kv_heads=4, head_dim=64, dtype="fp32")
    defaults: dict[str, list[Any]] = {"heads": [(plain.heads, plain.kv_heads)]}
    defaults |= {"head_dim": [plain.head_dim], "dtype": [plain.dtype]}
    kinds = {field: (option, _KINDS[kind]) for option, field, kind, _ in _AXES}
    return expand(defaults | {field: _values(text, *kinds[field]) for field, text in given.items()})


def _values(text: str, option: str, read: Callable[[str], list[Any]]) -> list[Any]:
    try:
        return [value for part in text.split(",") for value in read(part.strip())]
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
