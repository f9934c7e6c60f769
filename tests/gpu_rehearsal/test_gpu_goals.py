"""The goals of a GPU run are judged by what lies in the folder: met, not met, and not measured are three things."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic_store import write_point

from gpu_acceptance.goals import GOALS, Found, Goal, Judged, Sense, Unit
from gpu_acceptance.judging import engine_findings, judge_part, memcheck_findings, prediction_findings
from gpu_acceptance.judging import test_findings as findings_of_tests
from gpu_acceptance.kernel_goals import (
    Sharing,
    TimedCase,
    cases_of,
    crossovers,
    fitted_cost,
    kernel_findings,
    mistakes,
    proposal,
)
from gpu_acceptance.parts import PARTS
from harness.bench.cases import KernelCase
from paged_kernels.cascade_groups import CascadeCost, RowGroup


def row(spec: KernelCase, provider: str, us: float, **other: Any) -> dict[str, Any]:
    plain = {"name": spec.name, **spec.values(), "provider": provider, "median_us": us}
    return {**plain, "copy_share": 0.92, "matmul_share": 0.1, "flat_bytes": spec.kv_bytes, **other}


def cases(*rows: dict[str, Any]) -> list[TimedCase]:
    return list(cases_of("decode", rows))


WIDE, LONG, SMALL = (
    KernelCase(batch=32, context=4096),
    KernelCase(batch=8, context=16_384),
    KernelCase(batch=1, context=1024),
)


def judged(key: str, found: Found, part: str = "kernels") -> str:
    goal = next(goal for goal in GOALS[part] if goal.key == key)
    return Judged(goal, found).verdict


def test_every_goal_of_every_part_is_judged_in_an_empty_folder(tmp_path: Path) -> None:
    for part in PARTS:
        found = judge_part(part, tmp_path)
        assert [one.goal for one in found] == list(GOALS[part])
        assert {one.verdict for one in found} == {"not measured"}
        assert all(one.found.where for one in found)


def test_no_two_goals_of_a_part_have_one_key() -> None:
    for part in PARTS:
        keys = [goal.key for goal in GOALS[part]]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("sense", "found", "verdict"),
    [
        *((Sense.most, 1.05, "yes"), (Sense.most, 1.051, "no")),
        *((Sense.least, 1.05, "yes"), (Sense.least, 1.049, "no")),
        *(
            (Sense.most, float("nan"), "no"),
            (Sense.least, float("nan"), "no"),
            (Sense.most, None, "not measured"),
        ),
    ],
)
def test_a_figure_reaches_its_aim_or_does_not(sense: Sense, found: float | None, verdict: str) -> None:
    assert Judged(Goal("x", "row", "figure", sense, 1.05, Unit.ratio), Found(found, "")).verdict == verdict


def test_a_figure_without_an_aim_is_shown() -> None:
    assert judged("blocks", Found(1.3, "")) == "shown"


def test_the_worst_large_decode_stands_for_all() -> None:
    found = kernel_findings(
        cases(
            row(WIDE, "paged", 100),
            row(LONG, "paged", 100, copy_share=0.85),
            row(SMALL, "paged", 9, copy_share=0.2),
        )
    )["decode_copy"]
    assert (found.value, LONG.name in found.where) == (0.85, True)
    assert judged("decode_copy", found) == "no"
    assert judged("decode_copy", kernel_findings(cases(row(WIDE, "paged", 100)))["decode_copy"]) == "yes"


@pytest.mark.parametrize("other", [{"block_size": 1}, {"dtype": "fp8_e4m3"}, {"kv_heads": 1}])
def test_other_blocks_types_and_groups_make_no_claim_about_bandwidth(other: dict[str, Any]) -> None:
    spec = replace(KernelCase(batch=256, context=8192), **other)
    assert kernel_findings(cases(row(spec, "paged", 100, copy_share=0.3)))["decode_copy"].value is None


def test_paging_is_compared_with_the_twin_of_the_same_run() -> None:
    rows = [row(WIDE, "paged", 102), row(WIDE, "contiguous", 100)]
    elsewhere = [row(WIDE, "paged", 100), row(WIDE, "contiguous", 50)]
    found = kernel_findings([*cases_of("decode", rows), *cases_of("blocks", elsewhere)])["paging"]
    assert found.value == 2.0
    assert judged("paging", kernel_findings(cases(*rows))["paging"]) == "yes"


def test_one_case_behind_a_peer_is_found_although_the_median_is_ahead() -> None:
    found = kernel_findings(
        cases(
            *(row(WIDE, "paged", 100), row(WIDE, "flashinfer", 110)),
            *(row(LONG, "paged", 106), row(LONG, "flashinfer", 100)),
            *(row(SMALL, "paged", 10), row(SMALL, "flashinfer", 12)),
        )
    )
    assert judged("flashinfer_worst", found["flashinfer_worst"]) == "no"
    assert judged("flashinfer_median", found["flashinfer_median"]) == "yes"
    assert found["flex_median"].value is None


def test_a_prefill_is_measured_by_the_matrix_ceiling_and_by_sdpa() -> None:
    spec = KernelCase(batch=1, context=4096, queries=2048)
    found = kernel_findings(cases(row(spec, "paged", 100, matmul_share=0.61), row(spec, "sdpa", 80)))
    assert judged("prefill_ceiling", found["prefill_ceiling"]) == "yes"
    assert (found["prefill_sdpa"].value, judged("prefill_sdpa", found["prefill_sdpa"])) == (0.8, "no")


def test_the_prefill_kernel_for_hopper_is_compared_with_the_plain_one() -> None:
    spec = KernelCase(batch=1, context=4096, queries=2048)
    found = kernel_findings(cases(row(spec, "paged", 100), row(spec, "paged-hopper", 110)))["prefill_hopper"]
    assert (found.value, judged("prefill_hopper", found)) == (1.1, "no")
    assert kernel_findings(cases(row(spec, "paged", 100)))["prefill_hopper"].value is None


def shared(rows: int, tokens: int) -> KernelCase:
    return KernelCase(batch=rows, context=tokens + 128, shared_prefix=tokens)


def timed(spec: KernelCase, flat: float, rule: float, always: float) -> list[dict[str, Any]]:
    return [row(spec, "paged", flat), row(spec, "cascade", rule), row(spec, "cascade-always", always)]


def test_a_cascade_that_pays_and_never_costs_meets_its_goals() -> None:
    found = kernel_findings(
        cases(*timed(shared(16, 8192), 600, 100, 100), *timed(shared(2, 128), 10, 10.1, 14))
    )
    assert found["cascade_gain"].value == 6.0
    assert [judged(key, found[key]) for key in ("cascade_gain", "cascade_flat", "cascade_rule")] == [
        "yes"
    ] * 3


def test_a_rule_that_misses_a_gain_and_one_that_costs_are_both_mistakes() -> None:
    found = kernel_findings(cases(*timed(shared(16, 2048), 100, 100, 50), *timed(shared(2, 128), 10, 14, 14)))
    assert found["cascade_rule"].value == 2
    assert judged("cascade_flat", found["cascade_flat"]) == "no"


def test_the_crossover_is_where_a_cascade_stays_ahead() -> None:
    rows = [
        *timed(shared(4, 128), 10, 10, 9),  # ahead by luck, then behind
        *timed(shared(4, 512), 20, 20, 22),
        *timed(shared(4, 2048), 60, 60, 40),
        *timed(shared(2, 128), 10, 10, 12),
    ]
    assert crossovers(cases(*rows)) == {2: None, 4: 2048}


TRUE = CascadeCost(memory_bytes_per_s=3.5e12, cache_bytes_per_s=9e12, cache_bytes=60 << 20, overhead_s=12e-6)


def as_if(cost: CascadeCost) -> list[Sharing]:
    """Cases that behave exactly as a rule with these constants says."""
    made = []
    for rows in (2, 4, 16, 64):
        for tokens in (128, 512, 2048, 8192, 32_768):
            kv_bytes, tiles = tokens * 4096, -(-rows // 16)
            saved = cost.saved_s(RowGroup(rows, kv_bytes, tiles)) - cost.overhead_s
            flat = 20e-6 + rows * kv_bytes / cost.memory_bytes_per_s
            made.append(Sharing(f"{rows}x{tokens}", rows, kv_bytes, tiles, flat, flat - saved))
    return made


def test_the_constants_of_the_cost_rule_are_found_again() -> None:
    found = fitted_cost(as_if(TRUE), TRUE.cache_bytes)
    assert found is not None
    assert found.memory_bytes_per_s == pytest.approx(TRUE.memory_bytes_per_s, rel=1e-3)
    assert found.cache_bytes_per_s == pytest.approx(TRUE.cache_bytes_per_s, rel=1e-3)
    assert found.overhead_s == pytest.approx(TRUE.overhead_s, rel=1e-3)


def test_constants_that_are_far_off_make_mistakes_and_the_true_ones_none() -> None:
    timid = CascadeCost(4.3e12, 8.6e12, 60 << 20, overhead_s=1e-3)
    assert mistakes(as_if(TRUE), TRUE) == []
    assert len(mistakes(as_if(TRUE), timid)) > 3


def test_three_constants_do_not_rest_on_a_few_cases() -> None:
    assert fitted_cost(as_if(TRUE)[:5], TRUE.cache_bytes) is None


def test_a_proposal_names_the_crossover_and_stands_beside_todays_constants() -> None:
    rows = [one for tokens in (128, 2048) for one in timed(shared(4, tokens), tokens / 10, tokens / 10, 60)]
    found = proposal(cases(*rows), 60 << 20)
    assert found is not None
    assert found["crossover_tokens_by_sequences"] == {4: 2048}
    assert found["today"]["mistakes"] == [shared(4, 2048).name]
    assert found["proposed"] is None  # two cases are too few


def test_failed_tests_are_counted_and_skipped_ones_prove_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tests.jsonl"
    said = [{"test": f"t{number}", "outcome": "skipped"} for number in range(3)]
    write_lines(file, [*said, {"ended": 0}])
    assert findings_of_tests(file).value is None
    said += [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}, {"ended": 1}]
    write_lines(file, said)
    assert findings_of_tests(file, tmp_path / "hopper.jsonl") == Found(1, "of 5, 3 skipped")
    write_lines(file, said[:-1])
    assert findings_of_tests(file) == Found(2, "of 5, 3 skipped, cut off")


def write_lines(file: Path, said: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in said))


def test_the_memory_checkers_errors_of_all_processes_are_added(tmp_path: Path) -> None:
    file = tmp_path / "memcheck.txt"
    file.write_text("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 3 errors\n")
    assert memcheck_findings(file).value == 3
    file.write_text("========= COMPUTE-SANITIZER\n")
    assert memcheck_findings(file).value is None


def decode_row(batch: int, host_share: float | None, *, graphs: bool = True) -> dict[str, Any]:
    figures = {"context": 528, "step_s": 0.01, "tokens_s": batch / 0.01, "bytes_s": 2e12}
    return {"graphs": graphs, "batch": batch, "host_share": host_share, **figures}


def test_the_hosts_share_is_that_of_the_worst_batch_with_graphs(tmp_path: Path) -> None:
    steps = [decode_row(1, 0.04), decode_row(256, 0.02), decode_row(1, 0.7, graphs=False)]
    peers = [
        {"name": "pagetwin", "tokens_s": 300.0, "error": None},
        {"name": "transformers_cb", "tokens_s": 200.0},
    ]
    (tmp_path / "1b.json").write_text(json.dumps({"steps": steps, "peers": peers}))
    found = engine_findings(tmp_path)
    assert (found["host_1b"].value, judged("host_1b", found["host_1b"], "engine")) == (0.04, "yes")
    assert found["tokens_1b"].value == 25_600
    assert found["peer_1b"].value == 1.5
    assert found["host_8b"].value is None


def test_a_peer_that_failed_is_named_with_its_error(tmp_path: Path) -> None:
    peers = [
        {"name": "pagetwin", "tokens_s": 3.0, "error": None},
        {"name": "transformers_cb", "error": "OOM"},
    ]
    (tmp_path / "8b.json").write_text(json.dumps({"steps": [], "peers": peers}))
    assert engine_findings(tmp_path)["peer_8b"] == Found(None, "transformers_cb: OOM")


def test_a_share_of_the_host_that_nobody_could_measure_is_not_met(tmp_path: Path) -> None:
    (tmp_path / "1b.json").write_text(json.dumps({"steps": [decode_row(1, None)], "peers": []}))
    assert judged("host_1b", engine_findings(tmp_path)["host_1b"], "engine") == "not measured"


def test_interpolated_kernels_are_judged_by_the_grid_that_a_calibration_kept(tmp_path: Path) -> None:
    (tmp_path / "calibration").mkdir()
    grid = {
        "across": [1, 2, 3],
        "along": [10, 20, 30],
        "seconds": [[r * t for t in (1, 2, 3)] for r in (1, 2, 3)],
    }
    file = tmp_path / "calibration" / "model.json"
    file.write_text(json.dumps({"grids": {"decode": grid}}))
    assert prediction_findings(tmp_path)["kernel"].value == pytest.approx(0, abs=1e-12)
    grid["seconds"][1][1] = None  # a cell that was not measured
    grid["seconds"][1][0] *= 1.5
    file.write_text(json.dumps({"grids": {"decode": grid}}))
    found = prediction_findings(tmp_path)["kernel"]
    assert judged("kernel", found, "prediction") == "no"


def test_the_trial_of_the_gate_is_judged_by_alarms_and_catches(tmp_path: Path) -> None:
    trial = {"alarms": ["a"], "inconclusive": [], "cases": 18, "planted": 18, "caught": 17}
    (tmp_path / "gate.json").write_text(json.dumps(trial))
    found = prediction_findings(tmp_path)
    assert [judged(key, found[key], "prediction") for key in ("gate_alarms", "gate_caught")] == ["no", "no"]
    (tmp_path / "gate.json").write_text(json.dumps(trial | {"alarms": [], "caught": 18}))
    found = prediction_findings(tmp_path)
    assert [judged(key, found[key], "prediction") for key in ("gate_alarms", "gate_caught")] == ["yes", "yes"]


def sweep(folder: Path, error: float) -> None:
    rows = [
        {"metric": name, "simulated": 1.0 + error, "measured": 1.0, "error": error, "spread": 0.0}
        for name in ("output_throughput", "tpot_mean", "ttft_p50")
    ]
    for number, size in enumerate((8, 16, 32)):
        point = {
            "cache.policy": "paged",
            "cache.block_size": size,
            "workload.prefix_share": 0.0,
            "decoding.beam_width": 1,
        }
        write_point(folder, point, seed=number, comparison=rows)


def test_a_prediction_is_judged_by_the_median_over_the_points_of_its_sweep(tmp_path: Path) -> None:
    sweep(tmp_path / "default", error=-0.03)
    sweep(tmp_path / "azure", error=0.015)
    found = prediction_findings(tmp_path)
    verdicts = {
        key: judged(key, found[key], "prediction")
        for key in (
            "default_output_throughput",
            "default_ttft_p50",
            "azure_output_throughput",
            "azure_tpot_mean",
        )
    }
    assert list(verdicts.values()) == ["no", "yes", "yes", "yes"]
    assert "3 points" in found["azure_tpot_mean"].where


def test_contiguous_memory_is_shown_as_a_ratio_of_measured_throughput(tmp_path: Path) -> None:
    for policy, rate in (("paged", 300.0), ("contiguous_max", 100.0)):
        measured = {"runs": [], "median": {"output_throughput": rate}, "spread": {}}
        pool = {"policy": policy}
        point = {
            "cache.policy": policy,
            "cache.block_size": 1,
            "workload.prefix_share": 0.0,
            "decoding.beam_width": 1,
        }
        write_point(tmp_path / "contiguous", point, measured=measured, pool=pool)
    found = prediction_findings(tmp_path)
    assert (found["ratio_contiguous_max"].value, found["ratio_contiguous_pow2"].value) == (3.0, None)


H200 = {"device": "NVIDIA H200", "heads": 32, "kv_heads": 8}


@pytest.mark.parametrize(("us", "verdict"), [(130, "yes"), (134, "no")])
def test_decode_is_compared_with_the_best_public_kernel_at_its_shape(us: float, verdict: str) -> None:
    """32 sequences of 4,096 keys: .85 of 4.8 TB/s take 131.6 us."""
    found = kernel_findings(cases(row(WIDE, "paged", us, **H200)))["decode_public"]
    assert judged("decode_public", found) == verdict


@pytest.mark.parametrize(("us", "verdict"), [(260, "yes"), (275, "no")])
def test_whole_prompts_are_compared_with_the_best_public_kernel(us: float, verdict: str) -> None:
    spec = KernelCase(batch=1, context=4096, queries=4096)
    found = kernel_findings(cases(row(spec, "paged", us, **H200)))["prefill_public"]
    assert judged("prefill_public", found) == verdict


def test_decode_is_shown_beside_the_static_model() -> None:
    found = kernel_findings(cases(row(WIDE, "paged", 150, **H200)))["decode_model"]
    assert found.value is not None
    assert 0.5 < found.value < 1.0
    assert judged("decode_model", found) == "shown"


def test_shapes_and_devices_without_a_published_time_are_not_compared() -> None:
    others = cases(
        *(
            row(WIDE, "paged", 10, **{**H200, "device": f"NVIDIA {name}"})
            for name in ("A100-SXM4-80GB", "H200 NVL", "H100 PCIe")
        ),
        row(replace(WIDE, context=8192), "paged", 10, **H200),
        row(replace(WIDE, dtype="fp16"), "paged", 10, **H200),
    )
    found = kernel_findings(others)
    assert found["decode_public"].value is None
    assert found["prefill_public"].value is None
