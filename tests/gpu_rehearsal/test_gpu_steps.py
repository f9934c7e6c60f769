"""The ten minutes on a GPU, without one: every step is rehearsed, and no step can take the others down."""

import contextlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import cases

import harness.point
from gpu_acceptance import machine as preflight
from gpu_acceptance import run as running
from gpu_acceptance.machine import check_packages, device_folder, device_overrides
from gpu_acceptance.parts import PARTS, REHEARSED, SECONDS, Setting, Step, steps_of
from gpu_acceptance.run import MINUTES, main
from harness.calibrate.store import calibration_path
from harness.cli.engine import calibrated_config
from harness.cli.main import main as harness_main
from harness.config.errors import UserError
from harness.sweep.plan import plan_sweep, sweep_request
from harness.workload.deployment import deployment_of

H200 = ("device=h200",)


def step(name: str, code: str, limit_s: float = 300, answers: tuple[int, ...] = (0,)) -> Step:
    command = (sys.executable, "-c", code)
    return Step(name, command, command, limit_s, answers)


def run(
    monkeypatch: pytest.MonkeyPatch, out: Path, *some: Step, minutes: float = 10, pack: str | None = None
) -> int:
    monkeypatch.setattr(running, "steps_of", lambda part, setting: list(some))
    monkeypatch.setattr(running, "check_gpu", lambda: ("NVIDIA H200",))
    plain = {"part": "quick", "only": None, "trace": None, "dry_run": False, "judge": False}
    flags = SimpleNamespace(**plain, out=str(out), minutes=minutes, pack=pack)
    return running.run_part(flags)  # type: ignore[arg-type]


def states(out: Path) -> dict[str, str]:
    found = json.loads((out / "quick" / "summary.json").read_text())["steps"]
    return {one["name"]: one["state"] for one in found}


STEPS = {
    "quick": ["contact", "tests", "kernels", "gate", "calibration", "sweep"],
    "kernels": [
        *(
            "contact",
            "tests",
            "memcheck",
            "decode",
            "blocks",
            "cascade",
            "flex",
            "counters",
            "hopper",
            "prefill",
        )
    ],
    "engine": ["1b", "8b"],
    "prediction": ["calibration", "default", "azure", "contiguous", "gate"],
}


def run_here(words: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Like `subprocess.run`, but commands of the harness run in this process, which has imported torch already."""
    if tuple(words[1:3]) != ("-m", "harness"):
        return subprocess.run(words, **options)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(options["cwd"]), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = harness_main(list(words[3:]))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(list(words), code, out.getvalue(), err.getvalue())


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_every_step_is_ready_for_a_gpu(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "subprocess", SimpleNamespace(run=run_here))
    steps = STEPS[part][:1] if part == "engine" else STEPS[part]  # its two steps differ in a word: see below
    words = ["--part", part, "--only", ",".join(steps), "--dry-run", "--out", str(tmp_path / "out")]
    code = main([*words])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    assert [line.partition(":")[0] for line in out.splitlines()[:-1]] == steps
    assert out.endswith("nothing was timed\n")


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_its_steps_in_order(part: str) -> None:
    assert [one.name for one in steps_of(part, Setting(Path("out"), H200))] == STEPS[part]


def test_the_two_models_are_rehearsed_by_the_same_words() -> None:
    small, large = (one.rehearsal for one in steps_of("engine", Setting(Path("out"), H200)))
    assert [word.replace("1b", "8b") for word in small] == list(large)


def test_a_typo_in_a_step_is_found_by_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = (sys.executable, "-m", "harness", "gate", "--layr", "latency", "--dry-run")
    monkeypatch.setattr(running, "steps_of", lambda part, setting: [Step("gate", wrong, wrong, 60)])
    assert main(["--dry-run", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "gate: NOT READY" in out
    assert "--layr" in err


@pytest.mark.parametrize("part", PARTS)
def test_the_limits_of_all_steps_fill_the_time_and_no_more(part: str) -> None:
    total = sum(one.limit_s for one in steps_of(part, Setting(Path("out"), H200)))
    assert 0.98 * 60 * MINUTES <= total <= 60 * MINUTES


def overrides_of(part: str, name: str, out: Path) -> list[str]:
    """The settings of a step as they are on a machine with an H200, but for the engine, which must run here."""
    command = next(one for one in steps_of(part, Setting(out, H200)) if one.name == name).command
    return [word for word in command if "=" in word] + [*REHEARSED]


@pytest.mark.nightly
@cases(
    ("part", "sweep"),
    [("quick", "sweep"), *(("prediction", name) for name in ("default", "azure", "contiguous"))],
    day=1,
)
def test_a_sweep_finds_what_the_calibration_step_keeps(part: str, sweep: str, tmp_path: Path) -> None:
    kept = calibration_path(
        deployment_of(calibrated_config(tuple(overrides_of(part, "calibration", tmp_path))))
    )
    plan = plan_sweep(sweep_request(overrides_of(part, sweep, tmp_path)), harness.point)
    assert {calibration_path(deployment_of(point.config)) for point in plan.points} == {kept}


def test_a_failed_step_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = run(
        monkeypatch, tmp_path, step("tests", "raise SystemExit('boom')"), step("sweep", "print('swept')")
    )
    assert code == 1
    assert states(tmp_path) == {"tests": "failed", "sweep": "done"}
    assert "swept" in (tmp_path / "quick" / "logs" / "sweep.txt").read_text()


def test_a_step_that_hangs_is_stopped_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LEAST_S", 0.01)
    hanging = step("tests", "import time; time.sleep(60)", limit_s=0.5)
    run(monkeypatch, tmp_path, hanging, step("sweep", ""))
    assert states(tmp_path) == {"tests": "stopped", "sweep": "done"}


def test_a_stopped_step_takes_along_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LEAST_S", 0.01)
    noted = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        f"pathlib.Path({str(noted)!r}).write_text(str(child.pid))\n"
        "child.wait()"
    )
    for limit in (1, 5, 25, 125):  # long enough for the step to begin, however busy the machine is
        run(monkeypatch, tmp_path, step("kernels", code, limit_s=limit), step("sweep", "", limit_s=600))
        assert states(tmp_path)["kernels"] == "stopped"
        if noted.exists() and noted.read_text():
            break
    assert not is_running(int(noted.read_text()))


def is_running(process: int) -> bool:
    """Whether a process is there and no corpse that waits for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_step_without_its_optional_tool_is_left_out_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, tmp_path, replace(step("counters", ""), tool="no-such-profiler")) == 0
    assert states(tmp_path) == {"counters": "not installed"}


def test_an_optional_tool_that_is_there_starts_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = step("counters", "import os; print(os.environ['WATCHED'])")
    watched = replace(plain, tool="env", command=("WATCHED=closely", *plain.command))
    assert run(monkeypatch, tmp_path, watched) == 0
    assert "closely" in (tmp_path / "quick" / "logs" / "counters.txt").read_text()


def test_a_step_is_told_how_long_it_may_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = step("kernels", "import sys; print('for', sys.argv[1])", limit_s=40)
    run(
        monkeypatch,
        tmp_path,
        replace(plain, command=(*plain.command, SECONDS)),
        step("sweep", "", limit_s=600),
    )
    assert "for 28" in (tmp_path / "quick" / "logs" / "kernels.txt").read_text()


def test_steps_that_were_chosen_share_the_whole_time() -> None:
    limits = [one.limit_s for one in running._sharing([step("a", "", 30), step("b", "", 10)], 400)]
    assert limits == [300, 100]


def test_a_second_call_keeps_what_the_first_one_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, tmp_path, step("tests", ""), step("gate", "raise SystemExit(1)"))
    run(monkeypatch, tmp_path, step("gate", ""))
    assert states(tmp_path) == {"tests": "done", "gate": "done"}


def test_all_that_was_left_comes_back_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "all.tar.gz"
    run(monkeypatch, tmp_path / "out", step("tests", "print('tested')"), pack=str(file))
    with tarfile.open(file) as archive:
        names = archive.getnames()
    assert {"quick/README.md", "quick/summary.json", "quick/logs/tests.txt"} <= set(names)


def test_what_was_measured_comes_back_although_the_page_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, code = tmp_path / "all.tar.gz", "import pathlib; pathlib.Path('tests.jsonl').mkdir()"
    broken = step("tests", f"import os; os.chdir({str(tmp_path / 'out' / 'quick')!r}); {code}")
    with pytest.raises(IsADirectoryError):
        run(monkeypatch, tmp_path / "out", broken, pack=str(file))
    with tarfile.open(file) as archive:
        assert "quick/logs/tests.txt" in archive.getnames()


def test_a_page_can_be_made_of_a_run_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_for", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, step("tests", ""))
    assert main(["--judge", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "quick" / "README.md").read_text().startswith("# NVIDIA H200: quick")


def test_a_name_that_is_no_archive_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"ends in \.tar\.gz"):
        run(monkeypatch, tmp_path, step("tests", ""), pack="all.zip")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--part", "prediction", "--trace", "none.csv", "--dry-run"]) == 2
    assert "--trace none.csv: no such file" in capsys.readouterr().err


def test_a_page_can_be_written_again_where_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, tmp_path, step("tests", ""))
    page = tmp_path / "quick" / "README.md"
    first = page.read_text()
    page.unlink()
    assert main(["--judge", "--out", str(tmp_path)]) == 0
    assert page.read_text() == first


def test_a_folder_that_nobody_measured_has_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--judge", "--out", str(tmp_path)]) == 2
    assert "has no summary.json of a run" in capsys.readouterr().err


def test_steps_behind_the_last_minute_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, step("tests", ""), minutes=0.01) == 1
    assert states(tmp_path) == {"tests": "left out"}


def test_a_gate_without_a_baseline_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, tmp_path, step("gate", "raise SystemExit(3)", answers=(0, 1, 3))) == 0


def test_only_some_steps_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--only", "kernels"]) == 0
    assert capsys.readouterr().out.startswith("kernels: ready")
    assert main(["--dry-run", "--only", "kernel"]) == 2
    assert "there are contact, tests, kernels" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "gpu_names", lambda: ())
    monkeypatch.setattr(preflight, "_torch_names", lambda: ())
    assert main([]) == 2
    assert "rehearses every step without one" in capsys.readouterr().err


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = (("no_such_module", "first-package"), ("nor_this_one", "second-package"))
    monkeypatch.setattr(preflight, "PACKAGES", (*preflight.PACKAGES, *absent))
    with pytest.raises(UserError, match="missing here: first-package, second-package"):
        check_packages()


@pytest.mark.parametrize(
    ("name", "folder", "overrides"),
    [
        ("NVIDIA H200", "nvidia-h200", ("device=h200",)),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3", ("device=h100",)),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb", ("device=a100_80gb",)),
        ("NVIDIA A100-PCIE-40GB", "nvidia-a100-pcie-40gb", ("device=h100", "device.name=a100_pcie_40gb")),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb", ("device=a100_40gb",)),
        ("NVIDIA GH200 480GB", "nvidia-gh200-480gb", ("device=h100", "device.name=gh200_480gb")),
        ("NVIDIA L40S", "nvidia-l40s", ("device=l40s",)),
        ("NVIDIA B200", "nvidia-b200", ("device=b200",)),
        ("NVIDIA H200 NVL", "nvidia-h200-nvl", ("device=h100", "device.name=h200_nvl")),
        ("NVIDIA H100 PCIe", "nvidia-h100-pcie", ("device=h100", "device.name=h100_pcie")),
        ("NVIDIA GeForce RTX 4090", "nvidia-geforce-rtx-4090", ("device=rtx4090",)),
        ("", "no-gpu", ("device=h100",)),
    ],
)
def test_a_device_has_a_folder_and_a_description(name: str, folder: str, overrides: tuple[str, ...]) -> None:
    names = [name] if name else []
    assert (device_folder(names), device_overrides(names)) == (folder, overrides)
