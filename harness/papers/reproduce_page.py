"""Reproduced figures as files: a picture and a CSV for each, `results.json`, a README, and one HTML page."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.metrics import METRICS
from harness.papers.reproduce import JudgedBar, Result
from harness.report import style
from harness.report.figures.series import axis_scale, value_axis
from harness.store.atomic import write_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_PRINTED, _OURS = "#b8b8b8", style.PALETTE[0]


def draw(result: Result) -> style.Drawing | None:
    """Stacked bars, bars or curves; None where there is nothing to draw. Call under `style()`."""
    import pandas as pd

    if not result.bars and not result.curves:
        return None
    found = result.experiment
    panels = bool(result.bars) + bool(result.curves)
    figure = style.new_figure(
        style.COLUMN_IN if panels == 1 else style.PAGE_IN, max(2.4, 0.8 + 0.22 * len(result.bars))
    )
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    if result.curves:
        _curves(axes.pop(), result)
    if axes:
        (_stacked if found.form == "stacked" else _bars)(axes[0], result)
    rows = [
        {"of": one.bar.of, "part": one.bar.part, "printed": _shown(one), "ours": one.ours, "error": one.error,
         "fitted": one.bar.fitted}
        for one in result.bars
    ]  # fmt: skip
    rows += [
        {"of": name, "part": f"{found.curves[1]}={x:g}" if found.curves else "", "ours": y}
        for name, points in result.curves.items()
        for x, y in points
    ]
    caption = f"{found.figure}: {found.title}. Grey: printed in the paper. Coloured: ours. {found.data}"
    return style.Drawing(found.name, caption, figure, pd.DataFrame(rows))


def _shown(one: JudgedBar) -> str:
    shown = one.bar.printed
    return f"{shown[0]:g} to {shown[1]:g}" if isinstance(shown, tuple) else f"{shown:g}"


def _middle(one: JudgedBar) -> float:
    shown = one.bar.printed
    return sum(shown) / 2 if isinstance(shown, tuple) else shown


def _bars(axes: "Axes", result: Result) -> None:
    """Two bars for each value; a printed range is a bar with its ends marked."""
    names = [" ".join(part for part in (one.bar.of, one.bar.part) if part) for one in result.bars]
    for place, one in enumerate(result.bars):
        shown = one.bar.printed
        reach = (shown[1] - shown[0]) / 2 if isinstance(shown, tuple) else None
        axes.barh(place - 0.2, _middle(one), 0.38, color=_PRINTED, xerr=reach, label="printed")
        axes.barh(place + 0.2, one.ours, 0.38, color=_OURS, label="ours")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(result.experiment.unit)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2])
    axes.grid(axis="y", visible=False)


def _stacked(axes: "Axes", result: Result) -> None:
    """Two stacked bars for each system, printed above ours, of the same parts."""
    systems = list(dict.fromkeys(one.bar.of for one in result.bars))
    parts = list(dict.fromkeys(one.bar.part for one in result.bars))
    for place, system in enumerate(systems):
        for side, shift, alpha in (("printed", -0.2, 0.45), ("ours", 0.2, 1.0)):
            left = 0.0
            for part, colour in zip(parts, style.PALETTE, strict=False):
                for one in result.bars:
                    if (one.bar.of, one.bar.part) == (system, part):
                        width = _middle(one) if side == "printed" else one.ours
                        axes.barh(place + shift, width, 0.36, left=left, color=colour, alpha=alpha)
                        left += width
            axes.text(left + 1, place + shift, side, va="center", fontsize=6)
    for part, colour in zip(parts, style.PALETTE, strict=False):
        axes.barh(0, 0, color=colour, label=part)
    axes.set_yticks(range(len(systems)), systems)
    axes.invert_yaxis()
    axes.set_xlabel(result.experiment.unit)
    axes.legend(loc="upper center", bbox_to_anchor=(0.4, 1.22), ncols=2)
    axes.grid(axis="y", visible=False)


def _curves(axes: "Axes", result: Result) -> None:
    from matplotlib.ticker import LogFormatter

    assert result.experiment.curves is not None
    _, key, metric = result.experiment.curves
    scale, unit = axis_scale(metric, max(y for points in result.curves.values() for _, y in points))
    for (name, points), colour in zip(result.curves.items(), style.PALETTE, strict=False):
        axes.plot([x for x, _ in points], [scale * y for _, y in points], "o-", color=colour, label=name)
    value_axis(axes, key, sorted({x for points in result.curves.values() for x, _ in points}))
    axes.set_ylabel(f"{METRICS[metric].label} ({unit})")
    lowest = min(y for points in result.curves.values() for _, y in points)
    if max(y for points in result.curves.values() for _, y in points) > 5 * lowest:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")  # plain text
        axes.yaxis.set_minor_formatter(LogFormatter())
    else:
        axes.set_ylim(bottom=0)
    if any(result.curves):  # a single curve has no name
        axes.legend()


PAGE, KEPT = "index.html", "results.json"


@dataclass(frozen=True)
class Kept:
    """What a page says of a figure; kept in `results.json`, so that one run may add to what an earlier one found."""

    name: str
    figure: str
    title: str
    source: str
    data: str
    unit: str
    verdict: str
    bars: Sequence[Mapping[str, str]]
    choices: Sequence[str]
    points: int
    seconds: float


def _error(one: JudgedBar) -> str:
    if one.bar.fitted:
        return f"fitted, {100 * one.error:+.1f} %"
    return "in the range" if one.inside else f"{100 * one.error:+.1f} %"


def kept(result: Result) -> Kept:
    """The texts of a result."""
    found = result.experiment
    bars = [
        {
            "of": one.bar.of,
            "part": one.bar.part,
            "printed": _shown(one),
            "ours": f"{one.ours:.4g}" if one.ours < 1e4 else f"{one.ours:.0f}",
            "error": _error(one),
        }
        for one in result.bars
    ]
    said = {
        name: getattr(found, name)
        for name in ("name", "figure", "title", "source", "data", "unit", "choices")
    }
    return Kept(
        **said, verdict=result.verdict, bars=bars, points=result.points, seconds=round(result.seconds, 1)
    )


def write_results(results: Sequence[Result], folder: Path, order: Sequence[str]) -> Path:
    """Write what was reproduced, beside what the folder holds already; returns the path of the page."""
    found = {**read_kept(folder), **{result.experiment.name: kept(result) for result in results}}
    out: dict[str, bytes] = {}
    with style.style():
        for result in results:
            drawing = draw(result)
            if drawing is not None:
                out |= style.drawing_files(drawing, digits=6)
    ordered = [found[name] for name in order if name in found]
    svgs = {
        one.name: out.get(f"{one.name}.svg") or (folder / f"{one.name}.svg").read_bytes()
        for one in ordered
        if f"{one.name}.svg" in out or (folder / f"{one.name}.svg").exists()
    }
    out[KEPT] = (json.dumps([asdict(one) for one in ordered], indent=1, ensure_ascii=False) + "\n").encode()
    readme = style.filled(
        Path(__file__).with_name("reproduce.md.j2"),
        found=ordered,
        drawn=svgs.keys(),
        missing=[name for name in order if name not in found],
    )
    out["README.md"] = readme.encode()
    out[PAGE] = _page(ordered, svgs).encode()
    write_files(folder, out)
    return folder / PAGE


def read_kept(folder: Path) -> dict[str, Kept]:
    """What an earlier run left in the folder, by name. Raises UserError where the file is not ours."""
    path = folder / KEPT
    if not path.exists():
        return {}
    try:
        return {row["name"]: Kept(**row) for row in json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{path} cannot be read ({error}); name another folder with --out, or remove it"
        raise UserError(reason) from None


def _page(found: Sequence[Kept], svgs: Mapping[str, bytes]) -> str:
    from markupsafe import Markup

    return style.filled(
        Path(__file__).with_name("reproduce.html.j2"),
        found=found,
        svgs={name: Markup(style.inline(svg, name, name)) for name, svg in svgs.items()},
    )
