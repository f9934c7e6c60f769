"""Which attention calls are timed: a case as plain numbers, its name, and grids of cases. Imports nothing heavy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from harness.config.errors import UserError

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")
LAYOUTS = ("NHD", "HND")


@dataclass(frozen=True)
class CaseSpec:
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
        """Stable and unique; baselines and reports are keyed by it."""
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
        """The same with the shared prefix counted once: what must lie in memory."""
        again = (self.batch - 1) * self.shared_prefix
        return self.kv_bytes - 2 * self.kv_heads * self.head_dim * self.element_bytes * again

    def values(self) -> dict[str, Any]:
        """The fields, for JSON; `CaseSpec(**values)` gives the case again."""
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


def expand(axes: Mapping[str, Sequence[Any]]) -> list[CaseSpec]:
    """Every combination of the axes' values; `heads` is a sequence of (heads, kv_heads).

    Raises:
        UserError: a combination is impossible, or there is none.
    """
    names = list(axes)
    cases = [_case(dict(zip(names, values, strict=True))) for values in product(*axes.values())]
    if not cases:
        raise UserError("the grid has no case: an option has no value")
    return unique(cases)


def unique(cases: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The cases in order, repetitions left out."""
    return list({case.name: case for case in cases}.values())


def _case(values: dict[str, Any]) -> CaseSpec:
    heads, kv_heads = values.pop("heads")
    return CaseSpec(heads=heads, kv_heads=kv_heads, **values)
