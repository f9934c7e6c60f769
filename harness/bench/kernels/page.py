"""The folder of results that a run of `bench kernels` writes.

kernels.json       every raw sample, as pytest-benchmark writes it
kernels.csv        one row for each case and provider (columns: `harness.cost.timings.COLUMNS`)
kernels.parquet    the same, for cost models and notebooks
figures/           each figure as SVG and PDF, with its data as CSV
index.html         all of it on one page that needs no other file
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bench.kernels.results import Problem, ProblemKind, Row, ceilings_of, rows_of
from harness.bench.session import Timing
from harness.cost.timings import COLUMNS, OURS, Ceilings, MadeOn
from harness.report.style import Drawing, Picture, inline
from harness.store.atomic import write_files

if TYPE_CHECKING:
    import pandas as pd


_CUDA = (
    "Time on the GPU, between events around one CUDA graph of the calls, inputs rotated past the L2 cache."
)
_CPU = "CPU time of the paths that run without a GPU. It says nothing about the kernels' speed on a GPU."


def build_page(
    table: "pd.DataFrame",
    limits: Ceilings,
    drawn: Sequence[Picture],
    svgs: Mapping[str, bytes],
    problems: Sequence[Problem],
    absent: Mapping[str, str],
    made_on: MadeOn,
) -> str:
    """The whole HTML document. `svgs` holds the bytes of every drawing in `drawn`."""
    from markupsafe import Markup

    import harness.report

    style = (Path(harness.report.__file__).parent / "page.css").read_text(encoding="utf-8")
    wrong = [one for one in problems if one.kind is not ProblemKind.unsupported]
    return str(
        _template().render(
            style=Markup(style),
            device=made_on.device,
            facts=facts(limits, made_on),
            complete=not wrong,
            completeness=_completeness(table, wrong),
            scope=scope(table),
            figures=[_shown(picture, svgs) for picture in drawn],
            head=case_head(table),
            rows=list(case_rows(table)),
            notes=[*_absent(absent), *_notes(problems)],
        )
    )


def scope(table: "pd.DataFrame") -> str:
    """What the times mean, in a sentence."""
    return _CPU if bool((table["how"] == "CPU time").all()) else _CUDA


def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2")


def facts(limits: Ceilings, made_on: MadeOn) -> list[tuple[str, str]]:
    """The ceilings that the device reached, and the kernel sources and versions of the run."""
    return [
        ("copied", f"{limits.copy_bytes_s / 1e9:,.0f} GB/s"),
        ("read", f"{limits.read_bytes_s / 1e9:,.0f} GB/s"),
        ("matrix product", f"{limits.matmul_flop_s / 1e12:,.3g} TFLOP/s"),
        ("kernel sources", made_on.kernels),
        ("torch", made_on.torch),
        ("triton", made_on.triton),
        ("date", made_on.date),
    ]


def _completeness(table: "pd.DataFrame", wrong: Sequence[Problem]) -> list[str]:
    done = (
        f"{table['name'].nunique()} cases by {table['provider'].nunique()} providers were checked and timed."
    )
    return [done, *(f"{one.kind}: {one.case} by {one.provider}: {one.reason}" for one in wrong)]


def _shown(picture: Picture, svgs: Mapping[str, bytes]) -> dict[str, Any]:
    from markupsafe import Markup

    if isinstance(picture, Drawing):
        svg = Markup(inline(svgs[picture.name], picture.name, picture.caption))
        return {"name": picture.name, "svg": svg, "caption": picture.caption}
    return {"name": picture.name, "svg": "", "reason": picture.reason}


def _others(table: "pd.DataFrame") -> list[str]:
    return [name for name in dict.fromkeys(table["provider"]) if name != OURS]


def case_head(table: "pd.DataFrame") -> list[str]:
    """The column titles of the table of all cases."""
    return ["case", "µs", "±", "GB/s", "TFLOP/s", "of copy", "of read", "of matmul", *_others(table)]


def case_rows(table: "pd.DataFrame") -> Iterator[list[str]]:
    """One row for each case: our own figures, then every other provider's time divided by ours."""
    for name, part in table.groupby("name", sort=False):
        found = {row["provider"]: row for _, row in part.iterrows()}
        yield [str(name), *_figures(found.get(OURS)), *(_ratio(found.get(other)) for other in _others(table))]


def _figures(row: Any) -> list[str]:
    if row is None:
        return ["–"] * 7
    shares = [f"{row[name]:.0%}" for name in ("copy_share", "read_share", "matmul_share")]
    return [
        f"{row['median_us']:,.1f}",
        f"{row['spread']:.1%}",
        f"{row['gbytes_s']:,.1f}",
        f"{row['tflop_s']:.3g}",
        *shares,
    ]


def _ratio(row: Any) -> str:
    if row is None:
        return "–"
    ratio = row["against_ours"]
    return f"{ratio:.2f} ×" if ratio == ratio and ratio is not None else f"{row['median_us']:,.1f} µs"


def _absent(absent: Mapping[str, str]) -> Iterator[str]:
    for name, reason in absent.items():
        yield f"{name} cannot run here: {reason}"


def _notes(problems: Sequence[Problem]) -> Iterator[str]:
    for one in problems:
        if one.kind is ProblemKind.unsupported:
            yield f"{one.provider} does not offer {one.case}: {one.reason}"


def write_run(
    timings: Sequence[Timing],
    problems: Sequence[Problem],
    absent: Mapping[str, str],
    facts: MadeOn,
    out: Path,
) -> Path:
    """Write everything except the raw samples, which exist already; returns the page's path."""
    from harness.bench.kernels.figures import pictures
    from harness.report.style import Drawing, pdf_bytes, style, svg_bytes

    table = table_of(rows_of(timings), facts)
    files: dict[str, bytes] = {}
    with style():
        drawn = list(pictures(table, ceilings_of(timings)))
        for picture in drawn:
            if isinstance(picture, Drawing):
                files[f"{picture.name}.svg"] = svg_bytes(picture.figure, picture.name)
                files[f"{picture.name}.pdf"] = pdf_bytes(picture.figure)
                files[f"{picture.name}.csv"] = _csv(picture.data)
    write_files(out / "figures", files)
    svgs = {name.removesuffix(".svg"): data for name, data in files.items() if name.endswith(".svg")}
    page = build_page(table, ceilings_of(timings), drawn, svgs, problems, absent, facts)
    tables = {"kernels.csv": _csv(table), "kernels.parquet": table.to_parquet(index=False)}
    write_files(out, {**tables, "index.html": page.encode()})
    return out / "index.html"


def table_of(rows: Sequence[Row], facts: MadeOn) -> "pd.DataFrame":
    """The rows as a table with exactly the columns of `COLUMNS`."""
    import pandas as pd

    return pd.DataFrame([{**row.flat(), **facts.values()} for row in rows], columns=list(COLUMNS))


def _csv(table: "pd.DataFrame") -> bytes:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()
