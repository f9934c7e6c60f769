"""The first contact with a GPU, drilled without one: whatever a call does, all other results are kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_acceptance.contact import CALLS, WRONG_DECODE, lines, main
from gpu_acceptance.judging import test_findings as findings_of_tests
from gpu_acceptance.machine import ROOT, step_environment


def contact(out: Path, calls: str) -> tuple[int, dict[str, str]]:
    code = main(["--out", str(out), "--calls", f"gpu_rehearsal.faulty_calls:{calls}", "--limit", "3"])
    return code, {line["call"]: line["state"] for line in lines(out) if line["call"]}


@pytest.mark.nightly
def test_hanging_ending_and_wrong_calls_lose_nothing_but_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, states = contact(tmp_path / "contact.jsonl", "BROKEN")
    assert code == 1
    assert states == {
        "decode": "right",
        "hanging": "lost",
        "ending": "lost",
        "refused": "failed",
        "wrong": "wrong",
        "not a number": "wrong",
        "behind them": "right",
        "risky: hanging": "lost",
        "risky: last": "right",
    }
    out = capsys.readouterr().out
    assert "hanging: lost (no answer in 3 s)" in out
    assert "ending: lost (the process ended with code -9)" in out
    assert "illegal memory access" in out


def test_after_a_wrong_decode_nothing_more_is_called(tmp_path: Path) -> None:
    code, states = contact(tmp_path / "contact.jsonl", "WRONG")
    assert code == WRONG_DECODE
    assert states == {"merge": "right", "decode": "wrong"}


@pytest.mark.nightly
def test_times_of_the_engines_launches_are_kept_though_one_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "contact.jsonl"
    code, states = contact(out, "TIMED")
    assert code == 1
    assert list(states.values()) == ["right", "wrong", "lost", "right"]
    times = {line["call"]: (line.get("us"), line.get("gb_s")) for line in lines(out) if line["call"]}
    assert times["engine: right"] == (250.0, 2000)
    assert times["engine: without a device"] == (None, None)
    assert "engine: right: right (250.0 us, 2,000 GB/s of KV)" in capsys.readouterr().out


@pytest.mark.nightly
def test_the_engines_launches_are_right_in_the_interpreter_and_have_no_times(tmp_path: Path) -> None:
    own, out = [name for name in CALLS if name.startswith("engine: ")], tmp_path / "contact.jsonl"
    words = (sys.executable, "-m", "gpu_acceptance.contact", "--device", "cpu", "--out", str(out))
    environment = step_environment() | {"TRITON_INTERPRET": "1"}
    subprocess.run((*words, "--child", *own), cwd=ROOT, env=environment, check=True)
    found = {line["call"]: line for line in lines(out) if line["call"]}
    assert {name: line["state"] for name, line in found.items()} == dict.fromkeys(own, "right")
    assert not any("us" in line for line in found.values())


@pytest.mark.nightly
def test_results_of_tests_are_kept_though_one_hangs(tmp_path: Path) -> None:
    file, kept = tmp_path / "test_some.py", tmp_path / "kept.jsonl"
    file.write_text(
        "import time\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): time.sleep(600)\ndef test_d(): pass\n"
    )
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "gpu_acceptance.stream")
    options = ("--stream", str(kept), "--test-limit", "3", "-c", "/dev/null", "--rootdir", str(tmp_path))
    done = subprocess.run(
        (*words, *options, str(file)), cwd=ROOT, env=step_environment(), capture_output=True, check=False
    )
    assert done.returncode == 1
    found = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(line["test"][-6:], line["outcome"]) for line in found] == [
        ("test_a", "passed"),
        ("test_b", "failed"),
    ]
    assert b"Timeout" in done.stderr
    judged = findings_of_tests(kept)
    assert (judged.value, judged.where) == (2, "of 2, 0 skipped, cut off")
