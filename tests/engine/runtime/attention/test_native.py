"""The compiled CPU kernels: exact under poison, left out where they cannot be had."""

import os

import numpy as np
import pytest
import torch
from quick_compiler import quick_compiler
from tiers import cases

from paged_kernels import native as compiling
from paged_kernels.backends import Demand, unserved_by_native
from paged_kernels.native import NativeUnavailableError, attention, library, why_unavailable

compiled = pytest.mark.usefixtures("compiled_kernels")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # query heads, KV heads, width of keys, width of values
    (8, 4, 64, 64),
    (4, 4, 64, 64),
    (8, 2, 128, 128),
    (3, 1, 128, 128),
    (6, 2, 16, 48),
    (4, 2, 80, 144),
]


class Pool:
    """As much of a KV pool as a plan asks for."""

    def __init__(self, block_size):
        self.block_size, self.device, self.token_bytes = block_size, torch.device("cpu"), 4096


def case(shape, block_size, dtype, lengths, seed=0):
    """Queries, poisoned caches and a layout of decode rows with shuffled blocks."""
    from engine.runtime.attention.metadata import StepLayout

    heads, kv_heads, dk, dv = shape
    draw = np.random.default_rng(seed)
    needed = -(-np.array(lengths) // block_size)
    blocks = draw.permutation(int(needed.sum()) + 3)[: needed.sum()] + 1
    tables = np.zeros((len(lengths), int(needed.max())), dtype=np.int64)
    tables[np.arange(tables.shape[1]) < needed[:, None]] = blocks
    generator = torch.Generator().manual_seed(seed)
    caches = [
        torch.full((int(needed.sum()) + 4, block_size, kv_heads, dim), float("nan"), dtype=dtype)
        for dim in (dk, dv)
    ]
    for cache in caches:
        cache[0] = 0.0
        for table, length in zip(tables, lengths, strict=True):
            rows = torch.randn(length, *cache.shape[2:], generator=generator)
            position = np.arange(length)
            cache.flatten(0, 1)[table[position // block_size] * block_size + position % block_size] = rows.to(
                dtype
            )
    q = torch.randn(len(lengths), heads, dk, generator=generator).to(dtype)
    return q, *caches, StepLayout(tables, np.array(lengths, dtype=np.int64), [])


def by_hand(q, keys, values, layout, scale, window):
    """Attention in float64, row by row."""
    out = []
    for row, (table, length) in enumerate(zip(layout.tables, layout.lengths, strict=True)):
        position = np.arange(max(0, length - window) if window else 0, length)
        slots = table[position // keys.shape[1]] * keys.shape[1] + position % keys.shape[1]
        k, v = (cache.flatten(0, 1)[slots].double() for cache in (keys, values))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        chance = torch.softmax(torch.einsum("hd,thd->ht", q[row].double(), k) * scale, dim=1)
        out.append(torch.einsum("ht,thd->hd", chance, v))
    return torch.stack(out)


def attended(q, keys, values, layout, scoring):
    from engine.runtime.attention.metadata import NativeMetadata
    from paged_kernels import Workspace

    out = q.new_full((len(q), q.shape[1], values.shape[3]), float("nan"))
    NativeMetadata(layout, Pool(keys.shape[1]), Workspace()).attend(q, keys, values, scoring, out)
    return out


@compiled
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 21])
def test_decode_equals_attention_in_float64_under_poison(shape, dtype, window):
    from paged_kernels import Scoring

    for block_size in (1, 16, 5):
        q, keys, values, layout = case(shape, block_size, dtype, [1, 15, 16, 17, 130])
        found = attended(q, keys, values, layout, Scoring(0.2, window))
        expected = by_hand(q, keys, values, layout, 0.2, window)
        assert torch.allclose(
            found.double(), expected, atol=1e-6 if dtype is torch.float32 else 1e-2, rtol=1e-2
        )


@compiled
@cases("window", [0, 1500], day=(1500,))
@cases("dtype", DTYPES, day=DTYPES[1:])
def test_a_long_row_is_read_by_several_threads_and_merged(dtype, window, monkeypatch):
    from paged_kernels import Scoring

    q, keys, values, layout = case(SHAPES[0], 16, dtype, [100, 3000, 5, 2100])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = attended(q, keys, values, layout, Scoring(0.2, window))
    expected = by_hand(q, keys, values, layout, 0.2, window)
    assert torch.allclose(found.double(), expected, atol=1e-6 if dtype is torch.float32 else 1e-2, rtol=1e-2)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [0, 1500])
def test_threads_read_every_token_once_and_about_as_many_each(threads, window):
    from paged_kernels.native.attention import plan_of

    lengths = np.array([9000, 1, 40, 5000, 700, 700, 3000])
    first = np.maximum(lengths - window, 0) if window else 0 * lengths
    read = [np.zeros(length, dtype=int) for length in lengths]
    plan, taken = plan_of(lengths, window, threads), []
    for rows, parts in plan.shares:
        spans = [(row, first[row], lengths[row]) for row in range(*rows)] + [part[:3] for part in parts]
        for row, begin, end in spans:
            read[row][begin:end] += 1
        taken.append(sum(end - begin for _, begin, end in spans))
    assert all((one == (np.arange(len(one)) >= begin)).all() for one, begin in zip(read, first, strict=True))
    assert len(taken) <= threads
    assert max(taken) <= sum(taken) / threads + 1024
    numbers = [(row, number) for _, parts in plan.shares for row, _, _, number in parts]
    assert numbers == [(row, start + k) for row, start, count in plan.merged for k in range(count)]


def test_short_rows_are_not_cut():
    from paged_kernels.native.attention import plan_of

    assert not plan_of(np.array([1000, 900]), 0, 2).merged


@compiled
def test_several_threads_give_the_same_numbers():
    from paged_kernels import Scoring

    q, keys, values, layout = case(SHAPES[0], 16, torch.float32, [200, 90, 40, 7, 3, 2, 1])
    one = attended(q, keys, values, layout, Scoring(0.1))
    torch.set_num_threads(3)
    try:
        three = attended(q, keys, values, layout, Scoring(0.1))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, three)


@compiled
@pytest.mark.parametrize("cache", [1, 2])
def test_a_slot_that_nobody_wrote_surfaces_as_nan(cache):
    from paged_kernels import Scoring

    tensors = case(SHAPES[0], 8, torch.float32, [30, 12])
    layout = tensors[3]
    tensors[cache][int(layout.tables[0, 1]), 3] = float("nan")
    found = attended(*tensors, Scoring(0.1))
    assert bool(torch.isnan(found[0]).all())
    assert not bool(torch.isnan(found[1]).any())


@compiled
@pytest.mark.parametrize(
    "wrong", ["a block beyond the pool", "a negative block", "a length beyond the table"]
)
def test_what_lies_outside_of_the_pool_is_an_error_and_not_read(wrong):
    from paged_kernels import Scoring

    q, keys, values, layout = case(SHAPES[0], 8, torch.float32, [30, 12])
    if wrong == "a length beyond the table":
        layout.lengths[0] = 33
    else:
        layout.tables[0, 1] = -1 if wrong == "a negative block" else len(keys)
    with pytest.raises(IndexError, match="outside of the pool"):
        attended(q, keys, values, layout, Scoring(0.1))


@compiled
@pytest.mark.parametrize("extreme", [-300.0, 300.0])
def test_scores_of_any_size_stay_numbers(extreme):
    from paged_kernels import Scoring

    q, keys, values, layout = case(SHAPES[0], 8, torch.float32, [40])
    keys.flatten(0, 1)[int(layout.tables[0, 0]) * 8 + 2] *= extreme
    found = attended(q, keys, values, layout, Scoring(1.0))
    assert torch.allclose(found.double(), by_hand(q, keys, values, layout, 1.0, 0), atol=1e-5)


@compiled
@pytest.mark.parametrize("what", ["softcap", "sinks", "float16"])
def test_what_the_kernel_does_not_know_is_left_to_torch(what):
    from engine.runtime.attention.metadata import TorchMetadata
    from paged_kernels import Scoring, Workspace

    dtype = torch.float16 if what == "float16" else torch.float32
    q, keys, values, layout = case(SHAPES[0], 8, dtype, [30, 12])
    scoring = Scoring(
        0.1, softcap=2.0 if what == "softcap" else 0.0, sinks=torch.ones(8) if what == "sinks" else None
    )
    assert what in unserved_by_native(Demand.of(q, keys, values, scoring))
    expected = torch.empty_like(q)
    TorchMetadata(layout, Pool(8), Workspace()).attend(q, keys, values, scoring, expected)
    assert torch.equal(attended(q, keys, values, layout, scoring), expected)


def chunks(shape, block_size, rows, dtype=torch.float32):
    """As `case`, with prefill rows: (queries, length) of each. Beyond the tokens every slot is NaN."""
    from engine.runtime.attention.metadata import PrefillRow, StepLayout

    _, keys, values, decode = case(shape, block_size, dtype, [length for _, length in rows])
    generator = torch.Generator().manual_seed(1)
    starts = np.cumsum([0, *(queries for queries, _ in rows)]).tolist()
    q = torch.randn(starts[-1], shape[0], shape[2], generator=generator).to(dtype)
    prefills = [
        PrefillRow(table[: -(-length // block_size)], start, queries, length)
        for table, start, (queries, length) in zip(decode.tables, starts, rows, strict=False)
    ]
    return q, keys, values, StepLayout(decode.tables[:0], decode.lengths[:0], prefills)


def chunks_by_hand(q, keys, values, layout, scale, window):
    """Attention of prefill rows in float64: every query as a decode row of its own."""
    from engine.runtime.attention.metadata import StepLayout

    out = []
    for row in layout.prefills:
        lengths = np.arange(row.length - row.queries + 1, row.length + 1)
        alone = StepLayout(np.tile(row.table, (row.queries, 1)), lengths, [])
        out.append(by_hand(q[row.start : row.start + row.queries], keys, values, alone, scale, window))
    return torch.cat(out)


CHUNKS = [(5, 5), (70, 70), (1, 64), (64, 64), (3, 140), (66, 131)]  # queries, tokens of the sequence
MATRIX_SHAPES = [*SHAPES[:4], (6, 2, 32, 96), (7, 1, 96, 64)]  # of prefill in bfloat16: multiples of 32


@pytest.fixture(params=["amx", "avx512_bf16", ""])
def bf16_unit(request, monkeypatch):
    """What multiplies in prefill in bfloat16: each that this CPU has."""
    use_unit(request.param, monkeypatch)


def use_unit(name, monkeypatch):
    has = compiling.bf16_unit() in ("amx", name)  # a CPU with AMX has the other too
    if compiling.why_unavailable() or (name and not has):
        pytest.skip(f"no compiled kernels, or no {name}")
    monkeypatch.setattr(attention, "bf16_unit", lambda: name)


@compiled
@cases("shape", SHAPES, day=(SHAPES[5],))
@cases("window", [0, 1, 21, 90], day=(21,))
def test_prefill_equals_attention_in_float64_under_poison(shape, window):
    from paged_kernels import Scoring

    for block_size in (1, 16, 5):
        q, keys, values, layout = chunks(shape, block_size, CHUNKS)
        found = attended(q, keys, values, layout, Scoring(0.2, window))
        expected = chunks_by_hand(q, keys, values, layout, 0.2, window)
        assert torch.allclose(found.double(), expected, atol=2e-5)  # torch: 4e-6


@cases("shape", MATRIX_SHAPES, day=(MATRIX_SHAPES[2], MATRIX_SHAPES[5]))
@cases("window", [0, 1, 21, 150], day=(21,))
def test_prefill_in_bfloat16_equals_attention_in_float64_under_poison(shape, window, bf16_unit):
    from paged_kernels import Scoring

    for block_size in (1, 16, 5):
        q, keys, values, layout = chunks(shape, block_size, [*CHUNKS, (40, 300)], torch.bfloat16)
        found = attended(q, keys, values, layout, Scoring(0.2, window))
        expected = chunks_by_hand(q, keys, values, layout, 0.2, window)
        assert torch.allclose(found.double(), expected, atol=1e-2, rtol=1e-2)


def test_prefill_in_bfloat16_is_as_exact_as_torchs(bf16_unit):
    from engine.runtime.attention.metadata import TorchMetadata
    from paged_kernels import Scoring, Workspace

    q, keys, values, layout = chunks(SHAPES[0], 16, [(300, 300), (130, 400)], torch.bfloat16)
    expected = chunks_by_hand(q, keys, values, layout, 0.125, 0)
    torchs = torch.empty_like(q)
    TorchMetadata(layout, Pool(16), Workspace()).attend(q, keys, values, Scoring(0.125), torchs)
    ours = attended(q, keys, values, layout, Scoring(0.125))
    errors = [float((found.double() - expected).square().mean().sqrt()) for found in (ours, torchs)]
    assert errors[0] <= 1.05 * errors[1]


@compiled
@pytest.mark.parametrize("dims", [(48, 64), (64, 80)])
def test_prefill_in_bfloat16_of_widths_that_fill_no_tile_is_computed_in_float32(dims):
    from paged_kernels import Scoring

    q, keys, values, layout = chunks((4, 2, *dims), 16, [(40, 70)], torch.bfloat16)
    assert attention.prefill_name(torch.bfloat16, *dims) == "prefill_bf16_wide"
    assert unserved_by_native(Demand.of(q, keys, values)) == ""
    expected = chunks_by_hand(q, keys, values, layout, 0.1, 0)
    found = attended(q, keys, values, layout, Scoring(0.1))
    assert torch.allclose(found.double(), expected, atol=1e-2, rtol=1e-2)


@compiled
@pytest.mark.parametrize("unit", ["float32", "", "amx", "avx512_bf16"])
def test_a_prompt_in_pieces_gives_the_same_numbers_as_whole(unit, monkeypatch):
    from paged_kernels import Scoring

    dtype = torch.float32 if unit == "float32" else torch.bfloat16
    if unit != "float32":
        use_unit(unit, monkeypatch)
    q, keys, values, layout = chunks(SHAPES[0], 16, [(140, 140)], dtype)
    whole = attended(q, keys, values, layout, Scoring(0.1))
    (row,) = layout.prefills
    pieces = [row._replace(start=a, queries=b - a, length=b) for a, b in ((0, 33), (33, 35), (35, 140))]
    assert torch.equal(attended(q, keys, values, layout._replace(prefills=pieces), Scoring(0.1)), whole)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@cases("shape", SHAPES, day=2)
def test_several_threads_give_the_same_prefill(shape, dtype):
    from paged_kernels import Scoring

    q, keys, values, layout = chunks(shape, 16, CHUNKS, dtype)
    one = attended(q, keys, values, layout, Scoring(0.1))
    torch.set_num_threads(3)
    try:
        three = attended(q, keys, values, layout, Scoring(0.1))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, three)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", [1, 2])
def test_a_slot_that_nobody_wrote_surfaces_as_nan_in_prefill(cache, dtype):
    from paged_kernels import Scoring

    tensors = chunks(SHAPES[0], 8, [(4, 30), (12, 12)], dtype)
    tensors[cache][int(tensors[3].prefills[0].table[1]), 3] = float("nan")
    found = attended(*tensors, Scoring(0.1))
    assert bool(torch.isnan(found[:4]).all())
    assert not bool(torch.isnan(found[4:]).any())


@compiled
@pytest.mark.parametrize(
    "wrong", ["a block beyond the pool", "a negative block", "a length beyond the table"]
)
def test_prefill_outside_of_the_pool_is_an_error_and_not_read(wrong):
    from paged_kernels import Scoring

    q, keys, values, layout = chunks(SHAPES[0], 8, [(4, 30)])
    (row,) = layout.prefills
    if wrong == "a length beyond the table":
        layout = layout._replace(prefills=[row._replace(length=33)])
    else:
        row.table[1] = -1 if wrong == "a negative block" else len(keys)
    with pytest.raises(IndexError, match="outside of the pool"):
        attended(q, keys, values, layout, Scoring(0.1))


@compiled
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("extreme", [-300.0, 300.0])
def test_scores_of_any_size_stay_numbers_in_prefill(extreme, dtype, exact):
    from paged_kernels import Scoring

    q, keys, values, layout = chunks(SHAPES[0], 8, [(30, 40)], dtype)
    keys.flatten(0, 1)[int(layout.prefills[0].table[0]) * 8 + 2] *= extreme
    found = attended(q, keys, values, layout, Scoring(1.0))
    assert torch.allclose(found.double(), chunks_by_hand(q, keys, values, layout, 1.0, 0), atol=exact)


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    with quick_compiler(monkeypatch, tmp_path):
        yield


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("CC", "no-such-compiler", "there is no C compiler"),
        ("CC", "false", "made no library"),
        (compiling.SWITCH, "0", "leaves compiled kernels out"),
    ],
)
def test_without_a_compiler_torch_does_it_and_a_user_is_told_why(
    setting, value, reason, monkeypatch, no_library
):

    from paged_kernels import BackendUnavailableError, choose_backend

    monkeypatch.setenv(setting, value)
    cpu = torch.device("cpu")
    with pytest.raises(NativeUnavailableError, match=reason):
        library()
    assert reason in choose_backend("auto", cpu).reason
    with pytest.raises(BackendUnavailableError, match=reason):
        choose_backend("native", cpu)


@compiled
def test_the_library_is_kept_for_the_next_process(monkeypatch, tmp_path, no_library):
    library()
    compiling.load_library.cache_clear()
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("compiled again"))
    library()
    assert len(list((tmp_path / "pagetwin" / "native").iterdir())) == 1


def test_a_compiler_that_fails_is_asked_once(monkeypatch, tmp_path, no_library):
    asked = tmp_path / "asked"
    failing = tmp_path / "cc"
    failing.write_text(f"#!/bin/sh\necho >> {asked}\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))
    assert "made no library" in why_unavailable()
    assert why_unavailable()
    assert asked.read_text() == "\n"


@pytest.mark.nightly
@compiled
def test_half_a_library_is_compiled_again(monkeypatch, tmp_path, no_library):
    monkeypatch.setattr(compiling, "_digest", lambda *_: "half")
    kept = tmp_path / "pagetwin" / "native" / "kernels-half.so"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"\x7fELF")
    assert why_unavailable() == ""
    assert library().decode_f32


@pytest.mark.nightly
@compiled
def test_a_compiler_may_have_options_of_its_own(monkeypatch, no_library):
    monkeypatch.setenv("CC", "env " + os.environ.get("CC", "cc") + " -O1")
    assert why_unavailable() == ""


@compiled
def test_native_kernels_are_refused_beside_a_gpu():

    from paged_kernels import BackendUnavailableError, choose_backend

    with pytest.raises(BackendUnavailableError, match="CPUs only"):
        choose_backend("native", torch.device("cuda"))


@compiled
@cases("family", ["gemma2", "llama", "mistral", "gpt2", "qwen3"], day=1)
def test_tokens_are_those_of_the_torch_backend(family, model_of, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    said = []
    for backend in ("native", "torch"):
        llm = LLM(model_of(family), pool_tokens=512, block_size=8, backend=backend, audit="full")
        assert llm.engine.runner.backend == backend
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
        said.append([output.outputs[0].token_ids for output in outputs])
    assert said[0] == said[1]


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 15, 16, 501])
def test_the_best_token_is_torchs_and_the_first_of_equals(dtype, vocab):
    from engine.runtime.decoding.choose import best_tokens

    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    logits[3] = logits[3].round()
    logits[4] = float("-inf")
    best, place = best_tokens(logits)
    assert torch.equal(best, logits.max(dim=-1).values.float())
    assert place.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


@compiled
@pytest.mark.parametrize("where", [0, 7, 16, 36])
def test_one_nan_among_the_logits_is_not_overlooked(where):
    from engine.runtime.decoding.choose import best_tokens

    logits = torch.randn(2, 37)
    logits[1, where] = float("nan")
    assert torch.isnan(best_tokens(logits)[0]).tolist() == [False, True]


def test_large_host_memory_is_a_plain_writable_tensor():
    from engine.runtime.kv_pool import host_memory

    for rows in (3, 5000):
        memory = host_memory((rows, 1024), torch.bfloat16)
        memory.fill_(2.0)
        assert memory.is_contiguous()
        assert float(memory.float().sum()) == 2048.0 * rows
