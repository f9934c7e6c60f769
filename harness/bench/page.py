"""The folder of results that a run of `bench kernels` writes, and its section in the report of a sweep.

The section warns if the kernels were timed on another device than the sweep, or are not the kernels of this checkout.

kernels.json       every raw sample, as pytest-benchmark writes it
kernels.csv        one row for each case and provider (columns: `harness.cost.timings.COLUMNS`)
kernels.parquet    the same, for cost models and notebooks
figures/           each figure as SVG and PDF, with its data as CSV
index.html         all of it on one page that needs no other file
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bench.results import Problem, ProblemKind, TimingRow, read_problems
from harness.cost.timings import COLUMNS, OURS, Ceilings, KernelRun, KernelRunError, MadeOn, read_run
from harness.report.page import Section, SectionMaker, in_page
from harness.report.study import Study
from harness.report.style import Drawing, Picture, csv_bytes, drawing_files, filled
from harness.report.tables import Table
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

    wrong = [one for one in problems if one.kind is not ProblemKind.unsupported]
    return str(
        filled(
            Path(__file__).with_name("page.html.j2"),
            device=made_on.device,
            facts=facts(limits, made_on),
            complete=not wrong,
            completeness=_completeness(table, wrong),
            scope=scope(table),
            figures=[in_page(picture, svgs) for picture in drawn],
            head=case_head(table),
            rows=list(case_rows(table)),
            notes=[
                *(f"{name} cannot run here: {reason}" for name, reason in absent.items()),
                *(
                    f"{one.provider} does not offer {one.case}: {one.reason}"
                    for one in problems
                    if one not in wrong
                ),
            ],
        )
    )


def scope(table: "pd.DataFrame") -> str:
    """What the times mean, in a sentence."""
    if bool((table["how"] == "CPU time").all()):
        return _CPU
    launched = ", ".join(dict.fromkeys(table.loc[table["how"] != "CUDA graph", "provider"]))
    return _CUDA + (
        f" Launched one by one between the events, not from a graph: {launched}." if launched else ""
    )


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
    cases, providers = table["name"].nunique(), table["provider"].nunique()
    return [f"{cases} cases by {providers} providers were checked and timed.", *map(_line, wrong)]


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
    speed = [f"{row['gbytes_s']:,.1f}", f"{row['tflop_s']:.3g}"]
    return [f"{row['median_us']:,.1f}", f"{row['spread']:.1%}", *speed, *shares]


def _ratio(row: Any) -> str:
    if row is None:
        return "–"
    ratio = row["against_ours"]
    return f"{ratio:.2f} ×" if ratio == ratio and ratio is not None else f"{row['median_us']:,.1f} µs"


def printed(table: "pd.DataFrame") -> str:
    """The same for the console: a line a case."""
    import pandas as pd

    return pd.DataFrame(list(case_rows(table)), columns=case_head(table)).to_string(index=False)


def write_run(
    table: "pd.DataFrame",
    limits: Ceilings,
    problems: Sequence[Problem],
    absent: Mapping[str, str],
    facts: MadeOn,
    out: Path,
) -> Path:
    """Write everything except the raw samples, which exist already; returns the page's path."""
    from harness.bench.figures import pictures
    from harness.report.style import style

    files: dict[str, bytes] = {}
    with style():
        drawn = list(pictures(table, limits))
        for picture in drawn:
            if isinstance(picture, Drawing):
                files |= drawing_files(picture, digits=6)
    write_files(out / "figures", files)
    svgs = {name.removesuffix(".svg"): data for name, data in files.items() if name.endswith(".svg")}
    page = build_page(table, limits, drawn, svgs, problems, absent, facts)
    tables = {"kernels.csv": csv_bytes(table, digits=6), "kernels.parquet": table.to_parquet(index=False)}
    write_files(out, {**tables, "index.html": page.encode()})
    return out / "index.html"


def table_of(rows: Sequence[TimingRow], facts: MadeOn) -> "pd.DataFrame":
    """The rows as a table with exactly the columns of `COLUMNS`."""
    import pandas as pd

    return pd.DataFrame([{**row.flat(), **facts.values()} for row in rows], columns=list(COLUMNS))


KEY, TITLE = "kernels", "Attention kernels, timed alone"


def kernel_section(named: Path | str) -> SectionMaker:
    """The section for the run in a folder. If the run cannot be read, the section says so and the report goes on."""

    def make(study: Study) -> Section:
        try:
            run = read_run(named)
        except KernelRunError as error:
            return Section(KEY, TITLE, warnings=[f"The kernel benchmark cannot be shown: {error}"])
        return _section(run, study)

    return make


def mismatches(run: KernelRun, study: Study) -> list[str]:
    """Reasons why the figures may not apply to the sweep: another device, or other kernel sources than these."""
    return [*_elsewhere(run, study), *_stale(run)]


def _section(run: KernelRun, study: Study) -> Section:
    import pandas as pd

    from harness.bench.figures import pictures

    table = pd.DataFrame(list(run.rows))
    made_on, (wrong, lost) = run.made_on, _wrong(run)
    rows = [["device", made_on.device], *([key, value] for key, value in facts(run.ceilings, made_on))]
    cases = list(case_rows(table))
    title = f"All {len(cases):,} cases: our own time and speed, then every other provider's time over ours"
    return Section(
        KEY,
        TITLE,
        warnings=[*mismatches(run, study), *lost, *(_line(one) for one in wrong if one.provider == OURS)],
        # Relative to the results, so that it stays valid if both are moved together.
        text=[f"Results of bench kernels in {os.path.relpath(run.file.parent, study.root)}. {scope(table)}"],
        pictures=list(pictures(table, run.ceilings)),
        tables=[Table(["", ""], rows, words=2), Table(case_head(table), cases, title=title, folded=True)],
        notes=[_line(one) for one in wrong if one.provider != OURS],
    )


def _wrong(run: KernelRun) -> tuple[list[Problem], list[str]]:
    """The errors of the providers, and a warning if they cannot be read."""
    file = run.file.parent / "problems.jsonl"
    try:
        found = read_problems(file)
    except (OSError, ValueError, TypeError, KeyError) as error:
        return [], [f"{file.name} cannot be read ({error}): what failed is not known."]
    return [one for one in found if one.kind is not ProblemKind.unsupported], []


def _line(one: Problem) -> str:
    return f"{one.kind}: {one.case} by {one.provider}: {one.reason}"


def _elsewhere(run: KernelRun, study: Study) -> Iterator[str]:
    named = (record.environment.get("device") for record in study.measured)
    ran = list(dict.fromkeys(str(name) for name in named if name))
    others = [name for name in run.devices if name not in ran] if ran else _not_predicted(run, study)
    if others:
        what = f"the sweep ran on {', '.join(ran)}" if ran else f"the sweep predicts {_predicted(study)[0]}"
        yield (
            f"Another device: these kernels were timed on {', '.join(others)}, {what}. "
            "Their figures say nothing about the sweep's times."
        )


def _predicted(study: Study) -> list[str]:
    """The simulated devices: names of options of the group `device`."""
    names = (record.setting("device.name") for record in study.records)
    return list(dict.fromkeys(str(name) for name in names if name is not None))


def _not_predicted(run: KernelRun, study: Study) -> list[str]:
    """Devices of the run that no simulated device stands for. The preset `h200` stands for 'NVIDIA H200'."""
    from harness.twin.configured import preset_of_device

    wanted = _predicted(study)
    on_cpu = {str(row["device"]) for row in run.rows if row["how"] == "CPU time"}
    known = {name for name in run.devices if preset_of_device(name) in wanted}
    known |= on_cpu if "cpu" in wanted else set()
    return [name for name in run.devices if wanted and name not in known]


def _stale(run: KernelRun) -> Iterator[str]:
    from harness.environment import kernel_digest

    found, here = run.made_on.kernels, kernel_digest()
    if found != here:
        yield f"Other kernels: these figures are of kernel sources {found}, this tree's are {here}. Time them again."
