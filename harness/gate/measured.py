"""What a layer measured, and the part of its verdict that is the same for every layer: coverage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config.errors import UserError
from harness.gate.baseline import Baseline
from harness.gate.finding import Finding, Verdict


@dataclass(frozen=True)
class Measured:
    """One run of a layer.

    `name` is the baseline's file name without its ending; `cases` are plain values, as they go into a baseline;
    `kernels` the digest of the kernel sources where the layer depends on them; the rest is as in `Baseline`.
    """

    layer: str
    name: str
    made_on: Mapping[str, Any]
    kernels: str | None
    cases: Mapping[str, Any]
    environment: Mapping[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def file(self, folder: Path) -> Path:
        """Where its baseline is."""
        return folder / f"{self.name}.json"


def accepted(measured: Measured, reason: str) -> Baseline:
    """What was measured, as a baseline of today.

    Raises:
        UserError: there is no reason, or nothing was measured.
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
    """There is nothing to compare with, which is no pass."""
    there = sorted(file.stem for file in folder.glob(f"{measured.layer}-*.json"))
    others = f" (there are: {', '.join(there)})" if there else ""
    return Finding(
        measured.layer,
        Verdict.inconclusive,
        f"no baseline {measured.file(folder)}{others}; look at the figures, then accept them with "
        f"gate --layer {measured.layer} --update --reason '…'",
    )


def coverage(measured: Measured, baseline: Baseline) -> Iterator[Finding]:
    """A case that is gone could hide a regression; a renamed one is gone and new."""
    for case in sorted(set(baseline.cases) - set(measured.cases)):
        yield Finding(case, Verdict.regressed, "in the baseline, but not run: removed, renamed or skipped")
    for case in sorted(set(measured.cases) - set(baseline.cases)):
        yield Finding(
            case, Verdict.inconclusive, "new: nothing to compare with; accept it with gate --update"
        )
    if not measured.cases:
        yield Finding(measured.layer, Verdict.regressed, "no case was run")
