"""The gate's answer in words: lines for a terminal and Markdown for a CI job's page."""

from collections.abc import Iterator, Sequence

from harness.gate import LAYERS
from harness.gate.finding import Finding, LayerResult, Verdict, gravest

SHOWN = 40  # findings of a layer that a page lists; the rest are counted

_SCOPE = {
    "resource": "what the compiler makes of each kernel; nothing was timed",
    "latency": "kernels on a GPU, as ratios to yardsticks of the same rounds",
    "policy": "block manager, scheduler and CPU attention, as ratios to loops of the same process",
}


def lines(results: Sequence[LayerResult]) -> Iterator[str]:
    """The answer for a terminal, the whole verdict last."""
    for result in results:
        passed = sum(finding.verdict is Verdict.passed for finding in result.findings)
        yield f"{result.layer}: {result.verdict} ({passed} of {len(result.findings)} pass; {result.made_on})"
        yield from (
            f"  {finding.verdict}: {finding.case}: {finding.reason}" for finding in result.worst[:SHOWN]
        )
        yield from _rest(result, "  ")
        yield from (f"  {remark}" for remark in result.remarks)
    yield f"gate: {gravest(result.verdict for result in results)}{_not_run(results)}"


def markdown(results: Sequence[LayerResult]) -> str:
    """The answer for a job page: a table of layers, then what did not pass."""
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
    if not result.worst:
        return text
    text += ["", f"### {result.layer}", "", "| case | verdict | why |", "| --- | --- | --- |"]
    text += [_row(finding) for finding in result.worst[:SHOWN]]
    return [*text, *_rest(result, "\n")]


def _rest(result: LayerResult, before: str) -> Iterator[str]:
    if len(result.worst) > SHOWN:
        yield f"{before}… and {len(result.worst) - SHOWN} more"


def _row(finding: Finding) -> str:
    return f"| {_cell(finding.case)} | {finding.verdict} | {_cell(finding.reason)} |"


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _not_run(results: Sequence[LayerResult]) -> str:
    missing = [layer for layer in LAYERS if layer not in {result.layer for result in results}]
    return f" (not run: {', '.join(missing)})" if missing else ""
