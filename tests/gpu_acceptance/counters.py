"""ncu's counts for each attention call: bytes read from memory, hits of the L2 cache, instructions.

The output of ncu (`--page raw --csv`) has messages, a header, a row of units and one row for each kernel. The order of
the calls (`counters/cases.json`) and the first kernel of a call decide which rows belong to which call.
`gpu_acceptance.ncu_calls` makes the calls.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.config.errors import UserError

READ, HITS, INSTRUCTIONS = "dram__bytes_read.sum", "lts__t_sector_hit_rate.pct", "smsp__inst_executed.sum"
_NAME = "Kernel Name"
CALL_BEGINS = ("plan_kernel", "prefix_kernel", "prefill_kernel", "decode_kernel")
NEVER_LAST = ("plan_kernel", "prefix_kernel")  # of a call: a decode follows


@dataclass(frozen=True)
class Counted:
    """The counts of one kernel of one call."""

    case: str
    provider: str
    kernel: str
    read_bytes: float
    hit_share: float
    instructions: float


def read_counters(out: Path) -> list[Counted]:
    """The kernels of every call, in order; an empty list where ncu did not run.

    Raises:
        UserError: the table does not have ncu's form, or the number of calls is not the one that was made.
    """
    table, calls = out / "counters.csv", out / "counters" / "cases.json"
    if not (table.exists() and calls.exists()):
        return []
    named = json.loads(calls.read_text(encoding="utf-8"))
    groups = list(_calls(list(_rows(table))))
    if len(groups) != len(named):
        raise UserError(f"{table}: holds {len(groups)} calls where {len(named)} were made; read it by hand")
    return [
        _counted(row, call["case"], call["provider"])
        for call, rows in zip(named, groups, strict=True)
        for row in rows
    ]


def _rows(table: Path) -> Iterator[dict[str, str]]:
    """The rows of kernels, by column, without ncu's messages and the row of units."""
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise UserError(f'{table}: has no header that begins with "ID"; the file holds ncu\'s messages')
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        missing = [name for name in (_NAME, READ, HITS, INSTRUCTIONS) if row.get(name) is None]
        if missing:
            raise UserError(f"{table}: lacks the columns {', '.join(missing)}")
        if row["ID"]:
            yield row


def _calls(rows: Sequence[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    """The rows of each call. What follows a list of parts or a prefix kernel belongs to the same call."""
    call: list[dict[str, str]] = []
    for row in rows:
        before = call[-1][_NAME] if call else ""
        if call and row[_NAME] in CALL_BEGINS and before not in NEVER_LAST:
            yield call
            call = []
        call.append(row)
    if call:
        yield call


def _counted(row: dict[str, str], case: str, provider: str) -> Counted:
    return Counted(
        case, provider, row[_NAME], _number(row[READ]), _number(row[HITS]) / 100, _number(row[INSTRUCTIONS])
    )


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def counter_lines(out: Path) -> Iterator[str]:
    """The lines of the page's table; one sentence where the counts cannot be read; nothing where there are none."""
    try:
        found = read_counters(out)
    except (UserError, ValueError, KeyError) as error:
        yield f"Hardware counters: {error}"
        return
    if found:
        yield "| call | by | kernel | MB read from memory | L2 hits | million instructions |"
        yield "| --- | --- | --- | --- | --- | --- |"
    for one in found:
        figures = (f"{one.read_bytes / 1e6:,.1f}", f"{one.hit_share:.1%}", f"{one.instructions / 1e6:,.2f}")
        yield f"| {one.case} | {one.provider} | {one.kernel} | {' | '.join(figures)} |"
