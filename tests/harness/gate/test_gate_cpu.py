"""The CPU layer: today's attention beside the accepted code, and what its ratios mean. Nothing here depends on time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config.errors import UserError
from harness.gate import cpu
from harness.gate.baseline import Measured, new_baseline
from harness.gate.findings import Finding, LayerResult, Verdict, lines
from harness.gate.settings import gate_settings

CASE = cpu.NATIVE


def run_of(level: float, *, noise: float = 0.06, difference: float = 0.0, seed: int = 0) -> Measured:
    ratios = level * np.exp(noise * np.random.default_rng(seed).standard_normal(40))
    cases = {CASE: {"ratios": list(ratios), "difference": difference}}
    return Measured("cpu", cpu.NAME, {"machine": "x86_64"}, None, cases, {"sources": {}})


def verdict(now: Measured, *overrides: str) -> Verdict:
    return cpu.judge(now, new_baseline(run_of(1.0), "test"), gate_settings(overrides)).verdict


def test_a_fifth_more_time_is_called_regressed_under_the_noise_of_a_busy_machine() -> None:
    found = [verdict(run_of(1.2, seed=seed)) for seed in range(20)]
    assert found.count(Verdict.regressed) >= 19


def test_unchanged_code_is_not_called_regressed() -> None:
    assert Verdict.regressed not in [verdict(run_of(1.0, seed=seed)) for seed in range(40)]


def test_nothing_that_is_a_fifth_slower_can_pass() -> None:
    assert Verdict.passed not in [verdict(run_of(1.2, noise=0.2, seed=seed)) for seed in range(20)]


def test_margins_can_be_chosen() -> None:
    assert verdict(run_of(1.08)) is not Verdict.regressed
    assert (
        verdict(run_of(1.08), "gate.attention.negligible=0.01", "gate.attention.material=0.02")
        is Verdict.regressed
    )


def test_other_results_are_a_regression_whatever_the_time() -> None:
    (finding,) = cpu.judge(run_of(1.0, difference=0.5), new_baseline(run_of(1.0), "test")).findings
    assert finding.verdict is Verdict.regressed
    assert "results differ" in finding.reason


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def test_the_accepted_code_runs_beside_todays_and_computes_the_same(torch: Any, tmp_path: Path) -> None:
    data = cpu.inputs()
    ours, theirs = cpu.works(None, data, tmp_path), cpu.works(cpu.sources(), data, tmp_path)
    for name in cpu.case_names():
        assert torch.equal(ours[name](), theirs[name]())


def test_a_changed_line_of_the_accepted_code_changes_only_the_accepted_side(
    torch: Any, tmp_path: Path
) -> None:
    changed = cpu.sources()
    changed["decode.py"] = changed["decode.py"].replace(
        "out[rows].copy_(result.reshape(out[rows].shape))",
        "out[rows].copy_(2 * result.reshape(out[rows].shape))",
    )
    data = cpu.inputs()
    ours, theirs = cpu.works(None, data, tmp_path), cpu.works(changed, data, tmp_path)
    assert torch.allclose(2 * ours[cpu.DECODE](), theirs[cpu.DECODE]())
    assert torch.equal(ours[cpu.PREFILL](), theirs[cpu.PREFILL]())


def test_the_three_paths_agree_on_the_same_attention(torch: Any, tmp_path: Path) -> None:
    found = cpu.works(None, cpu.inputs(), tmp_path)
    assert torch.allclose(found[cpu.NATIVE](), found[cpu.DECODE](), atol=1e-5)


def test_accepted_code_that_does_not_compile_is_named(torch: Any, tmp_path: Path) -> None:
    broken = cpu.sources() | {"decode.c": "this is no C"}
    with pytest.raises(UserError, match=r"the accepted decode.c does not compile here"):
        cpu.works(broken, cpu.inputs(), tmp_path)


def test_the_answer_lists_every_ratio_of_a_layer_that_times() -> None:
    result = LayerResult("cpu", (Finding("a", Verdict.passed, "1.010 of the baseline"),), "CPU")
    assert "  pass: a: 1.010 of the baseline" in list(lines([result]))


def test_passed_kernels_of_the_resource_layer_are_counted_and_not_listed() -> None:
    result = LayerResult("resource", (Finding("a", Verdict.passed, "same"),), "sm_90")
    assert not any("same" in line for line in lines([result]))
