"""Reproduced figures as files: a picture and a CSV for each, `results.json`, a README, and one HTML page."""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from harness.config.errors import UserError
from harness.papers.reproduce import Result
from harness.papers.reproduced_figure import draw
from harness.report.style import inline, pdf_bytes, style, svg_bytes
from harness.store.atomic import write_files

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


def kept(result: Result) -> Kept:
    """The texts of a result."""
    found = result.experiment
    bars = []
    for one in result.bars:
        shown = one.bar.printed
        bars.append(
            {
                "of": one.bar.of,
                "part": one.bar.part,
                "printed": f"{shown[0]:g} to {shown[1]:g}" if isinstance(shown, tuple) else f"{shown:g}",
                "ours": f"{one.ours:.4g}" if one.ours < 1e4 else f"{one.ours:.0f}",
                "error": "fitted" if one.bar.fitted else f"{100 * one.error:+.1f} %",
            }
        )
    return Kept(
        found.name,
        found.figure,
        found.title,
        found.source,
        found.data,
        found.unit,
        result.verdict,
        bars,
        found.choices,
        result.points,
        round(result.seconds, 1),
    )


def write_results(results: Sequence[Result], folder: Path, order: Sequence[str]) -> Path:
    """Write what was reproduced, beside what the folder holds already; returns the path of the page."""
    found = {**read_kept(folder), **{result.experiment.name: kept(result) for result in results}}
    out: dict[str, bytes] = {}
    with style():
        for result in results:
            drawing = draw(result)
            if drawing is not None:
                name = drawing.name
                table = drawing.data.to_csv(index=False, float_format="%.6g", lineterminator="\n")
                out[f"{name}.csv"] = table.encode()
                out[f"{name}.svg"] = svg_bytes(drawing.figure, name)
                out[f"{name}.pdf"] = pdf_bytes(drawing.figure)
    ordered = [found[name] for name in order if name in found]
    svgs = {
        one.name: out.get(f"{one.name}.svg") or (folder / f"{one.name}.svg").read_bytes()
        for one in ordered
        if f"{one.name}.svg" in out or (folder / f"{one.name}.svg").exists()
    }
    out[KEPT] = (json.dumps([asdict(one) for one in ordered], indent=1, ensure_ascii=False) + "\n").encode()
    out["README.md"] = _readme(ordered, svgs, [name for name in order if name not in found]).encode()
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
        raise UserError(
            f"{path} cannot be read ({error}); name another folder with --out, or remove it"
        ) from None


def _readme(found: Sequence[Kept], drawn: Container[str], missing: Sequence[str]) -> str:
    lines = [
        "# Published figures, reproduced",
        "",
        "Made by `python -m harness reproduce`. Everything is simulated: no figure here was measured on a GPU.",
        "Each section names the data that stood in for the paper's, and what the paper leaves open.",
        "",
        "| name | figure | verdict |",
        "|---|---|---|",
        *(f"| [{one.name}](#{one.name}) | {one.figure}: {one.title} | {one.verdict} |" for one in found),
    ]
    if missing:
        lines += ["", f"Not run yet: {', '.join(missing)}."]
    for one in found:
        lines += ["", f"## {one.name}", "", f"{one.figure} of {one.source}: {one.title}. {one.data}", ""]
        if one.name in drawn:
            lines += [f"![{one.figure}: {one.title}]({one.name}.svg)", ""]
        if one.bars:
            lines += [f"| | printed, {one.unit} | ours | error |", "|---|---|---|---|"]
            lines += [
                f"| {_named(bar)} | {bar['printed']} | {bar['ours']} | {bar['error']} |" for bar in one.bars
            ]
            lines.append("")
        lines += [f"Verdict: {one.verdict}."]
        if one.choices:
            chosen = [f"* {text}" for text in one.choices]
            lines += ["", "Not said in the paper, and chosen here:", "", *chosen]
        if one.points:
            lines += ["", f"{one.points} simulated points, {one.seconds:.0f} s of work."]
    return "\n".join(lines) + "\n"


def _named(bar: Mapping[str, str]) -> str:
    return " ".join(part for part in (bar["of"], bar["part"]) if part)


def _page(found: Sequence[Kept], svgs: Mapping[str, bytes]) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    css = files("harness.report").joinpath("page.css").read_text(encoding="utf-8")
    text = files("harness.papers").joinpath("reproduce.html.j2").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(text).render(
        style=Markup(css),
        found=found,
        svgs={name: Markup(inline(svg, name, name)) for name, svg in svgs.items()},
    )
