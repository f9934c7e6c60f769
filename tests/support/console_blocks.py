"""Commands with their output in the documents: `console` blocks, whose lines that begin with `$ ` are commands.

`python tests/support/console_blocks.py docs/tutorial.md` runs the commands of a document in a new folder and writes
what they print into it. A line `...` of a document stands for any lines, and `...` in a line for any characters.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Example:
    """A command as it stands in a document, and what the document says that it prints on standard output."""

    command: str
    printed: str

    @property
    def words(self) -> list[str]:
        """The command as the shell splits it."""
        return shlex.split(self.command.replace("\\\n", " "))

    @property
    def is_measured(self) -> bool:
        """Whether it runs the engine: that takes a calibration, and prints other figures each time."""
        return self.words[2:4] == ["harness", "run"] and "measure=false" not in self.words


def examples(text: str) -> Iterator[Example]:
    """The commands of a document in order."""
    for block in _BLOCK.findall(text):
        _, *parts = _COMMAND.split(block)
        for command, printed in zip(parts[::2], parts[1::2], strict=True):
            yield Example(command, printed)


def new_folder(folder: Path) -> Path:
    """Make the folder one in which the documents' commands find what a checkout has."""
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def output_of(example: Example, folder: Path) -> str:
    """What the command prints on standard output. Raises AssertionError where it fails."""
    program, *arguments = example.words
    assert program == "python", f"{example.command}: the documents start everything with python"
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{example.command}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout


def agree(written: str, printed: str) -> bool:
    """Whether an output is the one of the document."""
    lines = [
        r"(?:.*\n)*?" if line.strip() == "..." else ".*?".join(map(re.escape, line.split("..."))) + r"\n"
        for line in written.rstrip("\n").split("\n")
        if written.strip()
    ]
    return (
        re.fullmatch("".join(lines), "".join(f"{line.rstrip()}\n" for line in printed.splitlines()))
        is not None
    )


def rewrite(document: Path, *, measured: bool) -> None:
    """Run every command and write its output; one whose output agrees is left as it is."""
    text = document.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = new_folder(Path(name))
        for example in list(examples(text)):
            if example.is_measured and not measured:
                continue
            printed = output_of(example, folder)
            if not agree(example.printed, printed):
                sys.stderr.write(f"{document.name}: new output of {example.command.splitlines()[0]}\n")
                old = f"$ {example.command}\n{example.printed}"
                assert text.count(old) == 1, f"{example.command}: stands twice"
                tidy = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
                text = text.replace(old, f"$ {example.command}\n{tidy}")
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if argument != "--measured":
            rewrite(Path(argument), measured="--measured" in sys.argv)
