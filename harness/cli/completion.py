"""`completion`: the shell code that completes commands, options and overrides with the Tab key.

The library argcomplete reads the parser. It knows no overrides, so they become an argument with a completer of ours.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from harness.cli import Arguments, Command
from harness.console import say

SHELLS = ("bash", "zsh", "fish")
ASKED = "_ARGCOMPLETE"  # set by the shell code: print what can follow the words, and do nothing else


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="shell", help="bash, zsh or fish")


def _run(arguments: Arguments) -> int:
    import argcomplete

    shell = arguments.flags.shell
    module = Path(__file__).with_name(f"module.{shell}")  # completes `python -m harness`
    say(argcomplete.shellcode(["pagetwin"], shell=shell).rstrip() + "\n\n" + module.read_text().rstrip())
    return 0


def answer(parser: argparse.ArgumentParser) -> None:
    """Tell the shell what can follow the words on its command line. The process ends here."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Give a command that takes overrides an argument for them."""
    words = parser.add_argument("overrides", nargs="*")
    words.completer = lambda prefix, **_: list(matching(prefix))  # type: ignore[attr-defined]


def matching(word: str) -> Iterator[str]:
    """The overrides that begin with `word`: keys up to their sign, then the values that can be listed.

    Values are completed one by one behind commas: `cache=paged,cont` gives `cache=paged,contiguous_max` and so on.
    """
    from harness.config.groups import DEPLOYMENT, EXPERIMENTS, groups
    from harness.config.schema import config_keys

    key, sign, text = word.partition("=")
    if not sign:
        names = [*groups(), EXPERIMENTS, DEPLOYMENT, *config_keys()]
        yield from (f"{name}=" for name in names if name.startswith(word))
        return
    before, comma, last = text.rpartition(",")
    for value in _values(key):
        if value.startswith(last):
            yield f"{key}={before}{comma}{value}"


def _values(key: str) -> tuple[str, ...]:
    """The values of a key that can be listed: options of a group, members of an enumeration, true and false."""
    from enum import StrEnum

    from harness.config.groups import EXPERIMENTS, groups, options
    from harness.config.schema import config_keys

    if key == EXPERIMENTS:
        return options(EXPERIMENTS)
    if key in groups():
        return groups()[key]
    found = config_keys().get(key)
    if found is None:
        return ()
    values: tuple[str, ...] = ("true", "false") if found.kind is bool else ()
    if issubclass(found.kind, StrEnum):
        values = tuple(str(member) for member in found.kind)
    return (*values, "null") if found.optional and values else values


COMMAND = Command(
    "completion",
    "print the shell code for completion with the Tab key",
    _add,
    _run,
    about="Print the shell code that completes commands, options and overrides with the Tab key.",
    takes_overrides=False,
)
