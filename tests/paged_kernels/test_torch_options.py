"""The torch paths at every option, dtype and layout, against float64 under poison and garbage."""

import threading

import pytest
import torch

from paged_kernels import paged_attention_decode, paged_attention_prefill, reshape_and_cache, swap_blocks
from paged_kernels.arguments import DEFAULT_WORKSPACE
from paged_kernels.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LENGTHS = (0, 1, 15, 16, 17, 120)
QUERIES = (0, 1, 15, 4, 17, 33)


def errors(spec, *, with_lse=True):
    """Relative error of the output, and the largest absolute one of the LSE."""
    case = build_case(spec)
    lse = torch.full(case.q.shape[:2], float("nan")) if with_lse else None
    common = case.scoring._asdict() | {"lse": lse, "backend": "torch"}
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    if case.decode:
        found = paged_attention_decode(*inputs, **common)
    else:
        found = paged_attention_prefill(*inputs, case.cu_seqlens_q, **common)
    exact, sums = exact_attention(case)
    seen = sums > float("-inf")
    apart = 0.0 if lse is None else float((lse[seen] - sums[seen]).abs().max())
    assert lse is None or torch.equal(lse > float("-inf"), seen)
    return relative_error(found, exact), apart


def spec_of(queries=(), **options):
    """A ragged batch of 4 query and 2 KV heads."""
    lengths = LENGTHS if not queries else LENGTHS[1:]
    small = {"heads": 4, "kv_heads": 2, "dk": 32, "block_size": 16, "dtype": torch.float32}
    return CaseSpec(lengths, tuple(queries[1:]), **(small | options))


@pytest.mark.parametrize("queries", [(), QUERIES])
@pytest.mark.parametrize(
    "options", [{"alibi": True}, {"alibi": True, "window": 20, "softcap": 2.0, "sinks": True}, {"window": 3}]
)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_options_in_either_layout(queries, options, layout):
    error, apart = errors(spec_of(queries, layout=layout, **options))
    assert error < TOLERANCE[torch.float32]
    assert apart < 1e-5


@pytest.mark.parametrize("queries", [(), QUERIES])
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [(torch.bfloat16, E4M3), (torch.float16, E5M2), (torch.float32, E4M3)]
)
def test_eight_bit_caches(queries, with_lse, dtype, kv_dtype):
    spec = spec_of(queries, dtype=dtype, kv_dtype=kv_dtype, k_scale=0.25, v_scale=2.0)
    assert errors(spec, with_lse=with_lse)[0] < TOLERANCE[dtype]


@pytest.mark.parametrize("queries", [(), QUERIES])
@pytest.mark.parametrize("widths", [(32, 16), (16, 32)])
def test_keys_and_values_of_different_widths_have_a_sum_too(queries, widths):
    error, apart = errors(spec_of(queries, dk=widths[0], dv=widths[1]))
    assert error < TOLERANCE[torch.float32]
    assert apart < 1e-5


@pytest.mark.parametrize("queries", [(), (0, 1, 2, 4, 3, 20)])
@pytest.mark.parametrize("with_lse", [False, True])
def test_what_a_window_has_left_may_be_nan(queries, with_lse):
    case = build_case(spec_of(queries, window=7))
    exact, _ = exact_attention(case)
    for row, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
        left = torch.arange(max(0, length - count + 1 - 7))
        places = case.block_table[row, left // 16].long(), left % 16
        case.key_cache[places] = case.value_cache[places] = float("nan")
    lse = torch.empty(case.q.shape[:2]) if with_lse else None
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    found = paged_attention_prefill(*inputs, **case.scoring._asdict(), lse=lse, backend="torch")
    assert relative_error(found, exact) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dk", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_every_head_dim_and_block_size(dk, block_size):
    assert errors(spec_of(dk=dk, block_size=block_size), with_lse=False)[0] < TOLERANCE[torch.float32]


@pytest.mark.parametrize("queries", [(), QUERIES])
@pytest.mark.parametrize("options", [{"sinks": True}, {"alibi": True}])
def test_scores_that_half_precision_cannot_hold(queries, options):
    case = build_case(spec_of(queries, dtype=torch.float16, **options))
    case.q.abs_().add_(60)  # 32 products of 60 x 60 are more than 65,504
    case.key_cache[~case.key_cache.isnan()] += 60
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    found = paged_attention_prefill(*inputs, **case.scoring._asdict(), backend="torch")
    assert relative_error(found, exact_attention(case)[0]) < TOLERANCE[torch.float16]


def test_each_thread_has_a_workspace_of_its_own():
    kept = [DEFAULT_WORKSPACE.take("rows", 8, torch.zeros(1)).fill_(1.0)]

    def other():
        kept.append(DEFAULT_WORKSPACE.take("rows", 8, torch.zeros(1)).fill_(2.0))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert kept[0].tolist() == [1.0] * 8
    assert kept[1].tolist() == [2.0] * 8


def test_an_eight_bit_cache_holds_scaled_values_within_its_range():
    rows = torch.tensor([[[3.0, -0.5]], [[1e6, -1e6]]])
    keys, values = (torch.zeros(1, 2, 1, 2, dtype=E4M3) for _ in range(2))
    reshape_and_cache(rows, rows, keys, values, torch.tensor([0, 1]), k_scale=0.5, v_scale=2.0)
    assert keys[0].float().flatten().tolist() == [6.0, -1.0, 448.0, -448.0]
    assert values[0].float().flatten().tolist() == [1.5, -0.25, 448.0, -448.0]


def test_writing_to_heads_before_slots_equals_writing_to_slots_before_heads():
    rows, slots = torch.randn(3, 2, 4), torch.tensor([5, -1, 2])
    plain = [torch.zeros(2, 4, 2, 4) for _ in range(2)]
    turned = [torch.zeros(2, 2, 4, 4).transpose(1, 2) for _ in range(2)]
    for caches in (plain, turned):
        reshape_and_cache(rows, rows, *caches, slots)
    assert torch.equal(plain[0], turned[0])


@pytest.mark.parametrize("pairs", [[(1, 0), (2, 1), (3, 2), (0, 4)], torch.tensor([[3, 1]]), []])
def test_swaps_move_blocks_of_all_layers_there_and_back(pairs):
    device, host = torch.randn(3, 4, 2, 2, 5), torch.full((3, 6, 2, 2, 5), float("nan"))
    kept = device.clone()
    swap_blocks(device, host, pairs)
    listed = [tuple(map(int, pair)) for pair in pairs]
    for source, destination in listed:
        assert torch.equal(host[:, destination], kept[:, source])
    assert int((~host[0, :, 0, 0, 0].isnan()).sum()) == len(listed)
    device.fill_(float("nan"))
    swap_blocks(host, device, [(destination, source) for source, destination in listed])
    for source, _ in listed:
        assert torch.equal(device[:, source], kept[:, source])
