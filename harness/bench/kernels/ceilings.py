"""What this device can do at most, measured in the same run: copying, reading, multiplying."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LARGE = {"cuda": 2**30, "cpu": 2**27}  # bytes of a buffer: well past any cache
SIDE = {"cuda": 8192, "cpu": 512}  # of the square matrices


@dataclass(frozen=True)
class Ceiling:
    """One call that does nothing but move `moved_bytes` (read and written) or multiply (`flops`)."""

    name: str
    run: Callable[[], object]
    moved_bytes: int
    flops: int


def ceilings(device: "torch.device") -> list[Ceiling]:
    """Copy, read (a sum: hardly anything is written) and the matrix product; contents are random, never zeros."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    size, side = LARGE[device.type], SIDE[device.type]
    source = torch.randn(size // 4, generator=generator, device=device)
    target = torch.empty_like(source)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    total = torch.empty((), device=device)
    return [
        Ceiling("copy", lambda: target.copy_(source), 2 * size, 0),
        Ceiling("read", lambda: torch.sum(source, dim=0, out=total), size, 0),
        Ceiling("matmul", lambda: torch.matmul(a, b, out=product), 0, 2 * side**3),
    ]


def copy_of(moved_bytes: int, device: "torch.device") -> Callable[[], object]:
    """A copy that reads and writes `moved_bytes` together: the yardstick of a call that reads as many."""
    import torch

    generator = torch.Generator(device).manual_seed(1)
    source = torch.randn(max(1, moved_bytes // 8), generator=generator, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product_of(flops: int, device: "torch.device") -> Callable[[], object]:
    """A square matrix product of about `flops` operations: the yardstick of a call that is bound by arithmetic."""
    import torch

    side = max(64, round((flops / 2) ** (1 / 3) / 64) * 64)
    generator = torch.Generator(device).manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=product)
