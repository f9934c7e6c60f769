"""The regression gate. It compares kernels and policy with accepted baselines, in four layers.

* resource: the compiler's output for every kernel, without a GPU. It says nothing about time.
* latency: kernels on a GPU, as ratios to yardsticks timed in the same rounds.
* policy: block manager and scheduler, as ratios to the accepted version of the same core in the same process.
* cpu: the engine's attention on a CPU, as ratios to the accepted version of the same code in the same process.

Each layer is one module with `case_names`, `measure`, `judge` and `unfit`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.gate.findings import (
    LayerResult,
    Measured,
    new_baseline,
    read_baseline,
    without_baseline,
    write_baseline,
)

if TYPE_CHECKING:
    from harness.gate.settings import GateSettings


def run_layers(
    layers: Sequence[str],
    folder: Path,
    save: Path | None = None,
    settings: "GateSettings | None" = None,
    *,
    changed: bool = False,
) -> list[LayerResult]:
    """Measure and judge each layer.

    Args:
        layers: names out of `harness.gate.LAYERS`, in the order to run.
        folder: the folder of the baselines.
        save: file for the latency layer's run as a record.
        settings: the margins; None takes the defaults.
        changed: the resource layer compiles only what has changed since its baseline.

    Raises:
        UserError: a layer cannot run here, or a baseline cannot be read.
    """
    results = []
    for layer in layers:
        measured = _measure(layer, folder, changed=changed)
        if layer == "latency" and save is not None and measured.cases:
            from harness.gate.latency import write_record

            write_record(measured, save)
        results.append(judge_layer(measured, folder, settings))
    return results


def case_names(layer: str) -> list[str]:
    """The names of the cases that a layer measures."""
    return list(_layer_module(layer).case_names())


def judge_layer(measured: Measured, folder: Path, settings: "GateSettings | None" = None) -> LayerResult:
    """Compare a run with its baseline in `folder`. The answer names margins that differ from the defaults."""
    baseline = read_baseline(measured.file(folder), measured.layer)
    if baseline is None:
        return without_baseline(measured, folder)
    result: LayerResult = _layer_module(measured.layer).judge(measured, baseline, settings)
    changed = ", ".join(settings.changed) if settings else ""
    return replace(result, remarks=(*result.remarks, f"margins changed: {changed}")) if changed else result


def update_layers(
    layers: Sequence[str], folder: Path, reason: str, settings: "GateSettings | None" = None
) -> list[Path]:
    """Measure each layer and write its figures as the new baseline; returns the files.

    Raises:
        UserError: the reason is empty, nothing was measured, or the figures cannot be a baseline.
    """
    if not reason.strip():  # checked before minutes of measuring
        raise UserError("a new baseline needs a reason: gate --update --reason 'why the figures may change'")
    return [accept(_measure(layer, folder), folder, reason, settings) for layer in layers]


def accept(measured: Measured, folder: Path, reason: str, settings: "GateSettings | None" = None) -> Path:
    """Write a run as the new baseline; returns the file.

    Raises:
        UserError: see `update_layers`.
    """
    wrong = list(_layer_module(measured.layer).unfit(measured, settings))
    if wrong:
        raise UserError("\n  ".join(["these figures cannot become a baseline:", *wrong]))
    write_baseline(measured.file(folder), new_baseline(measured, reason))
    return measured.file(folder)


def _measure(layer: str, folder: Path, *, changed: bool = False) -> Measured:
    """One run of a layer. Two run the baseline's code too, so they must know where the baseline is."""
    if layer == "resource" and changed:
        from harness.gate import resource

        return resource.measure(read_baseline(resource.measured({}).file(folder), layer))
    module = _layer_module(layer)
    measured: Measured = module.measure(folder) if layer in ("cpu", "policy") else module.measure()
    return measured


def _layer_module(layer: str) -> ModuleType:
    """The module of a layer, with `case_names`, `measure`, `judge` and `unfit`."""
    from harness.gate import cpu, latency, policy, resource

    return {"resource": resource, "latency": latency, "policy": policy, "cpu": cpu}[layer]
