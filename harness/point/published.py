"""The cost model `published` of a point: what its configuration asks of the published tables."""

from typing import Any

from engine.runtime.options import KVDtype
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig, WeightDtype
from harness.cost.aiconfigurator import (
    Limits,
    TableSetup,
    check_package,
    compiled,
    described,
    step_tables,
    system_of,
)
from harness.cost.published import PublishedCost
from harness.cost.roofline import RooflineCost
from harness.point.bounds import DATASHEET, origin_of
from harness.replay.cost_model import CostSource
from harness.workload.shapes import device_shape, max_position, model_shape

_WEIGHTS = {
    WeightDtype.model: None,
    WeightDtype.fp8: "fp8",
    WeightDtype.int8: "int8_wo",
    WeightDtype.int4: "int4_wo",
    WeightDtype.mxfp4: "w4a16_mxfp4",  # of experts alone: dense layers have no such kernel
}


def check_published(config: RunConfig) -> None:
    """Check that the tables can price the point.

    Raises:
        ConfigError: the package is missing or of another version, the tables do not know device, model or engine, or
            the point decodes with drafts.
    """
    check_package()
    system_of(config.device.name)
    if config.decoding.draft_tokens:
        raise ConfigError("decoding.draft_tokens", "published does not price draft passes; use cost=roofline")
    compiled(table_setup(config))


def table_setup(config: RunConfig) -> TableSetup:
    """The tables' view of the point's model, devices and engine.

    Raises:
        ConfigError: the dense layers would have weights in a form that no table has.
    """
    model = config.model
    weights = _WEIGHTS[model.weight_dtype]
    if model.weight_dtype is WeightDtype.mxfp4 and not model.experts_only:
        raise ConfigError(
            "model.weight_dtype",
            "mxfp4, but the tables have it for experts alone; set model.experts_only=true, or use cost=roofline",
        )
    return TableSetup(
        device=config.device.name,
        engine=config.cost.engine,
        parallel=config.device.tensor_parallel,
        expert_parallel=config.device.expert_parallel,
        checkpoint=model.path,
        shape=None if model.path else model_shape(model),
        weights=None if model.experts_only else weights,
        expert_weights=weights,
        kv="fp8" if model.kv_dtype is KVDtype.fp8_e4m3 else None,
    )


def published_cost(config: RunConfig, setup: TableSetup | None = None) -> PublishedCost:
    """The cost model. The tables of a setup are made once in a process, up to the next powers of two of its limits.

    `setup` names a quantisation that no key of the configuration has; None: the configuration's.
    """
    if setup is None:
        check_published(config)
        setup = table_setup(config)
    longest = config.cache.max_model_len or max_position(config.model)
    scheduler = config.scheduler
    limits = Limits(
        rows=_power_of_two(scheduler.max_running),
        tokens=_power_of_two(max(scheduler.max_batched_tokens, scheduler.max_running)),
        sequence=_power_of_two(longest),
    )
    device = device_shape(config)
    step_us = config.device.step_overhead_us
    source = CostSource(
        "published",
        config.device.name,
        f"published:{setup}:{step_us}:{device}",
        {**described(setup), "model": config.model.name, **_residual(config)},
    )
    return PublishedCost(step_tables(setup, limits), RooflineCost(model_shape(config.model), device), source)


def _power_of_two(number: int) -> int:
    """The next power of two: points of about the same limits share their tables."""
    return 1 << (number - 1).bit_length()


def _residual(config: RunConfig) -> dict[str, Any]:
    """Constants that are no operator's: the host's time of a step, and the links of moved blocks."""
    fitted = config.device.fitted_from
    return {
        "step_overhead_us": config.device.step_overhead_us,
        "tensor_parallel": config.device.tensor_parallel,
        "from": {
            "operators": "published timings",
            "step_overhead_us": f"fitted to {fitted}" if fitted else "assumed",
            **{name: origin_of(config.device, name) for name in DATASHEET if name.startswith("host")},
        },
    }
