"""The verdict in words. The console and the page's first section show the same sentences."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.metrics.verdict import TIMES, ClassVerdict, Trust, Verdict, judge
from harness.report import numbers
from harness.report.answers import answers
from harness.report.axes import find_axes
from harness.report.study import Record, Study, read_study


def verdict_lines(store_root: Path) -> list[str]:
    """The verdict on a store for the console, most important line first. Raises ReportError if it has no point."""
    study = _LAST.pop(store_root, None) or read_study(store_root)
    verdict = judged(study)
    return [
        *thinned(study),
        *completeness(study, verdict),
        answer(verdict),
        *soundness(verdict),
        *oracle_lines(study.records),
        *pace_lines(study.records),
        *(
            line
            for found in answers(study, find_axes(study.records), verdict)
            for line in (found.text, *found.items)
        ),
    ]


# The large sweep that the page was just made of: reading 100,000 records again would take another minute.
_LAST: dict[Path, Study] = {}


def remember(study: Study) -> None:
    """Keep a study that is not whole for the verdict that is printed next."""
    _LAST.clear()
    if study.is_thinned:
        _LAST[study.root] = study


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
        trouble.append(
            f"{_points(len(study.failures))} FAILED, first {first.label}: {first.message} ({first.path})"
        )
    if study.absent:
        trouble.append(f"{_points(study.absent)} NOT run yet: the same command continues where it stopped")
    if study.problems:
        trouble.append(f"NOT readable: {study.problems[0]}" + _more(len(study.problems)))
    if verdict.unfinished:
        label, words = next(iter(verdict.unfinished.items()))
        trouble.append(f"NOT all requests finished at {_points(len(verdict.unfinished))}: {label}: {words}")
    return trouble or [f"Everything finished: {_points(verdict.points)}, all requests on every side."]


def answer(verdict: Verdict) -> str:
    """Whether the prediction can be trusted, in one sentence; `Verdict.classes` has the verdict on each class."""
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
    if bad:
        return f"{'No' if times and all(one in bad for one in times) else 'Partly'}: {text}."
    if within or untested:
        return f"{'Yes, within limits' if not untested else 'Partly'}: {text}."
    return f"Yes: {text}."


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
    if not verdict.measured:
        return []
    return [_counts_line(verdict), _audit_line(verdict)]


def _counts_line(verdict: Verdict) -> str:
    if verdict.different:
        label, first = next(iter(verdict.different.items()))
        return f"Counts DIFFER at {_points(len(verdict.different))} of {verdict.counted}, first at {label}: {first}"
    if not verdict.counted:
        return "Counts were not compared."
    return f"Counts identical at {verdict.counted} of {verdict.counted} points: same plans, block ids and copies."


def _audit_line(verdict: Verdict) -> str:
    if not verdict.audit_checks:
        return "The tensors were not audited."
    found = f"{verdict.audit_mismatches:,} mismatches" if verdict.audit_mismatches else "no mismatch"
    return f"Audit: written slots counted in the tensors {verdict.audit_checks:,} times, {found} with the counters."


def _points(count: int) -> str:
    return f"{count:,} point" if count == 1 else f"{count:,} points"


def _more(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""


def oracle_lines(records: Sequence[Record]) -> list[str]:
    """One sentence for each version of another system whose scheduler decided beside ours."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if section := record.get("oracle"):
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
            f"the same decisions as vLLM {version} in {same:,} of {steps:,} steps at {_points(points)} "
            "(rows, hits, block tables, evictions, preemptions)"
        )
    if ids < same:
        parts.append(f"blocks have the same numbers in {ids:,} steps")
    stopped = [one["stopped"] for one in sections if one.get("stopped")]
    if stopped:
        parts.append(f"not compared after an allowed difference, {stopped[0]}{_more(len(stopped))}")
    if refused:
        parts.append(
            f"{_points(len(refused))} not compared with vLLM: {refused[0]}{_more(len(set(refused)))}"
        )
    return f"Scheduler: {'; '.join(parts)}."


def pace_lines(records: Sequence[Record]) -> list[str]:
    """One sentence on the pace of the device; empty where it was not followed."""
    paced = [(record, record["pace"]) for record in records if (record.get("pace") or {}).get("ratio")]
    if not paced:
        return []
    ratio = median(pace["ratio"] for _, pace in paced)
    low = min(pace.get("low", pace["ratio"]) for _, pace in paced)
    high = max(pace.get("high", pace["ratio"]) for _, pace in paced)
    where = "1 point" if len(paced) == 1 else f"{len(paced):,} points"
    if all(pace.get("by") == "yardstick" for _, pace in paced):
        since = " or the ".join(sorted({str(pace.get("since", "calibration")) for _, pace in paced}))
        return [
            f"Pace: during the runs the core took {ratio:.2f} times as long as at {_the(since)} (a yardstick between "
            f"the steps: {low:.2f} to {high:.2f}, {where}). Measured times are divided by the pace beside "
            f"them{_worth(paced)}."
        ]
    return [
        f"Pace: during the runs the device took {ratio:.2f} times as long as at calibration (probes from {low:.2f} to "
        f"{high:.2f}, {where}), and the prediction was scaled by it{_worth(paced)}."
    ]


def _the(since: str) -> str:
    return since if since.startswith("calibration") else f"the {since}"


def _worth(paced: Sequence[tuple[Record, Mapping[str, Any]]]) -> str:
    """The error of step times on the measured step plans, with the pace followed and without."""
    found = [
        (_mape((record.get("levels") or {}).get("teacher_forced")), _mape(pace.get("unscaled")))
        for record, pace in paced
    ]
    pairs = [(scaled, plain) for scaled, plain in found if scaled is not None and plain is not None]
    if not pairs:
        return ""
    scaled, plain = (median(errors) for errors in zip(*pairs, strict=True))
    return f"; mean error of a step's time {100 * scaled:.1f} % with it, {100 * plain:.1f} % without"


def _mape(errors: Mapping[str, Any] | None) -> float | None:
    return None if errors is None else errors.get("mape")
