"""Which cost model predicts a point."""

from harness.config.errors import ConfigError
from harness.config.schema import CostKind, RunConfig
from harness.point.shapes import device_shape, model_shape
from harness.sim.cost import CostModel
from harness.sim.roofline import RooflineCost


def resolve_cost_kind(config: RunConfig) -> CostKind:
    """What `auto` stands for: fitted where this device is measured or has been calibrated, else roofline."""
    from harness.measured.calibration import is_calibrated

    if config.cost.kind is not CostKind.auto:
        return config.cost.kind
    return CostKind.fitted if config.measure or is_calibrated(config) else CostKind.roofline


def check_cost(config: RunConfig) -> None:
    """Raises ConfigError where a simulation-only point asks for a fit that does not exist."""
    from harness.measured.calibration import is_calibrated

    if config.cost.kind is CostKind.fitted and not config.measure and not is_calibrated(config):
        raise ConfigError(
            "cost.kind",
            "fitted, but this model and engine have not been calibrated on this device. Run the same with "
            "measure=true first, which calibrates, or use cost=roofline",
        )


def cost_model(config: RunConfig) -> CostModel:
    """The point's cost model; a fitted one must have been calibrated."""
    if resolve_cost_kind(config) is CostKind.roofline:
        return RooflineCost(model_shape(config.model), device_shape(config))
    from harness.measured.calibration import load_calibration

    return load_calibration(config)
