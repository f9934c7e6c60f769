"""The page's tables as rows of text. Each cell is a string with its unit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord
from harness.metrics.verdict import MetricVerdict, Trust, Verdict
from harness.report import numbers
from harness.report.axes import POLICY, Axes, plain_words, short_label
from harness.report.figures.series import column_scale
from harness.report.study import MOST_POINTS, Study, spread
from harness.report.style import latex_table

_FOLD = 40
_POINT_METRICS = ("output_throughput", "ttft_p50", "tpot_p50", "internal_share", "sharing_saving")
_SHORT = {"predicted": "pred.", "measured": "meas.", "error": "error"}


@dataclass(frozen=True)
class Table:
    """Header and rows of text. The first `words` columns are words; the others are numbers, aligned to the right.

    `groups` are (title, number of columns) above the header, from the left. With `last_is_point` the last column names
    points. A `folded` table is hidden until the reader opens it.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    title: str = ""
    folded: bool = False
    groups: Sequence[tuple[str, int]] = ()
    last_is_point: bool = False
    sortable: bool = False


def verdict_table(verdict: Verdict) -> Table:
    """Each class and metric: its verdict, typical and worst error, their bounds, and the noise of the repeats.

    The worst point is named only if there are several points and its error is not zero.
    """
    rows = [
        [
            group.name if item is group.metrics[0] else "",
            item.metric.label,
            str(item.trust)
            + (f" {numbers.error_size(item.metric, item.reach)}" if item.trust is Trust.within else ""),
            numbers.error_size(item.metric, item.median_error),
            numbers.error_size(item.metric, item.bound),
            numbers.error_size(item.metric, item.floor),
            _beyond(item),
            numbers.error(item.metric, item.worst_error),
            numbers.error_size(item.metric, item.worst_spread),
            plain_words(item.worst_point) if numbers.shows(item.worst_error) else numbers.NONE,
        ]
        for group in verdict.classes
        for item in group.metrics
    ]
    head = ["class", "metric", "verdict", "typical error", "its bound", "noise floor", "beyond it",
            "worst", "widest spread", "worst point"]  # fmt: skip
    if verdict.measured == 1:
        return Table(head[:-1], [row[:-1] for row in rows], words=3)
    return Table(head, rows, words=3, last_is_point=True)


def _beyond(item: MetricVerdict) -> str:
    """The typical error beyond the noise floor."""
    if item.floor is None:
        return numbers.NONE
    return numbers.error_size(item.metric, max(0.0, item.median_error - item.floor))


def pools_table(records: Sequence[PointRecord]) -> Table:
    """The distinct pools. Both sides of a point use the same pool."""
    head = ["allocator", "model", "block size", "blocks", "KV slots", "memory", "per token",
            "longest request", "size from", "points"]  # fmt: skip
    rows: dict[tuple[str, ...], int] = {}
    for record in records:
        key = _pool_cells(record)
        rows[key] = rows.get(key, 0) + 1
    return Table(head, [[*key, str(count)] for key, count in rows.items()], words=2)


def _pool_cells(record: PointRecord) -> tuple[str, ...]:
    pool = record.pool
    whole = (pool.get(name) for name in ("block_size", "num_blocks", "tokens"))
    sizes = (pool.get(name) for name in ("bytes", "kv_bytes_per_token"))
    return (
        str(pool.get("policy", record.policy)),
        str(record.setting("model.name")),
        *(numbers.NONE if value is None else f"{value:,}" for value in whole),
        *(numbers.NONE if value is None else numbers.size(value) for value in sizes),
        str(pool.get("max_model_len", numbers.NONE)),
        _sized_by(pool),
    )


def _sized_by(pool: Mapping[str, Any]) -> str:
    """The key that set the pool's size, or the memory that it was taken from, and the note beside it."""
    memory, words = pool.get("memory_per_device"), str(pool.get("sized_by", numbers.NONE))
    if memory:
        less = " - ".join(f"{memory[name] / 1e9:.2f} {name}" for name in memory if name != "usable")
        words = f"{memory['usable'] / 1e9:.2f} GB - {less}"
    return f"{words}; {pool['note']}" if pool.get("note") else words


LATEX = ("points.tex", "errors.tex")
_MOST_PRINTED = 12  # rows of a table in a paper


def points_table(records: Sequence[PointRecord], axes: Axes) -> Table:
    """Every point, ordered by its settings: prediction, measurement and error of a few metrics."""
    measured = any(record.measured for record in records)
    sides = ("predicted", "measured", "error") if measured else ("predicted",)
    scales = {name: column_scale(name, records) for name in _POINT_METRICS}
    titles = [(f"{METRICS[name].label} ({unit})", len(sides)) for name, (_, unit) in scales.items()]
    oracles = sorted({f"vLLM {one['version']}" for record in records if (one := record.oracle)})
    groups = [("", 1 + len(axes.values)), *titles, *((f"same decisions as {name}", 1) for name in oracles)]
    head = [
        "cache",
        *map(short_label, axes.values),
        *(_SHORT[side] for _ in _POINT_METRICS for side in sides),
        *("steps" for _ in oracles),
    ]
    ordered = sorted(records, key=lambda record: _sort_key(record, axes))
    rows = [
        [
            *(str(record.setting(key)) for key in (POLICY, *axes.values)),
            *_figures(record, sides, scales),
            *(_steps_as(record, name) for name in oracles),
        ]
        for record in ordered
    ]
    title = f"All {len(rows):,} points"
    if len(rows) > MOST_POINTS:
        rows = spread(rows, MOST_POINTS)
        title = f"{MOST_POINTS:,} of {len(ordered):,} points, spread evenly; figures/points.csv has all"
    return Table(head, rows, 1 + len(axes.values), title, len(rows) > _FOLD, groups, sortable=True)


def latex_files(records: Sequence[PointRecord], axes: Axes, verdict: Verdict) -> dict[str, bytes]:
    """The tables of a paper by file name: points (at most 12, spread evenly; below, of how many), errors by class."""
    points = points_table(records, axes)
    both = list(zip((title for title, span in points.groups for _ in range(span)), points.head, strict=True))
    # errors.tex has them
    printed = [place for place, (_, side) in enumerate(both) if side != _SHORT["error"]]
    rows = [[row[place] for place in printed] for row in spread(points.rows, _MOST_PRINTED)]
    table, of_all = latex_table([both[place] for place in printed], rows, points.words), "\\bottomrule\n"
    if len(rows) < len(records):
        shown = f"{len(rows)} of {len(records):,} points, spread evenly"
        of_all += f"\\multicolumn{{{len(printed)}}}{{l}}{{{shown}}} \\\\\n"
    files = {LATEX[0]: table.replace(b"\\bottomrule\n", of_all.encode())}
    judged = verdict_table(verdict)
    if judged.rows:
        kept = [
            judged.head.index(name) for name in ("metric", "verdict", "typical error", "noise floor", "worst")
        ]
        cells = [[row[place] for place in kept] for row in judged.rows]
        files[LATEX[1]] = latex_table([("", judged.head[place]) for place in kept], cells, 2)
    return files


def _steps_as(record: PointRecord, oracle: str) -> str:
    """In how many of the point's steps ours decided as `oracle` did."""
    found = record.oracle
    if f"vLLM {found.get('version')}" != oracle:
        return numbers.NONE
    if found.get("not_compared"):
        return "not compared"
    return f"{found.get('compared') or 0:,} of {found.get('steps') or 0:,}"


def _sort_key(record: PointRecord, axes: Axes) -> list[Any]:
    values = ((known, record.setting(key)) for key, known in axes.values.items())
    places = [known.index(value) if value in known else -1 for known, value in values]
    return [record.policy != "paged", record.policy, places, record.fingerprint]


def _figures(
    record: PointRecord, sides: Sequence[str], scales: Mapping[str, tuple[float, str]]
) -> Iterable[str]:
    for name, (scale, _) in scales.items():
        known = {"predicted": record.value(name, "simulated"), "measured": record.value(name, "measured")}
        cells = {side: numbers.NONE if v is None else numbers.digits(scale * v) for side, v in known.items()}
        cells["error"] = numbers.error(METRICS[name], record.value(name, "error"))
        yield from (cells[side] for side in sides)


def detail_table(record: PointRecord) -> Table:
    """All metrics of one point: analytic, simulated and measured."""
    head = ["metric", "analytic", "simulated", "measured", "range of runs", "error", "spread"]
    rows = []
    for row in record.comparison:
        metric = METRICS.get(row["metric"])
        if metric is None:
            continue
        span = [numbers.figure(metric, row[end]) for end in ("low", "high")]
        rows.append(
            [
                metric.label,
                *(numbers.figure(metric, row[side]) for side in ("analytic", "simulated", "measured")),
                " – ".join(span) if row["low"] is not None else numbers.NONE,
                numbers.error(metric, row["error"]),
                numbers.error_size(metric, row["spread"]),
            ]
        )
    return Table(head, rows, title=f"All metrics of a point: {plain_words(record.point_label)}", folded=True)


def tenants_table(record: PointRecord) -> Table | None:
    """What each tenant asks for and gets, on each side; None where a point has no tenants."""
    head = ["tenant", "side", "requests", "prompt tokens", "hit ratio", "waiting, mean", "occupancy"]
    rows = [
        [
            *(name, side, f"{one['requests']:,.0f}", f"{one['prompt_tokens']:,.0f}"),
            *(
                f"{100 * one['hit_ratio']:.3g} %" if "hit_ratio" in one else numbers.NONE,
                f"{one['waiting_mean']:.3g} s",
                f"{100 * one['occupancy']:.3g} %",
            ),
        ]
        for side, found in record.tenants.items()
        for name, one in found.items()
    ]
    return Table(head, rows, words=2, title=f"Tenants at {record.point_label}") if rows else None


def failures_table(study: Study) -> Table:
    """Failed points, with the file of the traceback relative to the store."""
    rows = [[failure.label, failure.message, failure.path] for failure in study.failures]
    return Table(["point", "error", "traceback in"], rows, words=3)


def definitions_table() -> Table:
    """Every metric with its definition."""
    rows = [[metric.label, metric.unit, metric.definition] for metric in METRICS.values()]
    return Table(
        ["metric", "unit", "definition"], rows, words=3, title="Definitions of all metrics", folded=True
    )
