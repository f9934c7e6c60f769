"""Attention cases for compiled kernels: nothing that a kernel must not read is harmless to read."""

from dataclasses import replace

import torch
from interpreted_cases import attend, spec_of
from ptx.triton_launch import Launches, interpreted_launches, unchanged

from paged_kernels.arguments import Workspace
from paged_kernels.case import Case, build_case, exact_attention, relative_error

# Relative errors against float64 that rounding of the weights and of the output explains; about twice what is found.
TIGHT = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}


GARBAGE = -(2**30)


class PoisonedWorkspace(Workspace):
    """Scratch buffers that hold NaN, as device memory may, or a number that is no row, tile or length."""

    def _grown(self, name, numel, buffer, dtype, device):  # type: ignore[no-untyped-def]
        return (
            super()
            ._grown(name, numel, buffer, dtype, device)
            .fill_(float("nan") if dtype.is_floating_point else GARBAGE)
        )


def hostile(lengths, queries=(), **options) -> Case:
    """A bfloat16 case of width 64, 8 query and 2 KV heads; null block NaN, tables without an entry behind their end."""
    usual = {"dtype": torch.bfloat16, "heads": 8, "kv_heads": 2, "dk": 64}
    case = build_case(spec_of(lengths, queries, **(usual | options)))
    for cache in (case.key_cache, case.value_cache):
        if cache.dtype.itemsize > 1:
            cache[0] = float("nan")
    needed = max(1, -(-max(lengths) // case.block_size))
    return replace(case, block_table=case.block_table[:, :needed].clone())


def run_compiled(
    case: Case, *, capability=80, seed=0, rewrite=unchanged, num_splits=None, prefill_kernel="plain"
) -> tuple[torch.Tensor, torch.Tensor, Launches]:
    """Output, LSE and what ran, of the compiled kernels. Both start as NaN."""
    lse = torch.full(case.q.shape[:2], float("nan"))
    with interpreted_launches(capability, rewrite=rewrite, seed=seed) as launches:
        options = {"num_splits": num_splits, "prefill_kernel": prefill_kernel}
        out = attend(case, lse=lse, workspace=PoisonedWorkspace(), **options)
    return out, lse, launches


def assert_exact(case: Case, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Output and LSE equal float64, but for rounding."""
    exact, sums = exact_attention(case)
    assert relative_error(out, exact) < TIGHT[case.q.dtype]
    assert torch.allclose(lse.double(), sums, atol=1e-5)
