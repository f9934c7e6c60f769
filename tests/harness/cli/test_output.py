"""The command line writes what it can, wherever it is told to write."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import cases

from harness.cli.main import main
from harness.console import OutputError, counted, remark, say


def shown(encoding: str, text: str) -> str:
    """What `say` leaves in a standard output of this encoding."""
    raw = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        say(text)
        return raw.getvalue().decode(encoding)


def test_signs_are_spelt_out_where_the_terminal_knows_ascii_alone() -> None:
    assert shown("ascii", "error −1.5 %, spread –, 3 µs, ü") == "error -1.5 %, spread -, 3 us, \\xfc\n"


def test_a_terminal_that_knows_the_signs_gets_them() -> None:
    assert shown("utf-8", "−1.5 %") == "−1.5 %\n"


def test_what_a_file_says_cannot_move_the_cursor_or_turn_the_text() -> None:
    assert shown("utf-8", "a\tb\nc\x1b[2Jd\re\x9b\u202ef") == "a\tb\nc\\x1b[2Jd\\re\\x9b\\u202ef\n"


def test_a_stream_that_was_closed_before_the_start_is_written_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    say("x")
    remark("x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_an_error_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115 (a `with` would fail as it flushes)
    with pytest.raises(OutputError, match="cannot write to standard output: No space left"):
        say("x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@cases("where", [">/dev/full", ">&-", "2>&- >/dev/full"], day=1)
def test_no_command_calls_a_lost_output_a_bug(where: str) -> None:
    command = f"exec {sys.executable} -m harness show --groups {where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.nightly
def test_a_disk_that_fills_while_a_picture_is_drawn_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # names no file

    monkeypatch.setattr("harness.report.trace_pictures.svg_bytes", full)
    words = ["trace", "inspect", "azure_conv", "--requests", "30", "--out", str(tmp_path)]
    assert main(words) == 1
    assert "error: cannot write: No space left on device; free some space" in capsys.readouterr().err


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(1, "point"), counted(2000, "point")] == ["1 point is", "2,000 points are"]
