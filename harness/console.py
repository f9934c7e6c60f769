"""The console: what the user wrote on the command line, and what is printed.

`say` prints results to standard output, `remark` prints remarks to standard error.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Arguments:
    """What the user wrote, sorted: the command, its flags, its overrides."""

    command: str
    flags: argparse.Namespace
    overrides: tuple[str, ...]


_LARGE, _EVERY = 100, 20  # points from which planning takes long enough to show, and how often
_ASCII = str.maketrans({"−": "-", "–": "-", "µ": "u", "·": ","})  # for terminals that know nothing else


class OutputError(Exception):
    """The answer could not be written: standard output is a full disk, say."""


def say(text: str = "") -> None:
    """A line of the answer.

    Raises:
        BrokenPipeError: its reader is gone.
        OutputError: it cannot be written.
    """
    try:
        _write(sys.stdout, text + "\n")
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error


def remark(text: str) -> None:
    """A line about the answer. Where it cannot be written nobody reads it, and nothing else is lost."""
    try:
        _write(sys.stderr, text + "\n")
    except OSError:
        return


def numbered(count: int, noun: str) -> str:
    """'1 point', '3 points'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def counted(count: int, noun: str) -> str:
    """'1 point is', '3 points are'."""
    return f"{numbered(count, noun)} {'is' if count == 1 else 'are'}"


def _write(stream: TextIO | None, text: str) -> None:
    """Write as well as the stream's encoding can; Python sets a stream to None that was closed before the start."""
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)


def planning(done: int, total: int) -> None:
    """A count that is redrawn on a terminal while a large sweep is planned; nothing in a log."""
    if sys.stderr is not None and sys.stderr.isatty() and total >= _LARGE and done % _EVERY == 0:
        sys.stderr.write(f"\rplanning {done}/{total}" if done < total else "\r\x1b[K")
        sys.stderr.flush()
