"""The scoreboard's tables: published runs, decode attention, and deployments of the user's, each as rows of a CSV."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind
from harness.deployment.configured import configured
from harness.deployment.fit import fit_device
from harness.deployment.prediction import Errors, errors_of, predictor
from harness.deployment.reading import read_deployment
from harness.scoreboard.attention import (
    GPUS,
    OTHER_KERNELS,
    SAME_KERNELS,
    held_out,
    package_errors,
    read_timings,
    transfer_errors,
)
from harness.scoreboard.published_runs import read_runs, reason_of, sample, simulated

KINDS = (CostKind.roofline, CostKind.published)
Row = dict[str, Any]
Say = Callable[[str], None]


def run_rows(each: int, say: Say) -> tuple[list[Row], Counter[str]]:
    """The errors of both cost models on published runs, and how many rows of the file are not simulated, by reason.

    `each` runs of every model, engine, device and precision; 0 takes all. An error is predicted / measured - 1. The
    measured values stand in the package alone.
    """
    runs, reasons = read_runs()
    chosen = sample(runs, each)
    reasons["left out by the sampling"] = len(runs) - len(chosen)
    rows: list[Row] = []
    for place, run in enumerate(chosen):
        for kind in KINDS:
            row: Row = {
                "run": run.name,
                "model": run.model,
                "engine": run.engine,
                "device": run.system,
                "precision": run.precision,
                "devices": run.parallel,
                "isl": run.isl,
                "osl": run.osl,
                "users": run.users,
                "cost": str(kind),
            }
            try:
                found = simulated(run, kind)
            except ConfigError as error:
                rows.append(row | {"not priced": reason_of(error)})
                continue
            rows.append(
                row
                | {
                    "ttft_ms": round(found.ttft_ms, 2),
                    "tpot_ms": round(found.tpot_ms, 3),
                    "ttft_error": round(found.ttft_ms / run.ttft_ms - 1, 4),
                    "tpot_error": round(found.tpot_ms / run.tpot_ms - 1, 4),
                }
            )
        say(f"{place + 1} of {len(chosen)}: {run.model}, {run.engine}, {run.system}")
    return rows, reasons


def attention_rows() -> list[Row]:
    """Held-out errors of tables by GPU and axis, and errors of the forms on GPUs that their fit has not seen."""
    tables = {gpu.system: read_timings(gpu) for gpu in GPUS}
    rows: list[Row] = []
    for system, table in tables.items():
        for by_ratio, how in ((True, "ratio to the form"), (False, "time on logarithms")):
            for axis, error in held_out(table, by_ratio=by_ratio).items():
                rows.append(_attention_row("held out", system, f"{axis}; {how}", error))
    for gpu in GPUS:
        for axis, error in package_errors(gpu).items():
            rows.append(
                _attention_row("held out", gpu.system, f"{axis}; the package (cost=published)", error)
            )
    for test, transfers in (("another GPU", SAME_KERNELS), ("other kernels", OTHER_KERNELS)):
        for known, other in transfers:
            for form, error in transfer_errors([tables[name] for name in known], tables[other]).items():
                rows.append(_attention_row(test, other, f"{form}, from {' + '.join(known)}", error))
    return rows


def _attention_row(what: str, system: str, how: str, error: Mapping[str, float]) -> Row:
    numbers = {name: round(error[name], 4) for name in ("mape", "bias", "p95", "max")}
    return {"test": what, "device": system, "how": how, "n": int(error["n"]), **numbers}


def deployment_rows(folders: Sequence[str], overrides: Sequence[str], say: Say) -> list[Row]:
    """The errors on logs of the user's: both cost models without a fit, and the roofline fitted to a first part.

    `overrides` say what the logs do not, as device=h100.
    """
    rows: list[Row] = []
    for folder in folders:
        deployment = read_deployment(Path(folder).expanduser())
        for kind in KINDS:
            row: Row = {"deployment": deployment.name, "cost": str(kind), "fit": "none"}
            try:
                config = configured(deployment, overrides).config
                config = replace(config, cost=replace(config.cost, kind=kind))
                found = predictor(config, deployment.workload)(config.device)
            except (ConfigError, UserError) as error:
                rows.append(row | {"not priced": str(error)[:160]})
                continue
            rows.append(row | _errors(errors_of(found, deployment, slice(0, None))))
            if kind is CostKind.roofline:
                fit = fit_device(deployment, config)
                rows.append(
                    row | {"fit": f"first {fit.fitted_on}; errors of the others"} | _errors(fit.held_out)
                )
        say(f"deployment {deployment.name}")
    return rows


def _errors(errors: Errors) -> Row:
    names = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
    return {"requests": errors.requests, **{name: round(getattr(errors, name), 4) for name in names}}


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV; the columns are those of all rows, in the order in which they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def counted(reasons: Mapping[str, int]) -> Iterable[Row]:
    """Reasons with their counts, the most frequent first."""
    return [{"reason": name, "rows": count} for name, count in Counter(reasons).most_common() if count]
