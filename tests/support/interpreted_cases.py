"""Small cases for Triton's interpreter, and their check against float64."""

import torch

from paged_kernels import paged_attention_decode, paged_attention_prefill
from paged_kernels.providers.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error

FP32 = torch.float32


def spec_of(lengths, queries=(), **options):
    """A small case: float32, 4 query and 2 KV heads of 16."""
    small = {"heads": 4, "kv_heads": 2, "dk": 16, "dtype": FP32}
    return CaseSpec(tuple(lengths), tuple(queries), **(small | options))


def options_of(case):
    """The scoring of a case as keyword arguments."""
    return case.scoring._asdict()


def attend(case, *, num_splits=None, workspace=None, lse=None):
    """The case through the Triton kernels."""
    common = options_of(case) | {"lse": lse, "workspace": workspace, "backend": "triton"}
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    if case.decode:
        return paged_attention_decode(*inputs, num_splits=num_splits, **common)
    return paged_attention_prefill(*inputs, case.cu_seqlens_q, **common)


def check(spec, **arguments):
    """Output and LSE of the kernels against float64, under poison and garbage."""
    case = build_case(spec)
    lse = torch.full(case.q.shape[:2], float("nan"))
    found = attend(case, lse=lse, **arguments)
    exact, sums = exact_attention(case)
    assert relative_error(found, exact) < TOLERANCE[spec.dtype]
    assert torch.allclose(lse.double(), sums, atol=1e-5 if spec.dtype == FP32 else 2e-2)


def halves(case, shared):
    """Tables and lengths of what the rows share and of what is their own."""
    blocks = shared // case.block_size
    lens = torch.tensor([shared], dtype=torch.int32)
    return case.block_table[:1, :blocks], lens, case.block_table[:, blocks:], case.seq_lens - shared
