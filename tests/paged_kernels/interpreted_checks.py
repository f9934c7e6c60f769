"""The Triton kernels in Triton's interpreter, run by `test_triton.py` in a process of its own.

TRITON_INTERPRET is read when a kernel is defined, so this file is not collected with the others. Shapes are tiny: a
program costs about 7 ms here and a tile 4 ms. What runs at full size and in all dtypes on a GPU is in `test_on_gpu.py`.
"""

import random
from dataclasses import replace

import pytest
import torch
from interpreted_cases import (
    LATENT_WIDTHS,
    attend,
    check,
    check_latent,
    cut_short_rows,
    options_of,
    over_shared,
    random_batches,
    random_spec,
    spec_of,
)
from tiers import cases, nights_share, tier

from paged_kernels import (
    Workspace,
    WorkspaceError,
    cascade_attention_decode,
    copy_blocks,
    merge_attn_states,
    paged_attention_prefill,
    reshape_and_cache,
)
from paged_kernels.case import TOLERANCE, build_case, exact_attention, relative_error
from paged_kernels.launch_policy import Room, parts_of_rows
from paged_kernels.triton import decode as triton_decode
from paged_kernels.triton.decode import PartsOfStep, Queries, run_decode

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OPTIONS = [
    {},
    {"window": 5},
    {"window": 70, "alibi": True},
    {"softcap": 2.0, "sinks": True},
    {"sinks": True, "window": 20, "softcap": 2.0, "alibi": True},
]
pytestmark = pytest.mark.filterwarnings("error:invalid value")


@cases("block_size", [1, 8, 16, 32, 64, 128, 256], day=(1, 256))
def test_decode_at_any_block_size_and_length(block_size):
    lengths = (0, 1, max(1, block_size - 1), block_size, block_size + 1, 90)
    check(spec_of(lengths, block_size=block_size, heads=2, kv_heads=1), num_splits=2)


@cases("options", OPTIONS, day=OPTIONS[-1:])
@cases("num_splits", [1, 3], day=(3,))
def test_decode_options(options, num_splits):
    check(spec_of((33, 0, 150), block_size=8, **options), num_splits=num_splits)


@cases(
    ("dtype", "kv_dtype"),
    [(FP16, None), (BF16, None), (BF16, E4M3), (FP16, E5M2), (FP32, E4M3)],
    day=((BF16, E4M3),),
)
def test_decode_of_any_dtype(dtype, kv_dtype):
    check(spec_of((33, 90), block_size=8, dtype=dtype, kv_dtype=kv_dtype), num_splits=2)


@cases("heads", [(1, 1), (3, 1), (7, 1), (16, 1)], day=((3, 1),))
@cases("dims", [(64, 64), (80, 48), (96, 96), (256, 128)], day=((80, 48),))
def test_decode_of_any_group_and_width(heads, dims):
    check(spec_of((65,), heads=heads[0], kv_heads=heads[1], dk=dims[0], dv=dims[1]), num_splits=1)


@cases("queries", [(6, 3), (20, 3), ()], day=1)
@cases("block_size", [8, 64], day=1)
def test_heads_before_slots_in_memory_change_nothing(queries, block_size):
    case, other = (
        build_case(spec_of(tier((40, 9), (70, 33)), queries, block_size=block_size, layout=layout))
        for layout in ("NHD", "HND")
    )
    assert other.key_cache.stride() != case.key_cache.stride()
    assert torch.equal(attend(case), attend(other))


@cases("options", [{}, {"window": 100}, {"sinks": True}], day=({"window": 100},))
def test_parts_are_balanced_on_the_device(monkeypatch, options):
    cut_short_rows(monkeypatch)
    check(spec_of((400, 1, 0, 70), block_size=16, heads=2, kv_heads=1, **options))


@cases("window", [100, 0], day=1)
@cases("dtype", [torch.int32, torch.int64], day=1)
def test_the_list_of_parts_covers_every_tile_that_a_row_sees_once(window, dtype):
    lengths, tile = torch.tensor([400, 1, 0, 70, 5000], dtype=dtype), 64
    room = Room(9, 1, 18_000, programs=2, tile=tile, tile_bytes=65_536, partial_bytes=1024)
    parts = PartsOfStep().of(lengths, room, window, Workspace())
    entries, spans = parts.entries.view(-1, 8).tolist(), parts.spans.view(-1, 2).tolist()
    for row, (length, (first, count)) in enumerate(zip(lengths.tolist(), spans, strict=True)):
        seen = range(max(length - window, 0) // tile if window else 0, -(-length // tile))
        mine = [entry for entry in entries if entry[0] == row]
        assert mine == entries[first : first + count]
        assert [place for _, begin, end, *_ in mine for place in range(begin, end)] == list(seen)
        assert all(entry[3:5] == [length, count] for entry in mine)
    used = sum(count for _, count in spans)
    assert len(entries) == len(lengths) + room.extra
    assert {entry[0] for entry in entries[used:]} == {len(lengths)}
    assert window or spans[4][1] > 1


@pytest.mark.nightly  # by day the test above has the list, and the tests of decode its use
@pytest.mark.parametrize("seed", range(50))
def test_the_device_cuts_rows_as_the_host_does(seed):
    for name, (room, lengths, window) in random_batches(seed).items():
        listed = PartsOfStep().of(torch.tensor(lengths, dtype=torch.int32), room, window, Workspace())
        expected = parts_of_rows(lengths, room, window).tolist()
        assert listed.spans.view(-1, 2)[:, 1].tolist() == expected, (name, lengths)


def test_layers_of_a_step_share_one_list_of_parts(monkeypatch):
    case, parts, launches = build_case(spec_of((20, 65), heads=2, kv_heads=1)), PartsOfStep(), []
    plan = triton_decode.plan_kernel
    monkeypatch.setattr(triton_decode, "plan_kernel", Counted(plan, launches))
    wide, narrow = (case.scoring._replace(window=window) for window in (0, 30))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    outs = [torch.empty_like(case.q) for _ in range(4)]
    for scoring, out in zip((wide, narrow, wide, narrow), outs, strict=True):
        run_decode(*inputs, scoring, out, parts=parts, workspace=Workspace())
    assert len(launches) == 2
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])


class Counted:
    """A kernel whose launches are noted."""

    def __init__(self, kernel, launches):
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid):
        self._launches.append(grid)
        return self._kernel[grid]


def test_more_parts_than_tiles():
    check(spec_of((20, 65), heads=2, kv_heads=1), num_splits=7)


def test_more_rows_than_one_program_looks_through(monkeypatch):
    monkeypatch.setattr("paged_kernels.triton.decode.MAX_ROWS", 2)
    check(spec_of((20, 65, 9), heads=2, kv_heads=1))


def test_a_workspace_that_is_large_enough_may_be_frozen():
    case, workspace = build_case(spec_of((20, 65))), Workspace()
    first = attend(case, num_splits=2, workspace=workspace)
    workspace.freeze()
    assert torch.equal(attend(case, num_splits=2, workspace=workspace), first)
    with pytest.raises(WorkspaceError, match="the call needs"):
        attend(case, num_splits=5, workspace=workspace)


@cases("block_size", [1, 8, 64, 256], day=(8,))
def test_prefill_chunks_see_their_prefix(block_size):
    check(spec_of((40, 0, 70, 9, 1), (40, 0, 5, 9, 1), block_size=block_size, heads=2, kv_heads=1))


@cases("options", OPTIONS, day=OPTIONS[-1:])
def test_prefill_options(options):
    check(spec_of((20, 90), (20, 3), block_size=8, **options))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (FP16, E4M3)])
def test_prefill_of_any_dtype(dtype, kv_dtype):
    check(spec_of((20, 70), (20, 3), block_size=8, dtype=dtype, kv_dtype=kv_dtype))


def test_prefill_of_a_group_that_is_no_power_of_two():
    check(spec_of((20, 33), (20, 7), heads=3, kv_heads=1, dk=24, dv=16))


SHORT = {"prefill_kernel": "auto"}
UNEVEN = [
    ((300, 90, 0, 1), (5, 3, 0, 1)),
    ((150, 64, 130), (2, 64, 1)),
    ((129, 260), (2, 17)),
    ((70, 0, 200), (7, 2, 33)),
]
GROUPS = [{"heads": 7, "kv_heads": 1}, {"heads": 18, "kv_heads": 1}]  # 18 rows take two programs
# every pair of rows and options, of rows and block size, and of options and block size
SQUARE = [
    (*rows, options, (1, 8, 48, 128)[(place + other) % 4])
    for place, rows in enumerate(UNEVEN)
    for other, options in enumerate([*OPTIONS, *GROUPS])
]


@cases(("lengths", "queries", "options", "block_size"), SQUARE, day=SQUARE[4:5])
def test_a_few_queries_a_row_are_read_in_parts(monkeypatch, lengths, queries, options, block_size):
    cut_short_rows(monkeypatch)
    check(spec_of(lengths, queries, block_size=block_size, **options), **SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP16, None), (BF16, None), (BF16, E4M3), (FP32, E5M2)])
def test_a_few_queries_a_row_in_any_dtype(monkeypatch, dtype, kv_dtype):
    cut_short_rows(monkeypatch)
    check(spec_of((290, 75), (6, 2), dtype=dtype, kv_dtype=kv_dtype), **SHORT)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", nights_share(range(1_000_000), 24))
def test_a_batch_that_nobody_chose(monkeypatch, seed):
    cut_short_rows(monkeypatch)
    check(random_spec(seed), **SHORT)


@pytest.mark.parametrize("num_splits", [1, None])
def test_the_first_query_of_a_row_sees_keys_in_a_tile_before_the_window_of_the_last(num_splits):
    case = build_case(spec_of((264,), (8,), window=6))
    out = torch.full_like(case.q, float("nan"))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.scoring, out)
    run_decode(*inputs, None, num_splits, queries=Queries(case.cu_seqlens_q, 8))
    assert relative_error(out, exact_attention(case)[0]) < TOLERANCE[FP32]


@pytest.mark.nightly
def test_queries_in_more_rows_than_one_launch_holds(monkeypatch):
    monkeypatch.setattr("paged_kernels.triton.decode.MAX_ROWS", 2)
    check(spec_of((90, 40, 70), (20, 3, 9), heads=2, kv_heads=1), **SHORT)


def test_queries_of_no_row_stay_as_they_are():
    case = build_case(spec_of((40, 30), (5, 3)))
    q = torch.cat([case.q, case.q[:2]])
    out = torch.full((10, *case.q.shape[1:]), 7.0)
    inputs = (q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q, 5)
    paged_attention_prefill(*inputs, **options_of(case), out=out, backend="triton")
    assert relative_error(out[:8], exact_attention(case)[0]) < TOLERANCE[FP32]
    assert (out[8:] == 7.0).all()


@pytest.mark.parametrize("kernel", ["auto", "plain"])
def test_a_query_of_the_second_row_is_not_taken_for_one_of_the_first(monkeypatch, kernel):
    """As many rows of q as sequences are no decode: the first sequence may have none, and a row may be nobody's."""
    if kernel == "plain":  # named, it computes single queries too
        monkeypatch.setattr("paged_kernels.triton.decode.run_decode", None)
    case = build_case(spec_of((40, 30), (0, 1)))
    q = torch.cat([case.q, case.q])
    out = torch.full_like(q, 7.0)
    inputs = (q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    paged_attention_prefill(*inputs, **options_of(case), out=out, backend="triton", prefill_kernel=kernel)
    assert relative_error(out[:1], exact_attention(case)[0]) < TOLERANCE[FP32]
    assert (out[1:] == 7.0).all()


LATENT = [
    (widths, heads, [(1, 1), (5, 2), (33, 1)][(place + other) % 3])
    for place, widths in enumerate(LATENT_WIDTHS)
    for other, heads in enumerate((1, 20, 4))
]


@cases(("widths", "heads", "queries"), LATENT, day=LATENT[1:2])
@cases("window", [0, 50], day=(50,))
def test_latent_vectors_are_keys_and_values(monkeypatch, widths, heads, window, queries):
    cut_short_rows(monkeypatch)
    check_latent(tier((70, 20), (300, 133)), queries, heads, widths, window=window)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", nights_share(range(1_000_000), 12))
def test_latent_rows_that_nobody_chose(monkeypatch, seed):
    cut_short_rows(monkeypatch)
    draw = random.Random(seed)
    queries = [draw.choice((1, draw.randint(1, 40))) for _ in range(draw.randint(1, 3))]
    lengths = [count + draw.choice((0, draw.randint(0, 200))) for count in queries]
    sizes = {"window": draw.choice((0, 1, 60)), "block_size": draw.choice((1, 3, 8, 48, 64, 96))}
    check_latent(lengths, queries, draw.randint(1, 20), draw.choice(LATENT_WIDTHS), **sizes)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", nights_share(range(1_000_000), 12))
def test_a_cascade_that_nobody_chose(monkeypatch, seed):
    cut_short_rows(monkeypatch)
    spec, draw = random_spec(seed), random.Random(seed)
    shared = draw.randint(1, -(-130 // spec.block_size)) * spec.block_size
    queries = [max(1, count) for count in spec.queries]
    lengths = [shared + max(1, length) for length in spec.lengths]
    case = build_case(replace(spec, lengths=tuple(lengths), queries=tuple(queries), shared_tokens=shared))
    lse, exact = torch.empty(case.q.shape[:2]), exact_attention(case)
    found = over_shared(case, shared, lse=lse)
    assert relative_error(found, exact[0]) < TOLERANCE[case.q.dtype]
    assert torch.allclose(lse.double(), exact[1], atol=1e-5 if case.q.dtype == FP32 else 2e-2)


@pytest.mark.nightly  # by day the test above has latent vectors
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_parts_of_latent_vectors_merge(num_splits, dtype):
    check_latent((130, 0, 64), (), 16, (64, 16), num_splits=num_splits, dtype=dtype)


@cases("options", [{}, *OPTIONS[1:3], {"sinks": True}, {"kv_dtype": E5M2}], day=({"kv_dtype": E5M2},))
def test_a_cascade_equals_the_whole(options):
    case = build_case(spec_of((97, 160, 120), shared_tokens=96, block_size=16, **options))
    lse = torch.empty(3, 4)
    found = over_shared(case, 96, lse=lse)
    exact, sums = exact_attention(case)
    assert relative_error(found, exact) < TOLERANCE[FP32]
    assert torch.allclose(lse.double(), sums, atol=1e-5)


FEW = [((97, 160, 120), (1, 9, 3)), ((300, 112, 99), (17, 2, 3))]
SHARING = [{}, OPTIONS[2], OPTIONS[3], {"kv_dtype": E5M2}, GROUPS[0], {"dtype": BF16, "kv_dtype": E4M3}]


@pytest.mark.nightly  # by day `interpreted_engine_checks.py` has such rows
@pytest.mark.parametrize(("lengths", "queries"), FEW)
@pytest.mark.parametrize("options", SHARING)
def test_a_cascade_of_a_few_queries_a_row_equals_the_whole(monkeypatch, lengths, queries, options):
    cut_short_rows(monkeypatch)
    case = build_case(spec_of(lengths, queries, shared_tokens=96, block_size=16, **options))
    lse, exact = torch.empty(case.q.shape[:2]), exact_attention(case)
    found = over_shared(case, 96, lse=lse)
    assert relative_error(found, exact[0]) < TOLERANCE[case.q.dtype]
    assert torch.allclose(lse.double(), exact[1], atol=1e-5 if case.q.dtype == FP32 else 2e-2)


@cases("queries", [(), (3, 1, 5, 20, 2), (64, 2, 0, 1, 1)], day=1)
def test_groups_of_a_cascade_may_stand_in_any_order(queries):
    case = build_case(spec_of((64, 30, 70, 20, 40), queries, block_size=4, heads=2, kv_heads=1))
    ids = torch.tensor([1, -1, 0, 1, 0])
    shared, lens = case.block_table[[2, 0], :4].contiguous(), torch.tensor([16, 12], dtype=torch.int32)
    inputs = (case.q, case.key_cache, case.value_cache, shared, lens, case.block_table, case.seq_lens, ids)
    several = {"cu_seqlens_q": case.cu_seqlens_q} if queries else {}
    found, exact = (
        cascade_attention_decode(*inputs, **several, **options_of(case), backend=name)
        for name in ("triton", "torch_ref")
    )
    assert relative_error(found, exact.double()) < TOLERANCE[FP32]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_partial_attentions_merge_and_empty_sides_take_no_part(dtype):
    a, b = (torch.randn(3, 5, 8).to(dtype) for _ in range(2))
    lse_a, lse_b = torch.randn(3, 5), torch.randn(3, 5)
    lse_a[0], lse_b[:2], a[0] = float("-inf"), float("-inf"), float("nan")
    found = merge_attn_states(a, lse_a, b, lse_b, backend="triton")
    exact = merge_attn_states(a.double(), lse_a.double(), b.double(), lse_b.double(), backend="torch")
    assert relative_error(found[0], exact[0]) < (1e-6 if dtype == FP32 else 2**-7)
    assert torch.allclose(found[1].double(), exact[1], atol=1e-6)
    assert not found[0][0].any()


def test_states_merge_whatever_their_strides():
    outs = [torch.randn(3, 8, 4).transpose(1, 2) for _ in range(2)]
    sums = [torch.randn(4, 3).T for _ in range(2)]
    found = merge_attn_states(outs[0], sums[0], outs[1], sums[1], backend="triton")
    exact = merge_attn_states(outs[0], sums[0], outs[1], sums[1], backend="torch")
    assert torch.allclose(found[0], exact[0], atol=1e-6)
    assert torch.allclose(found[1], exact[1], atol=1e-6)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_land_in_their_slots_and_minus_one_is_skipped(layout):
    cache = [torch.full((4, 4, 2, 3), float("nan"), dtype=BF16) for _ in range(2)]
    if layout == "HND":
        cache = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in cache]
    key = torch.randn(2, 3, 3).bfloat16().transpose(0, 1)
    slots = torch.tensor([9, 3, -1, 3, 4])[::2]  # with gaps: a kernel reads it as if it had none
    reshape_and_cache(key, key, *cache, slots, backend="triton")
    assert torch.equal(cache[0][2, 1], key[0])
    assert torch.equal(cache[1][1, 0], key[2])
    assert int((~cache[0][..., 0, 0].isnan()).sum()) == 2


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_an_eight_bit_cache_takes_scaled_values_within_its_range(kv_dtype):
    """Of numbers that it can hold: how the interpreter rounds others is not how a GPU does."""
    rows = torch.randint(-3, 4, (4, 2, 8)).float()
    rows[3, 0], rows[3, 1] = 1e6, -1e6
    keys, values = (torch.zeros(2, 4, 2, 8, dtype=kv_dtype) for _ in range(2))
    reshape_and_cache(rows, rows, keys, values, torch.arange(4), k_scale=0.5, v_scale=2.0, backend="triton")
    most = torch.finfo(kv_dtype).max
    assert torch.equal(keys[0].float(), (rows / 0.5).clamp(-most, most))
    assert torch.equal(values[0].float(), (rows / 2.0).clamp(-most, most))


@pytest.mark.parametrize("kind", ["disjoint", "simultaneous"])
def test_copies_move_both_caches_of_a_stack_of_layers(kind):
    keys, values = torch.randn(2, 2, 5, 4, 2, 3).unbind(0)
    expected = [stack.clone() for stack in (keys, values)]
    pairs = [[1, 2], [3, 4]] if kind == "disjoint" else [[1, 2], [2, 1], [3, 4]]
    source, destination = torch.tensor(pairs).unbind(1)
    for stack in expected:
        stack[:, destination] = stack[:, source]
    copy_blocks(keys, values, torch.tensor(pairs), backend="triton")
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_the_check_sees_a_table_that_is_off_by_one():
    case = build_case(spec_of((90, 40), block_size=8))
    exact, _ = exact_attention(case)
    case.block_table[0, 3] = case.block_table[0, 4]
    assert relative_error(attend(case), exact) > 100 * TOLERANCE[FP32]


@pytest.mark.nightly  # by day the one above
def test_the_check_sees_a_read_behind_the_end():
    case = build_case(spec_of((90, 41), block_size=8))
    exact, _ = exact_attention(case)
    case.seq_lens[1] += 1
    assert not relative_error(attend(case), exact) < TOLERANCE[FP32]


@pytest.mark.nightly  # by day `interpreted_engine_checks.py` has it
def test_the_engine_gives_the_same_tokens_on_both_backends():
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec
    from engine.runtime.params import SamplingParams

    shape = {
        "layers": 1,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "intermediate": 32,
        "vocab": 64,
    }
    loaded = load_model(ModelSpec(**shape, max_position=64))
    prompts = [[5, 9, 2, 7], [8], list(range(3, 20))]
    answers = [
        LLM(loaded, backend=backend, pool_tokens=128, block_size=8, audit="full").generate(
            prompts, SamplingParams(max_tokens=2, temperature=0.0)
        )
        for backend in ("torch", "triton")
    ]
    found, expected = ([done.outputs[0].token_ids for done in answer] for answer in answers)
    assert found == expected
