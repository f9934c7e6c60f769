"""Completion with the Tab key: what is offered, and the shell code in real shells."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import cases

from harness.cli.completion import matching

ROOT = Path(__file__).parents[3]


def offered(line: str) -> list[str]:
    """What the program answers to the shell for a command line."""
    made = f"exec 8>&1; {sys.executable} -m harness"
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": f"pagetwin {line}", "COMP_POINT": str(len(line) + 9)}
    found = subprocess.run(
        ["bash", "-c", made], env=os.environ | asked, capture_output=True, text=True, cwd=ROOT, check=True
    )
    return [word.strip() for word in found.stdout.split("\013") if word.strip()]


def code(shell: str) -> str:
    words = [sys.executable, "-m", "harness", "completion", shell]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_commands_are_offered() -> None:
    assert {"sweep", "report", "completion"} <= {*offered("")}


def test_options_of_a_command_are_offered() -> None:
    assert {"--dry-run", "--force"} <= {*offered("sweep --")}


def test_keys_of_overrides_are_offered() -> None:
    assert "cache.block_size=" in offered("sweep cache.bl")


def test_options_of_a_group_are_offered_behind_a_comma() -> None:
    assert "cache=paged,contiguous_max" in matching("cache=paged,contiguous_m")


def test_members_of_an_enumeration_are_offered() -> None:
    assert "scheduler.preemption=swap" in matching("scheduler.preemption=s")


def test_true_and_false_are_offered() -> None:
    assert [*matching("measure=")] == ["measure=true", "measure=false"]


def test_a_number_has_no_offer() -> None:
    assert not [*matching("cache.block_size=")]


def test_a_command_without_overrides_offers_none() -> None:
    assert not [word for word in offered("status ca") if "=" in word]


@cases("line", ["pagetwin swe", "python -m harness swe"], day=1)
def test_bash_completes_a_command(line: str) -> None:
    words = line.split()
    script = f"""{code("bash")}
pagetwin() {{ {sys.executable} -m harness "$@"; }}
python() {{ {sys.executable} "$@"; }}
COMP_LINE="{line}"; COMP_POINT={len(line)}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}
$(complete -p {words[0]} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {words[0]}
echo "got ${{COMPREPLY[*]}}"
"""
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split() == ["got", "sweep"]


def test_bash_leaves_other_python_programs_alone() -> None:
    script = f"""{code("bash")}
COMP_LINE="python -m pip ins"; COMP_POINT=17; COMP_WORDS=(python -m pip ins); COMP_CWORD=3
_pagetwin_module python
echo "got ${{COMPREPLY[*]}}"
"""
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.split() == ["got"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize("line", ["pagetwin sweep cache=cont", "python -m harness sweep cache=cont"])
def test_fish_completes_an_override(line: str, tmp_path: Path) -> None:
    for name, words in (("pagetwin", "-m harness"), ("python", "")):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = f"{code('fish')}\ncomplete -C '{line}'"
    found = subprocess.run(
        ["fish", "--no-config", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
    )
    assert "cache=contiguous_max" in found.stdout, found.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_the_code() -> None:
    script = f"autoload -U compinit; compinit -u -D\n{code('zsh')}\nprint ${{_comps[python]}} ${{_comps[pagetwin]}}"
    found = subprocess.run(["zsh", "-f", "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.split() == ["_pagetwin_module", "_python_argcomplete"], found.stderr
