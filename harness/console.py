"""The console: what is printed.

`say` prints results to standard output, `remark` prints remarks to standard error.
"""

import os
import re
import sys
from typing import TextIO

MOST_LINES = 30  # of one message: more scrolls the cause out of sight
_MOST_CHARACTERS = 1000  # of one line of a message
_LARGE, _EVERY = 100, 20  # progress is shown from 100 points on, every 20 points
# What moves the cursor, colours, or turns the direction of text; a store or a log of a stranger may hold it.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
_ASCII = str.maketrans({"−": "-", "–": "-", "µ": "u", "·": ","})  # for terminals without these characters


class OutputError(Exception):
    """Standard output could not be written, for instance because the disk is full."""


def say(text: str = "") -> None:
    """Print a line of the result to standard output.

    Raises:
        BrokenPipeError: the reader of the pipe has ended.
        OutputError: the line cannot be written.
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
    """Print a remark to standard error; a remark that cannot be written is dropped."""
    try:
        _write(sys.stderr, text + "\n")
    except OSError:
        return


def shortened(text: str) -> str:
    """A message with at most `MOST_LINES` lines, none of them endless; it says how much was left out."""
    lines = [_cut(line) for line in text.splitlines()]
    if len(lines) > MOST_LINES:
        left = len(lines) - MOST_LINES + 1
        lines = [*lines[: MOST_LINES - 1], f"... and {left:,} more lines like these"]
    return "\n".join(lines)


def one_line(text: object, most: int = _MOST_CHARACTERS) -> str:
    """A text of a file that somebody else may have written, cut: what is no letter or sign is escaped, so that it adds
    no line and commands no terminal.
    """
    line = "\\n".join(str(text).splitlines())
    shown = (each if each.isprintable() else ascii(each)[1:-1] for each in line)
    return _cut(line if line.isprintable() else "".join(shown), most)


def _cut(line: str, most: int = _MOST_CHARACTERS) -> str:
    if len(line) <= most:
        return line
    half = most // 2
    return f"{line[:half]} [... {len(line) - 2 * half:,} more characters ...] {line[-half:]}"


def install_hint(extra: str) -> str:
    """How to install an extra of this package, whose name is on no index."""
    return f"pip install '.[{extra}]' in a clone of PageTwin, or pip install 'WHEEL_FILE[{extra}]'"


def numbered(count: int, noun: str) -> str:
    """'1 point', '3 points'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def counted(count: int, noun: str) -> str:
    """'1 point is', '3 points are'."""
    return f"{numbered(count, noun)} {'is' if count == 1 else 'are'}"


def _write(stream: TextIO | None, text: str) -> None:
    """Write `text`, with escapes for control characters, and replacements for what the stream's encoding lacks.

    Python sets a stream to None that was closed before the start; then nothing is written.
    """
    if stream is None:
        return
    text = _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    stream.write(text)


def planning(done: int, total: int) -> None:
    """Show progress while a large sweep is planned: a line that is redrawn on a terminal, a few lines elsewhere."""
    if sys.stderr is None or total < _LARGE:
        return
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        if done % _EVERY == 0 or done == total:
            sys.stderr.write(f"\rplanning {done}/{total}" if done < total else "\r\x1b[K")
            sys.stderr.flush()
    elif done == 1 or (total >= 10 * _LARGE and done % (total // 10) == 0):
        remark(f"planning: {done:,} of {total:,} points")
