"""The CPU layer: today's attention beside the accepted code, and what its ratios mean. Nothing here depends on time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import cases

from harness.config.errors import UserError
from harness.gate import cpu
from harness.gate.findings import (
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    lines,
    new_baseline,
    write_baseline,
)
from harness.gate.settings import gate_settings

CASE = cpu.NATIVE


def run_of(level: float, *, noise: float = 0.06, difference: float = 0.0, seed: int = 0) -> Measured:
    ratios = level * np.exp(noise * np.random.default_rng(seed).standard_normal(40))
    cases = {CASE: {"ratios": list(ratios), "difference": difference}}
    return Measured("cpu", cpu.NAME, {"machine": "x86_64"}, None, cases, {"sources": {}})


def verdict(now: Measured, *overrides: str) -> GateVerdict:
    return cpu.judge(now, new_baseline(run_of(1.0), "test"), gate_settings(overrides)).verdict


def test_a_fifth_more_time_is_called_regressed_under_the_noise_of_a_busy_machine() -> None:
    found = [verdict(run_of(1.2, seed=seed)) for seed in range(20)]
    assert found.count(GateVerdict.regressed) >= 19


def test_unchanged_code_is_not_called_regressed() -> None:
    assert GateVerdict.regressed not in [verdict(run_of(1.0, seed=seed)) for seed in range(40)]


def test_nothing_that_is_a_fifth_slower_can_pass() -> None:
    assert GateVerdict.passed not in [verdict(run_of(1.2, noise=0.2, seed=seed)) for seed in range(20)]


def test_margins_can_be_chosen() -> None:
    assert verdict(run_of(1.08)) is not GateVerdict.regressed
    assert (
        verdict(run_of(1.08), "gate.cpu.negligible=0.01", "gate.cpu.material=0.02") is GateVerdict.regressed
    )


def test_other_results_are_a_regression_whatever_the_time() -> None:
    (finding,) = cpu.judge(run_of(1.0, difference=0.5), new_baseline(run_of(1.0), "test")).findings
    assert finding.verdict is GateVerdict.regressed
    assert "results differ" in finding.reason


def test_results_that_are_no_numbers_are_a_regression() -> None:
    """A kernel that gave NaN passed: no comparison with NaN is true."""
    assert verdict(run_of(1.0, difference=float("nan"))) is GateVerdict.regressed


@pytest.fixture(scope="module")
def torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Both sides are compiled alike here, and quickly: nothing of this file is timed."""
    found = pytest.importorskip("torch")
    from quick_compiler import quick_compiler

    with pytest.MonkeyPatch.context() as patch, quick_compiler(patch, tmp_path_factory.mktemp("today")):
        yield found


def test_the_accepted_code_runs_beside_todays_and_computes_the_same(torch: Any, tmp_path: Path) -> None:
    data = cpu.inputs()
    ours, theirs = cpu.works(None, data, tmp_path), cpu.works(cpu.sources(), data, tmp_path)
    for name in cpu.case_names():
        assert torch.equal(ours[name](), theirs[name]())


def test_a_changed_line_of_the_accepted_code_changes_only_the_accepted_side(
    torch: Any, tmp_path: Path
) -> None:
    changed = cpu.sources()
    changed[cpu.TORCH_FILE] = changed[cpu.TORCH_FILE].replace(
        "out[rows].copy_(result.reshape(out[rows].shape))",
        "out[rows].copy_(2 * result.reshape(out[rows].shape))",
    )
    data = cpu.inputs()
    ours, theirs = cpu.works(None, data, tmp_path), cpu.works(changed, data, tmp_path)
    assert torch.allclose(2 * ours[cpu.DECODE](), theirs[cpu.DECODE]())
    assert torch.equal(ours[cpu.PREFILL](), theirs[cpu.PREFILL]())


@pytest.mark.nightly
def test_a_changed_line_of_the_accepted_prefill_in_c_changes_only_the_accepted_side(
    torch: Any, tmp_path: Path
) -> None:
    changed = cpu.sources()
    before = "LOAD(q + (own * heads + head) * dk + i) * scale"
    assert before in changed["attention.h"]
    changed["attention.h"] = changed["attention.h"].replace(before, f"{before} * 0")
    data = cpu.inputs()
    ours, theirs = cpu.works(None, data, tmp_path), cpu.works(changed, data, tmp_path)
    assert not torch.allclose(ours[cpu.CHUNK](), theirs[cpu.CHUNK]())
    assert torch.equal(ours[cpu.NATIVE](), theirs[cpu.NATIVE]())


@cases("case", cpu.case_names(), day=2)
def test_what_is_timed_is_the_attention_of_its_case(torch: Any, tmp_path: Path, case: str) -> None:
    data = cpu.inputs()
    prefills, capped = case in (cpu.CHUNK, cpu.PREFILL), case in (cpu.DECODE, cpu.PREFILL)
    found = cpu.works(None, data, tmp_path)[case]()
    for row, table in enumerate(data.table[:1] if prefills else data.table):
        q = (data.q[: cpu.QUERIES] if prefills else data.q[row : row + 1]).double()
        k, v = (cache[table].flatten(0, 1).double() for cache in (data.keys, data.values))
        k, v = (part.repeat_interleave(cpu.HEADS // cpu.KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * cpu.DIM**-0.5
        if capped:
            scores = cpu.SOFTCAP * torch.tanh(scores / cpu.SOFTCAP)
        later = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
        chance = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        expected = torch.einsum("hqk,khd->qhd", chance, v)
        own = found if prefills else found[row : row + 1]
        assert torch.allclose(own.double(), expected, atol=2e-5)


@pytest.mark.nightly
def test_a_file_that_is_new_is_compared_with_itself_and_its_case_is_named(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "ratios_of", lambda sides: [1.0] * 30)
    older = {name: text for name, text in cpu.sources().items() if name != "attention.c"}
    cases = {cpu.NATIVE: {"ratios": [1.0], "difference": 0.0}}
    kept = Measured("cpu", cpu.NAME, {"machine": "x86_64"}, None, cases, {"sources": older})
    write_baseline(tmp_path / f"{cpu.NAME}.json", new_baseline(kept, "test"))
    now = cpu.measure(tmp_path)
    found = {finding.case: finding.verdict for finding in cpu.judge(now, new_baseline(kept, "test")).findings}
    assert found[cpu.NATIVE] is GateVerdict.passed
    assert found[cpu.CHUNK] is not GateVerdict.passed


def test_accepted_code_that_does_not_compile_is_named(torch: Any, tmp_path: Path) -> None:
    broken = cpu.sources() | {"attention.c": "this is no C"}
    with pytest.raises(UserError, match=r"the accepted C files do not compile here"):
        cpu.works(broken, cpu.inputs(), tmp_path)


def test_the_answer_lists_every_ratio_of_a_layer_that_times() -> None:
    result = LayerResult("cpu", (Finding("a", GateVerdict.passed, "1.010 of the baseline"),), "CPU")
    assert "  pass: a: 1.010 of the baseline" in list(lines([result]))


def test_passed_kernels_of_the_resource_layer_are_counted_and_not_listed() -> None:
    result = LayerResult("resource", (Finding("a", GateVerdict.passed, "same"),), "sm_90")
    assert not any("same" in line for line in lines([result]))
