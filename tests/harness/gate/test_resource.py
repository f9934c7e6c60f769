"""The resource gate sees what makes a memory-bound kernel slow, in kernels compiled here without a GPU."""

import os
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from tiers import NIGHT, cases

from harness.gate import resource
from harness.gate.findings import Baseline, Finding, GateVerdict
from harness.gate.resource import (
    SAME_CODE,
    Instructions,
    Resources,
    built,
    case_names,
    compare_kernel,
    compiled_cases,
    count,
    digest_of,
    judge,
    listed,
    measured,
    pipeline_depth,
    unfit,
)
from harness.kernel_speed.predict import read_listing

GOOD = Resources(
    registers=96, stack_bytes=0, shared_bytes=67_072, depth=2, instructions=1400,
    wide_loads=48, narrow_loads=41, local=0, hmma=32, hgmma=12,
    conversions=0, loop=400, per_byte=0.05, most_per_byte=0.06,
    programs=3, in_flight=196_608, prologue=3700, tile=1500, epilogue=900, pipe=377, shared=201, copied=8192,
    product_waits=2, goal_per_byte=0.06, goal_in_flight=65_536,
)  # fmt: skip


def configuration(key: str) -> Any:
    """A kernel as its launcher would compile it."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels of this process are the interpreter's")
    from paged_kernels.triton.configurations import kernel_configurations

    return next(one for one in kernel_configurations() if one.key == key)


def compiled_case(configuration: Any, capability: int) -> tuple[str, dict[str, Any]]:
    """The name of one compiled kernel, and its resources or the compiler's error."""
    (case,) = compiled_cases([configuration], capability, (capability,))
    return case


def faults(planted: Any, capability: int) -> str:
    """What is wrong with a kernel whatever its baseline says."""
    name, values = compiled_case(planted, capability)
    return " ".join(unfit(measured({name: values})))


@pytest.fixture(scope="module")
def decode() -> Any:
    """The decode kernel of a common shape."""
    return configuration("decode/bf16/d128/g4/bs16/vector")


@pytest.fixture(scope="module")
def case(decode: Any) -> tuple[str, dict[str, Any]]:
    """The name and the figures of that kernel as it is."""
    return compiled_case(decode, 90)


@pytest.fixture(scope="module")
def before(case: tuple[str, dict[str, Any]]) -> Baseline:
    return baseline(dict([case]))


@pytest.fixture(scope="module")
def eight_bits() -> Any:
    """The decode kernel of the same shape that reads caches of 8 bits."""
    return configuration("decode/bf16-kv-fp8e4nv/d128/g4/bs16/vector")


@pytest.fixture(scope="module")
def eight_bit_case(eight_bits: Any) -> tuple[str, dict[str, Any]]:
    return compiled_case(eight_bits, 90)


@pytest.fixture(scope="module")
def one_by_one(eight_bits: Any) -> tuple[str, dict[str, Any]]:
    """The case of that kernel where it reads the bytes one by one, and multiplies them as bfloat16."""
    strides = {name: 2 * eight_bits.constants[name] for name in ("K_BLOCK", "K_SLOT", "V_BLOCK", "V_SLOT")}
    return compiled_case(
        replace(
            eight_bits,
            constants={**eight_bits.constants, **strides, "PAIRS": ""},
            signature={**eight_bits.signature, "key_cache": "*fp8e4nv", "value_cache": "*fp8e4nv"},
        ),
        90,
    )


def baseline(cases: dict[str, Any]) -> Baseline:
    now = measured(cases)
    return Baseline("resource", now.made_on, now.kernels, "test", "2026-01-01", cases, {})


def judged(configuration: Any, before: Baseline) -> Finding:
    """The gate's finding on one compiled kernel."""
    (finding,) = judge(measured(dict([compiled_case(configuration, 90)])), before).findings
    return finding


@pytest.mark.nightly
def test_a_launch_policy_that_leaves_waves_half_empty_is_found(
    decode: Any, before: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = judged(decode, before)
    assert accepted.verdict is GateVerdict.passed
    monkeypatch.setattr("paged_kernels.launch_policy.share_of", lambda tiles, room: int(tiles.max()))
    finding = judged(decode, before)
    assert finding.verdict is GateVerdict.regressed
    assert re.search(r"predicted share of bandwidth, h200 8 × 16k: 0\.89\d → 0\.55\d", finding.reason)


def test_an_unchanged_kernel_passes(decode: Any, before: Baseline) -> None:
    assert judged(decode, before).verdict is GateVerdict.passed


def test_a_non_contiguous_cache_is_found(decode: Any, before: Baseline) -> None:
    odd = {name: decode.constants[name] + 1 for name in ("K_SLOT", "V_SLOT")}
    finding = judged(replace(decode, constants={**decode.constants, **odd}), before)
    assert finding.verdict is GateVerdict.regressed
    assert "16-byte loads 49 → 1 " in finding.reason  # the queries


def test_a_lost_divisibility_hint_is_found(decode: Any, before: Baseline) -> None:
    finding = judged(replace(decode, aligned=decode.aligned - {"key_cache", "value_cache"}), before)
    assert finding.verdict is GateVerdict.regressed
    assert "16-byte loads" in finding.reason


@pytest.mark.nightly
def test_a_spill_is_found(decode: Any, before: Baseline) -> None:
    finding = judged(replace(decode, num_warps=1, constants={**decode.constants, "ROWS": 32}), before)
    assert finding.verdict is GateVerdict.regressed
    assert "spills: " in finding.reason


@pytest.mark.nightly
def test_a_halved_pipeline_and_fewer_bytes_on_their_way_are_found(decode: Any, before: Baseline) -> None:
    finding = judged(replace(decode, num_stages=2), before)
    assert finding.verdict is GateVerdict.regressed
    assert "pipeline depth 2 → 1" in finding.reason
    assert "bytes on their way in a multiprocessor 196,608 → " in finding.reason


def test_a_kernel_that_cannot_launch_is_found(decode: Any, before: Baseline) -> None:
    finding = judged(replace(decode, constants={**decode.constants, "TILE": 256}, kv_tile=(256, 128)), before)
    assert finding.verdict is GateVerdict.regressed
    assert "does not fit sm_90 (232,448 B): it cannot launch" in finding.reason


@pytest.mark.nightly
def test_the_tile_of_warp_groups_spills_where_there_are_none() -> None:
    wrong = faults(configuration("prefill/bf16/d128/g4/bs16/vector/sm_90"), 80)
    assert "spills: " in wrong


@pytest.mark.nightly
def test_three_stages_of_wide_heads_do_not_fit_the_smaller_shared_memories() -> None:
    fitting = configuration("prefill/bf16/d256/g4/bs16/vector/sm_86")
    assert not NIGHT or not faults(fitting, 86)
    wrong = faults(replace(fitting, num_stages=3), 86)
    assert "shared memory 102,400 B does not fit sm_86 (101,376 B): it cannot launch" in wrong


@pytest.mark.nightly
def test_a_group_of_128_heads_in_one_program_spills() -> None:
    split = configuration("decode/bf16/d128/g128/bs16/vector")
    assert not NIGHT or not faults(split, 80)
    wrong = faults(replace(split, constants={**split.constants, "ROWS": 128}), 80)
    assert "spills: " in wrong


def test_a_loop_that_takes_more_instructions_than_promised_is_found(
    decode: Any, case: tuple[str, dict[str, Any]]
) -> None:
    assert list(unfit(measured(dict([case])))) == []
    wrong = faults(replace(decode, constants={**decode.constants, "HAS_SOFTCAP": True, "FOLD": False}), 90)
    assert "instructions per byte of K and V; 0.06 are promised" in wrong


@pytest.mark.nightly
def test_conversions_of_eight_bit_keys_to_bfloat16_are_found(
    eight_bit_case: tuple[str, dict[str, Any]], one_by_one: tuple[str, dict[str, Any]]
) -> None:
    (finding,) = judge(measured(dict([one_by_one])), baseline(dict([eight_bit_case]))).findings
    assert finding.verdict is GateVerdict.regressed
    assert re.search(r"conversions through the slow pipe 0 → \d\d", finding.reason)


def test_eight_bit_keys_that_are_read_one_by_one_break_the_promise(
    eight_bit_case: tuple[str, dict[str, Any]], one_by_one: tuple[str, dict[str, Any]]
) -> None:
    assert list(unfit(measured(dict([eight_bit_case])))) == []
    assert "instructions per byte of K and V; 0.085 are promised" in " ".join(
        unfit(measured(dict([one_by_one])))
    )


def test_a_longer_way_to_the_first_tile_is_found(case: tuple[str, dict[str, Any]]) -> None:
    """The list of parts computed by every program took 1,451 cycles more than one made once per step."""
    name, values = case
    accepted = baseline({name: values | {"prologue": values["prologue"] - 600}})
    (finding,) = judge(measured({name: values}), accepted).findings
    assert finding.verdict is GateVerdict.regressed
    assert "cycles before the first tile" in finding.reason


@pytest.mark.nightly
def test_products_that_wait_for_each_other_are_found() -> None:
    prefill = configuration("prefill/bf16/d128/g4/bs16/vector/sm_90")
    name, values = compiled_case(prefill, 90)
    assert values["product_waits"] > 0
    accepted = baseline({name: values | {"product_waits": values["product_waits"] - 1}})
    (finding,) = judge(measured({name: values}), accepted).findings
    assert finding.verdict is GateVerdict.regressed
    assert "waits for warp-group products per tile" in finding.reason


def test_a_missed_goal_is_named_though_the_baseline_holds_it() -> None:
    slow = asdict(replace(GOOD, per_byte=0.16, most_per_byte=0.175, goal_per_byte=0.12, in_flight=32_768))
    result = judge(measured({"kernel sm_90": slow}), baseline({"kernel sm_90": slow}))
    assert result.verdict is GateVerdict.passed
    (remark,) = result.remarks
    assert "kernel sm_90: 0.16 instructions per byte of K and V (goal 0.12)" in remark
    assert "32,768 bytes on their way in a multiprocessor (goal 65,536)" in remark


def test_a_goal_that_is_met_is_not_mentioned() -> None:
    result = judge(measured({"kernel sm_90": asdict(GOOD)}), baseline({"kernel sm_90": asdict(GOOD)}))
    assert result.remarks == ()


def test_every_architecture_is_compiled() -> None:
    pytest.importorskip("triton")
    compiled = {int(name.rpartition("sm_")[2]) for name in case_names()}
    assert compiled == {80, 86, 89, 90, 100, 120}


@pytest.mark.nightly
@cases(
    "key",
    [
        "decode/bf16/d128/g4/bs16/vector",
        "prefill/bf16/d256/g4/bs16/vector/sm_86",
        "prefix/bf16/d128/g4/bs16/vector/sm_80",
    ],
    day=1,
)
def test_architectures_that_are_compiled_once_have_the_same_code(key: str) -> None:
    one = configuration(key)
    for arch, twin in SAME_CODE.items():
        assert built(one, arch).code == built(one, twin).code


@pytest.mark.nightly
def test_kernels_that_are_listed_together_are_read_as_each_alone(decode: Any) -> None:
    copy = configuration("copy/bf16")
    codes = [built(one, 120).code for one in (copy, decode)]
    together, alone = list(listed(codes, 120)), [next(listed([code], 120)) for code in codes]
    for some, same in zip(
        together, alone, strict=True
    ):  # operands hold addresses, which follow the place in the list
        assert [replace(one, operands="") for one in some] == [replace(one, operands="") for one in same]


@pytest.mark.nightly
def test_a_kernel_that_does_not_compile_leaves_the_others_of_its_batch(
    decode: Any, case: tuple[str, dict[str, Any]]
) -> None:
    wrong = replace(decode, key="wrong", constants={**decode.constants, "TILE": 48})
    cases = dict(compiled_cases([wrong, decode], 90, (90,)))
    assert set(cases["wrong sm_90"]) == {"error"}
    assert dict([case]).items() <= cases.items()


def test_a_kernel_that_does_not_compile_is_a_finding_and_no_crash(decode: Any, before: Baseline) -> None:
    wrong = replace(decode, constants={**decode.constants, "TILE": 48})
    finding = judged(wrong, before)
    assert finding.verdict is GateVerdict.regressed
    assert "does not compile: " in finding.reason
    assert "power of 2" in finding.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"programs": 2}, "programs that a multiprocessor holds 3 → 2"),
        ({"shared_bytes": 67_073}, "shared memory 67,072 → 67,073 B"),
        ({"instructions": 1541}, "instructions 1400 → 1541"),
        ({"hgmma": 0}, "warp-group matrix instructions 12 → 0"),
        ({"wide_loads": 47}, "16-byte loads 48 → 47"),
        ({"local": 1}, "1 accesses to local memory"),
        ({"depth": 1}, "pipeline depth 2 → 1"),
        ({"loop": 441}, "instructions per tile 400 → 441"),
        ({"conversions": 8}, "conversions through the slow pipe 0 → 8"),
        ({"per_byte": 0.061}, "0.061 instructions per byte of K and V; 0.06 are promised"),
        ({"per_byte": 0.0}, "0.0 instructions per byte"),
        ({"in_flight": 131_072}, "bytes on their way in a multiprocessor 196,608 → 131,072"),
        ({"prologue": 4100.0}, "cycles before the first tile 3700 → 4100"),
        ({"tile": 1651.0}, "cycles of a warp per tile 1500 → 1651"),
        ({"product_waits": 3}, "waits for warp-group products per tile 2 → 3"),
    ],
)
def test_a_worse_figure_is_named(change: dict[str, int], reason: str) -> None:
    finding = compare_kernel("kernel sm_90", 90, replace(GOOD, **change), GOOD, 0.10)
    assert finding.verdict is GateVerdict.regressed
    assert reason in finding.reason


def test_better_figures_and_slightly_more_code_pass() -> None:
    better = replace(GOOD, registers=97, shared_bytes=60_000, depth=3, wide_loads=60, instructions=1500)
    assert compare_kernel("kernel sm_90", 90, better, GOOD, 0.10).verdict is GateVerdict.passed


def test_a_baseline_with_spills_excuses_nothing() -> None:
    spilling = replace(GOOD, stack_bytes=64, local=16)
    assert compare_kernel("kernel sm_80", 80, spilling, spilling, 0.10).verdict is GateVerdict.regressed


def test_another_compilers_baseline_is_no_comparison() -> None:
    now = measured({"kernel sm_90": asdict(GOOD)})
    result = judge(now, replace(baseline(dict(now.cases)), made_on={"triton": "2.0.0"}))
    assert result.verdict is GateVerdict.inconclusive
    assert "Triton 2.0.0" in result.findings[0].reason


def test_what_spills_or_does_not_compile_becomes_no_baseline() -> None:
    cases = {"a sm_90": {"error": "boom"}, "b sm_90": asdict(replace(GOOD, local=3)), "c sm_90": asdict(GOOD)}
    wrong = list(unfit(measured(cases)))
    assert len(wrong) == 2
    assert wrong[0].startswith("a sm_90")
    assert wrong[1].startswith("b sm_90")


def test_instructions_are_counted_from_a_disassembly() -> None:
    text = """
	.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @UP1 LDG.E R4, desc[UR4][R2.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0040*/                   STL.64 [R1+0x8], R4 ;
        /*0050*/                   LDL R4, [R1] ;
        /*0060*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
    .L_x_1:
        /*0080*/                   BRA `(.L_x_1) ;
"""
    assert count(read_listing(text)) == Instructions(
        instructions=9, wide_loads=2, narrow_loads=1, local=2, hmma=1, hgmma=1
    )


def test_the_loop_is_the_one_that_loads_tiles() -> None:
    text = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
    .L_x_1:
        /*0010*/                   IADD3 R4, R4, 0x1, RZ ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
    .L_x_2:
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R9], desc[UR4][R2.64] ;
        /*0040*/                   F2F.BF16.F16 R4, R4 ;
        /*0050*/              @!P0 BRA `(.L_x_3) ;
    .L_x_4:
        /*0060*/               @P0 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
    .L_x_3:
        /*0080*/                   NOP ;
        /*0090*/                   BRA `(.L_x_4) ;
        /*00a0*/                   BRA `(.L_x_2) ;
"""
    assert count(read_listing(text)).loop == 4
    assert count(read_listing(text)).conversions == 1


def test_the_depth_is_the_smaller_of_both_buffers() -> None:
    line = "%k = ttg.local_alloc : () -> !ttg.memdesc<{}x64x128xbf16, #shared, #smem, mutable> loc(#loc1)\n"
    assert pipeline_depth(line.format(3) + line.format(2), (64, 128)) == 2
    assert pipeline_depth(line.format(3), (32, 128)) == 0
    assert pipeline_depth("", (64, 128)) == 0


def accepted_as_they_are() -> Baseline:
    """A baseline of made-up figures with the digests of today's kernels."""
    digests = {one.key: digest_of(one) for one in resource._configurations()}
    return baseline(
        {name: asdict(replace(GOOD, digest=digests[name.rpartition(" ")[0]])) for name in case_names()}
    )


def test_kernels_that_have_not_changed_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(resource, "ProcessPoolExecutor", None)
    before = accepted_as_they_are()
    now = resource.measure(before)
    assert now.cases == before.cases
    assert judge(now, before).remarks[0] == f"{len(before.cases)} unchanged kernels were not compiled"


def test_a_kernel_with_another_constant_has_changed(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = accepted_as_they_are()
    other = replace(decode, constants={**decode.constants, "FOLD": False})
    monkeypatch.setattr(resource, "_configurations", lambda: [other, configuration("copy/bf16")])
    assert {name.split()[0] for name in resource.unchanged(before)} == {"copy/bf16"}
    assert {key for batch in resource._batches(resource.unchanged(before)) for key in batch.keys} == {
        decode.key
    }


def test_a_baseline_of_another_compiler_says_nothing_of_a_kernel() -> None:
    pytest.importorskip("triton")
    assert resource.unchanged(replace(accepted_as_they_are(), made_on={"triton": "2.0.0"})) == {}
