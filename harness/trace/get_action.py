"""`trace get`: download a public trace into the user's cache, checked by sha256; offline, say what to place where."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.say import remark, say
from harness.config.errors import UserError
from harness.trace.flags import describe

_FAILED = 1

if TYPE_CHECKING:
    from harness.trace.flags import Actions
    from traces.catalogue import CatalogueEntry, RemoteFile


def add(actions: "Actions") -> None:
    """Describe `get`."""
    more = "The cache is $PAGETWIN_TRACES, or pagetwin/traces in the user's cache folder."
    parser = describe(actions, "get", "download a public trace into the cache", "get NAME", more)
    parser.add_argument("name", metavar="NAME", help="a public trace of 'trace ls'")


def run(flags: argparse.Namespace) -> int:
    """Fetch what is missing; returns 1 where a file could not be had."""
    from harness.trace.cache import folder_of, trace_path
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
    """Download one file unless it is there; raises OSError where it cannot be had, ValueError on a wrong checksum."""
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
