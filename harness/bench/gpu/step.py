"""One command of `bench gpu`, how long it may take, and what became of it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

SECONDS = "{seconds}"
"""Stands in a command for the seconds that it may work: its limit, less what starting and writing take."""

START_AND_WRITE_S = 12.0
_BESIDE_CUDA = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/bin",
)  # where the toolkit's tools lie, often outside the PATH


@dataclass(frozen=True)
class Step:
    """One command.

    `answers` are the exit codes that mean it did its work: a gate without a baseline answers 3, and that is an answer.
    `rehearsal` is the command of a dry run: the same words as far as they go without a GPU. `tool` is an optional
    program that starts the command: where it is not installed the step is left out, and that is no failure.
    """

    name: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit_s: float
    answers: tuple[int, ...] = (0,)
    tool: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def within(self, limit_s: float) -> "Step":
        """The same with another limit, its commands told how long they may work."""
        seconds = str(max(1, round(limit_s - START_AND_WRITE_S)))

        def filled(words: Sequence[str]) -> tuple[str, ...]:
            return tuple(word.replace(SECONDS, seconds) for word in words)

        return replace(self, limit_s=limit_s, command=filled(self.command), rehearsal=filled(self.rehearsal))

    @property
    def words(self) -> tuple[str, ...]:
        """What is started: the tool, where there is one, by its full path."""
        return (found_tool(self.tool) or self.tool, *self.command) if self.tool else self.command


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `done`, `failed`, `stopped` (out of time), `left out` (no time) or `not installed`."""

    step: Step
    state: str
    code: int | None
    seconds: float


def found_tool(name: str) -> str | None:
    """Where an optional program lies, or None."""
    beside = (str(Path(folder) / name) for folder in _BESIDE_CUDA)
    return shutil.which(name) or next((path for path in beside if shutil.which(path)), None)
