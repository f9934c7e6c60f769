"""A report in Markdown, for a pull request or a job's page: the answers of a store, and what changed against another

one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.metrics import HEADLINE, METRICS
from harness.metrics.verdict import judge, median_interval, point_label
from harness.report import numbers
from harness.report.answers import answers, differs, value
from harness.report.axes import find_axes, plain_words
from harness.report.study import Record, ReportError, read_study
from harness.report.verdict_text import answer, completeness

_WORST = 3  # points that changed most, listed by name
Pair = tuple[Record, Record]


def summary_markdown(root: Path, against: Path | None = None) -> str:
    """The answers of a store as Markdown; with `against`, also what changed from that store to this one.

    Raises:
        ReportError: a store has no point, or the two have no point in common.
    """
    study = read_study(root)
    verdict = judge(study.records)
    lines = [f"## PageTwin: {study.name}", ""]
    lines += [*completeness(study, verdict), "", f"**Can the prediction be trusted?** {answer(verdict)}", ""]
    for found in answers(study, find_axes(study.records), verdict):
        lines.append(f"* **{found.question}** {found.text}")
        lines += [f"  * {line}" for line in found.items]
    if against is not None:
        lines += ["", *change_lines(root, against)]
    return "\n".join(lines) + "\n"


def change_lines(root: Path, against: Path) -> list[str]:
    """What changed from the store `against` to the store `root`: one row a metric, with bounds, and the largest
    changes.

    Points are matched by their settings. A ratio is this store over the other; for shares a difference. Measured values
    are used where both points were measured.

    Raises:
        ReportError: the stores have no point in common.
    """
    pairs = _matched(read_study(root).records, read_study(against).records)
    if not pairs:
        raise ReportError(
            f"{root} and {against} have no point in common: their settings differ at every point"
        )
    rows = [row for name in ("request_throughput", *HEADLINE) for row in _row(name, pairs)]
    head = "| metric | change, median | 95 % interval | changed beyond the spread | side |"
    return [
        f"### Change against {against} ({len(pairs):,} matched points)",
        "",
        head,
        "| --- | --- | --- | --- | --- |",
        *rows,
        "",
        *_largest(pairs),
    ]


def _matched(ours: Sequence[Record], theirs: Sequence[Record]) -> list[Pair]:
    known = {point_label(record): record for record in theirs}
    return [(record, known[label]) for record in ours if (label := point_label(record)) in known]


def _change(name: str, pair: Pair) -> float | None:
    one, other = (value(record, name) for record in pair)
    if one is None or other is None:
        return None
    if METRICS[name].is_share:
        return one - other
    return one / other - 1 if other else None


def _row(name: str, pairs: Sequence[Pair]) -> Iterator[str]:
    alike = [pair for pair in pairs if bool(pair[0].get("measured")) == bool(pair[1].get("measured"))]
    changes = sorted(change for pair in alike if (change := _change(name, pair)) is not None)
    if not changes:
        return
    metric = METRICS[name]
    low, high = median_interval(changes) or (changes[0], changes[-1])
    clear = sum(differs(*pair, name) for pair in alike)
    side = "measured" if any(pair[0].get("measured") for pair in alike) else "predicted"
    middle = changes[len(changes) // 2]
    cells = (
        metric.label,
        numbers.error(metric, middle),
        f"{numbers.error(metric, low)} to {numbers.error(metric, high)}",
        f"{clear} of {len(changes)}",
        side,
    )
    yield f"| {' | '.join(cells)} |"


def _largest(pairs: Sequence[Pair]) -> Iterator[str]:
    name = "request_throughput"
    changes = [(change, pair[0]) for pair in pairs if (change := _change(name, pair)) is not None]
    ranked = sorted(changes, key=lambda found: -abs(found[0]))[:_WORST]
    for change, record in ranked:
        if numbers.shows(change):
            yield (
                f"* {METRICS[name].label} {numbers.error(METRICS[name], change)} at {plain_words(point_label(record))}"
            )
