"""The verdict in words. The console and the page's first section show the same sentences.

So does a report in Markdown, for a pull request or a job's page, with what changed against another store.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.console import numbered
from harness.cost.seen import NEW
from harness.metrics import HEADLINE, KEEPS_MORE, METRICS, Metric
from harness.metrics.record import PointRecord
from harness.metrics.verdict import TIMES, ClassVerdict, Trust, Verdict, judge, median_interval
from harness.report import numbers
from harness.report.answers import Answer, Choice, Pair, answers, differs, sides, value
from harness.report.axes import differing, find_axes, plain_words
from harness.report.study import ReportError, Study, read_study


def verdict_lines(store_root: Path) -> list[str]:
    """The verdict on a store for the console, most important line first. Raises ReportError if it has no point."""
    return study_lines(read_study(store_root))


def study_lines(study: Study) -> list[str]:
    """The same of a study that was read already."""
    verdict, records = judged(study), study.records
    said = answers(study, find_axes(records), verdict)
    return [
        *thinned(study),
        *completeness(study, verdict),
        answer(verdict, records),
        *beside_figures(records),
        *soundness(verdict),
        *oracle_lines(records),
        *pace_lines(records),
        *(line for found in said for line in (found.text, *found.items)),
    ]


def console_lines(study: Study) -> list[str]:
    """What a finished sweep says: what is missing, what to choose, how far to trust it."""
    verdict, records = judged(study), study.records
    chosen = choices(answers(study, find_axes(records), verdict))
    return [
        *thinned(study),
        *completeness(study, verdict),
        *beside_figures(records),
        *(str(one) for one in chosen),
        trust_line(verdict, records),
        *(soundness(verdict) if not verdict.sound else ()),
        *oracle_lines(records),
    ]


def choices(found: Iterable[Answer]) -> list[Choice]:
    """The cells of the first screen: one a setting, and of several baselines the first."""
    return list({one.choice.setting: one.choice for one in reversed([*found]) if one.choice}.values())[::-1]


def trust_line(verdict: Verdict, records: Sequence[PointRecord]) -> str:
    """How far to trust the prediction, class by class, in one line."""
    said = answer(verdict, records)
    if not verdict.measured or not verdict.sound:
        return said
    yes = said.partition(":")[0]
    classes = [
        f"{one.name} {numbers.error_size(one.worst.metric, one.worst.median_error).replace('pts', 'points')}"
        + ("" if one.trust in (Trust.trusted, Trust.within) else f" ({one.trust})")
        for one in verdict.classes
        if one.worst is not None
    ]
    pairs = _paced_errors([(record, record.pace) for record in records])
    raw = f"{100 * median(plain for _, plain in pairs):.0f} %" if pairs else ""
    how = f", after correcting for the machine's pace (without it a step is {raw} off)" if raw else ""
    everywhere = f"{verdict.counted} of {verdict.counted} points"
    counted = f" Counts are identical at {everywhere}." if verdict.counted else ""
    return f"{yes}. Typical errors: {', '.join(classes)}{how}.{counted}"


def judged(study: Study) -> Verdict:
    """The verdict; where not all points are shown, with the number of all and those of them that are unfinished."""
    verdict = judge(study.records)
    return replace(verdict, points=study.total, unfinished=study.unfinished) if study.is_thinned else verdict


def thinned(study: Study) -> list[str]:
    """How many of the points are shown and judged; empty where it is all of them."""
    if not study.is_thinned:
        return []
    return [
        f"Shown are {len(study.records):,} of {study.total:,} points: a grid of the values of each setting, spread "
        "evenly. Figures and answers rest on these; figures/points_wide.csv and summary.parquet have all points."
    ]


def completeness(study: Study, verdict: Verdict) -> list[str]:
    """Whether everything finished: one line if it did, else one line for each kind of problem."""
    trouble = []
    if study.failures:
        first = study.failures[0]
        failed = numbered(len(study.failures), "point")
        trouble.append(f"{failed} FAILED, first {first.label}: {first.message} ({first.path})")
    if study.absent:
        left = numbered(study.absent, "point")
        trouble.append(f"{left} NOT run yet: the same command continues where it stopped")
    if study.problems:
        trouble.append(f"NOT readable: {study.problems[0]}" + _more(len(study.problems)))
    if verdict.unfinished:
        alike = {words: label for label, words in [*verdict.unfinished.items()][::-1]}
        named = [f"{label}: {words}" for words, label in [*alike.items()][::-1]]
        trouble.append(
            f"NOT all requests finished at {numbered(len(verdict.unfinished), 'point')}: {'; '.join(named[:8])}"
            + _more(len(named) - 7)
        )
    whole = f"Everything finished: {numbered(verdict.points, 'point')}, all requests on every side."
    trouble = trouble or [whole]
    changes = (one for record in study.records for one in record.trace.get("changes") or ())
    return [*dict.fromkeys(f"Of the trace: {one}." for one in changes if one.startswith(UNREAD)), *trouble]


def answer(verdict: Verdict, records: Sequence[PointRecord]) -> str:
    """Whether the prediction can be trusted, in a sentence or two; `Verdict.classes` has the verdict on each class."""
    if not verdict.points:
        return "No point has a record, so there is nothing to judge."
    if not verdict.measured:
        return "Simulation only: nothing was measured, so the prediction is not judged here."
    if not verdict.sound:
        return "No: the two sides did different work, or the counters differ from the tensors. That is a bug."
    by_trust = {trust: [one for one in verdict.classes if one.trust is trust] for trust in Trust}
    trusted, within, bad, untested = (by_trust[trust] for trust in Trust)
    times = [one for one in verdict.classes if one.name in TIMES]
    parts = [
        _listed("trusted", trusted),
        _within(within),
        _listed("not trusted", bad),
        _listed("not tested", untested),
    ]
    text = "; ".join(part for part in parts if part)
    how = f" {corrected}" if (corrected := _corrected(records)) and times else ""
    if bad:
        return f"{'No' if times and all(one in bad for one in times) else 'Partly'}: {text}.{how}"
    if within or untested:
        return f"{'Yes, within limits' if not untested else 'Partly'}: {text}.{how}"
    return f"Yes: {text}.{how}"


def _corrected(records: Sequence[PointRecord]) -> str:
    """That times were judged after a correction, and what they are without it; empty where they were not corrected."""
    pairs = _paced_errors([(record, record.pace) for record in records])
    if not pairs:
        return ""
    raw = f"raw, the error of a step's time is {100 * median(plain for _, plain in pairs):.1f} %."
    return f"Times are judged after correcting for the machine's pace; {raw}"


def _listed(word: str, found: Sequence[ClassVerdict]) -> str:
    return f"{word}: {', '.join(one.name for one in found)}" if found else ""


def _within(found: Sequence[ClassVerdict]) -> str:
    limits = [
        f"{one.name} (within {numbers.error_size(one.metrics[0].metric, one.within)} at nine of ten points)"
        for one in found
    ]
    return f"trusted within a limit: {', '.join(limits)}" if limits else ""


def soundness(verdict: Verdict) -> list[str]:
    """Results of the checks that allow no error: equal counts, and the audit of the tensors."""
    return [_counts_line(verdict), _audit_line(verdict)] if verdict.measured else []


def _counts_line(verdict: Verdict) -> str:
    if verdict.different:
        label, first = next(iter(verdict.different.items()))
        points = numbered(len(verdict.different), "point")
        return f"Counts DIFFER at {points} of {verdict.counted}, first at {label}: {first}"
    if not verdict.counted:
        return "Counts were not compared."
    return f"Counts identical at {verdict.counted} of {verdict.counted} points: same plans, block ids and copies."


def _audit_line(verdict: Verdict) -> str:
    if not verdict.audit_checks:
        return "The tensors were not audited."
    found = f"{verdict.audit_mismatches:,} mismatches" if verdict.audit_mismatches else "no mismatch"
    return f"Audit: written slots counted in the tensors {verdict.audit_checks:,} times, {found} with the counters."


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def oracle_lines(records: Sequence[PointRecord]) -> list[str]:
    """One sentence for each version of another system whose scheduler decided beside ours."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if section := record.oracle:
            found.setdefault(str(section.get("version")), []).append(section)
    return [_oracle_line(version, sections) for version, sections in sorted(found.items())]


def _oracle_line(version: str, sections: Sequence[Mapping[str, Any]]) -> str:
    refused = [str(one["not_compared"]) for one in sections if one.get("not_compared")]
    points = len(sections) - len(refused)
    steps, same, ids = (
        sum(one.get(name) or 0 for one in sections) for name in ("steps", "compared", "equal_ids")
    )
    parts = []
    if points:
        parts.append(
            f"the same decisions as vLLM {version} in {same:,} of {steps:,} steps at {numbered(points, 'point')} "
            "(rows, hits, block tables, evictions, preemptions)"
        )
    counted = [one for one in sections if points and one.get("equal_ids", 0) is None]
    if counted:
        parts.append(
            f"with layers in groups ({numbered(len(counted), 'point')}) free pages are counted, not named"
        )
    if ids < same - sum(one.get("compared") or 0 for one in counted):
        parts.append(f"blocks have the same numbers in {ids:,} steps")
    stopped = [one["stopped"] for one in sections if one.get("stopped")]
    if stopped:
        parts.append(f"not compared after an allowed difference, {stopped[0]}{_more(len(stopped))}")
    if refused:
        parts.append(
            f"{numbered(len(refused), 'point')} not compared with vLLM: {refused[0]}{_more(len(set(refused)))}"
        )
    return f"Scheduler: {'; '.join(parts)}."


def pace_lines(records: Sequence[PointRecord]) -> list[str]:
    """One sentence on the pace of the device; empty where it was not followed."""
    paced = [(record, record.pace) for record in records if record.pace.get("ratio")]
    if not paced:
        return []
    ratio = median(pace["ratio"] for _, pace in paced)
    low = min(pace.get("low", pace["ratio"]) for _, pace in paced)
    high = max(pace.get("high", pace["ratio"]) for _, pace in paced)
    where = numbered(len(paced), "point")
    if all(pace.get("by") == "yardstick" for _, pace in paced):
        since = " or the ".join(sorted({str(pace.get("since", "calibration")) for _, pace in paced}))
        since = since if since.startswith("calibration") else f"the {since}"
        return [
            f"Pace: during the runs the core took {ratio:.2f} times as long as at {since} (a yardstick between "
            f"the steps: {low:.2f} to {high:.2f}, {where}). Measured times are divided by the pace beside "
            f"them{_worth(paced)}."
        ]
    return [
        f"Pace: during the runs the device took {ratio:.2f} times as long as at calibration (probes from {low:.2f} to "
        f"{high:.2f}, {where}), and the prediction was scaled by it{_worth(paced)}."
    ]


def _worth(paced: Sequence[tuple[PointRecord, Mapping[str, Any]]]) -> str:
    """The error of step times on the measured step plans, with the pace followed and without."""
    pairs = _paced_errors(paced)
    if not pairs:
        return ""
    scaled, plain = (median(errors) for errors in zip(*pairs, strict=True))
    return f"; mean error of a step's time {100 * scaled:.1f} % with it, {100 * plain:.1f} % without"


def _paced_errors(paced: Sequence[tuple[PointRecord, Mapping[str, Any]]]) -> list[tuple[float, float]]:
    """The mean error of a step's time at each point, with the pace followed and without."""
    found = [(_mape(one.levels.get("teacher_forced")), _mape(pace.get("unscaled"))) for one, pace in paced]
    return [(scaled, plain) for scaled, plain in found if scaled is not None and plain is not None]


def _mape(errors: Mapping[str, Any] | None) -> float | None:
    return None if errors is None else errors.get("mape")


_ENGINE = ("scheduler.max_running", "scheduler.max_batched_tokens", "cache.pool_tokens")
# what begins a change that the console says too: a trace was not read whole, or comes at another rate than asked for
UNREAD = "the first ", "requests come at "
# how a trace was shared when the setting was a part of each prompt
_OLD_SHARING = "of each prompt comes from one of"


def beside_figures(records: Sequence[PointRecord]) -> list[str]:
    """What the console says as well: settings that were assumed, missed, or are not those of vLLM."""
    found = [line for record in records for line in _assumed(record)]
    for record in records:
        changes = record.trace.get("changes") or ()
        reached = record.trace.get("realised_prefix_share")
        found += [
            f"Made by an earlier PageTwin: {change}. So {100 * reached:.0f} % of the prompt tokens are shared (the "
            "first use of a text is new), and workload.prefix_share stands for that here."
            for change in changes
            if reached is not None and _OLD_SHARING in change
        ]
    return list(dict.fromkeys(found))


def _assumed(record: PointRecord) -> Iterable[str]:
    chosen = {word.lstrip("+").partition("=")[0] for word in record.given or record.overrides}
    missing = [key for key in _ENGINE if not chosen & ({key, key.partition(".")[0]} - {"cache"})]
    fitted = record.setting("device.fitted_from")
    if new := record.cost.get("provenance", {}).get(NEW):
        yield f"{new[0].upper()}{new[1:]}. For another model or a larger load the figures may be far off."
    for rule in record.earlier_rules:
        yield f"Points with {rule} were made under an earlier rule of {rule}, corrected since: run them again."
    if repeats := record.cost.get("provenance", {}).get("repeatability"):
        yield (
            f"Calibrations like this one differ by up to ±{165 * repeats:.1f} % in the level of all steps (nine of "
            "ten), as its own passes show: an error below that may be chance, alike in all points."
        )
    if fitted and missing and "cache.pool_blocks" not in chosen:
        yield (
            f"The device was fitted to {fitted}, but its file has no settings of that engine: {', '.join(missing)} are "
            "PageTwin's defaults. Set them to the engine's, or times to first token are those of another engine."
        )
    caching = record.setting("cache.groups") not in (None, "off") and record.setting("cache.prefix_caching")
    if caching and record.setting("cache.retention_interval") is None:
        yield KEEPS_MORE


_SAME = 0.01  # a change that matters to nobody
_WORST = 3  # points that changed most, listed by name


def summary_markdown(root: Path, against: Path | None = None) -> str:
    """The answers of a store as Markdown; with `against`, also what changed from that store to this one.

    Raises:
        ReportError: a store has no point, or the two have no point in common.
    """
    study = read_study(root)
    verdict = judge(study.records)
    lines = [
        *(f"## PageTwin: {study.name}", ""),
        *completeness(study, verdict),
        *beside_figures(study.records),
        "",
        f"**Can the prediction be trusted?** {answer(verdict, study.records)}",
        "",
    ]
    for found in answers(study, find_axes(study.records), verdict):
        lines.append(f"* **{found.question}** {found.text}")
        lines += [f"  * {line}" for line in found.items]
    if against is not None:
        lines += ["", *change_lines(root, against)]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Change:
    """What became of a metric from one store to another, over the points that both have.

    `middle`, `low` and `high` are the median change and its 95 % interval (of fewer than three points the range), as
    shares of the other store's value, of shares as differences. At `clear` of `points` the change is beyond the spread
    of repeated runs, and beyond 1 % (of shares: a point of 100).
    """

    metric: Metric
    middle: float
    low: float
    high: float
    clear: int
    points: int
    side: str

    @property
    def worse(self) -> bool:
        """Whether the metric became worse beyond doubt: the whole interval, and at most of the points."""
        bad = {"lower": self.low > _SAME, "higher": self.high < -_SAME}
        return bad.get(self.metric.better, False) and 2 * self.clear > self.points

    @property
    def cells(self) -> list[str]:
        """The row of a table."""
        bounds = f"{numbers.error(self.metric, self.low)} to {numbers.error(self.metric, self.high)}"
        clear = f"{self.clear} of {self.points}"
        return [self.metric.label, numbers.error(self.metric, self.middle), bounds, clear, self.side,
                "worse" if self.worse else ""]  # fmt: skip


CHANGE_HEAD = ["metric", "change, median", "95 % interval (of 1 or 2: range)", "beyond 1 % and the spread", "side",
               ""]  # fmt: skip


def changes(root: Path, against: Path) -> tuple[list[Change], list[str]]:
    """What changed from the store `against` to the store `root`, and the largest changes in words.

    Points are matched by the settings that tell them apart in their sweep; a sentence names what else they differ in.
    Measured values are used where both points were measured, and points of which one was are left out.

    Raises:
        ReportError: a store has no point, or the two have no point in common.
    """
    known = {record.point_label: record for record in read_study(against).records}
    records = read_study(root).records
    pairs = [(record, known[label]) for record in records if (label := record.point_label) in known]
    if not pairs:
        reason = f"{root} and {against} have no point in common: their settings differ at every point"
        raise ReportError(reason)
    alike = [pair for pair in pairs if bool(pair[0].measured) == bool(pair[1].measured)]
    found = [_changed(name, alike) for name in dict.fromkeys(("request_throughput", *HEADLINE))]
    differ = ", ".join(sorted(set[str]().union(*(differing(*pair) for pair in pairs))))
    matched = f"{len(pairs):,} of {len(records):,} points have the settings of a point of {against}"
    matched += f", but for {differ}." if differ else "."
    if lost := len(pairs) - len(alike):
        matched += f" {numbered(lost, 'point')} of them measured in one store alone: not compared."
    before = [f"{against}: {line}" for line in beside_figures([*known.values()])]
    return [one for one in found if one is not None], [matched, *before, *_largest(alike)]


def change_lines(root: Path, against: Path) -> list[str]:
    """The same as Markdown: one row a metric, and the largest changes. Raises ReportError as `changes` does."""
    rows, largest = changes(root, against)
    lines = [CHANGE_HEAD, ["---"] * len(CHANGE_HEAD), *(one.cells for one in rows)]
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    return [f"### Change against {against}", "", *table, "", *(f"* {line}" for line in largest)]


def _change(name: str, pair: Pair) -> float | None:
    one, other = (value(record, name) for record in pair)
    if one is None or other is None:
        return None
    if METRICS[name].is_share:
        return one - other
    return one / other - 1 if other else None


def _changed(name: str, pairs: Sequence[Pair]) -> Change | None:
    found = [(change, pair[0]) for pair in pairs if (change := _change(name, pair)) is not None]
    if not found:
        return None
    shifts, records = zip(*found, strict=True)
    low, high = median_interval(shifts) or (min(shifts), max(shifts))
    clear = sum(differs(*pair, name) for pair in pairs)
    return Change(METRICS[name], median(shifts), low, high, clear, len(found), sides(records))


def _largest(pairs: Sequence[Pair]) -> Iterator[str]:
    name = "request_throughput"
    changes = [(change, pair[0]) for pair in pairs if (change := _change(name, pair)) is not None]
    ranked = sorted(changes, key=lambda found: -abs(found[0]))[:_WORST]
    for change, record in ranked:
        if numbers.shows(change):
            yield (
                f"{METRICS[name].label} {numbers.error(METRICS[name], change)} at {plain_words(record.point_label)}"
            )
