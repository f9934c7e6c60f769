"""One compiled form of a kernel as a value: what a resource gate compiles, and what a baseline is keyed by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelConfiguration:
    """A kernel with every constant fixed, as the launcher would launch it for one shape.

    `triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=facts)` takes the fields as they
    are.
    """

    key: str  # unique and stable, e.g. "decode/bf16/d128/g4/bs16/vector"
    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]  # every argument in order; constants as "constexpr"
    constants: Mapping[str, Any]
    aligned: frozenset[str]  # arguments divisible by 16: the launcher checks or guarantees each
    num_warps: int
    num_stages: int
    kv_tile: tuple[int, int] | None = (
        None  # [keys, width] of one staged K tile: its buffers give the pipeline's depth
    )
    matrix: bool = False  # whether its products are large enough for warp-group instructions (HGMMA) on sm_90
    capabilities: tuple[int, ...] = field(default=(80, 90))  # architectures that it is meant for

    @property
    def fixed(self) -> dict[tuple[int], Any]:
        """The constants by argument position, as Triton's compiler wants them."""
        names = list(self.signature)
        return {(names.index(name),): value for name, value in self.constants.items()}

    @property
    def facts(self) -> dict[tuple[int], list[list[Any]]]:
        """The divisibility by argument position, as Triton's compiler wants it."""
        return {
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(self.signature)
            if name in self.aligned
        }

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}
