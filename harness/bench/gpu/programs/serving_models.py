"""Random models of serving size, made on the device: their weights would take minutes on a processor."""

from typing import Any

from engine.runtime.models.load import LoadedModel, adopt_model
from engine.runtime.models.spec import ModelSpec, config_values

MODELS = {
    # Shapes of Llama 3.2 1B and Llama 3 8B (their published config.json); weights are random.
    "1b": ModelSpec(
        name="llama-1b-class", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192,
        vocab=128_256, max_position=8192, dtype="bfloat16", initializer_range=0.02,
    ),
    "8b": ModelSpec(
        name="llama-8b-class", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14_336,
        vocab=128_256, max_position=8192, dtype="bfloat16", initializer_range=0.02,
    ),
    "tiny": ModelSpec(
        name="rehearsal", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256,
        max_position=512, dtype="float32",
    ),
}  # fmt: skip


def made_model(spec: ModelSpec, device: str) -> LoadedModel:
    """The model with random weights, on paged KV."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(spec.family, **config_values(spec))
    torch.manual_seed(spec.seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, spec.dtype))
    return adopt_model(model.to(device), name=spec.name)


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a decode step reads: all but an input embedding that is not the output's too."""
    total = sum(parameter.nbytes for parameter in model.parameters())  # a tied weight is counted once
    inner, outer = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return int(total if inner is outer else total - inner.nbytes)
