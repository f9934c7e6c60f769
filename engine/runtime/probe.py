"""One token through the model tells what its layers really send: configs are wrong about it too often."""

from collections.abc import Mapping
from typing import Any

import torch

from engine.runtime.errors import ModelError
from paged_kernels import Scoring

LayerShape = tuple[tuple[int, int], tuple[int, int]]

# What layers send beside q, k, v and what the paged kernels take; without meaning for them.
_HARMLESS = frozenset({"position_ids", "use_cache", "dropout", "is_causal", "cache_position", "layer_type"})


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith("output_")  # what the model shall return beside its logits


class ShapeProbe:
    """Stands where the paged KV stands in a real step, records shapes, and answers zeros."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.calls = 0
        self.strange: set[str] = set()

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Record one layer's call."""
        self.calls += 1
        if rest.get("is_causal", getattr(module, "is_causal", True)) is False:
            self.strange.add("keys to the right of a query")
        self.shapes[module.layer_idx] = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
        self.strange |= {name for name, sent in rest.items() if sent is not None and not _is_harmless(name)}
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def probe_layers(model: Any, name: str, token: int) -> tuple[LayerShape, ...]:
    """KV shapes per layer. Raises ModelError unless every layer called our function exactly once, and understood it."""
    probe = ShapeProbe()
    ids = torch.tensor([[token]], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False, paged=probe)
    layers = model.config.get_text_config().num_hidden_layers
    if probe.calls != layers or sorted(probe.shapes) != list(range(layers)):
        raise ModelError(
            f"model {name}: {len(probe.shapes)} of {layers} layers ran on paged attention ({probe.calls} calls): "
            f"{model.config.model_type} mixes in layers without a KV cache per token"
        )
    if probe.strange:
        raise ModelError(
            f"model {name}: {model.config.model_type} asks its attention for {', '.join(sorted(probe.strange))}, "
            "which the paged kernels do not know"
        )
    return tuple(probe.shapes[layer] for layer in range(layers))
