"""The ten minutes on a GPU, without one: every step is rehearsed, and no step can take the others down."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import harness.point
from harness.bench.gpu import MINUTES, preflight, running
from harness.bench.gpu.preflight import check_packages, device_folder, device_option
from harness.bench.gpu.steps import Step, steps
from harness.bench.gpu.summary import aims_of
from harness.cli.calibrate_command import _config
from harness.cli.main import main
from harness.config.errors import UserError
from harness.measured.calibration import calibration_path
from harness.plan.planning import make_plan
from harness.plan.request import sweep_request


def step(name: str, code: str, limit_s: float = 60, answers: tuple[int, ...] = (0,)) -> Step:
    command = (sys.executable, "-c", code)
    return Step(name, command, command, limit_s, answers)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *some: Step, minutes: float = 1) -> int:
    monkeypatch.setattr(running, "steps", lambda folder, device: list(some))
    monkeypatch.setattr(running, "check_gpu", lambda: ("NVIDIA H200",))
    flags = SimpleNamespace(out=str(out), only=None, dry_run=False, minutes=minutes)
    return running.run_steps(flags)  # type: ignore[arg-type]


def states(out: Path) -> dict[str, str]:
    found = json.loads((out / "summary.json").read_text())["steps"]
    return {one["name"]: one["state"] for one in found}


def test_every_step_is_ready_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "gpu", "--dry-run", "--out", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert [line.partition(":")[0] for line in out.splitlines()[:-1]] == [
        *("tests", "kernels", "gate", "calibration", "sweep")
    ]
    assert out.endswith("nothing was timed\n")


def test_a_typo_in_a_step_is_found_by_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (sys.executable, "-m", "harness", "gate", "--layr", "latency", "--dry-run")
    monkeypatch.setattr(running, "steps", lambda folder, device: [Step("gate", wrong, wrong, 60)])
    assert main(["bench", "gpu", "--dry-run", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "gate: NOT READY" in out
    assert "--layr" in err


def test_the_limits_of_all_steps_are_ten_minutes() -> None:
    assert sum(one.limit_s for one in steps(Path("out"), "h200")) == 60 * MINUTES


def overrides_of(name: str, out: Path) -> list[str]:
    """The settings of a step as they are on a machine with an H200, but for the engine, which must run here."""
    command = next(one for one in steps(out, "h200") if one.name == name).command
    return [word for word in command if "=" in word] + ["engine=auto"]


def test_the_sweep_finds_what_the_calibration_step_keeps(tmp_path: Path) -> None:
    kept = calibration_path(_config(tuple(overrides_of("calibration", tmp_path))))
    plan = make_plan(sweep_request(overrides_of("sweep", tmp_path)), harness.point)
    assert {calibration_path(point.config) for point in plan.points} == {kept}
    assert kept.parent == tmp_path / "calibration"


def test_the_calibration_step_calibrates(tmp_path: Path) -> None:
    command = next(one for one in steps(tmp_path, "h200") if one.name == "calibration").command
    assert command[1:4] == ("-m", "harness", "calibrate")


def test_a_dry_calibration_says_where_it_would_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", f"cost.cache_dir={tmp_path / 'kept'}", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"kept in {tmp_path / 'kept'}" in out
    assert "where nothing is yet\nnothing was measured" in out
    assert not (tmp_path / "kept").exists()


def test_a_failed_step_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = run(
        monkeypatch, tmp_path, step("tests", "raise SystemExit('boom')"), step("sweep", "print('swept')")
    )
    assert code == 1
    assert states(tmp_path) == {"tests": "failed", "sweep": "done"}
    assert "swept" in (tmp_path / "logs" / "sweep.txt").read_text()


def test_a_step_that_hangs_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_GRACE_S", 0.1)
    run(monkeypatch, tmp_path, step("tests", "import time; time.sleep(60)", limit_s=0.5), step("sweep", ""))
    assert states(tmp_path) == {"tests": "stopped", "sweep": "done"}


def test_steps_behind_the_last_minute_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, step("tests", ""), minutes=0.0) == 1
    assert states(tmp_path) == {"tests": "left out"}


def test_a_gate_without_a_baseline_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, step("gate", "raise SystemExit(3)", answers=(0, 1, 3))) == 0


def test_only_some_steps_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--dry-run", "--only", "kernels"]) == 0
    assert capsys.readouterr().out.startswith("kernels: ready")
    assert main(["bench", "gpu", "--dry-run", "--only", "kernel"]) == 2
    assert "there are tests, kernels" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "gpu_names", lambda: ())
    monkeypatch.setattr(preflight, "_torch_names", lambda: ())
    assert main(["bench", "gpu"]) == 2
    assert "rehearses every step without one" in capsys.readouterr().err


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (("no_such_module", "first-package"), ("nor_this_one", "second-package"))
    monkeypatch.setattr(preflight, "PACKAGES", (*preflight.PACKAGES, *absent))
    with pytest.raises(UserError, match="missing here: first-package, second-package"):
        check_packages()


@pytest.mark.parametrize(
    ("name", "folder", "option"),
    [
        ("NVIDIA H200", "nvidia-h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb", "a100_80gb"),
    ],
)
def test_a_device_has_a_folder_and_a_description(name: str, folder: str, option: str) -> None:
    assert (device_folder([name]), device_option([name])) == (folder, option)


def row(name: str, provider: str, **other: Any) -> dict[str, Any]:
    plain = {"queries": 1, "flat_bytes": 5e8, "shared_prefix": 0, "median_us": 100.0}
    return {"name": name, "provider": provider, **plain, "copy_share": 0.92, "matmul_share": 0.1, **other}


def test_the_worst_large_case_stands_for_each_aim() -> None:
    rows = [
        *(
            row("a", "paged"),
            row("b", "paged", copy_share=0.85),
            row("tiny", "paged", flat_bytes=1e6, copy_share=0.2),
        ),
        *(row("a", "contiguous", median_us=99.0), row("b", "contiguous", median_us=90.0)),
        *(
            row("p", "paged", queries=2048, matmul_share=0.62),
            row("q", "paged", queries=512, matmul_share=0.61),
        ),
    ]
    decode, paging, prefill = aims_of(rows)
    assert (decode["worst case"], decode["found"], decode["met"]) == ("b", 0.85, False)
    assert (paging["worst case"], paging["met"]) == ("b", False)
    assert (prefill["worst case"], prefill["found"], prefill["met"]) == ("q", 0.61, True)


def test_without_a_table_no_aim_is_claimed() -> None:
    assert list(aims_of([])) == []
