"""Run the layers and compare them with their baselines, or accept what they measured as new baselines."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from harness.config.errors import UserError
from harness.gate.baseline import Measured, accepted, read_baseline, without_baseline, write_baseline
from harness.gate.settings import GateSettings
from harness.gate.verdict import LayerResult


def run_layers(
    layers: Sequence[str], folder: Path, save: Path | None = None, settings: GateSettings | None = None
) -> list[LayerResult]:
    """Measure and judge each layer.

    Args:
        layers: of `harness.gate.LAYERS`, in this order.
        folder: holds the baselines.
        save: receives the latency layer's run as a record.
        settings: the margins; None takes the default ones.

    Raises:
        UserError: a layer cannot run here, or a baseline's file is none.
    """
    results = []
    for layer in layers:
        measured = _room(layer).measure()
        if layer == "latency" and save is not None and measured.cases:
            from harness.gate.latency import write_record

            write_record(measured, save)
        results.append(judged(measured, folder, settings))
    return results


def case_names(layer: str) -> list[str]:
    """What a layer would measure."""
    return list(_room(layer).case_names())


def judged(measured: Measured, folder: Path, settings: GateSettings | None = None) -> LayerResult:
    """Compare what was measured with its baseline in `folder`; margins that were changed are named in the answer."""
    baseline = read_baseline(measured.file(folder), measured.layer)
    if baseline is None:
        made_on = ", ".join(f"{key} {value}" for key, value in measured.made_on.items())
        return LayerResult(measured.layer, (without_baseline(measured, folder),), made_on, measured.remarks)
    result: LayerResult = _room(measured.layer).judge(measured, baseline, settings)
    changed = ", ".join(settings.changed) if settings else ""
    return replace(result, remarks=(*result.remarks, f"margins changed: {changed}")) if changed else result


def update_layers(
    layers: Sequence[str], folder: Path, reason: str, settings: GateSettings | None = None
) -> list[Path]:
    """Measure each layer and write its figures as the new baseline; returns the files.

    Raises:
        UserError: no reason, nothing measured, or figures that no baseline may hold.
    """
    if not reason.strip():  # said before minutes of measuring
        raise UserError("a new baseline needs a reason: gate --update --reason 'why the figures may change'")
    return [accept(_room(layer).measure(), folder, reason, settings) for layer in layers]


def accept(measured: Measured, folder: Path, reason: str, settings: GateSettings | None = None) -> Path:
    """Write what was measured as the new baseline; returns the file.

    Raises:
        UserError: see `update_layers`.
    """
    wrong = list(_room(measured.layer).unfit(measured, settings))
    if wrong:
        raise UserError(
            "these figures cannot become a baseline:\n" + "\n".join(f"  {line}" for line in wrong)
        )
    write_baseline(measured.file(folder), accepted(measured, reason))
    return measured.file(folder)


def _room(layer: str) -> ModuleType:
    """The layer's module: `case_names`, `measure`, `judge`, `unfit`."""
    from harness.gate import latency, policy, resource

    return {"resource": resource, "latency": latency, "policy": policy}[layer]
