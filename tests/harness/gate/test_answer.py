"""What the gate says and returns: coverage, baselines, records, Markdown, exit codes."""

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import harness.gate as running
from harness.cli.main import main
from harness.config.errors import UserError
from harness.environment import digested_files, kernel_digest
from harness.gate import latency
from harness.gate.findings import (
    Finding,
    GateVerdict,
    LayerResult,
    Measured,
    gravest,
    lines,
    markdown,
    new_baseline,
    read_baseline,
    write_baseline,
)
from harness.gate.latency import latency_name, write_record

DEVICE = "NVIDIA H200"


def ratios(level: float, noise: float = 0.01, seed: int = 0) -> list[float]:
    return list(level * np.exp(noise * np.random.default_rng(seed).standard_normal(40)))


def run_of(cases: dict[str, float], **other: Any) -> Measured:
    """A latency run with the median ratio of each case."""
    found = {name: {"ratios": ratios(level, seed=place)} for place, (name, level) in enumerate(cases.items())}
    made_on = {"device": DEVICE, "torch": "2.11.0", "triton": "3.6.0"}
    plain = Measured("latency", latency_name(DEVICE), made_on, kernel_digest(), found)
    return replace(plain, **other)


def compared(now: Measured, before: Measured) -> dict[str, GateVerdict]:
    result = latency.judge(now, new_baseline(before, "test"))
    return {finding.case: finding.verdict for finding in result.findings}


def test_an_unchanged_run_passes_and_names_its_worst_case() -> None:
    result = latency.judge(run_of({"a": 1.1, "b": 1.2}), new_baseline(run_of({"a": 1.1, "b": 1.2}), "test"))
    assert result.verdict is GateVerdict.passed
    assert result.remarks[0].startswith("worst case: ")


def test_one_slower_case_among_many_regresses_the_layer() -> None:
    cases = {f"case {number}": 1.1 for number in range(20)}
    result = latency.judge(run_of(cases | {"case 7": 1.2}), new_baseline(run_of(cases), "test"))
    assert result.verdict is GateVerdict.regressed
    assert [finding.case for finding in result.worst] == ["case 7"]


def test_a_missing_case_fails() -> None:
    assert compared(run_of({"a": 1.0}), run_of({"a": 1.0, "b": 1.0}))["b"] is GateVerdict.regressed


def test_a_renamed_case_fails_as_missing_and_shows_as_new() -> None:
    found = compared(run_of({"a": 1.0, "b2": 1.0}), run_of({"a": 1.0, "b": 1.0}))
    assert found == {"a": GateVerdict.passed, "b": GateVerdict.regressed, "b2": GateVerdict.inconclusive}


def test_a_run_without_cases_fails() -> None:
    assert (
        latency.judge(run_of({}), new_baseline(run_of({"a": 1.0}), "test")).verdict is GateVerdict.regressed
    )


def test_another_device_or_yardstick_is_no_comparison() -> None:
    for change in ({"device": "NVIDIA H100"}, {"torch": "2.12.0"}):
        before = run_of({"a": 1.0})
        now = replace(before, made_on={**before.made_on, **change})
        assert latency.judge(now, new_baseline(before, "test")).verdict is GateVerdict.inconclusive


def test_a_throttled_device_makes_no_pass() -> None:
    now = run_of({"a": 1.0})
    slowed = {"a": {**now.cases["a"], "throttled": "thermal (hardware)"}}
    result = latency.judge(replace(now, cases=slowed), new_baseline(now, "test"))
    assert result.verdict is GateVerdict.inconclusive
    assert "thermal" in result.worst[0].reason


def test_noise_and_throttling_become_no_baseline() -> None:
    noisy = {
        "a": {"ratios": ratios(1.0, noise=0.4)},
        "b": {"ratios": ratios(1.0), "throttled": "thermal (software)"},
    }
    wrong = list(latency.unfit(replace(run_of({"a": 1.0}), cases=noisy)))
    assert len(wrong) == 2


def test_a_baseline_comes_back_as_it_was_written(tmp_path: Path) -> None:
    before = new_baseline(run_of({"a": 1.0}), "first figures")
    write_baseline(tmp_path / "latency.json", before)
    assert read_baseline(tmp_path / "latency.json", "latency") == before


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layer": "latency"}'])
def test_a_file_that_is_no_baseline_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "latency.json").write_text(text)
    with pytest.raises(UserError, match=r"latency\.json is no baseline"):
        read_baseline(tmp_path / "latency.json", "latency")


def test_a_pipe_is_refused_before_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latency.json")
    with pytest.raises(UserError, match=r"latency\.json is no file"):
        read_baseline(tmp_path / "latency.json", "latency")


def test_a_baseline_of_another_layer_is_refused(tmp_path: Path) -> None:
    write_baseline(tmp_path / "x.json", new_baseline(run_of({"a": 1.0}), "test"))
    with pytest.raises(UserError, match="expected 'policy'"):
        read_baseline(tmp_path / "x.json", "policy")


def test_a_baseline_needs_a_reason_and_a_case() -> None:
    with pytest.raises(UserError, match="needs a reason"):
        new_baseline(run_of({"a": 1.0}), "  ")
    with pytest.raises(UserError, match="an empty baseline would pass everything"):
        new_baseline(run_of({}), "test")


def test_the_gravest_verdict_wins_and_nothing_is_inconclusive() -> None:
    assert (
        gravest([GateVerdict.passed, GateVerdict.regressed, GateVerdict.inconclusive])
        is GateVerdict.regressed
    )
    assert gravest([]) is GateVerdict.inconclusive


def test_a_page_lists_what_did_not_pass_and_says_what_was_not_run() -> None:
    bad = Finding("decode|16", GateVerdict.regressed, "registers 96 → 97\nand more")
    result = LayerResult("resource", (bad, Finding("b", GateVerdict.passed, "")), "Triton 3.6.0")
    page = markdown([result])
    assert "## Regression gate: regressed (not run: latency, policy, cpu)" in page
    assert "| decode\\|16 | regressed | registers 96 → 97 and more |" in page
    assert "| resource | regressed | 1/2 | Triton 3.6.0 |" in page


def test_a_terminal_gets_one_line_a_finding_and_the_verdict_last() -> None:
    found = tuple(Finding(f"case {number}", GateVerdict.regressed, "slower") for number in range(60))
    text = list(lines([LayerResult("policy", found, "Python 3.11")]))
    assert text[-2] == "  … and 20 more"
    assert text[-1].startswith("gate: regressed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a baseline in `baselines/` and a record `latency.json` of the same figures."""
    monkeypatch.chdir(tmp_path)
    before = run_of({"a": 1.0, "b": 2.0})
    write_baseline(before.file(tmp_path / "baselines"), new_baseline(before, "test"))
    write_record(before, tmp_path / "latency.json")
    return tmp_path


def gate(*words: str) -> int:
    return main(["gate", "--baselines", "baselines", *words])


def test_a_record_is_judged_without_a_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate("--record", "latency.json") == 0
    assert "nothing was timed now" in capsys.readouterr().out


def test_a_slower_record_exits_with_1(folder: Path) -> None:
    write_record(run_of({"a": 1.0, "b": 2.2}), folder / "latency.json")
    assert gate("--record", "latency.json") == 1


def test_a_record_of_other_kernels_is_stale(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(run_of({"a": 1.0, "b": 2.0}, kernels="0123456789abcdef"), folder / "latency.json")
    assert gate("--record", "latency.json") == 3
    assert "stale: the record is of kernels 0123456789abcdef" in capsys.readouterr().out


def test_a_record_of_another_device_has_no_baseline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_of({"a": 1.0}, made_on={"device": "NVIDIA L4", "torch": "2.11.0", "triton": "3.6.0"})
    write_record(other, folder / "latency.json")
    assert gate("--record", "latency.json") == 3
    assert "(there are: latency-nvidia-h200)" in capsys.readouterr().out


def test_a_record_becomes_the_baseline_with_a_reason(folder: Path) -> None:
    write_record(run_of({"a": 1.5}), folder / "latency.json")
    assert gate("--record", "latency.json", "--update") == 2
    assert gate("--record", "latency.json", "--update", "--reason", "larger tiles") == 0
    assert gate("--record", "latency.json") == 0


def test_a_missing_record_is_the_users_mistake(folder: Path) -> None:
    assert gate("--record", "nowhere.json") == 2


def test_a_wrong_record_is_told_apart_from_a_wrong_baseline(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.json").write_text("[]")
    assert gate("--record", "other.json") == 2
    err = capsys.readouterr().err
    assert "make gpu writes one as latency.json" in err
    assert "--update" not in err


def test_the_answer_is_appended_to_a_page(folder: Path) -> None:
    (folder / "page.md").write_text("before\n")
    gate("--record", "latency.json", "--markdown", "page.md")
    assert (folder / "page.md").read_text().startswith("before\n## Regression gate: pass")


def test_layers_are_measured_judged_and_updated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = run_of({"a": 1.0, "b": 2.0})
    layer_module = SimpleNamespace(measure=lambda: now, judge=latency.judge, unfit=latency.unfit)
    monkeypatch.setattr(running, "_layer_module", lambda layer: layer_module)
    assert gate("--layer", "latency") == 0
    assert gate("--layer", "latency", "--update") == 2
    assert gate("--layer", "latency", "--update", "--reason", "test") == 0


def test_a_new_baseline_is_never_of_changed_kernels_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert gate("--layer", "resource", "--changed", "--update", "--reason", "test") == 2
    assert "--changed: a new baseline is measured whole" in capsys.readouterr().err


def test_without_a_gpu_the_latency_layer_says_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert gate("--layer", "latency") == 2
    assert "judge a recorded run with gate --record FILE" in capsys.readouterr().err


def test_a_changed_kernel_changes_the_digest(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return kernel_digest(tmp_path)

    digest("reference.py", "a = 1")
    digest("providers.py", "a = 1")
    before = digest("triton/decode.py", "a = 1")
    assert digest("reference.py", "a = 2") == before
    assert digest("providers.py", "a = 2") == before
    assert digest("triton/decode.py", "a = 2") != before


def test_the_digest_covers_every_kernel_of_the_package() -> None:
    package = Path(next(iter(find_spec("paged_kernels").submodule_search_locations)))
    folders = {path.parent.name for path in digested_files(package)}
    assert folders == {"native", "paged_kernels", "triton"}
