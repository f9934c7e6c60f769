"""Printing: results to standard output, remarks to standard error."""

import sys

_LARGE, _EVERY = 100, 20  # points from which planning takes long enough to show, and how often


def say(text: str = "") -> None:
    """A line of the answer."""
    sys.stdout.write(text + "\n")


def remark(text: str) -> None:
    """A line about the answer."""
    sys.stderr.write(text + "\n")


def planning(done: int, total: int) -> None:
    """A count that is redrawn on a terminal while a large sweep is planned; nothing in a log."""
    if sys.stderr.isatty() and total >= _LARGE and done % _EVERY == 0:
        sys.stderr.write(f"\rplanning {done}/{total}" if done < total else "\r\x1b[K")
        sys.stderr.flush()
