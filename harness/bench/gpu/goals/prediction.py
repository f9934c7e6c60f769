"""What calibration, sweeps and the trial of the gate say about the goals."""

import json
from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

from harness.bench.gpu.goals.goal import Found, missing
from harness.bench.gpu.goals.listed import BASELINES, ERRORS, SWEEPS
from harness.compare import judge
from harness.sim.table import Grid
from harness.sim.table_errors import DECODE_AXES, PREFILL_AXES, grid_errors
from harness.store.reading import Record, read_store


def prediction_findings(out: Path) -> dict[str, Found]:
    """By goal: what was found."""
    found: dict[str, Found] = {}
    for sweep, _ in SWEEPS:
        found |= _errors(sweep, list(read_store(out / sweep).records.values()))
    found["kernel"] = _kernel(out / "calibration")
    found |= _ratios(list(read_store(out / "contiguous").records.values()))
    return found | _gate(out / "gate.json")


def _errors(sweep: str, records: list[Record]) -> dict[str, Found]:
    """The median over the sweep's points, the worst point beside it."""
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
    """Attention in shapes that were left out of the grid and interpolated: the axis on which that is worst."""
    errors: dict[str, Mapping[str, float]] = {}
    for file in sorted(folder.glob("*.json")):
        grids = json.loads(file.read_text(encoding="utf-8")).get("grids") or {}
        for part, section in grids.items():
            errors |= grid_errors(part, _grid(section), DECODE_AXES if part == "decode" else PREFILL_AXES)
    errors = {name: error for name, error in errors.items() if error["mape"] == error["mape"]}
    if not errors:
        return missing("no calibration with a grid of attention")
    worst = max(errors, key=lambda name: errors[name]["mape"])
    return Found(errors[worst]["mape"], f"{worst}, {errors[worst]['n']:.0f} shapes")


def _grid(section: Mapping[str, Any]) -> Grid:
    """A cell that was not measured is null in the file."""
    cells = tuple(tuple(nan if cell is None else float(cell) for cell in row) for row in section["seconds"])
    return Grid(tuple(section["across"]), tuple(section["along"]), cells)


def _ratios(records: list[Record]) -> dict[str, Found]:
    rates = {record["pool"]["policy"]: _throughput(record) for record in records}
    paged = rates.get("paged")
    return {f"ratio_{policy}": _ratio(paged, rates.get(policy)) for policy in BASELINES}


def _ratio(paged: float | None, other: float | None) -> Found:
    if not (paged and other):
        return missing("both policies must be measured")
    return Found(paged / other, f"{paged:.0f} and {other:.0f} output tokens/s")


def _throughput(record: Record) -> float | None:
    measured = record.get("measured")
    return measured["median"].get("output_throughput") if measured else None


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
