"""Programs in another Python: answers, the last words of one that stops, versions."""

import sys
from pathlib import Path

import pytest

from harness.workers import Peer, PeerError, version_in

ECHO = "import json, sys\nfor line in sys.stdin: print(json.dumps([json.loads(line)]), flush=True)\n"


def peer(folder: Path, text: str, **more: float) -> Peer:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    return Peer(sys.executable, program, **more)


def test_questions_are_answered_in_turn(tmp_path: Path) -> None:
    with peer(tmp_path, ECHO) as echo:
        assert [echo.ask({"a": number}) for number in (1, 2)] == [[{"a": 1}], [{"a": 2}]]


def test_a_program_that_stops_leaves_its_last_lines(tmp_path: Path) -> None:
    with peer(tmp_path, "import sys\ninput()\nsys.exit('one\\ntwo\\nthree\\nfour')") as stopping:
        for _ in range(2):  # a dead program is asked again
            with pytest.raises(PeerError, match=r"^two / three / four$"):
                stopping.ask({})


def test_a_program_that_stops_silently_is_told(tmp_path: Path) -> None:
    with peer(tmp_path, "") as silent, pytest.raises(PeerError, match="without a word"):
        silent.ask({})


def test_an_answer_that_takes_too_long_ends_the_program(tmp_path: Path) -> None:
    with peer(tmp_path, "input()\ninput()", limit_s=0.1) as slow, pytest.raises(PeerError):
        slow.ask({})


def test_the_version_of_a_package_in_an_interpreter() -> None:
    assert version_in(sys.executable, "numpy")
    assert version_in(sys.executable, "yaml")  # of the distribution PyYAML
    assert version_in(sys.executable, "no_such_package") is None
    with pytest.raises(PeerError, match="'/no/python' cannot be started: No such file"):
        version_in("/no/python", "numpy")
