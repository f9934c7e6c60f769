"""Wrong input ends in one message: exit code 2 or 1, at most 30 lines, no traceback, little memory and time.

By day a seeded sample is tried in this process, by night all, each in a process of its own.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bad_inputs import bad_inputs, sample
from tiers import cases

from harness.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_BYTES, MOST_SECONDS = 30, 2 * 10**9, 10.0
USAGE = 60  # lines of a usage text, which argparse prints for a wrong flag


def judged(code: int, text: str) -> str | None:
    """What is wrong with an answer; None where it is as it should be."""
    if code not in (1, 2):
        return f"exit code {code}"
    if "Traceback" in text or "internal error" in text:
        return "an internal error"
    lines = len(text.splitlines())
    if not lines:
        return "no message"
    return f"{lines} lines" if lines > (USAGE if text.startswith("usage:") else MOST_LINES) else None


def answered(words: tuple[str, ...]) -> int:
    """The exit code of a command line in this process."""
    try:
        return main(list(words))
    except SystemExit as stopped:  # argparse: a wrong flag
        return int(stopped.code or 0)


def test_there_are_four_hundred_bad_inputs(tmp_path: Path) -> None:
    assert len(set(bad_inputs(tmp_path))) >= 400


@cases("seed", range(12), day=1)
def test_a_sample_of_bad_inputs_ends_in_one_message_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], seed: int
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for words in sample(tmp_path, 15, seed):
        fault = judged(answered(words), "".join(capfd.readouterr()))
        if fault:
            wrong[shlex.join(words)] = fault
    assert wrong == {}


@pytest.mark.nightly
def test_every_tenth_bad_input_ends_in_one_message_with_little_memory_and_time(tmp_path: Path) -> None:
    wrong = {}
    for words in [*bad_inputs(tmp_path)][::10]:  # a process each
        fault = tried(words, tmp_path)
        if fault:
            wrong[shlex.join(words)] = fault
    assert wrong == {}


def tried(words: tuple[str, ...], folder: Path) -> str | None:
    """Run a command line in a process of its own; what is wrong with its answer, its memory or its CPU time."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds, bytes_used = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024
    if seconds > MOST_SECONDS or bytes_used > MOST_BYTES:
        return f"{seconds:.0f} CPU-seconds, {bytes_used / 1e9:.1f} GB"
    return judged(process.returncode, output.read_text(errors="replace"))
