"""The beginnings of commands that several parts share."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from harness.bench.gpu.step import Step

HARNESS = ("-m", "harness")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")


def workers() -> tuple[str, ...]:
    """Tests in a few processes where pytest-xdist is installed: most of their time is compiling on the host."""
    return ("-n", "4") if find_spec("xdist") else ()


def program(name: str) -> tuple[str, str]:
    """A program of `harness.bench.gpu.programs`."""
    return ("-m", f"harness.bench.gpu.programs.{name}")


def step(
    name: str,
    command: Sequence[str],
    rehearsal: Sequence[str],
    limit_s: float,
    *,
    answers: tuple[int, ...] = (0,),
    tool: Sequence[str] = (),
    environment: tuple[tuple[str, str], ...] = (),
) -> Step:
    """A step of this Python; `tool` is an optional program with its options that starts the command."""
    name_of_tool, *options = tool or ("",)
    return Step(
        name,
        (*options, sys.executable, *command),
        (sys.executable, *rehearsal),
        limit_s,
        answers,
        name_of_tool or None,
        environment,
    )
