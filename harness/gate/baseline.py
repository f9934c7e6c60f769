"""Baselines: the figures of a run, the figures accepted earlier, and the check that every case was run.

A baseline is a JSON file in `results/baselines/`. It records on what, why and when it was made.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config.errors import UserError
from harness.gate.findings import Finding, Verdict
from harness.store.atomic import write_files

FORMAT = 1


@dataclass(frozen=True)
class Baseline:
    """The accepted figures of a layer: `cases` by name, with reason and date.

    `made_on` holds what a comparison depends on (compiler or device, packages). `environment` holds further facts.
    `kernels` is the digest of the kernel sources; None where the layer does not depend on them.
    """

    layer: str
    made_on: Mapping[str, Any]
    kernels: str | None
    reason: str
    date: str
    cases: Mapping[str, Any]
    environment: Mapping[str, Any]
    format: int = FORMAT


def read_baseline(
    file: Path, layer: str, remedy: str = "write it again with gate --update"
) -> Baseline | None:
    """The baseline in `file`; None if the file does not exist.

    Raises:
        UserError: the file is not a baseline of this layer.
    """
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = Baseline(**content)
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is no baseline: {error}; {remedy}") from error
    if (found.layer, found.format) != (layer, FORMAT):
        held = f"layer {found.layer!r}, format {found.format}"
        raise UserError(f"{file} holds a baseline of {held}; expected {layer!r}, format {FORMAT}; {remedy}")
    return found


def write_baseline(file: Path, baseline: Baseline) -> None:
    """Write the file completely or not at all. Cases are sorted, so that a diff of the file is readable."""
    text = json.dumps(asdict(baseline), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_files(file.parent, {file.name: text.encode()})


@dataclass(frozen=True)
class Measured:
    """One run of a layer.

    `name` is the baseline's file name without its suffix. `cases` are plain values, as a baseline keeps them. The other
    fields are as in `Baseline`.
    """

    layer: str
    name: str
    made_on: Mapping[str, Any]
    kernels: str | None
    cases: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def file(self, folder: Path) -> Path:
        """The file of the baseline in `folder`."""
        return folder / f"{self.name}.json"


def new_baseline(measured: Measured, reason: str) -> Baseline:
    """A baseline of today from what was measured.

    Raises:
        UserError: the reason is empty, or nothing was measured.
    """
    if not reason.strip():
        raise UserError("a new baseline needs a reason: gate --update --reason 'why the figures may change'")
    if not measured.cases:
        raise UserError(
            f"nothing was measured for the {measured.layer} layer; an empty baseline would pass everything"
        )
    return Baseline(
        layer=measured.layer,
        made_on=measured.made_on,
        kernels=measured.kernels,
        reason=reason.strip(),
        date=datetime.now(UTC).date().isoformat(),
        cases=measured.cases,
        environment=measured.environment,
    )


def without_baseline(measured: Measured, folder: Path) -> Finding:
    """The finding that there is no baseline to compare with: inconclusive."""
    there = sorted(file.stem for file in folder.glob(f"{measured.layer}-*.json"))
    others = f" (there are: {', '.join(there)})" if there else ""
    return Finding(
        measured.layer,
        Verdict.inconclusive,
        f"no baseline {measured.file(folder)}{others}; look at the figures, then accept them with "
        f"gate --layer {measured.layer} --update --reason '…'",
    )


def coverage(measured: Measured, baseline: Baseline) -> Iterator[Finding]:
    """Findings on missing and new cases. A missing case could hide a regression. A renamed one is both."""
    for case in sorted(set(baseline.cases) - set(measured.cases)):
        yield Finding(case, Verdict.regressed, "in the baseline, but not run: removed, renamed or skipped")
    for case in sorted(set(measured.cases) - set(baseline.cases)):
        yield Finding(
            case, Verdict.inconclusive, "new: nothing to compare with; accept it with gate --update"
        )
    if not measured.cases:
        yield Finding(measured.layer, Verdict.regressed, "no case was run")
