"""The Triton kernels in Triton's interpreter at their limits: NaN, freed blocks, far strides, large groups and scales.

Run by `test_triton.py` in a process of its own, beside `interpreted_checks.py`.
"""

import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted_cases import (
    attend,
    check,
    cut_short_rows,
    halves,
    latent_case,
    options_of,
    over_shared,
    spec_of,
)
from tiers import cases

from paged_kernels import (
    cascade_attention_decode,
    launch_policy,
    merge_attn_states,
    paged_attention_prefill,
    reshape_and_cache,
)
from paged_kernels.arguments import Workspace, storable
from paged_kernels.case import TOLERANCE, build_case, contiguous_kv, exact_attention, relative_error
from paged_kernels.launch_policy import Room
from paged_kernels.triton.decode import PartsOfStep, Queries, run_contiguous_decode, run_decode
from paged_kernels.triton.launch import PAIRS
from paged_kernels.triton.scan import widened

BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
pytestmark = pytest.mark.filterwarnings("error:invalid value")


def strange(value, which, lengths=(300, 40), **options):
    """A case with `value` in one element of one key or value of row 0, and its exact output and LSE."""
    case = build_case(spec_of(lengths, options.pop("queries", ()), block_size=16, **options))
    cache = case.key_cache if which == "key" else case.value_cache
    cache[case.block_table[0, 7], 5, 0, 3] = value  # token 117, KV head 0
    return case, exact_attention(case)


def few(case, **options):
    """The case by the decode kernel for a few queries a row."""
    return attend(case, prefill_kernel="auto", **options)


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@cases("value", [float("nan"), float("inf")], day=1)
@cases("queries", [(5, 2), (33, 1)], day=1)
def test_a_strange_key_reaches_those_of_a_few_queries_that_see_it(monkeypatch, value, queries):
    """Token 117 is the fourth of the last five of row 0: the queries before it do not see it."""
    cut_short_rows(monkeypatch)
    case, (exact, _) = strange(value, "key", (119, 40), queries=queries)
    assert exact[: queries[0] - 2].isfinite().all()
    assert not exact[queries[0] - 2 : queries[0]].isfinite().all()
    assert_same(few(case), exact)


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@cases("value", [float("nan"), float("inf")], day=1)
def test_a_strange_value_reaches_those_of_a_few_queries_that_see_it_and_no_other_row(monkeypatch, value):
    cut_short_rows(monkeypatch)
    case, (exact, _) = strange(value, "value", (119, 40), queries=(5, 2))
    found = few(case)
    assert not found[3:5, :2, 3].isfinite().any()
    assert_same(found[5:], exact[5:])


@np.errstate(invalid="ignore")
def test_a_read_behind_the_end_of_a_few_queries_would_be_seen(monkeypatch):
    cut_short_rows(monkeypatch)
    case = build_case(spec_of((300, 40), (7, 2), block_size=16))
    assert few(case).isfinite().all()
    case.seq_lens[0] += 1
    assert few(case)[6].isnan().all()


@cases("queries", [(9,), (64,)], day=1)
def test_blocks_freed_behind_the_window_of_a_few_queries_are_not_read(queries):
    case = build_case(spec_of((300,), queries, block_size=16, window=40))
    right = few(case)
    freed = case.block_table[0, : (300 - queries[0] - 40) // 16].long()
    case.key_cache[freed], case.value_cache[freed] = float("nan"), float("nan")
    assert torch.equal(few(case), right)


def test_parts_without_keys_take_no_part_in_a_few_queries():
    case = build_case(spec_of((20, 65), (3, 2), block_size=8))
    out = torch.full_like(case.q, float("nan"))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.scoring, out)
    run_decode(*inputs, None, 9, queries=Queries(case.cu_seqlens_q, 3))
    assert relative_error(out, exact_attention(case)[0]) < TOLERANCE[FP32]


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@pytest.mark.parametrize("which", [0, 1])
@cases("queries", [(), (5, 2)], day=1)
def test_a_nan_in_a_latent_vector_or_rotary_key_reaches_the_rows_that_see_it(monkeypatch, which, queries):
    cut_short_rows(monkeypatch)
    inputs, bounds, (exact, _) = latent_case((119, 40), queries, 4, (32, 8), block_size=16)
    table, out = inputs[3], inputs[0].new_empty(*exact.shape)
    inputs[1 + which][table[0, 7], 5, 0, 3] = float("nan")  # token 117 of row 0
    run_decode(*inputs, out, queries=Queries(bounds, max(queries)) if queries else None, latent=True)
    seen, other = (slice(3, 5), slice(5, 7)) if queries else (slice(0, 1), slice(1, 2))
    assert out[seen].isnan().flatten(1).any(1).all()
    assert relative_error(out[other], exact[other]) < TOLERANCE[FP32]


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@pytest.mark.parametrize("place", [1, 7])
def test_nan_reaches_a_few_queries_over_what_they_share(place):
    """Block 1 is shared by both rows; block 7 is the first row's own, and the last three of its queries see it."""
    case = build_case(spec_of((117, 100), (5, 3), block_size=16, shared_tokens=64))
    case.key_cache[case.block_table[0, place], 2] = float("nan")  # token 18 or 114
    exact, _ = exact_attention(case)
    for backend in ("triton", "torch"):
        assert_same(over_shared(case, 64, backend=backend), exact)


def blocks_far_apart(cache, apart=2**29 + 2**19):
    """The cache with its blocks `apart` elements from one another, in a sparse file, as `heads_outermost`."""
    blocks, size, heads, dim = cache.shape
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(held := cache.itemsize * (blocks * apart + size * heads * dim))
        memory = torch.from_file(file.name, shared=True, size=held // cache.itemsize, dtype=cache.dtype)
    far = memory.as_strided(cache.shape, (apart, heads * dim, dim, 1))
    return far.copy_(cache)


@pytest.mark.parametrize("latent", [False, True])
def test_blocks_may_lie_further_apart_than_32_bits_count(latent):
    if latent:
        (q, *caches, table, lengths, scoring), bounds, (exact, _) = latent_case((40, 9), (5, 2), 4, (32, 8))
    else:
        case = build_case(spec_of((40, 9), (5, 2), block_size=8))
        q, *caches, table, lengths, bounds = (
            *(case.q, case.key_cache, case.value_cache, case.block_table), case.seq_lens, case.cu_seqlens_q
        )  # fmt: skip
        scoring, exact = case.scoring, exact_attention(case)[0]
    far = [blocks_far_apart(cache) for cache in caches]
    assert int(table[0, :5].max()) * far[0].stride(0) > 2**31
    out = q.new_empty(*exact.shape)
    run_decode(q, *far, table, lengths, scoring, out, queries=Queries(bounds, 5), latent=latent)
    assert relative_error(out, exact) < TOLERANCE[FP32]


def assert_same(found, exact, *, atol=1e-5):
    """Finite where `exact` is, and there equal; NaN and infinite where it is."""
    assert torch.equal(found.isnan(), exact.isnan())
    assert torch.allclose(found.double(), exact, atol=atol, equal_nan=True)


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@cases("num_splits", [1, 3, None], day=(3,))
def test_a_strange_number_reaches_the_output_of_any_split(monkeypatch, which, value, num_splits):
    cut_short_rows(monkeypatch)
    case, (exact, sums) = strange(value, which)
    lse = torch.empty(2, 4)
    assert not exact.isfinite().all()
    assert_same(attend(case, num_splits=num_splits, lse=lse), exact)
    assert torch.equal(lse.isfinite(), sums.isfinite())  # an infinite LSE may become NaN on the way


@np.errstate(invalid="ignore")  # here it is meant
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("column", [6, 7])
@cases("kv_dtype", [E4M3, E5M2], day=1)
def test_an_eight_bit_nan_reaches_the_output_from_either_place_of_a_pair(which, column, kv_dtype):
    case = build_case(spec_of((150, 40), block_size=16, dtype=BF16, kv_dtype=kv_dtype))
    clean = attend(case, num_splits=2)
    cache = case.key_cache if which == "key" else case.value_cache
    storable(cache)[case.block_table[0, 7], 5, 0, column] = 0x7F  # NaN in both formats
    found = attend(case, num_splits=2)
    touched = torch.zeros_like(found, dtype=torch.bool)
    touched[0, :2, slice(None) if which == "key" else column] = True
    assert torch.equal(found.isnan(), touched)
    assert torch.equal(found[~touched], clean[~touched])


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_every_pair_of_eight_bit_numbers_is_widened_exactly(kv_dtype):
    pairs = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    even, odd = torch.empty(2**16), torch.empty(2**16)
    widen_all[(1,)](pairs, even, odd, PAIRS[kv_dtype])
    exact = pairs.view(kv_dtype).float().view(-1, 2)
    assert torch.equal(even.nan_to_num(1e9), exact[:, 0].nan_to_num(1e9))
    assert torch.equal(odd.nan_to_num(1e9), exact[:, 1].nan_to_num(1e9))


@triton.jit
def widen_all(pairs, even, odd, kind: tl.constexpr):
    place = tl.arange(0, 65536)
    first, second = widened(tl.load(pairs + place), kind, True)
    tl.store(even + place, first)
    tl.store(odd + place, second)


@np.errstate(invalid="ignore", over="ignore")  # here they are meant
@pytest.mark.parametrize("which", ["key", "value"])
@cases("shared", [64, 160], day=1)
@cases("options", [{}, {"sinks": True}], day=1)
def test_nan_reaches_the_output_of_a_cascade(which, shared, options):
    case, (exact, _) = strange(float("nan"), which, (300, 200), shared_tokens=shared, **options)
    for backend in ("triton", "torch"):
        assert_same(over_shared(case, shared, backend=backend), exact)


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_merge_keeps_the_nan_of_either_side(backend, side):
    parts = {"a": torch.randn(2, 3, 8), "b": torch.randn(2, 3, 8)}
    sums = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}
    parts[side][0], sums[side][0] = float("nan"), float("nan")
    merged, lse = merge_attn_states(parts["a"], sums["a"], parts["b"], sums["b"], backend=backend)
    assert merged[0].isnan().all()
    assert lse[0].isnan().all()
    assert merged[1].isfinite().all()


@np.errstate(invalid="ignore")
@cases("num_splits", [1, 4, None], day=(4,))
def test_a_read_behind_the_end_would_be_seen(monkeypatch, num_splits):
    """Slots behind a sequence are NaN, so a length that is one too long shows in the output."""
    cut_short_rows(monkeypatch)
    case = build_case(spec_of((300, 40), block_size=16))
    right = attend(case, num_splits=num_splits)
    assert right.isfinite().all()
    case.seq_lens[0] += 1
    assert attend(case, num_splits=num_splits)[0].isnan().all()


@cases("num_splits", [1, 3, None], day=(3,))
def test_blocks_freed_behind_the_window_are_not_read(num_splits):
    case = build_case(spec_of((300,), block_size=16, window=40))
    right = attend(case, num_splits=num_splits)
    freed = case.block_table[0, : (300 - 40) // 16]
    case.key_cache[freed.long()] = float("nan")
    case.value_cache[freed.long()] = float("nan")
    assert torch.equal(attend(case, num_splits=num_splits), right)


def test_a_length_on_the_edge_of_a_split_is_exact():
    check(spec_of((192, 128, 64), block_size=16), num_splits=3)


@cases("more", [-1, 0, 1], day=(1,))
def test_a_length_on_the_edge_of_a_balanced_part_is_exact(monkeypatch, more):
    cut_short_rows(monkeypatch)
    monkeypatch.setattr(launch_policy, "SPLIT_TOKENS", 128)  # parts of two tiles
    lengths = (192 + more, 128 + more, 64)
    room = Room(16, 3, 18_000, programs=1, tile=64, tile_bytes=65_536, partial_bytes=0)
    listed = PartsOfStep().of(torch.tensor(lengths), room, 0, Workspace())
    assert {end * 64 for _, _, end, *_ in listed.entries.view(-1, 8)[:2].tolist()} == {
        128,
        192 if more < 1 else 256,
    }
    check(spec_of(lengths, block_size=16))


def test_blocks_freed_behind_the_window_are_not_read_by_a_prefill():
    case = build_case(spec_of((300,), (9,), block_size=16, window=40))
    right = attend(case)
    freed = case.block_table[0, : (300 - 9 - 40) // 16].long()
    case.key_cache[freed], case.value_cache[freed] = float("nan"), float("nan")
    assert torch.equal(attend(case), right)


def heads_outermost(cache, apart):
    """A cache of 8-bit floats as `[kv_heads, blocks, block_size, dim]` in memory, heads `apart` bytes from one another.

    The memory is a sparse file, which takes no space. An offset that wraps at 32 bits points into the part before the
    first head, and reads zeros.
    """
    _, size, heads, dim = cache.shape
    held = 2**31 + heads * apart
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(held)
        memory = torch.from_file(file.name, shared=True, size=held, dtype=torch.uint8)
    far = memory.view(cache.dtype).as_strided(cache.shape, (size * dim, dim, apart, 1), 2**31)
    storable(far).copy_(storable(cache))
    return far


@pytest.mark.parametrize("queries", [(), (9, 3)])
def test_heads_may_be_outermost_and_further_apart_than_32_bits_count(queries):
    spec = spec_of((40, 9), queries, heads=3, kv_heads=3, kv_dtype=E5M2, block_size=8)
    case = build_case(spec)
    exact, _ = exact_attention(case)
    far = [heads_outermost(cache, 2**30 + 2**20) for cache in (case.key_cache, case.value_cache)]
    assert (spec.kv_heads - 1) * far[0].stride(2) > 2**31
    case = replace(case, key_cache=far[0], value_cache=far[1])
    assert relative_error(attend(case), exact) < TOLERANCE[FP32]


def test_rows_are_written_to_heads_further_apart_than_32_bits_count():
    near = torch.zeros(2, 4, 3, 16, dtype=E5M2)
    far, rows = heads_outermost(near, 2**30 + 2**20), torch.randint(-3, 4, (2, 3, 16)).float()
    reshape_and_cache(rows, rows, near, near, torch.tensor([1, 6]), backend="triton")
    reshape_and_cache(rows, rows, far, far, torch.tensor([1, 6]), backend="triton")
    assert torch.equal(storable(far), storable(near))
    assert near.float().abs().sum() > 0


@pytest.mark.parametrize("softcap", [50.0, 300.0])
@pytest.mark.parametrize("queries", [(), (9, 3)])
def test_a_large_softcap_is_as_exact_as_none(softcap, queries):
    check(spec_of((40, 70), queries, block_size=8, softcap=softcap))


@pytest.mark.parametrize("queries", [(), (9, 3)])
def test_tables_and_lengths_may_be_int64(queries):
    case = build_case(spec_of((40, 70), queries, block_size=8))
    wide = {name: getattr(case, name).long() for name in ("block_table", "seq_lens", "cu_seqlens_q")}
    assert torch.equal(attend(replace(case, **wide)), attend(case))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("queries", [(), (3, 1)])
def test_large_groups(group, queries):
    check(spec_of((20, 5), queries, heads=group, kv_heads=1, block_size=8))


def test_tables_and_lengths_of_a_cascade_may_be_int64():
    case = build_case(spec_of((97, 160), shared_tokens=96, block_size=16))
    narrow = halves(case, 96)
    wide = [value.long() for value in narrow]
    outs = [
        cascade_attention_decode(
            case.q, case.key_cache, case.value_cache, *tables, **options_of(case), backend="triton"
        )
        for tables in (narrow, wide)
    ]
    assert torch.equal(*outs)


def test_a_cascade_of_a_large_group_equals_the_whole():
    case = build_case(spec_of((20, 25), heads=40, kv_heads=1, shared_tokens=16, block_size=8))
    found = over_shared(case, 16)
    assert relative_error(found, exact_attention(case)[0]) < TOLERANCE[FP32]


def test_during_graph_capture_no_bound_of_the_queries_is_read(monkeypatch):
    """Many queries may then lie in a row, so the kernel for prompts computes them, not the one for a few."""
    case = build_case(spec_of((40, 70), (9, 3), block_size=8))
    expected = exact_attention(case)[0]

    def refuse(tensor, *arguments):
        raise RuntimeError("the host waits for the device")

    monkeypatch.setattr("paged_kernels.arguments.can_read_values", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "diff", refuse)
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    found = paged_attention_prefill(*inputs, **options_of(case), validate=False, backend="triton")
    assert relative_error(found, expected) < TOLERANCE[FP32]


@pytest.mark.parametrize("scale", [-0.25, 0.0])
@pytest.mark.parametrize("queries", [(), (9, 3)])
def test_a_scale_need_not_be_positive(scale, queries):
    case = build_case(spec_of((40, 70), queries, block_size=8))
    case = replace(case, scoring=case.scoring._replace(scale=scale))
    assert relative_error(attend(case), exact_attention(case)[0]) < TOLERANCE[FP32]


@pytest.mark.parametrize("factor", [1e-30, 1.0, 3e7])
@pytest.mark.parametrize("queries", [(), (9, 3)])
def test_queries_of_any_size_meet_an_eight_bit_cache(factor, queries):
    """They are multiplied as float16, whose range is smaller than bfloat16's."""
    case = build_case(spec_of((40, 70), queries, block_size=8, dtype=BF16, kv_dtype=E4M3))
    case = replace(case, q=case.q * factor, scoring=case.scoring._replace(scale=0.25 / factor))
    assert relative_error(attend(case), exact_attention(case)[0]) < TOLERANCE[BF16]


@pytest.mark.parametrize("num_splits", [1, None])
def test_decode_over_contiguous_keys_equals_the_paged_one(num_splits):
    case = build_case(spec_of((40, 9), block_size=8))
    keys, values = contiguous_kv(case)
    out, paged = torch.empty(2, 4, 16), attend(case, num_splits=num_splits)
    run_contiguous_decode(case.q, keys, values, case.seq_lens, case.scoring, out, None, num_splits)
    assert torch.equal(out, paged)
