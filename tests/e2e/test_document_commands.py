"""The commands of the documents: each one parses, and where a document shows output, the command prints it."""

import os
import re
import runpy
from pathlib import Path

import pytest
from console_blocks import ROOT, Example, agree, examples, new_folder, output_of

from engine.runtime.options import VLLM_NAMES
from harness.cli.main import parse_arguments
from harness.config.checks import value_of
from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.sweep.plan import run_request

SHOWN = ("tutorial.md", "recipes.md")  # documents with output
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BASH = re.compile(r"^```(?:bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def typed(text: str) -> list[Example]:
    """Every `python -m harness …` of a document's code blocks that has no place to be filled in."""
    lines = [line for block in BASH.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    commands = [line.removeprefix("$ ").partition(" #")[0] for line in lines]
    return [
        Example(line, "")
        for line in commands
        if line.startswith("python -m harness ") and not re.search(r"…|\.\.\.|\b[A-Z]{3,}\b", line)
    ]


def check(example: Example) -> None:
    """Parse a command as the command line does, its overrides included."""
    arguments = parse_arguments(example.words[3:])
    if arguments.command in ("run", "sweep", "show") and arguments.overrides:
        run_request(list(arguments.overrides))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_each_command_of_a_document_parses(document: Path) -> None:
    for example in typed(document.read_text(encoding="utf-8")):
        check(example)


@pytest.mark.parametrize(
    "wrong",
    ["sweep cache.block_sise=8", "sweep cache.block_size=8 --dry-runs", "trace make x", "lessons pool"],
)
def test_a_command_that_does_not_parse_is_seen(wrong: str) -> None:
    (example,) = typed(f"```bash\npython -m harness {wrong}  # as it was\n```\n")
    with pytest.raises((UserError, SystemExit)):
        check(example)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHOWN)
def test_the_commands_of_a_document_print_what_it_shows(name: str, tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    for example in examples((ROOT / "docs" / name).read_text(encoding="utf-8")):
        printed = output_of(example, folder)
        assert agree(example.printed, printed), f"{example.command}\n{printed}"


@pytest.mark.parametrize(
    ("written", "printed", "same"),
    [
        ("a\n...\nb 1 ...\n", "a\nx\ny\nb 1 2 3\n", True),
        ("a\n...\nb\n", "a\nb\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n...\n", "b\n", False),
        ("1.5\n", "1x5\n", False),
    ],
)
def test_an_output_is_compared_with_what_stands_written(written: str, printed: str, same: bool) -> None:
    assert agree(written, printed) == same


def test_a_document_gives_its_commands_with_their_output() -> None:
    text = "# T\n```console\n$ python a \\\n  b\none\n\ntwo\n$ python c\n```\n```bash\npython d\n```\n"
    found = [(one.words, one.printed) for one in examples(text)]
    assert found == [(["python", "a", "b"], "one\n\ntwo\n"), (["python", "c"], "")]


# -- the table of vLLM's flags ---------------------------------------------------------------------------


def flag_table() -> list[tuple[list[str], list[str]]]:
    """vLLM's flags and our keys of each row."""
    rows = (ROOT / "docs/vllm-flags.md").read_text(encoding="utf-8").splitlines()
    cells = [row.split(" | ") for row in rows if row.startswith("| `--")]
    return [
        (re.findall(r"`(--[\w-]+)`", row[0]), re.findall(r"`([a-z_]*\.[a-z_]+)`", row[2])) for row in cells
    ]


def test_every_key_beside_a_flag_of_vllm_exists() -> None:
    rows = flag_table()
    assert len(rows) > 25
    section = ""
    for _, keys in rows:
        for key in keys:
            section = key.partition(".")[0] or section  # `.victim` stands behind `scheduler.order`
            value_of(RunConfig(), f"{section}.{key.partition('.')[2]}")


def test_every_option_of_vllm_that_we_read_stands_in_the_table() -> None:
    told = {flag: keys for flags, keys in flag_table() for flag in flags}
    for ours, theirs in VLLM_NAMES.items():
        keys = told.get("--" + theirs.replace("_", "-")) or told["--speculative-config"]
        other = {
            "host_memory_gb": "tier_tokens",
            "quantization": "weight_dtype",
        }  # no key of ours is the same
        assert keys[0].partition(".")[2] == other.get(ours, ours)


WRITER = runpy.run_path(str(ROOT / "docs/vllm_flags.py"))
PAGE = (ROOT / "docs/vllm-flags.md").read_text(encoding="utf-8")


def test_the_defaults_of_pagetwin_in_the_table_are_those_of_its_configuration() -> None:
    assert WRITER["written"](PAGE) == PAGE
    planted = PAGE.replace("`scheduler.policy` | `fcfs`", "`scheduler.policy` | `priority`")
    assert planted != PAGE
    assert WRITER["written"](planted) == PAGE


def test_a_default_that_vllm_has_changed_is_written_anew() -> None:
    line = "| `--block-size` | 16: more | `cache.block_size` | 32; as there |"
    other = WRITER["written"](line, ("0.34.0", {"--block-size": 64}))
    assert other == "| `--block-size` | 64: more | `cache.block_size` | 16; as there |"


@pytest.mark.nightly
def test_the_table_is_that_of_vllms_own_parser() -> None:
    python = os.environ.get("PAGETWIN_VLLM")
    if not python:
        pytest.skip("PAGETWIN_VLLM=PATH/bin/python names an environment that has vLLM 0.33.0")
    assert WRITER["written"](PAGE, WRITER["flags_of_vllm"](python)) == PAGE
