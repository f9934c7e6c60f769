"""`trace ls` and `trace inspect`: which traces there are, and what is in one."""

import argparse
from pathlib import Path
from typing import Any

from harness.cli.parser import Arguments
from harness.cli.say import say
from harness.config.errors import UserError
from traces.catalogue import catalogue
from traces.errors import TraceError
from traces.synth.generator import generate_trace
from traces.inspect import inspect_trace
from traces.reading import read_trace
from traces.synth.tables import TABLES
from traces.trace import Trace


def trace_command(arguments: Arguments) -> int:
    """List the catalogue, or print the statistics of one trace."""
    if arguments.flags.action == "ls":
        _list()
    else:
        _say_tree(inspect_trace(_trace(arguments.flags)), "")
    return 0


def _list() -> None:
    entries = catalogue()
    name_width = max(len(entry.name) for entry in entries)
    format_width = max(len(entry.format) for entry in entries)
    for entry in entries:
        rows = "" if entry.rows is None else f"{entry.rows:,} rows"
        say(f"{entry.name:{name_width}}  {entry.format:{format_width}}  {rows:>14}  {entry.licence}")
        say(f"{'':{name_width}}  {entry.where}; sharing: {entry.sharing}")


def _trace(flags: argparse.Namespace) -> Trace:
    try:
        if flags.trace in TABLES and not Path(flags.trace).exists():
            return generate_trace(flags.trace, num_requests=flags.requests, seed=0)
        if not Path(flags.trace).is_file():
            raise UserError(f"'{flags.trace}' is neither a file nor a generator ({', '.join(TABLES)})")
        return read_trace(flags.trace, flags.format)
    except (TraceError, ValueError) as error:
        raise UserError(str(error)) from error


def _say_tree(value: Any, indent: str) -> None:
    width = max((len(key) for key in value), default=0)
    for key, item in value.items():
        if isinstance(item, dict):
            say(f"{indent}{key}")
            _say_tree(item, indent + "  ")
        else:
            say(f"{indent}{key:{width}}  {_shown(item)}")


def _shown(item: Any) -> str:
    if isinstance(item, float):
        return f"{item:,.6g}"
    if isinstance(item, int) and not isinstance(item, bool):
        return f"{item:,}"
    if isinstance(item, list):
        return "; ".join(map(str, item)) or "-"
    return "-" if item is None or item == "" else str(item)
