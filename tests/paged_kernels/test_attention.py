"""The fast paths against the float64 reference, under poison, permuted blocks and ragged tables."""

import pytest
import torch

from paged_kernels import (
    BackendUnavailableError,
    KernelError,
    paged_attention_decode,
    paged_attention_prefill,
)
from paged_kernels.native import why_unavailable

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def run_both(case, dtype=torch.float32, **options):
    """The fast path in `dtype`, and the float64 reference on the same rounded values."""
    fast = paged_attention_prefill(*case.args(dtype), scale=SCALE, backend="torch", **options)
    rounded = [
        value.to(dtype).double() if value.is_floating_point() else value for value in case.args(torch.float32)
    ]
    exact = paged_attention_prefill(*rounded, scale=SCALE, backend="torch_ref", **options)
    return fast, exact


@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_ragged_decode_equals_the_reference(make_case, block_size, dtype):
    case = make_case([1, block_size, block_size + 1, 3 * block_size - 1, 200], [1] * 5, block_size)
    fast, exact = run_both(case, dtype)
    assert relative_error(fast, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (7, 1), (8, 2)])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (24, 16)])
def test_any_group_and_unequal_widths(make_case, heads, dims):
    case = make_case([33, 7, 50, 20], [1, 1, 20, 5], 8, heads, dims)
    fast, exact = run_both(case)
    assert relative_error(fast, exact) < TOLERANCE[torch.float32]


@pytest.mark.skipif(bool(why_unavailable()), reason="no compiled kernels")
@pytest.mark.parametrize("window", [0, 13])
def test_the_c_kernels_equal_the_reference_on_mixed_rows_and_leave_unused_table_entries_alone(
    make_case, window
):
    case = make_case([33, 7, 0, 50, 20, 9], [1, 1, 1, 20, 5, 1], 8, (6, 2), (32, 48))
    inputs = case.args(torch.float32)
    inputs[3].masked_fill_(inputs[3] > inputs[1].shape[0], 2**30)  # garbage behind a row's last block
    out = torch.full((len(inputs[0]), 6, 96), float("nan"))[:, :, :48]
    paged_attention_prefill(*inputs, scale=SCALE, window=window, backend="native", out=out)
    exact = paged_attention_prefill(
        *case.args(torch.float64), scale=SCALE, window=window, backend="torch_ref"
    )
    assert relative_error(out, exact) < TOLERANCE[torch.float32]
    with pytest.raises(BackendUnavailableError, match="does not know a softcap, LSE"):
        paged_attention_prefill(
            *inputs, scale=SCALE, softcap=2.0, lse=out[..., 0].contiguous(), backend="native"
        )


@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_chunks_of_prompts_see_their_cached_prefix(make_case, block_size, dtype):
    case = make_case([40, 300, 17, 129, 5], [40, 150, 3, 129, 1], block_size)
    fast, exact = run_both(case, dtype)
    assert relative_error(fast, exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("options", [{"window": 5}, {"softcap": 2.0}, {"window": 30, "softcap": 1.5}])
def test_window_and_softcap(make_case, options):
    case = make_case([40, 9, 200, 33], [1, 9, 140, 1], 8)
    fast, exact = run_both(case, **options)
    assert relative_error(fast, exact) < TOLERANCE[torch.float32]


def test_sinks_join_the_denominator_only(make_case):
    case = make_case([40, 9, 33], [1, 9, 1], 8)
    fast, exact = run_both(case, sinks=torch.linspace(-1, 3, 8))
    without, _ = run_both(case)
    assert relative_error(fast, exact) < TOLERANCE[torch.float32]
    assert relative_error(without, exact) > 0.05


def test_many_rows_are_gathered_in_several_chunks(make_case, monkeypatch):
    monkeypatch.setattr("paged_kernels.torch_backend.CPU_GATHER_BYTES", 20_000)
    case = make_case([90, 61, 60, 30, 4, 3, 120], [1] * 7, 8)
    fast, exact = run_both(case)
    assert relative_error(fast, exact) < TOLERANCE[torch.float32]


def test_lse_is_the_natural_log_of_the_denominator(make_case):
    case = make_case([40, 9, 33], [1, 9, 1], 8)
    found, exact = (torch.empty(11, 8, dtype=dtype) for dtype in (torch.float32, torch.float64))
    paged_attention_prefill(*case.args(torch.float32), scale=SCALE, lse=found, backend="torch")
    paged_attention_prefill(*case.args(torch.float64), scale=SCALE, lse=exact, backend="torch_ref")
    assert torch.allclose(found.double(), exact, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "torch_ref"])
def test_an_empty_sequence_gives_zeros_and_minus_infinity(make_case, backend):
    case = make_case([12, 5], [1, 1], 8)
    case.seq_lens[1] = 0
    lse = torch.empty(2, 8)
    q, key_cache, value_cache, table, lengths, _ = case.args(torch.float32)
    out = paged_attention_decode(
        q, key_cache, value_cache, table, lengths, scale=SCALE, lse=lse, backend=backend
    )
    assert not out[1].any()
    assert lse[1].eq(float("-inf")).all()
    assert out[0].isfinite().all()


def test_physical_placement_does_not_matter(make_case):
    first = make_case([40, 61], [1, 20], 8)
    blocks = first.key_cache.shape[0]
    order = torch.cat([torch.tensor([0]), torch.randperm(blocks - 1) + 1])
    place = torch.empty_like(order)
    place[order] = torch.arange(blocks)
    moved = [cache[order] for cache in (first.key_cache, first.value_cache)]
    table = torch.where(first.block_table < blocks, place[first.block_table.clamp_max(blocks - 1)], 2**30)
    q, *_, lengths, bounds = first.args(torch.float32)
    assert torch.equal(
        paged_attention_prefill(*first.args(torch.float32), scale=SCALE),
        paged_attention_prefill(q, moved[0], moved[1], table, lengths, bounds, scale=SCALE),
    )


def test_strided_queries(make_case):
    case = make_case([40, 61, 30], [1, 20, 1], 8)
    _, *rest = case.args(torch.float32)
    apart = torch.stack([case.q, torch.full_like(case.q, float("nan"))], dim=1)[:, 0]
    assert not apart.is_contiguous()
    assert torch.equal(
        paged_attention_prefill(apart, *rest, scale=SCALE),
        paged_attention_prefill(case.q, *rest, scale=SCALE),
    )


def test_a_length_beyond_the_table_is_refused(make_case):
    case = make_case([12], [1], 8)
    case.seq_lens[0] = 1000
    with pytest.raises(KernelError, match="1000 tokens does not fit a table of 32 slots"):
        paged_attention_prefill(*case.args(torch.float32), scale=SCALE)


def test_heads_must_be_a_multiple_of_kv_heads(make_case):
    case = make_case([12], [1], 8)
    case.q = case.q[:, :7]
    with pytest.raises(KernelError, match="multiple of 4"):
        paged_attention_prefill(*case.args(torch.float32), scale=SCALE)
