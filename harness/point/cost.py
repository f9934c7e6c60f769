"""Choose the cost model of a point, check that it is available, and load it."""

import os
from dataclasses import replace
from pathlib import Path

from harness.config.errors import ConfigError
from harness.config.schema import CostKind, ReplayMode, RunConfig
from harness.cost.block_sizes import REFERENCE, UNCERTAINTY
from harness.cost.roofline import RooflineCost
from harness.environment import device_identity
from harness.point.bounds import origins
from harness.replay.cost_model import CostModel
from harness.workload.devices import is_predicted_device
from harness.workload.shapes import (
    block_size_factor_of,
    device_shape,
    draft_of,
    draft_shape,
    model_shape,
    unmodelled,
)

_PREDICTED = (CostKind.roofline, CostKind.operators, CostKind.published)
"""The kinds that need no calibration of this machine."""


def resolve_cost_kind(config: RunConfig) -> CostKind:
    """The cost model's kind. `auto` is table with timed kernels, fitted if measured or calibrated, else roofline.

    Layers with a state are priced by the roofline alone. A calibration of this machine prices no other device: for
    another `device`, `auto` is the roofline.
    """
    from harness.calibrate.store import is_calibrated

    if config.cost.kind is not CostKind.auto:
        return config.cost.kind
    if config.model.state_layers:
        return CostKind.roofline
    if config.cost.kernels is not None:
        return CostKind.table
    if config.cost.operators is not None:
        return CostKind.operators
    fitted = is_predicted_device(config) and (config.measure or is_calibrated(config))
    return CostKind.fitted if fitted else CostKind.roofline


def takes_timed_kernels(config: RunConfig) -> bool:
    """Whether the price of attention comes from a run of `bench kernels`."""
    return resolve_cost_kind(config) is CostKind.table and config.cost.kernels is not None


def needs_fit(config: RunConfig) -> bool:
    """Whether the point needs fitted coefficients. A measured point calibrates its device where they are missing."""
    return resolve_cost_kind(config) is CostKind.fitted or takes_timed_kernels(config)


def check_cost(config: RunConfig) -> None:
    """Raise ConfigError if the point needs a calibration that does not exist, or that could not be written."""
    from harness.calibrate.store import calibration_path, has_grid, is_calibrated

    kind = resolve_cost_kind(config)
    _check_device(config, kind)
    _check_modelled(config, kind)
    _check_replicas(config)
    _check_acceptance(config, kind)
    _check_block_sizes(config, kind)
    if kind is CostKind.operators:
        if config.cost.operators is None:
            raise ConfigError(
                "cost.operators", "missing: cost=operators reads a table; add cost.operators=FILE.csv"
            )
        cost_model(config)
    elif kind is CostKind.published:
        from harness.point.published import check_published

        check_published(config)
    elif takes_timed_kernels(config):
        from harness.calibrate.kernel_table import check_kernel_table

        check_kernel_table(config)
    elif kind is CostKind.table and not has_grid(config):
        raise ConfigError(
            "cost.kind",
            "table, but attention has not been measured on a grid for this model and engine on this device. Run "
            "'python -m harness calibrate' with the same settings first, or use cost=fitted or cost=roofline",
        )
    if not needs_fit(config) or is_calibrated(config):
        return
    if config.measure:
        _check_writable(calibration_path(config).parent)
    else:
        raise ConfigError(
            "cost.kind",
            f"{kind}, but this model and engine have not been calibrated on this device. Run 'python -m harness "
            "calibrate' with the same settings first, or the same with measure=true, or use cost=roofline",
        )


def _check_device(config: RunConfig, kind: CostKind) -> None:
    """Raise ConfigError if seconds of this machine would be given out as those of another device."""
    if kind not in _PREDICTED and config.device.tensor_parallel > 1:
        raise ConfigError(
            "device.tensor_parallel",
            f"found {config.device.tensor_parallel}, but {kind} takes its seconds from one device; use cost=roofline",
        )
    if is_predicted_device(config):
        return
    here = device_identity(config.engine.device)
    if config.measure:
        raise ConfigError(
            "device.name",
            f"{config.device.name} would be predicted, but the engine measures on {here}; use measure=false to predict "
            f"{config.device.name}, or device=cpu, which stands for the machine at hand",
        )
    if kind not in _PREDICTED:
        raise ConfigError(
            "cost.kind",
            f"{kind} takes its seconds from {here} and cannot price device {config.device.name}; use cost=roofline, or "
            "device=cpu, which stands for the machine at hand",
        )


def _check_replicas(config: RunConfig) -> None:
    """Raise ConfigError if data-parallel replicas are asked for where they are not modelled."""
    if config.device.data_parallel == 1:
        return
    found = f"found {config.device.data_parallel}, but"
    if config.measure:
        raise ConfigError(
            "device.data_parallel", f"{found} the engine measures one replica; use measure=false"
        )
    if config.replay.mode in (ReplayMode.closed, ReplayMode.sessions):
        raise ConfigError(
            "device.data_parallel",
            f"{found} in replay.mode={config.replay.mode} requests wait for others, which may run on another replica; "
            "use an open loop (trace, poisson, gamma, offline)",
        )
    if model_shape(config.model).experts:
        raise ConfigError(
            "device.data_parallel",
            f"{found} replicas of a mixture of experts run in lockstep in vLLM, which is not modelled; predict one of "
            "them at its share of the request rate",
        )
    if config.replay.kv_events or config.replay.lookups or config.replay.residency is not None:
        raise ConfigError(
            "device.data_parallel",
            f"{found} KV events, lookups and the residency of blocks are kept for one replica alone",
        )


def _check_modelled(config: RunConfig, kind: CostKind) -> None:
    """Raise ConfigError if the roofline would price the model as something that it is not."""
    if kind not in _PREDICTED or kind is CostKind.published:
        return
    models = [(config.model, "model.path")]
    if config.decoding.draft_tokens and config.decoding.draft_path:
        models.append((draft_of(config.model, config.decoding.draft_path), "decoding.draft_path"))
    for model, key in models:
        shape = model_shape(model, key)
        unknown = unmodelled(model, key)
        if unknown:
            raise ConfigError(
                "cost.kind",
                f"roofline, but {model.path or model.name} has {unknown}, which the roofline does not price. Use "
                "cost=fitted on the device that runs it",
            )
        proposes = config.decoding.draft_tokens and (len(models) == 1 or key == "decoding.draft_path")
        if proposes and (shape.experts or shape.window):
            raise ConfigError(
                key,
                f"{model.path or model.name} proposes tokens and has {'experts' if shape.experts else 'windows'}, "
                "which the roofline does not price in a draft pass; name a dense model (decoding.draft_path)",
            )
    if config.device.expert_parallel and not model_shape(config.model).experts:
        raise ConfigError(
            "device.expert_parallel", f"true, but {config.model.name} has no experts; set it to false"
        )


def _check_acceptance(config: RunConfig, kind: CostKind) -> None:
    """Raise ConfigError if the acceptance of drafts is unknown. Only a calibration measures it."""
    if config.decoding.draft_tokens and config.decoding.acceptance is None and kind in _PREDICTED:
        raise ConfigError(
            "decoding.acceptance",
            "missing: decoding.draft_tokens proposes tokens, and a roofline does not know the share of accepted ones; "
            "set it (1 where the model drafts for itself), or use cost=fitted on a device that is calibrated",
        )


def _check_block_sizes(config: RunConfig, kind: CostKind) -> None:
    """Raise ConfigError if block sizes are to be priced where the static model of our kernels has no figures."""
    if config.cost.block_sizes and kind is not CostKind.roofline:
        raise ConfigError(
            "cost.block_sizes",
            f"true, but it is a factor on cost=roofline and this point has {kind}; leave it out",
        )
    block_size_factor_of(config)


def _check_writable(folder: Path) -> None:
    """Raise ConfigError if the calibration could not be written. Checked early, because calibrating takes long."""
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            "cost.cache_dir",
            f"the calibration cannot be kept in {folder}: {there} is not a writable folder; choose another",
        )


def cost_model(config: RunConfig) -> CostModel:
    """The point's cost model. A fitted one must have been calibrated before."""
    kind = resolve_cost_kind(config)
    if kind is CostKind.published:
        from harness.point.published import published_cost

        return published_cost(config)
    if kind in _PREDICTED:
        cost = RooflineCost(model_shape(config.model), device_shape(config), draft_shape(config))
        provenance = {**cost.source.provenance, "model": config.model.name, "from": origins(config.device)}
        if (factor := cost.device.block_size_factor) is not None:
            provenance["block size"] = _priced_block_size(config, factor)
        cost.source = replace(cost.source, provenance=provenance)
        if kind is CostKind.roofline:
            return cost
        from harness.cost.operator_table import read_operators
        from harness.cost.operators import OperatorCost

        return OperatorCost(cost, read_operators(str(config.cost.operators), cost.device))
    from harness.calibrate.store import load_calibration, load_table

    if takes_timed_kernels(config):
        from harness.calibrate.kernel_table import kernel_table

        return kernel_table(config, load_calibration(config))
    return load_table(config) if kind is CostKind.table else load_calibration(config)


def _priced_block_size(config: RunConfig, factor: float) -> dict[str, object]:
    """Where the factor on decode attention comes from, as the record has it."""
    return {
        "what": "static model of our Triton decode kernel, not measured",
        "factor": factor,
        "block_size": config.cache.block_size,
        "of": f"seconds of decode attention at block size {REFERENCE}",
        "uncertainty": UNCERTAINTY,
    }
