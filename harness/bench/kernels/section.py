"""The section on kernels in the report of a sweep.

It warns if the kernels were timed on another device than the sweep, or are not the kernels of this checkout.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from harness.bench.kernels.results import Problem, ProblemKind, read_problems
from harness.cost.timings import OURS, KernelRun, KernelRunError, read_run
from harness.report.page import ExtraSection, SectionMaker
from harness.report.study import Study
from harness.report.tables import Table

if TYPE_CHECKING:
    import pandas as pd


KEY, TITLE = "kernels", "Attention kernels, timed alone"


def kernel_section(named: Path | str) -> SectionMaker:
    """The section for the run in a folder. If the run cannot be read, the section says so and the report goes on."""

    def make(study: Study) -> ExtraSection:
        try:
            run = read_run(named)
        except KernelRunError as error:
            return ExtraSection(KEY, TITLE, warnings=[f"The kernel benchmark cannot be shown: {error}"])
        return _section(run, study)

    return make


def mismatches(run: KernelRun, study: Study) -> list[str]:
    """Reasons why the figures may not apply to the sweep: another device, or other kernel sources than these."""
    return [*_elsewhere(run, study), *_stale(run)]


def _section(run: KernelRun, study: Study) -> ExtraSection:
    import pandas as pd

    from harness.bench.kernels.figures import pictures
    from harness.bench.kernels.page import facts, scope

    table = pd.DataFrame(list(run.rows))
    made_on, (wrong, lost) = run.made_on, _wrong(run)
    rows = [["device", made_on.device], *([key, value] for key, value in facts(run.ceilings, made_on))]
    return ExtraSection(
        KEY,
        TITLE,
        warnings=[*mismatches(run, study), *lost, *(_line(one) for one in wrong if one.provider == OURS)],
        text=[f"Results of bench kernels in {_place(run, study)}. {scope(table)}"],
        pictures=list(pictures(table, run.ceilings)),
        tables=[Table(["", ""], rows, words=2), _cases(table)],
        notes=[_line(one) for one in wrong if one.provider != OURS],
    )


def _place(run: KernelRun, study: Study) -> str:
    """The run's folder relative to the results. It stays valid if both are moved together."""
    return os.path.relpath(run.file.parent, study.root)


def _cases(table: "pd.DataFrame") -> Table:
    from harness.bench.kernels.page import case_head, case_rows

    rows = list(case_rows(table))
    title = f"All {len(rows):,} cases: our own time and speed, then every other provider's time over ours"
    return Table(case_head(table), rows, title=title, folded=True)


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
    ran = _measured_on(study)
    others = [name for name in run.devices if name not in ran] if ran else _not_predicted(run, study)
    if others:
        what = f"the sweep ran on {', '.join(ran)}" if ran else f"the sweep predicts {_predicted(study)[0]}"
        yield (
            f"Another device: these kernels were timed on {', '.join(others)}, {what}. "
            "Their figures say nothing about the sweep's times."
        )


def _measured_on(study: Study) -> list[str]:
    """The devices of the sweep's measured points; none where nothing was measured."""
    named = ((record.get("environment") or {}).get("device") for record in study.measured)
    return list(dict.fromkeys(str(name) for name in named if name))


def _predicted(study: Study) -> list[str]:
    """The simulated devices: names of options of the group `device`."""
    sections = (((record.get("config") or {}).get("device") or {}) for record in study.records)
    return list(dict.fromkeys(str(section["name"]) for section in sections if "name" in section))


def _not_predicted(run: KernelRun, study: Study) -> list[str]:
    """Devices of the run that no simulated device stands for. The option `h200` stands for 'NVIDIA H200'."""
    words = [re.split(r"[-_ ]", name.lower())[0] for name in _predicted(study)]
    on_cpu = {str(row["device"]) for row in run.rows if row["how"] == "CPU time"}
    known = {name for name in run.devices for word in words if word in name.lower()}
    known |= on_cpu if "cpu" in words else set()
    return [name for name in run.devices if words and name not in known]


def _stale(run: KernelRun) -> Iterator[str]:
    from harness.environment import kernel_digest

    found, here = run.made_on.kernels, kernel_digest()
    if found != here:
        yield f"Other kernels: these figures are of kernel sources {found}, this tree's are {here}. Time them again."
