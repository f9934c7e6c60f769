"""The page: its sections in reading order, each with figures and tables, or the reason why there are none.

Another package adds a `Section` of its own: text, pictures, tables, and warnings.

It holds the points as data for its chart, small enough to lie in the page.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.metrics import METRICS
from harness.metrics.record import PointRecord, Side
from harness.metrics.verdict import CLASSES, FLOOR_FACTOR, TIMES, WORST_FACTOR, Trust, Verdict
from harness.report import provenance, tables, verdict_text
from harness.report.answers import answers
from harness.report.axes import POLICY, Axes, label, order, plain_point, reference, short_label
from harness.report.figures.series import column_scale, policy_style
from harness.report.study import MOST_POINTS, Study, spread
from harness.report.style import Drawing, Picture, filled, inline
from harness.report.tables import Table

EXPLORED = ("request_throughput", "output_throughput", "generated_throughput", "norm_latency_mean",
            "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99", "e2e_mean", "queue_mean", "utilisation",
            "internal_share", "external_share", "free_share", "sharing_saving", "tail_waste", "peak_kv",
            "hit_ratio", "host_hit_tokens", "disk_hit_tokens", "tier_load_s", "tier_saved_s", "copies_per_token",
            "recomputed_tokens", "preemptions", "running_mean", "waiting_mean", "steps", "busy_share",
            "attention_per_decode_step", "kv_read_per_decode_step")  # fmt: skip
_DRAWN_SIDES: tuple[Side, ...] = ("simulated", "measured", "low", "high")
_DIGITS = 5

# How the figures of one metric at one point stand in the page.
Figures = int | float | list[int | float | None] | None


def shown_records(study: Study) -> list[PointRecord]:
    """The points that the page holds: all, or `MOST_POINTS` spread evenly over them."""
    return spread(study.records, MOST_POINTS)


def points_json(study: Study, axes: Axes) -> str:
    """The axes, metrics and points as JSON that may stand in a script element; empty for a single point."""
    if len(study.records) < 2:
        return ""
    records = shown_records(study)
    keys = [POLICY, *axes.values]
    known = [name for name in EXPLORED if any(one.value(name, "simulated") is not None for one in records)]
    scales = {name: column_scale(name, records) for name in known}
    content = {
        "axes": [_axis(records, key) for key in keys],
        "metrics": [
            {"name": name, "label": METRICS[name].label, "unit": unit} for name, (_, unit) in scales.items()
        ],
        "points": [
            {
                "l": plain_point(record),
                "s": [_plain_value(record.setting(key)) for key in keys],
                "v": [_figure_cells(record, name, scale) for name, (scale, _) in scales.items()],
            }
            for record in records
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _axis(records: Sequence[PointRecord], key: str) -> dict[str, Any]:
    """A setting and its values. Cache policies bring the colours that they have in the figures."""
    values = sorted({_plain_value(record.setting(key)) for record in records}, key=order)
    axis = {"key": key, "label": short_label(key), "values": values}
    return axis | ({"colours": [policy_style(value)["color"] for value in values]} if key == POLICY else {})


def _plain_value(value: Any) -> Any:
    """Numbers stay numbers; everything else becomes a word."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _figure_cells(record: PointRecord, name: str, scale: float) -> Figures:
    """The sides of a metric; one number where all are equal, and no more than are known. The script fills them up."""
    found = [record.value(name, side) for side in _DRAWN_SIDES]
    values = [None if value is None else _rounded(scale * value) for value in found]
    while values and values[-1] is None:
        values.pop()
    if len(values) == len(_DRAWN_SIDES) and len(set(values)) == 1:
        return values[0]
    return values or None


def _rounded(value: float) -> int | float:
    found = float(f"{value:.{_DIGITS}g}")
    return int(found) if found.is_integer() else found


_FOLDER = Path(__file__).parent
Pictures = Mapping[str, Picture]
Svgs = Mapping[str, bytes]


@dataclass(frozen=True)
class Shown:
    """A figure in the page: inline SVG with caption and file stem, or the reason why there is none."""

    name: str
    svg: str = ""
    caption: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page: heading, texts, figures and tables. Its `key` is its anchor.

    `warnings` come first and look like those of a failed point. A section of another package gives `pictures`, of which
    the page makes its figures; their names are file names and begin with `kernel_`.
    """

    key: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[Shown] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())
    warnings: Sequence[str] = field(default=())
    parts: Sequence["Section"] = ()  # folded
    pictures: Sequence[Picture] = ()


# Makes the section for a sweep. It is called inside `harness.report.style.style()`, so that it can draw.
SectionMaker = Callable[[Study], Section]


def build_page(
    study: Study, axes: Axes, pictures: Pictures, svgs: Svgs, added: Sequence[Section], *, pdf: bool
) -> str:
    """The whole HTML document. `svgs` holds the bytes of every drawing in `pictures`, including those of `added`.

    `pdf` says whether each is also written as a PDF, which the page then links.
    """
    from markupsafe import Markup

    verdict = verdict_text.judged(study)
    shown = {name: in_page(picture, svgs) for name, picture in pictures.items()}
    sections = _sections(study, axes, verdict, shown, added)
    points = points_json(study, axes)
    said = answers(study, axes, verdict)
    return filled(
        _FOLDER / "page.html.j2",
        name=study.name,
        script=Markup((_FOLDER / "explorer.js").read_text(encoding="utf-8")),
        points_data=Markup(points),
        complete=not (study.failures or study.absent or study.problems or verdict.unfinished),
        completeness=verdict_text.completeness(study, verdict),
        cautions=[
            *verdict_text.thinned(study),
            *provenance.cautions(study),
            *(f"{one.title}: {line}" for one in added for line in one.warnings),
        ],
        choices=verdict_text.choices(said),
        overview=[shown[name] for name in ("overview", "overview_narrow")],
        trust=verdict_text.trust_line(verdict, study.records),
        answers=said,
        tone=_tone(verdict),
        facts=provenance.headline(study),
        load=next((one.text for one in said if one.key == "load"), ""),
        trace=provenance.trace_line(study.records),
        sections=sections,
        pdf=pdf,
        command=study.command,
    )


def in_page(picture: Picture, svgs: Svgs) -> Shown:
    """The figure as a page shows it: its SVG and caption, or the reason why there is none."""
    from markupsafe import Markup

    if isinstance(picture, Drawing):
        # this SVG is safe: matplotlib has escaped every text in it
        svg = Markup(inline(svgs[picture.name], picture.name, picture.caption))
        return Shown(picture.name, svg=svg, caption=picture.caption)
    return Shown(picture.name, reason=picture.reason)


def _tone(verdict: Verdict) -> str:
    if not verdict.measured:
        return "neutral"
    classes = verdict.classes
    times = [one for one in classes if one.name in TIMES]
    if not verdict.sound or (times and all(one.trust is Trust.not_trusted for one in times)):
        return "bad"
    return "good" if all(one.trust is Trust.trusted for one in classes) else "fair"


def _sections(
    study: Study, axes: Axes, verdict: Verdict, shown: Mapping[str, Shown], added: Sequence[Section]
) -> list[Section]:
    curves = [figure for name, figure in shown.items() if name.startswith("curve_")]
    swept = ", ".join(label(key) for key in axes.numeric)
    no_curves = "No numeric setting was swept. Give one several values, for example cache.block_size=8,16,32."
    along = "Along the swept settings"
    return [
        *_failure_section(study),
        _trust_section(study, verdict, shown),
        Section("explore", "Explore the points"),
        Section(
            "memory",
            "What paging saves",
            _memory_text(study),
            [shown["memory"]],
            parts=[
                Section("waste", "Where the memory goes", figures=_memory_figures(shown)),
                Section("pool", "The pool over time", figures=[shown["pool_over_time"]]),
                Section("kernel", "Attention latency", figures=[shown["kernel"]]),
                Section("trade", "Throughput against latency", figures=[shown["tradeoff"], shown["heat"]]),
                Section("curves", along, [f"Swept: {swept}."] if swept else [no_curves], curves),
            ],
        ),
        *(replace(one, figures=[shown[picture.name] for picture in one.pictures]) for one in added),
        _run_section(study),
        _table_section(study, axes),
    ]


def _trust_section(study: Study, verdict: Verdict, shown: Mapping[str, Shown]) -> Section:
    checks = [
        *verdict_text.soundness(verdict),
        *verdict_text.oracle_lines(study.records),
        *verdict_text.pace_lines(study.records),
    ]
    table = tables.verdict_table(verdict)
    margins = ", ".join(f"{one.name} {100 * one.margin:g} %" for one in CLASSES)
    how = [
        "An error is predicted / measured − 1, for shares a difference in points of 100. Typical: the median over the "
        "points. Its bound: the upper 95 % confidence bound of the typical error, from a bootstrap of points and "
        "repeated runs. Noise floor: the typical error with which one half of the repeated runs predicts the other; no "
        "model can be shown to be better.",
        f"Trusted: the bound is below the margin of the class ({margins}) or {FLOOR_FACTOR:g} times the noise floor, "
        f"and no point is off by more than {WORST_FACTOR:g} margins or twice its own spread. Trusted within x: nine of "
        "ten points are off by less than x (bound), and x is at most 25 %, for shares 10 points. All else is not "
        "trusted.",
    ]
    levels = provenance.attribution_table(study.measured)
    judged = [Section("words", "What these words mean", how)] if table.rows else []
    return Section(
        "trust",
        "How far to trust it",
        [verdict_text.answer(verdict, study.records)],
        [shown["errors"]],
        [table] if table.rows else [],
        checks,
        parts=[
            *judged,
            Section("agreement", "Predicted against measured", figures=[shown["agreement"]]),
            Section(
                "levels",
                "Where the error comes from",
                figures=[shown["levels"]],
                tables=[levels] if levels else [],
                notes=provenance.divergence_lines(study.measured),
            ),
        ],
    )


def _run_section(study: Study) -> Section:
    changes = provenance.trace_changes(study.records)
    return Section(
        "run",
        "What was run",
        ["Changes made to the trace:" if changes else "The trace was replayed as it is."],
        notes=changes,
        parts=[
            Section(
                "pools",
                "Pools and traces",
                ["Both sides of a point have the same policy, pool and trace."],
                tables=[tables.pools_table(study.records), provenance.traces_table(study.records)],
                notes=provenance.left_out(study.records),
            ),
            Section("environment", "Environment", tables=_environment(study)),
            _cost_section(study),
        ],
    )


def _failure_section(study: Study) -> list[Section]:
    notes = list(study.problems)
    if study.others:
        notes.append(f"{study.others} more points in this store belong to another sweep and are not shown.")
    if not study.failures and not notes:
        return []
    if not study.failures and not study.problems:
        return [Section("others", "Other points", notes=notes)]
    shown = [tables.failures_table(study)] if study.failures else []
    text = ["The same command runs them again."] if study.failures else []
    title = "Points that failed, files that were skipped"
    return [Section("failures", title, text, tables=shown, notes=notes)]


def _memory_figures(shown: Mapping[str, Shown]) -> list[Shown]:
    """Causes of waste and what is in use over time are shown where a point has groups of layers; hits where known."""
    more = (shown.get(name) for name in ("causes", "groups_over_time", "hits"))
    return [shown["waste"], *(one for one in more if one is not None and one.svg)]


def _memory_text(study: Study) -> list[str]:
    found = {record.policy for record in study.records}
    if len(found) > 1:
        return []
    only = next(iter(found), "none")
    other = "cache=paged,contiguous_max" if only == "paged" else "cache=paged"
    return [f"Only one allocator was run ({only}); {other} compares it with another."]


def _table_section(study: Study, axes: Axes) -> Section:
    like = reference(study.records, axes, "middle")
    detail = [tables.detail_table(like)] if like else []
    if like and (tenants := tables.tenants_table(like)):
        detail.append(tenants)
    return Section(
        "tables",
        "Every number",
        [
            "All metrics of all points are in figures/points.csv (of a large sweep: points_wide.csv), and in the "
            "store's summary.parquet. Shares of slots and bytes are weighted by seconds of steps, without idle time."
        ],
        parts=[
            Section("points", "Points", tables=[tables.points_table(study.records, axes), *detail]),
            Section("definitions", "What the metrics mean", tables=[tables.definitions_table()]),
        ],
    )


def _environment(study: Study) -> list[Table]:
    facts = provenance.facts_table("environment", study.records)
    pace = provenance.facts_table("pace", study.records)
    title = "Pace of the device during the measured runs"
    return [facts, replace(pace, title=title)] if pace.rows else [facts]


def _cost_section(study: Study) -> Section:
    notes = provenance.extrapolation_notes(study.records)
    heldout = provenance.heldout_table(study.records)
    facts = provenance.facts_table("cost", study.records, without=("heldout", "validation"))
    if heldout is None:
        bounds = provenance.bounds_table(study.records)
        fits = {str(fit) for one in study.records if (fit := one.setting("device.fitted_from"))}
        said = f"The device was fitted to {', '.join(sorted(fits))}; its file has the errors of that fit."
        return Section(
            "cost",
            "Cost model",
            [said if fits else "The cost model was not fitted, so it has no held-out error."],
            tables=[bounds, facts] if bounds else [facts],
            notes=notes,
        )
    text = [
        "Fitted on other workloads than the ones above. The table shows its error on steps that were kept out of the "
        "fit, and the error of a grid on shapes that were kept out of the grid:"
    ]
    validation = provenance.validation_table(study.records)
    shown = [heldout, *([validation] if validation else []), facts]
    return Section("cost", "Cost model", text, tables=shown, notes=notes)
