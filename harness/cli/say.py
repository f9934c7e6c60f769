"""Printing: results to standard output, remarks to standard error."""

import sys


def say(text: str = "") -> None:
    """A line of the answer."""
    sys.stdout.write(text + "\n")


def remark(text: str) -> None:
    """A line about the answer."""
    sys.stderr.write(text + "\n")
