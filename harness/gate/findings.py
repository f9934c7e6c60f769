"""The findings of each layer, their verdicts, the gate's answer as text for a terminal and a CI page, and baselines.

There are three verdicts. `inconclusive` is not a pass: this run cannot decide. A baseline is a JSON file in
`results/baselines/`: the figures that were accepted, and on what, why and when they were made.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.config.errors import UserError
from harness.store.atomic import write_files

SHOWN = 40  # findings of a layer that a page lists; the rest are counted
_SCOPE = {
    "resource": "what the compiler makes of each kernel; nothing was timed",
    "latency": "kernels on a GPU, as ratios to yardsticks of the same rounds",
    "policy": "block manager and scheduler, as ratios to the accepted core in the same process",
    "cpu": "attention on this CPU, as ratios to the accepted code in the same process; no GPU figure",
}
LAYERS = tuple(_SCOPE)
_UNDECIDED = (
    "where bounds are wide, run it again on a quieter machine; where a baseline is missing or of other versions, "
    "look at the figures, then accept them with a reason"
)


class GateVerdict(StrEnum):
    """The verdict on a case, a layer or the whole gate. `inconclusive` is no pass: this run cannot decide."""

    passed = "pass"
    inconclusive = "inconclusive"
    regressed = "regressed"


_GRAVITY = (GateVerdict.passed, GateVerdict.inconclusive, GateVerdict.regressed)
# 2 means wrong input
EXIT_CODES = {GateVerdict.passed: 0, GateVerdict.regressed: 1, GateVerdict.inconclusive: 3}


@dataclass(frozen=True)
class Finding:
    """One case of a layer: its name, the verdict, and the reason in a sentence with figures."""

    case: str
    verdict: GateVerdict
    reason: str


@dataclass(frozen=True)
class LayerResult:
    """All findings of a layer, the device or versions they were made on, and remarks that change no verdict."""

    layer: str
    findings: tuple[Finding, ...]
    made_on: str
    remarks: tuple[str, ...] = field(default=())

    @classmethod
    def undecided(cls, layer: str, reason: str, made_on: str, remarks: tuple[str, ...] = ()) -> "LayerResult":
        """One inconclusive finding on the whole layer."""
        return cls(layer, (Finding(layer, GateVerdict.inconclusive, reason),), made_on, remarks)

    @property
    def verdict(self) -> GateVerdict:
        """The gravest verdict of the findings; inconclusive for a layer without findings."""
        return gravest(finding.verdict for finding in self.findings)

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The findings that kept the layer from passing, gravest first."""
        found = (one for one in self.findings if one.verdict is not GateVerdict.passed)
        return tuple(sorted(found, key=lambda one: -_GRAVITY.index(one.verdict)))

    @property
    def shown(self) -> tuple[Finding, ...]:
        """The findings to list: of a layer that times, every ratio with its bounds; else those that did not pass."""
        if self.layer == "resource":
            return self.worst
        return (*self.worst, *(one for one in self.findings if one.verdict is GateVerdict.passed))


def gravest(verdicts: Iterable[GateVerdict]) -> GateVerdict:
    """The gravest of several verdicts; inconclusive if there are none."""
    return max(verdicts, key=_GRAVITY.index, default=GateVerdict.inconclusive)


def lines(results: Sequence[LayerResult], layers: Sequence[str] = LAYERS) -> Iterator[str]:
    """The answer for a terminal. The last line is the verdict on all; it names those of `layers` that did not run."""
    for result in results:
        passed = sum(finding.verdict is GateVerdict.passed for finding in result.findings)
        yield f"{result.layer}: {result.verdict} ({passed} of {len(result.findings)} pass; {result.made_on})"
        yield from (f"  {one.verdict}: {one.case}: {one.reason}" for one in result.shown[:SHOWN])
        yield from _rest(result, "  ")
        yield from (f"  {remark}" for remark in result.remarks)
    whole = gravest(result.verdict for result in results)
    remedy = f"; {_UNDECIDED}" if whole is GateVerdict.inconclusive else ""
    yield f"gate: {whole}{_not_run(results, layers)}{remedy}"


def markdown(
    results: Sequence[LayerResult], layers: Sequence[str] = LAYERS, scopes: Mapping[str, str] = _SCOPE
) -> str:
    """The answer for the page of a CI job: a table of layers, then the cases: every ratio, and what did not pass."""
    whole = gravest(result.verdict for result in results)
    text = [f"## Regression gate: {whole}{_not_run(results, layers)}", ""]
    text += ["| layer | verdict | pass | made on | scope |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        passed = sum(finding.verdict is GateVerdict.passed for finding in result.findings)
        cells = (result.layer, result.verdict, f"{passed}/{len(result.findings)}", result.made_on)
        text.append(f"| {' | '.join(map(_cell, (*cells, scopes[result.layer])))} |")
    for result in results:
        text += _details(result)
    return "\n".join(text) + "\n"


def _details(result: LayerResult) -> list[str]:
    text = ["", *(f"* {remark}" for remark in result.remarks)] if result.remarks else []
    if not result.shown:
        return text
    text += ["", f"### {result.layer}", "", "| case | verdict | why |", "| --- | --- | --- |"]
    text += [f"| {_cell(one.case)} | {one.verdict} | {_cell(one.reason)} |" for one in result.shown[:SHOWN]]
    return [*text, *_rest(result, "\n")]


def _rest(result: LayerResult, before: str) -> Iterator[str]:
    if len(result.shown) > SHOWN:
        yield f"{before}… and {len(result.shown) - SHOWN} more"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _not_run(results: Sequence[LayerResult], layers: Sequence[str]) -> str:
    missing = [layer for layer in layers if layer not in {result.layer for result in results}]
    return f" (not run: {', '.join(missing)})" if missing else ""


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
    if not file.is_file():  # reading a pipe may never end
        raise UserError(f"{file} is no file; {remedy}")
    try:
        found = Baseline(**json.loads(file.read_text(encoding="utf-8")))
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
        reason = "an empty baseline would pass everything"
        raise UserError(f"nothing was measured for the {measured.layer} layer; {reason}")
    made = measured.layer, measured.made_on, measured.kernels, reason.strip()
    return Baseline(*made, datetime.now(UTC).date().isoformat(), measured.cases, measured.environment)


def without_baseline(measured: Measured, folder: Path) -> LayerResult:
    """There is no baseline to compare with."""
    there = sorted(file.stem for file in folder.glob(f"{measured.layer}-*.json"))
    others = f" (there are: {', '.join(there)})" if there else ""
    command = f"gate --layer {measured.layer} --update --reason '…'"
    reason = (
        f"no baseline {measured.file(folder)}{others}; look at the figures, then accept them with {command}"
    )
    made_on = ", ".join(f"{key} {value}" for key, value in measured.made_on.items())
    return LayerResult.undecided(measured.layer, reason, made_on, measured.remarks)


def coverage(measured: Measured, baseline: Baseline) -> Iterator[Finding]:
    """Findings on missing and new cases. A missing case could hide a regression. A renamed one is both."""
    for case in sorted(set(baseline.cases) - set(measured.cases)):
        yield Finding(case, GateVerdict.regressed, "in the baseline, but not run: gone, renamed or skipped")
    for case in sorted(set(measured.cases) - set(baseline.cases)):
        reason = "new: nothing to compare with; accept it with gate --update"
        yield Finding(case, GateVerdict.inconclusive, reason)
    if not measured.cases:
        yield Finding(measured.layer, GateVerdict.regressed, "no case was run")
