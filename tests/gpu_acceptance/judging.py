"""The goals of a part, judged by the files in its folder.

The files hold results of the tests and of the memory checker, timed kernels, decode steps, sweeps, and the trial of
the latency gate.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_acceptance.contact import lines
from gpu_acceptance.goals import BASELINES, ERRORS, GOALS, SWEEPS, Found, Judged, missing
from gpu_acceptance.kernel_goals import kernel_findings, timed_cases
from harness.cost.grid import DECODE_AXES, PREFILL_AXES, Grid, grid_errors
from harness.metrics.record import PointRecord
from harness.metrics.verdict import judge
from harness.store.commit import read_store

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
MODELS = ("1b", "8b")
OURS, PEER = "pagetwin", "transformers_cb"


def test_findings(*files: Path) -> Found:
    """From the lines of `gpu_acceptance.stream`: failed tests. Skipped ones are counted: they prove nothing."""
    known = [line for file in files for line in lines(file)]
    outcomes = {line["test"]: line["outcome"] for line in known if "test" in line}  # the last of a test
    failed, skipped = (sum(one == name for one in outcomes.values()) for name in ("failed", "skipped"))
    if len(outcomes) == skipped:
        return missing(f"none of {skipped} tests ran" if known else "the tests did not finish")
    cut = sum(file.exists() for file in files) - sum("ended" in line for line in known)
    return Found(failed + cut, f"of {len(outcomes)}, {skipped} skipped" + (", cut off" if cut else ""))


def memcheck_findings(file: Path) -> Found:
    """From the log of compute-sanitizer: the errors of all processes that it watched."""
    if not file.exists():
        return missing("compute-sanitizer did not run")
    counts = [int(found) for found in _SUMMARY.findall(file.read_text(encoding="utf-8", errors="replace"))]
    if not counts:
        return missing(f"{file.name} has no summary: the checker did not finish")
    return Found(sum(counts), f"{len(counts)} processes")


def engine_findings(out: Path) -> dict[str, Found]:
    """The findings of the part `engine` by goal, from the files `<model>.json` of `gpu_acceptance.decoding`."""
    found: dict[str, Found] = {}
    for model in MODELS:
        file = out / f"{model}.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found |= _of_model(model, document)
    return found


def _of_model(model: str, document: Mapping[str, Any]) -> dict[str, Found]:
    recorded = [row for row in document.get("steps", ()) if row["graphs"]]
    largest = max(recorded, key=lambda row: int(row["batch"]), default=None)
    return {
        f"host_{model}": _worst_host_share(recorded),
        f"tokens_{model}": _of_largest(largest, "tokens_s", 1.0),
        f"bytes_{model}": _of_largest(largest, "bytes_s", 1e9),
        f"peer_{model}": _peer(document.get("peers", ())),
    }


def _worst_host_share(rows: Sequence[Mapping[str, Any]]) -> Found:
    known = [row for row in rows if row["host_share"] is not None]
    if not known:
        return missing("no decode step was measured with its device time")
    worst = max(known, key=lambda row: float(row["host_share"]))
    return Found(float(worst["host_share"]), f"batch {worst['batch']}, of {len(known)} batch sizes")


def _of_largest(row: Mapping[str, Any] | None, figure: str, unit: float) -> Found:
    if row is None:
        return missing("no decode step was measured")
    value = float(row[figure]) / unit
    return Found(
        round(value, 1),
        f"batch {row['batch']}, {row['context']} tokens each, {1e3 * row['step_s']:.2f} ms a step",
    )


def _peer(rows: Sequence[Mapping[str, Any]]) -> Found:
    rates = {row["name"]: row for row in rows}
    ours, theirs = rates.get(OURS), rates.get(PEER)
    failed = next((row for row in (ours, theirs) if row and row.get("error")), None)
    if failed:
        return missing(f"{failed['name']}: {failed['error']}")
    if not (ours and theirs):
        return missing("the peer did not run")
    return Found(
        ours["tokens_s"] / theirs["tokens_s"], f"{ours['tokens_s']:.0f} and {theirs['tokens_s']:.0f} tokens/s"
    )


def prediction_findings(out: Path) -> dict[str, Found]:
    """The findings of the part `prediction` by goal."""
    found: dict[str, Found] = {}
    for sweep, _ in SWEEPS:
        found |= _errors(sweep, list(read_store(out / sweep).records.values()))
    found["kernel"] = _kernel(out / "calibration")
    found |= _ratios(list(read_store(out / "contiguous").records.values()))
    return found | _gate(out / "gate.json")


def _errors(sweep: str, records: list[PointRecord]) -> dict[str, Found]:
    """The median error over the sweep's points, with the worst point."""
    names = [name for name, _, _ in ERRORS]
    verdicts = {one.metric.name: one for one in judge(records, names).metrics} if records else {}
    found = {}
    for name in names:
        one = verdicts.get(name)
        found[f"{sweep}_{name}"] = (
            Found(one.median_error, f"{one.points} points, worst {one.worst_error:+.1%} at {one.worst_point}")
            if one
            else missing("no point of this sweep was measured")
        )
    return found


def _kernel(folder: Path) -> Found:
    """The error of attention at shapes that were left out of the grid and interpolated, on the worst axis."""
    errors: dict[str, Mapping[str, float]] = {}
    for file in sorted(folder.glob("*.json")):
        grids = json.loads(file.read_text(encoding="utf-8")).get("grids") or {}
        for part, section in grids.items():
            errors |= grid_errors(
                part, Grid.of_section(section), DECODE_AXES if part == "decode" else PREFILL_AXES
            )
    errors = {name: error for name, error in errors.items() if error["mape"] == error["mape"]}
    if not errors:
        return missing("no calibration with a grid of attention")
    worst = max(errors, key=lambda name: errors[name]["mape"])
    return Found(errors[worst]["mape"], f"{worst}, {errors[worst]['n']:.0f} shapes")


def _ratios(records: list[PointRecord]) -> dict[str, Found]:
    rates = {record.pool["policy"]: _throughput(record) for record in records}
    paged = rates.get("paged")
    return {f"ratio_{policy}": _ratio(paged, rates.get(policy)) for policy in BASELINES}


def _ratio(paged: float | None, other: float | None) -> Found:
    if not (paged and other):
        return missing("both policies must be measured")
    return Found(paged / other, f"{paged:.0f} and {other:.0f} output tokens/s")


def _throughput(record: PointRecord) -> float | None:
    return record.measured["median"].get("output_throughput") if record.measured else None


def _gate(file: Path) -> dict[str, Found]:
    if not file.exists():
        return dict.fromkeys(("gate_alarms", "gate_caught"), missing("the trial of the gate did not finish"))
    trial: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    alarms, planted, caught = trial["alarms"], trial["planted"], trial["caught"]
    unsure = f", {len(trial['inconclusive'])} inconclusive" if trial["inconclusive"] else ""
    return {
        "gate_alarms": Found(len(alarms), f"of {trial['cases']} ratios{unsure}"),
        "gate_caught": Found(caught / planted, f"{caught} of {planted} ratios")
        if planted
        else missing("nothing planted"),
    }


def judge_part(part: str, out: Path) -> list[Judged]:
    """Every goal of a part, measured or not, in the order of `GOALS`."""
    found = _FINDERS[part](out)
    return [Judged(goal, found.get(goal.key, missing("not measured"))) for goal in GOALS[part]]


def _kernels(out: Path) -> dict[str, Found]:
    checks = {
        "tests": test_findings(*(out / f"{name}.jsonl" for name in ("tests", "hopper"))),
        "memcheck": memcheck_findings(out / "memcheck.txt"),
    }
    return checks | kernel_findings(timed_cases(out))


_FINDERS: Mapping[str, Callable[[Path], dict[str, Found]]] = {
    "quick": _kernels,
    "kernels": _kernels,
    "engine": engine_findings,
    "prediction": prediction_findings,
}
