"""Check a provider's output against float64. A provider with a wrong output is not timed."""

import torch

from paged_kernels.errors import KernelError
from paged_kernels.providers.case import Case
from paged_kernels.reference import paged_attention

# ||found - exact|| / ||exact|| against float64 over the same rounded inputs; measured errors are several times smaller.
# Values of an fp8 cache convert exactly, so the queries' dtype decides. Triton's interpreter truncates to bfloat16, a
# GPU rounds. A GPU sums float32 over thousands of keys in another order.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
TOLERANCE_ON_GPU = TOLERANCE | {torch.float32: 2e-5}


class DisagreementError(KernelError):
    """A wrong output: NaN, a wrong shape, or an error larger than rounding explains."""


def exact_attention(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The case in float64 over the same rounded inputs: output `[tokens, heads, dv]` and LSE `[tokens, heads]`."""
    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    return paged_attention(case.q.double(), case.key_cache, case.value_cache, *tables, case.scoring)


def exact_output(case: Case) -> torch.Tensor:
    """The output of `exact_attention`."""
    return exact_attention(case)[0]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||; NaN, which exceeds every tolerance, if `found` has one."""
    return float((found.double() - exact).norm() / exact.norm())


def tolerance(case: Case) -> float:
    """The relative error that rounding explains."""
    return (TOLERANCE if case.device.type == "cpu" else TOLERANCE_ON_GPU)[case.q.dtype]


def verify(found: torch.Tensor, exact: torch.Tensor, who: str, case: Case) -> float:
    """The relative error of `found`. Raises `DisagreementError` if rounding does not explain it."""
    if found.shape != exact.shape:
        raise DisagreementError(
            f"{who} on {case.name}: output has shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
        )
    error, allowed = relative_error(found, exact), tolerance(case)
    if not error <= allowed:
        raise DisagreementError(
            f"{who} on {case.name}: relative error {error:.2g} against float64; rounding of {case.q.dtype} explains "
            f"{allowed:g}"
        )
    return error
