"""The engine's description of the configured model. No torch here: plans are checked with it."""

from dataclasses import asdict

from engine.runtime.models.spec import ModelSpec
from harness.config.schema import ModelConfig


def model_spec(model: ModelConfig) -> ModelSpec:
    """The engine's description of `model`."""
    fields = {**asdict(model), "dtype": str(model.dtype)}
    del fields["kv_dtype"]  # the pool's, not the model's
    return ModelSpec(**fields)
