"""`trace ls` and `trace get`: the embedded generators and the public traces.

`ls` prints licence, size and sharing of each. `get` downloads a public trace into the user's cache and checks its
sha256. Without a network it prints which files to place in which folder.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.console import remark, say
from harness.trace.flags import describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions
    from traces.catalogue import CatalogueEntry, RemoteFile


_FAILED = 1


def add_ls(actions: "Actions") -> None:
    """Describe `ls`."""
    parser = describe(actions, "ls", "list the embedded generators and the public traces", "ls [--names]")
    parser.add_argument("--names", action="store_true", help="names alone")


def run_ls(flags: argparse.Namespace) -> int:
    """Print the catalogue."""
    from harness.trace.files import cache_folder, is_fetched
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


def add_get(actions: "Actions") -> None:
    """Describe `get`."""
    more = "The cache is $PAGETWIN_TRACES, or pagetwin/traces in the user's cache folder."
    parser = describe(actions, "get", "download a public trace into the cache", "get NAME", more)
    parser.add_argument("name", metavar="NAME", help="a public trace of 'trace ls'")


def run_get(flags: argparse.Namespace) -> int:
    """Download the missing files; returns 1 if a file could not be downloaded."""
    from harness.trace.files import folder_of, trace_path
    from traces.catalogue import catalogue, public_trace

    entry = public_trace(flags.name)
    if entry is None:
        names = ", ".join(known.name for known in catalogue() if known.format != "generated")
        raise UserError(f"no public trace '{flags.name}'; there are {names}")
    remark(f"licence: {entry.licence}; source: {entry.where}")
    if not entry.files:
        raise UserError(f"{entry.name} must be fetched by hand from {entry.where}; then name its file")
    folder = folder_of(entry)
    for file in entry.files:
        try:
            _fetch(file, folder)
        except (OSError, ValueError) as error:
            remark(f"error: {file.path}: {_first_line(error)}\n{_by_hand(entry, folder)}")
            return _FAILED
    say(str(trace_path(entry)))
    return 0


def _fetch(file: "RemoteFile", folder: Path) -> None:
    """Download one file unless it exists. Raises OSError if that fails, ValueError on a wrong checksum."""
    import pooch

    pooch.get_logger().setLevel("ERROR")
    if file.sha256 is None:
        remark(f"{file.path}: its publisher states no checksum; what arrives is not checked")
    known = f"sha256:{file.sha256}" if file.sha256 else None
    downloader = pooch.HTTPDownloader(progressbar=False, timeout=30)
    pooch.retrieve(file.url, known_hash=known, fname=file.path, path=folder, downloader=downloader)


def _by_hand(entry: "CatalogueEntry", folder: Path) -> str:
    files = [
        f"  {file.path}  sha256 {file.sha256 or 'not known'}\n    from {file.url}" for file in entry.files
    ]
    first = f"Without a connection place these files in {folder}:"
    return "\n".join([first, *files, f"The publisher's page is {entry.where}"])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
