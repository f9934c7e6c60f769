"""Calibrations on disk: one file for each model, engine and device, named by its fingerprint. No torch here."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.runtime.models.spec import checkpoint_stamp
from harness.cost.fitted import ATTENTION, REST, FittedCost
from harness.cost.grid import DECODE_AXES, GRID_BLOCK_SIZE, PREFILL_AXES, Grid, grid_errors
from harness.cost.table import TableCost
from harness.environment import code_version, engine_code, versions
from harness.replay.cost_model import CostSource
from harness.replay.features import FEATURES
from harness.store.atomic import write_files
from harness.workload.deployment import Deployment

CODE = (  # packages that step times depend on
    "engine",
    "paged_kernels",
    "traces",
    *(f"harness.{name}" for name in ("replay", "cost", "compiled", "measure", "calibrate")),
)


class CalibrationError(RuntimeError):
    """A calibration that is missing, damaged, or could not be made."""


def calibration_fingerprint(deployment: Deployment) -> str:
    """A digest of all that step times depend on: model, engine settings, device, versions, code."""
    model, engine, decoding = deployment.model, deployment.engine, deployment.decoding
    code = engine_code(engine, deployment.vllm_python)
    # the model that proposes tokens, whose passes are priced too; the number of draft tokens does not matter
    draft = checkpoint_stamp(decoding.draft_path) if decoding.draft_path else "the model itself"
    facts: dict[str, Any] = {
        "model": {name: str(value) for name, value in sorted(vars(model).items())},
        "checkpoint": checkpoint_stamp(model.path) if model.path else None,
        "engine": [*code, engine.threads, bool(engine.cuda_graphs)],
        "device": deployment.device_at_hand,
        "clock": str(deployment.clock_used),
        "yardstick": deployment.has_yardstick,
        "budget": deployment.scheduler.max_batched_tokens,
        "draft": draft if decoding.draft_tokens else None,
        "versions": versions(),
        "code": code_version(CODE),
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=10).hexdigest()


def calibration_path(deployment: Deployment) -> Path:
    """The file of this device's calibration for the model, whether it exists or not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(deployment.cost.cache_dir or cache / "pagetwin" / "calibration")
    return folder / f"{deployment.model.name}-{calibration_fingerprint(deployment)}.json"


def is_calibrated(deployment: Deployment) -> bool:
    """Whether a calibration for this model, engine and device exists, damaged or not."""
    return calibration_path(deployment).exists()


def set_aside_damaged(deployment: Deployment) -> str | None:
    """Rename a calibration that cannot be read, so that it is made anew; returns what was wrong, or None."""
    path = calibration_path(deployment)
    if not path.exists():
        return None
    try:
        load_calibration(deployment)
    except CalibrationError as error:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        return f"{str(error).partition('; ')[0]}; it is now {aside.name}, and this device is calibrated anew"
    return None


def save_calibration(deployment: Deployment, cost: FittedCost, grids: Mapping[str, Grid]) -> Path:
    """Store the coefficients with their provenance and held-out error, and the grids where they were measured."""
    path, source = calibration_path(deployment), cost.source
    document = {
        "name": source.name,
        "fingerprint": source.fingerprint,
        "coefficients_s": cost.coefficients(),
        "heldout": source.heldout,
        "beam_churn": {str(width): churn for width, churn in source.beam_churn.items()},
        "beam_evenness": {str(width): value for width, value in source.beam_evenness.items()},
        "draft_acceptance": source.draft_acceptance,
        "hull": source.hull,
        "validation": source.validation,
        "grids": {name: grid.section() for name, grid in grids.items()},
        "provenance": source.provenance,
    }
    write_files(path.parent, {path.name: json.dumps(document, indent=1).encode()})
    return path


def load_table(deployment: Deployment) -> TableCost:
    """The calibration as a `table` model.

    Raises:
        CalibrationError: the calibration is missing or damaged, or its grids were not measured.
    """
    fitted, path = load_calibration(deployment), calibration_path(deployment)
    grids = json.loads(path.read_text(encoding="utf-8")).get("grids") or {}
    if not grids:
        raise CalibrationError(f"{path}: this calibration has no grid of measured attention")
    return measured_table(fitted, {name: Grid.of_section(section) for name, section in grids.items()})


def measured_table(fitted: FittedCost, grids: Mapping[str, Grid]) -> TableCost:
    """The `table` model of the grids that a calibration measured, with their own held-out errors."""
    errors = grid_errors("decode", grids["decode"], DECODE_AXES)
    errors |= grid_errors("prefill", grids["prefill"], PREFILL_AXES)
    source = replace(fitted.source, kind="table", heldout={**fitted.source.heldout, **errors})
    return TableCost(fitted, grids["decode"], grids["prefill"], GRID_BLOCK_SIZE, source)


def has_grid(deployment: Deployment) -> bool:
    """Whether a calibration exists and holds a grid of measured attention."""
    try:
        return bool(json.loads(calibration_path(deployment).read_text(encoding="utf-8")).get("grids"))
    except (OSError, ValueError):
        return False


def load_calibration(deployment: Deployment) -> FittedCost:
    """The calibration as a `fitted` model.

    Raises:
        CalibrationError: it is missing or damaged; names the path.
    """
    path = calibration_path(deployment)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        values = np.array([float(document["coefficients_s"][name]) for name in FEATURES])
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError("a coefficient is negative or no number: seconds per unit are 0 or more")
        source = CostSource(
            kind="fitted",
            name=document["name"],
            fingerprint=document["fingerprint"],
            provenance=document["provenance"],
            heldout=document["heldout"],
            beam_churn={int(width): float(churn) for width, churn in document["beam_churn"].items()},
            beam_evenness={int(width): float(value) for width, value in document["beam_evenness"].items()},
            draft_acceptance=document["draft_acceptance"],
            hull={name: (float(low), float(high)) for name, (low, high) in document["hull"].items()},
            validation=document["validation"],
        )
        errors = [one["tpot_mean"]["error"] for one in source.validation.values() if "tpot_mean" in one]
        repeats = float(source.provenance.get("repeatability", 0.0))
        if not np.isfinite([repeats, *errors]).all() or min(errors, default=0.0) <= -1:
            raise ValueError("the repeatability, or an error on held-out workloads, is no number")
    except FileNotFoundError as error:
        reason = f"this device is not calibrated for {deployment.model.name}"
        raise CalibrationError(f"{path}: {reason}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"damaged calibration ({error}); a measured run sets it aside and calibrates anew"
        raise CalibrationError(f"{path}: {reason}") from error
    return FittedCost(values[ATTENTION], values[REST], source)
