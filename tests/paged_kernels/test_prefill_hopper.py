"""The prefill kernel for Hopper, without a GPU: its source replayed beside float64, and its compiled code read.

No GPU has run it. The replay executes the source on torch with the barriers of sm_90 (`gluon_replay`), so it shows
arithmetic, addresses and protocol, and not what the compiler makes of them.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiers import cases

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET=1 keeps Triton from compiling", allow_module_level=True)

import triton
from gluon_replay import ReplayError, loaded
from interpreted_cases import spec_of
from ptx.triton_launch import Driver
from triton.runtime import driver

from harness.gate.resource import built, count, listed, text_section
from paged_kernels import BackendUnavailableError, OptionError, Scoring, paged_attention_prefill
from paged_kernels.arguments import PagedBatch
from paged_kernels.backends import check_prefill_kernel, no_hopper
from paged_kernels.case import build_case, exact_attention, relative_error
from paged_kernels.operations import run_triton
from paged_kernels.providers import HopperPrefill
from paged_kernels.triton.configurations import kernel_configurations
from paged_kernels.triton.prefill_hopper import run_hopper_prefill

FILE = str(Path(__file__).resolve().parents[2] / "kernels" / "paged_kernels" / "triton" / "prefill_hopper.py")
BF16, FP16 = torch.bfloat16, torch.float16
# relative errors against float64 that rounding of the weights and of the output explains; about twice what is found
TIGHT = {BF16: 4e-3, FP16: 5e-4}


def case_of(lengths, queries, **options):
    """A case of width 64 with 8 query and 2 KV heads; what nobody wrote is NaN, the null block too."""
    usual = {"dtype": BF16, "heads": 8, "kv_heads": 2, "dk": 64}
    case = build_case(spec_of(lengths, queries, **(usual | options)))
    for cache in (case.key_cache, case.value_cache):
        cache[0] = float("nan")
    return case


def replayed(case, *, lse=None, seed=0, rewrite=str, longest=None):
    """The output of the replay. It starts as NaN."""
    module = loaded(FILE, seed=seed, rewrite=rewrite)
    out = torch.full_like(case.q, float("nan"))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    module.run_hopper_prefill(PagedBatch(*inputs, longest or max(case.queries)), case.scoring, out, lse)
    return out


@cases(
    ("lengths", "queries", "options"),
    [
        ((300, 40, 129), (200, 40, 1), {}),
        ((256, 128, 1), (256, 128, 1), {"block_size": 128}),
        ((270, 33), (33, 33), {"dk": 128, "heads": 6}),
        ((150, 60), (70, 60), {"heads": 2, "block_size": 1}),
        ((190, 100), (9, 100), {"heads": 16, "block_size": 48, "dtype": FP16}),
        ((700,), (20,), {"dk": 128, "block_size": 32, "kv_heads": 1}),
    ],
    day=3,
)
def test_the_source_computes_what_float64_does(lengths, queries, options):
    case = case_of(lengths, queries, **options)
    lse = torch.full(case.q.shape[:2], float("nan"))
    exact, sums = exact_attention(case)
    assert relative_error(replayed(case, lse=lse), exact) < TIGHT[case.q.dtype]
    assert torch.allclose(lse.double(), sums, atol=1e-5)


@cases("seed", range(6), day=2)
def test_no_order_of_the_warp_groups_changes_the_output(seed):
    """Every order that the barriers allow must do; six random ones, over more tiles than there are buffers."""
    case = case_of((900,), (20,), block_size=32)
    assert torch.equal(replayed(case, seed=seed), replayed(case, seed=100))


def test_a_row_without_keys_gives_zeros():
    case = case_of((150, 40), (20, 40))
    empty = replace(case, seq_lens=torch.tensor([150, 0], dtype=torch.int32))
    lse = torch.full(case.q.shape[:2], float("nan"))
    out = replayed(empty, lse=lse)
    assert not out[20:].any()
    assert (lse[20:] == float("-inf")).all()
    assert out[:20].isfinite().all()


def test_a_nan_among_the_keys_reaches_the_output():
    case = case_of((150,), (20,))
    case.key_cache[case.block_table[0, 2].long(), 3] = float("nan")
    assert replayed(case).isnan().all()


def test_rows_outside_all_spans_stay_as_they_are():
    case = case_of((150, 40), (20, 40))
    shorter = replace(case, cu_seqlens_q=torch.tensor([0, 20, 50], dtype=torch.int32))
    assert replayed(shorter)[50:].isnan().all()


# name: text, what stands there instead, and the error that names it ("": any; None: or the output is wrong)
PLANTED = {
    "keys are not waited for": ("mbarrier.wait(k_full.index(following), ((tile + 1) // STAGES) & 1)", "pass", "race"),
    "values are not waited for": ("mbarrier.wait(v_full.index(stage), (tile // STAGES) & 1)", "pass", "race"),
    "the wrong phase of the keys": ("((tile + 1) // STAGES) & 1)", "(tile // STAGES) & 1)", "race"),
    "no fence": ("        fence_async_shared()\n        summed", "        summed", "fence"),
    "a buffer of keys is left too early": (
        "mbarrier.wait(k_free.index(stage), phase ^ 1)", "mbarrier.wait(k_free.index(stage), phase)", "for ever"
    ),
    "no wait for empty buffers of values": ("mbarrier.wait(v_free.index(stage), phase ^ 1)", "pass", ""),
    "a buffer is never given back": ("        mbarrier.arrive(v_free.index(stage), count=1)\n", "", "for ever"),
    "a turn is kept": ("arrive(turns.index(1 - half), count=1)", "arrive(turns.index(half), count=1)", "for ever"),
    "the first turn is nobody's": ("mbarrier.arrive(turns.index(0), count=1)", "pass", "for ever"),
    "keys behind the end are read": ("mask=inside", "mask=inside | True", None),
    "the diagonal is one key too wide": ("position[None, :] <= asked", "position[None, :] <= 1 + asked", None),
    "sums are not rescaled": ("gl.convert_layout(keep,", "gl.convert_layout(keep * 0 + 1,", None),
    "the stride of a block is wrong": ("wide * K_BLOCK", "wide * (K_BLOCK // 2)", None),
    "half of the rows twice": ("member = half * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))",
                              "member = gl.arange(0, ROWS, gl.SliceLayout(1, layout))", None),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_noticed(name):
    text, instead, named = PLANTED[name]

    def planted(source):
        assert text in source
        return source.replace(text, instead)

    case = case_of((900,), (40,), block_size=32)
    if named is None:
        try:
            assert not relative_error(replayed(case, rewrite=planted), exact_attention(case)[0]) < TIGHT[BF16]
        except ReplayError:
            return
    elif not named:
        with pytest.raises(ReplayError):
            replayed(case, rewrite=planted)
    else:
        words = {"race": "while a product read it|without a wait for its copy", "fence": "a fence behind it"}
        with pytest.raises(ReplayError, match=words.get(named, named)):
            replayed(case, rewrite=planted)


def test_the_halves_multiply_in_turns():
    module = loaded(FILE)
    case = case_of((700,), (30,), block_size=32)
    arguments = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    module.run_hopper_prefill(PagedBatch(*arguments, 30), case.scoring, torch.empty_like(case.q))
    turns = module.gl.turns  # of all programs, one after the other; each has 6 tiles and 2 halves
    assert len(turns) % 12 == 0
    assert turns == [0, 1] * (len(turns) // 2)


def configurations():
    """The compiled forms of the kernel that the resource gate knows."""
    return [one for one in kernel_configurations() if one.key.startswith("prefill-hopper/")]


@pytest.fixture(scope="module")
def compiled():
    """The common shape, compiled for sm_90, and its instructions."""
    (one,) = (each for each in configurations() if each.key == "prefill-hopper/bf16/d128/g4/bs16")
    kernel = built(one, 90)
    return kernel, next(listed([kernel.code], 90))


def product_loops(code):
    """The loops with products of queries and of weights, each as its instructions.

    A branch from behind a loop back into it (after another try to wait) looks like a longer loop, which overlaps.
    """
    found: list[range] = []
    loops = [range(one.target, place + 1) for place, one in enumerate(code) if 0 <= one.target <= place]
    for loop in sorted(loops, key=len):
        products = [code[place].operands for place in loop if code[place].name == "HGMMA"]
        weights = [operands for operands in products if "tnspB" in operands]
        alone = all(loop.stop <= other.start or other.stop <= loop.start for other in found)
        if alone and 0 < len(weights) < len(products):
            found.append(loop)
    return [code[loop.start : loop.stop] for loop in found]


def test_the_compiled_code_spills_nothing_and_fits_the_shared_memory(compiled):
    kernel, code = compiled
    assert not kernel.stack_bytes
    assert not any(one.name in ("LDL", "STL") for one in code)
    assert kernel.shared_bytes <= 232_448
    assert kernel.depth == 2


def test_two_warp_groups_multiply_and_one_copies(compiled):
    """Each tile is 8 products of 64 x 128 x 16 for the scores and 8 for the output, one wait for both."""
    _, code = compiled
    loops = product_loops(code)
    assert len(loops) == 2
    for loop in loops:
        assert sum(one.name == "HGMMA" for one in loop) == 16
        assert sum(one.opcode.startswith("WARPGROUP.DEPBAR") for one in loop) == 1
        assert not any(one.name == "LDGSTS" for one in loop)
    assert sum(one.opcode.startswith("USETMAXREG") for one in code) >= 3


def test_a_multiplying_warp_takes_fewer_instructions_than_the_plain_kernel(compiled):
    """Of 128 keys of the loop without a mask; the plain kernel takes 64 keys in a round (`resource` gate: its loop)."""
    _, code = compiled
    assert all(len(loop) / 2 < 375 for loop in product_loops(code))


def test_an_arrival_follows_a_barrier_of_the_warp_group(compiled):
    """One thread arrives for its warp group, so the other three warps must have come that far."""
    _, code = compiled
    for loop in product_loops(code):
        names = [one.name for one in loop if one.name in ("BAR", "SYNCS") and "TRYWAIT" not in one.opcode]
        assert names.count("SYNCS") == 3
        assert all(names[place - 1] == "BAR" for place, name in enumerate(names) if name == "SYNCS")


@pytest.mark.nightly
def test_the_launcher_compiles_what_the_gate_compiles(compiled, monkeypatch):
    """Triton specialises the launcher's arguments itself; the gate states their types and divisors."""
    kernels, run = [], triton.JITFunction.run

    def compile_only(function, *arguments, grid, warmup, **options):
        kernels.append(run(function, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Driver(90))
    case = case_of((300, 40), (200, 40), heads=32, kv_heads=8, dk=128)
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    run_hopper_prefill(PagedBatch(*inputs, 200), case.scoring, torch.empty_like(case.q))
    (kernel,) = kernels
    (code,) = listed([text_section(kernel.asm["cubin"])], 90)
    assert count(code) == count(compiled[1])


@pytest.mark.parametrize("wrong", ["fast", "", "Hopper"])
def test_a_kernel_that_does_not_exist_is_refused(wrong):
    with pytest.raises(OptionError, match="choose auto, plain, hopper"):
        prefill_on_cpu(wrong)


def test_the_kernel_is_refused_on_the_cpu():
    with pytest.raises(
        BackendUnavailableError, match=r"9\.0 \(H100, H200, GH200\), and this run is on 'cpu'"
    ):
        prefill_on_cpu("hopper")
    assert "9.0" in (HopperPrefill().available(torch.device("cpu")) or "")


def prefill_on_cpu(kernel):
    """A small prefill with that kernel."""
    case = case_of((40,), (20,))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    paged_attention_prefill(*inputs, scale=0.1, prefill_kernel=kernel)


def test_the_kernel_that_was_named_computes_single_queries_too(monkeypatch):
    replay = loaded(FILE).run_hopper_prefill
    monkeypatch.setattr("paged_kernels.triton.prefill_hopper.run_hopper_prefill", replay)
    monkeypatch.setattr("paged_kernels.triton.decode.run_decode", None)
    case = case_of((150, 40), (1, 1))
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    out = torch.full_like(case.q, float("nan"))
    run_triton(PagedBatch(*inputs, 1), case.scoring, out, None, None, None, prefill_kernel="hopper")
    assert relative_error(out, exact_attention(case)[0]) < TIGHT[BF16]


def test_other_architectures_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert no_hopper(torch.device("cuda")).endswith("this GPU has 10.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert no_hopper(torch.device("cuda")) == ""


@pytest.mark.parametrize(
    ("options", "scoring", "reason"),
    [
        ({"dk": 80}, {}, "head_dim 64 or of 128, not 80"),
        ({"dtype": torch.float32}, {}, "bfloat16 or float16"),
        ({"kv_dtype": torch.float8_e4m3fn}, {}, "of one dtype"),
        ({}, {"window": 5}, "does not know window"),
        ({}, {"softcap": 5.0, "alibi": torch.ones(8)}, "does not know softcap, alibi"),
        ({}, {"scale": -1.0}, "a scale above 0, not -1.0"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused_by_name(monkeypatch, options, scoring, reason):
    monkeypatch.setattr("paged_kernels.backends.no_hopper", lambda device: "")
    case = build_case(spec_of((40,), (20,), **({"dtype": BF16, "heads": 8, "dk": 64} | options)))
    asked = Scoring(**({"scale": 0.1} | scoring))
    with pytest.raises(OptionError, match=reason):
        check_prefill_kernel("hopper", "triton", case.q, case.key_cache, case.value_cache, asked)
