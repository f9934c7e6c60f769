"""`trace ls`: the embedded generators and the public traces, with licence, size and the sharing that they carry."""

import argparse
from typing import TYPE_CHECKING

from harness.cli.say import say
from harness.trace.flags import describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions


def add(actions: "Actions") -> None:
    """Describe `ls`."""
    parser = describe(actions, "ls", "list the embedded generators and the public traces", "ls [--names]")
    parser.add_argument("--names", action="store_true", help="names alone")


def run(flags: argparse.Namespace) -> int:
    """Print the catalogue."""
    from harness.trace.cache import cache_folder, is_fetched
    from traces.catalogue import catalogue
    from traces.synth.chat import CHAT, chat_source

    entries = catalogue()
    if flags.names:
        for entry in entries:
            say(entry.name)
        say(CHAT)
        return 0
    name_width = max(len(entry.name) for entry in entries)
    format_width = max(len(entry.format) for entry in entries)
    for entry in entries:
        rows = "" if entry.rows is None else f"{entry.rows:,} rows"
        state = "fetched" if is_fetched(entry) else _size(entry.bytes)
        say(
            f"{entry.name:{name_width}}  {entry.format:{format_width}}  {rows:>12} {state:>9}  {entry.licence}"
        )
        say(f"{'':{name_width}}  {entry.where}; sharing: {entry.sharing}")
    say(f"{CHAT:{name_width}}  {'generated':{format_width}}  {'':>12} {'':>9}  conversations, turn by turn")
    say(f"{'':{name_width}}  calibrated on {chat_source()}; sharing: the history of each conversation")
    say(f"Fetch a public trace with 'python -m harness trace get NAME'; it goes to {cache_folder()}")
    return 0


def _size(size: int | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.0f} kB"
