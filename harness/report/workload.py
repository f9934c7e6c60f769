"""What was replayed: the traces, every change made to them, and what was left out."""

from collections.abc import Sequence

from harness.report.study import Record
from harness.report.tables import Table


def traces_table(records: Sequence[Record]) -> Table:
    """Each distinct trace file or generator with its size and digest."""
    head = [
        "trace",
        "format",
        "source",
        "clock",
        "requests",
        "prompt tokens",
        "output tokens",
        "shared prefix",
        "sha256",
    ]
    rows = {_trace_cells(record): None for record in records if record.get("trace")}
    return Table(head, sorted(rows), words=4)


def _trace_cells(record: Record) -> tuple[str, ...]:
    trace = record["trace"]
    counts = (trace.get(name) for name in ("requests", "prompt_tokens", "output_tokens"))
    share = trace.get("realised_prefix_share")
    return (
        str(trace.get("name")),
        str(trace.get("format")),
        str(trace.get("source")),
        f"{trace.get('clock_quantum_us', '?')} µs",
        *("–" if value is None else f"{value:,}" for value in counts),
        "–" if share is None else f"{100 * share:.1f} %",
        str(trace.get("sha256") or "")[:12],
    )


def trace_changes(records: Sequence[Record]) -> list[str]:
    """Every sentence about a change of a trace, with the number of points that it was made for."""
    found: dict[str, int] = {}
    for record in records:
        for sentence in (record.get("trace") or {}).get("changes") or ():
            found[sentence] = found.get(sentence, 0) + 1
    return [
        s if count == len(records) else f"{s} ({count} of {len(records)} points)"
        for s, count in found.items()
    ]


def left_out(records: Sequence[Record]) -> list[str]:
    """Rows that a reader dropped or noted, by reason, from the points with most of them."""
    found: dict[str, int] = {}
    for record in records:
        for kind in ("dropped", "noted"):
            for reason, count in ((record.get("trace") or {}).get(kind) or {}).items():
                key = f"{reason} ({kind})"
                found[key] = max(found.get(key, 0), int(count))
    return [f"{reason}: {count:,} rows" for reason, count in found.items() if count]
