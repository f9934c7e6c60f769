"""The findings of each layer, their verdicts, and the gate's answer as text for a terminal and a CI page.

There are three verdicts. `inconclusive` is not a pass: this run cannot decide.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from harness.gate import LAYERS

SHOWN = 40  # findings of a layer that a page lists; the rest are counted
_SCOPE = {
    "resource": "what the compiler makes of each kernel; nothing was timed",
    "latency": "kernels on a GPU, as ratios to yardsticks of the same rounds",
    "policy": "block manager and scheduler, as ratios to loops of the same process",
    "cpu": "attention on this CPU, as ratios to the accepted code in the same process; no GPU figure",
}


class Verdict(StrEnum):
    """The verdict on a case, a layer or the whole gate. `inconclusive` is no pass: this run cannot decide."""

    passed = "pass"
    inconclusive = "inconclusive"
    regressed = "regressed"


_GRAVITY = (Verdict.passed, Verdict.inconclusive, Verdict.regressed)
EXIT_CODES = {Verdict.passed: 0, Verdict.regressed: 1, Verdict.inconclusive: 3}  # 2 means wrong input


@dataclass(frozen=True)
class Finding:
    """One case of a layer: its name, the verdict, and the reason in a sentence with figures."""

    case: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class LayerResult:
    """All findings of a layer, the device or versions they were made on, and remarks that change no verdict."""

    layer: str
    findings: tuple[Finding, ...]
    made_on: str
    remarks: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """The gravest verdict of the findings; inconclusive for a layer without findings."""
        return gravest(finding.verdict for finding in self.findings)

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The findings that kept the layer from passing, gravest first."""
        found = [finding for finding in self.findings if finding.verdict is not Verdict.passed]
        return tuple(sorted(found, key=lambda finding: -_GRAVITY.index(finding.verdict)))

    @property
    def shown(self) -> tuple[Finding, ...]:
        """The findings to list: of a layer that times, every ratio with its bounds; else those that did not pass."""
        if self.layer == "resource":
            return self.worst
        passed = [finding for finding in self.findings if finding.verdict is Verdict.passed]
        return (*self.worst, *passed)


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The gravest of several verdicts; inconclusive if there are none."""
    return max(verdicts, key=_GRAVITY.index, default=Verdict.inconclusive)


def lines(results: Sequence[LayerResult]) -> Iterator[str]:
    """The answer for a terminal. The verdict of the whole gate is the last line."""
    for result in results:
        passed = sum(finding.verdict is Verdict.passed for finding in result.findings)
        yield f"{result.layer}: {result.verdict} ({passed} of {len(result.findings)} pass; {result.made_on})"
        yield from (
            f"  {finding.verdict}: {finding.case}: {finding.reason}" for finding in result.shown[:SHOWN]
        )
        yield from _rest(result, "  ")
        yield from (f"  {remark}" for remark in result.remarks)
    yield f"gate: {gravest(result.verdict for result in results)}{_not_run(results)}"


def markdown(results: Sequence[LayerResult]) -> str:
    """The answer for the page of a CI job: a table of layers, then the cases: every ratio, and what did not pass."""
    whole = gravest(result.verdict for result in results)
    text = [
        f"## Regression gate: {whole}{_not_run(results)}",
        "",
        "| layer | verdict | pass | made on | scope |",
    ]
    text.append("| --- | --- | --- | --- | --- |")
    for result in results:
        passed = sum(finding.verdict is Verdict.passed for finding in result.findings)
        cells = (result.layer, result.verdict, f"{passed}/{len(result.findings)}", result.made_on)
        text.append(f"| {' | '.join(map(_cell, (*cells, _SCOPE[result.layer])))} |")
    for result in results:
        text += _details(result)
    return "\n".join(text) + "\n"


def _details(result: LayerResult) -> list[str]:
    text = [f"* {remark}" for remark in result.remarks]
    if text:
        text.insert(0, "")
    if not result.shown:
        return text
    text += ["", f"### {result.layer}", "", "| case | verdict | why |", "| --- | --- | --- |"]
    text += [_row(finding) for finding in result.shown[:SHOWN]]
    return [*text, *_rest(result, "\n")]


def _rest(result: LayerResult, before: str) -> Iterator[str]:
    if len(result.shown) > SHOWN:
        yield f"{before}… and {len(result.shown) - SHOWN} more"


def _row(finding: Finding) -> str:
    return f"| {_cell(finding.case)} | {finding.verdict} | {_cell(finding.reason)} |"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _not_run(results: Sequence[LayerResult]) -> str:
    missing = [layer for layer in LAYERS if layer not in {result.layer for result in results}]
    return f" (not run: {', '.join(missing)})" if missing else ""
