"""Bad input is refused before anything runs, by kind, with the values that are wrong."""

import numpy as np
import pytest
import torch

from paged_kernels import (
    BackendUnavailableError,
    DeviceError,
    DtypeError,
    KernelError,
    OptionError,
    ShapeError,
    StrideError,
    TableError,
    Workspace,
    WorkspaceError,
    cascade_attention_decode,
    choose_backend,
    copy_blocks,
    merge_attn_states,
    paged_attention_decode,
    paged_attention_prefill,
    reshape_and_cache,
    swap_blocks,
)
from paged_kernels.backends import Demand
from paged_kernels.case import CaseSpec, build_case

SPEC = CaseSpec((12, 9), heads=4, kv_heads=2, dk=16, block_size=8, dtype=torch.float32)
NAMES = ("q", "key_cache", "value_cache", "block_table", "seq_lens")


def decode(**changes):
    """A sound decode, but for what is changed."""
    case = build_case(SPEC)
    arguments = {name: getattr(case, name) for name in NAMES} | {"scale": 0.3} | changes
    return paged_attention_decode(**arguments)


def changed(name, change):
    return {name: change(getattr(build_case(SPEC), name))}


def with_entry(table, value):
    table[1, 1] = value
    return table


REFUSED = {
    "other widths of q and cache": (changed("q", lambda q: q[..., :8].contiguous()), ShapeError, r"\(2, 4, 8\)"),
    "heads that are no multiple": (changed("q", lambda q: q[:, :3]), ShapeError, "multiple of 2"),
    "a cache of other form": (changed("value_cache", lambda v: v[:-1]), ShapeError, "agree in the first three"),
    "values without a width": (changed("value_cache", lambda v: v[..., 0].contiguous()), ShapeError, "must both be"),
    "values with an axis more": (changed("value_cache", lambda v: v[..., None]), ShapeError, "must both be"),
    "queries of another dtype": (changed("q", torch.Tensor.half), DtypeError, "q is torch.float16 and the cache"),
    "values of another dtype": (changed("value_cache", torch.Tensor.half), DtypeError, "value_cache torch.float16"),
    "a cache of integers": (
        changed("key_cache", torch.Tensor.int) | changed("value_cache", torch.Tensor.int),
        DtypeError,
        "torch.int32; a cache must be one of float16",
    ),
    "tables of numbers": (changed("block_table", torch.Tensor.float), DtypeError, "block_table is torch.float32"),
    "q elsewhere": (changed("q", lambda q: q.to("meta")), DeviceError, "q is on meta and key_cache on cpu"),
    "tables elsewhere": (changed("block_table", lambda t: t.to("meta")), DeviceError, "block_table is on meta"),
    "rows with gaps": (changed("q", lambda q: q.repeat(1, 1, 2)[..., ::2]), StrideError, "the last one must be 1"),
    "one table row too few": (changed("block_table", lambda t: t[:1]), ShapeError, "2 seq_lens need as many rows"),
    "a block that is not there": (
        changed("block_table", lambda t: with_entry(t, 99)),
        TableError,
        r"block_table\[1, 1\] is 99; the cache has blocks 0 to",
    ),
    "a negative block": (changed("block_table", lambda t: with_entry(t, -1)), TableError, r"block_table\[1, 1\] is -1"),
    "a negative length": (changed("seq_lens", lambda n: n - 10), TableError, "a sequence of -1 tokens"),
    "a length beyond its table": (changed("seq_lens", lambda n: n * 100), TableError, "1200 tokens does not fit"),
    "a negative window": ({"window": -1}, OptionError, "window -1"),
    "a negative softcap": ({"softcap": -2.0}, OptionError, "softcap -2.0"),
    "half a window": ({"window": 2.5}, OptionError, r"window 2.5 \(a whole number\)"),
    "a softcap that is no number": ({"softcap": float("nan"), "backend": "native"}, OptionError, "softcap nan"),
    "half a split": ({"num_splits": 2.5}, OptionError, "num_splits 2.5"),
    "blocks of no slots": (
        changed("key_cache", lambda k: k[:, :0]) | changed("value_cache", lambda v: v[:, :0]),
        ShapeError,
        "none of the last three 0",
    ),
    "no heads of keys": (
        changed("key_cache", lambda k: k[:, :, :0]) | changed("value_cache", lambda v: v[:, :, :0]),
        ShapeError,
        "none of the last three 0",
    ),
    "a scale of zero": ({"k_scale": 0.0}, OptionError, "k_scale 0.0"),
    "a scale of what is stored without one": ({"v_scale": 2.0}, OptionError, "not fp8: it is torch.float32"),
    "lengths in two dimensions": (changed("seq_lens", lambda n: n[:, None]), ShapeError, r"seq_lens \(2, 1\) must"),
    "a single length": (changed("seq_lens", lambda n: n[0]), ShapeError, r"seq_lens \(\) must"),
    "no splits": ({"num_splits": 0}, OptionError, "num_splits 0"),
    "sinks for other heads": ({"sinks": torch.zeros(3)}, ShapeError, r"sinks \(3,\)"),
    "slopes elsewhere": ({"alibi": torch.zeros(4, device="meta")}, ShapeError, "on meta"),
    "an output of other form": ({"out": torch.empty(2, 4, 8)}, ShapeError, r"out \(2, 4, 8\)"),
    "an output of another dtype": ({"out": torch.empty(2, 4, 16).half()}, DtypeError, "out is torch.float16 and q"),
    "a narrow lse": ({"lse": torch.empty(2, 4).half()}, DtypeError, "must be float32 or float64"),
    "an lse with gaps": ({"lse": torch.empty(2, 8)[:, ::2]}, StrideError, "must be contiguous"),
    "an unknown backend": ({"backend": "cuda"}, OptionError, "choose auto, native, torch, torch_ref, triton"),
    "triton without a GPU": ({"backend": "triton"}, BackendUnavailableError, "this run is on 'cpu'"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_decode_is_refused_for(reason):
    changes, kind, message = REFUSED[reason]
    with pytest.raises(kind, match=message):
        decode(**changes)


def test_every_refusal_is_a_kernel_error_and_a_value_error():
    assert all(
        issubclass(kind, KernelError) and issubclass(kind, ValueError) for _, kind, _ in REFUSED.values()
    )


def test_entries_behind_the_end_are_never_looked_at():
    table = build_case(SPEC).block_table
    table[1, 5] = -7
    decode(block_table=table)


@pytest.mark.parametrize("backend", ["torch", "torch_ref"])
def test_on_a_cpu_a_callers_word_does_not_replace_the_check(backend):
    table = build_case(SPEC).block_table
    table[0, 0] = 99
    with pytest.raises(TableError, match=r"block_table\[0, 0\] is 99"):
        decode(block_table=table, validate=False, backend=backend)
    case = build_case(SPEC)
    with pytest.raises(TableError, match="slots from -3 to -3"):
        reshape_and_cache(
            case.key_cache[0, :1], case.value_cache[0, :1], case.key_cache, case.value_cache,
            torch.tensor([-3]), validate=False,
        )  # fmt: skip
    lens = torch.full((1,), 10**6)
    with pytest.raises(TableError, match="a sequence of 1000000 tokens"):
        cascade_attention_decode(
            case.q, case.key_cache, case.value_cache, case.block_table[:1], lens, case.block_table,
            case.seq_lens, scale=1.0, validate=False,
        )  # fmt: skip


def test_more_queries_than_cached_tokens_are_refused():
    case = build_case(SPEC)
    bounds = torch.tensor([0, 13, 14])
    inputs = (case.q.repeat(7, 1, 1), case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    with pytest.raises(TableError, match="sequence 0 has 13 queries in cu_seqlens_q and 12 cached tokens"):
        paged_attention_prefill(*inputs, bounds, scale=1.0)
    with pytest.raises(TableError, match="runs from 0 to 16; q has 14 rows"):
        paged_attention_prefill(*inputs, torch.tensor([0, 8, 16]), scale=1.0)
    with pytest.raises(TableError, match=r"sequence 1 has 6 queries .* 5 \(max_seqlen_q\) at most"):
        paged_attention_prefill(*inputs, torch.tensor([0, 2, 8]), 5, scale=1.0)


def test_no_sequence_has_no_output():
    case = build_case(SPEC)
    inputs = (case.q[:0], case.key_cache, case.value_cache, case.block_table[:0], case.seq_lens[:0])
    assert paged_attention_prefill(*inputs, torch.tensor([0]), scale=1.0).shape == (0, 4, 16)


def test_a_frozen_workspace_does_not_grow():
    workspace = Workspace()
    workspace.freeze()
    with pytest.raises(
        WorkspaceError, match=r"holds 0 elements .* 'decode_k' on cpu and the call needs 1024"
    ):
        decode(workspace=workspace, backend="torch")


@pytest.mark.parametrize("slot", [-2, 40])
def test_a_slot_outside_of_the_cache_is_refused(slot):
    case = build_case(SPEC)
    rows, slots = case.key_cache[0, :2], torch.tensor([0, slot])
    room = case.key_cache.shape[0] * 8
    with pytest.raises(TableError, match=f"allowed are -1 .skip. to {room - 1}"):
        reshape_and_cache(rows, rows, case.key_cache, case.value_cache, slots if slot < 0 else slots + room)


def test_rows_of_another_form_or_dtype_are_not_written():
    case = build_case(SPEC)
    rows, slots = case.key_cache[0, :2], torch.tensor([0, 1])
    caches = (case.key_cache, case.value_cache)
    with pytest.raises(ShapeError, match=r"key \(2, 1, 16\) must be \[tokens, 2, 16\]"):
        reshape_and_cache(rows[:, :1], rows, *caches, slots)
    with pytest.raises(ShapeError, match="with as many tokens in key and value"):
        reshape_and_cache(rows, rows[:1], *caches, slots)
    with pytest.raises(OptionError, match=r"k_scale 0.5 .* not fp8: it is torch.float32"):
        reshape_and_cache(rows, rows, *caches, slots, k_scale=0.5)
    with pytest.raises(DtypeError, match=r"value is torch.float16"):
        reshape_and_cache(rows, rows.half(), *caches, slots)
    with pytest.raises(ShapeError, match="must be 2 integers"):
        reshape_and_cache(rows, rows, *caches, slots[:1])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([[0, 99]], "writes 99 to 99 of"),
        ([[-1, 1]], "reads blocks -1"),
        ([[1, 3], [2, 3]], "writes a destination twice"),
        ([[1, 2, 3], [1, 3, 2]], "must be .n, 2."),
        ([[1.5, 2]], "block_mapping is torch.float32"),
        ([1, 2], "must be .n, 2."),
    ],
)
@pytest.mark.parametrize("form", [torch.tensor, list])
def test_a_mapping_that_points_nowhere_is_refused(pairs, message, form):
    case = build_case(SPEC)
    mapping = form(pairs)
    with pytest.raises(KernelError, match=message):
        copy_blocks(case.key_cache, case.value_cache, mapping)
    with pytest.raises(KernelError, match=message):
        swap_blocks(case.key_cache, torch.empty_like(case.key_cache), mapping)


@pytest.mark.parametrize("pairs", [[(1, 2), (3,)], [("a", "b")]])
def test_a_mapping_that_is_no_list_of_pairs_is_refused(pairs):
    case = build_case(SPEC)
    with pytest.raises(ShapeError, match="no list of pairs"):
        copy_blocks(case.key_cache, case.value_cache, pairs)


def test_a_mapping_may_be_an_array_or_empty():
    case = build_case(SPEC)
    before = case.key_cache.clone()
    copy_blocks(case.key_cache, case.value_cache, [])
    assert torch.equal(case.key_cache.isnan(), before.isnan())
    copy_blocks(case.key_cache, case.value_cache, np.array([[1, 2]]))
    assert torch.equal(case.key_cache[2].nan_to_num(), before[1].nan_to_num())


def test_blocks_of_other_forms_are_neither_copied_nor_swapped():
    cache = build_case(SPEC).key_cache[0]
    with pytest.raises(ShapeError, match="or have an axis of layers in front"):
        copy_blocks(cache, cache, [(1, 2)])
    with pytest.raises(ShapeError, match="or have an axis of layers in front"):
        swap_blocks(cache, cache, [(1, 2)])


def test_a_mapping_points_into_both_caches():
    case = build_case(SPEC)
    with pytest.raises(TableError, match="reads blocks 1 to 1 of 2 and writes 2 to 2 of 2"):
        copy_blocks(case.key_cache, case.value_cache[:2], [(1, 2)])


def test_swaps_between_unlike_caches_are_refused():
    cache = build_case(SPEC).key_cache
    with pytest.raises(ShapeError, match="agree in all but the number of blocks"):
        swap_blocks(cache, cache[..., :8], [(1, 1)])
    with pytest.raises(DtypeError, match="copied without conversion"):
        swap_blocks(cache, cache.half(), [(1, 1)])


def test_states_of_other_rows_do_not_merge():
    out, lse = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="of the same rows"):
        merge_attn_states(out, lse, out, lse[:, :2])
    with pytest.raises(ShapeError, match=r"out \(1, 3, 4\) must be \(2, 3, 4\)"):
        merge_attn_states(out, lse, out, lse, out[:1].clone())
    with pytest.raises(StrideError, match="lse has strides"):
        merge_attn_states(out, lse, out, lse, lse=torch.zeros(3, 2).T)


def test_a_group_that_is_not_there_is_refused():
    case = build_case(SPEC)
    caches = (case.q, case.key_cache, case.value_cache)
    inputs = (*caches, case.block_table[:1], torch.tensor([8]), case.block_table, case.seq_lens)
    with pytest.raises(TableError, match=r"group_ids from 0 to 1; allowed are -1 .none. to 0"):
        cascade_attention_decode(*inputs, torch.tensor([0, 1]), scale=1.0)
    with pytest.raises(ShapeError, match="group_ids"):
        cascade_attention_decode(*inputs, torch.tensor([0]), scale=1.0)
    with pytest.raises(DtypeError, match=r"group_ids is torch\.float32"):
        cascade_attention_decode(*inputs, torch.tensor([0.5, 0.0]), scale=1.0)


def test_auto_says_why_it_fell_back():
    demand = Demand(torch.float16, torch.float16, 4, 128)
    choice = choose_backend("auto", "cpu", demand)
    assert choice.backend == "torch"
    assert "serves float32 and bfloat16" in choice.reason or "compiled kernels" in choice.reason
    with pytest.raises(BackendUnavailableError, match="compiles for a CUDA device and this run is on 'cpu'"):
        choose_backend("triton", "cpu")


@pytest.mark.parametrize(
    ("demand", "reason"),
    [
        (Demand(torch.float64, torch.float64, 4, 128), "not float64"),
        (Demand(torch.bfloat16, torch.bfloat16, 4, 576), "up to 256, not 576"),
        (Demand(torch.bfloat16, torch.bfloat16, 256, 128), "up to 128 query heads per KV head, not 256"),
        (Demand(torch.bfloat16, torch.float8_e4m3fn, 4, 128), "needs sm_89"),
        (Demand(torch.bfloat16, torch.float8_e4m3fn, 4, 15, paired=False), "even head_dim and even strides"),
        (
            Demand(torch.bfloat16, torch.bfloat16, 4, 72, aligned=False),
            "strides that are multiples of 16 elements",
        ),
    ],
)
def test_what_the_kernels_do_not_serve_falls_back_by_name_or_is_refused(monkeypatch, demand, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert reason in choose_backend("auto", "cuda", demand).reason
    with pytest.raises(BackendUnavailableError, match=reason):
        choose_backend("triton", "cuda", demand)


def test_what_they_serve_runs_on_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    served = Demand(torch.bfloat16, torch.float8_e4m3fn, 7, 80)
    assert choose_backend("auto", "cuda", served) == ("triton", "")
