"""A cost model from datasheets, for devices not at hand: what a step must move and multiply, plus host time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.sim.cost import Amount, CostSource, Price
from harness.sim.features import feature_index

TOKENS, SAMPLED, DECODE_KV, PREFILL_KV, PREFILL_WORK, COPIED = feature_index(
    ("tokens", "sampled_rows", "decode_kv", "prefill_kv", "prefill_work", "copied_slots")
)


@dataclass(frozen=True)
class ModelShape:
    """What the arithmetic of a decoder depends on. `mlp_matrices` is 3 with a gate (Llama, Qwen), 2 without."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bytes_per_element: int
    mlp_matrices: int = 3

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * query + 2 * key_value) + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, input and output embeddings counted separately."""
        return (self.layers * self.layer_weights + 2 * self.hidden * self.vocab) * self.bytes_per_element

    @property
    def kv_bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_element


@dataclass(frozen=True)
class DeviceShape:
    """Datasheet: bytes/s, FLOP/s, and host seconds per step and per layer."""

    name: str
    bandwidth: float
    flops: float
    step_overhead_s: float
    layer_overhead_s: float


class RooflineCost:
    """Each part of a step takes the longer of its bytes over bandwidth and its FLOP over peak; host time is added.

    Dense layers read all weights once a step; decode attention reads every KV slot; causal prefill does
    4 x heads x head_dim FLOP per query-key pair. An upper bound on speed: it knows no efficiency below the datasheet.
    """

    def __init__(self, model: ModelShape, device: DeviceShape) -> None:
        self.model = model
        self.device = device
        self.source = CostSource("roofline", device.name, f"roofline:{device}:{model}", _provenance(device))

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds by the roofline of each part."""
        model, device = self.model, self.device
        attention = self._attention(features)
        dense_flop = features[TOKENS] * self._token_flop + features[SAMPLED] * self._sample_flop
        dense = _larger(dense_flop / device.flops, model.weight_bytes / device.bandwidth)
        copies = features[COPIED] * (2.0 * model.kv_bytes_per_token / device.bandwidth)
        host = device.step_overhead_s + model.layers * device.layer_overhead_s
        return Price(dense + attention + copies + host, attention)

    @property
    def _token_flop(self) -> float:
        return 2.0 * self.model.layers * self.model.layer_weights

    @property
    def _sample_flop(self) -> float:
        return 2.0 * self.model.hidden * self.model.vocab

    def _attention(self, features: Sequence[Amount]) -> Amount:
        model, device = self.model, self.device
        pair_flop = 4.0 * model.heads * model.head_dim * model.layers
        read = (features[DECODE_KV] + features[PREFILL_KV]) * (model.kv_bytes_per_token / device.bandwidth)
        work = (features[DECODE_KV] + features[PREFILL_WORK]) * (pair_flop / device.flops)
        return _larger(read, work)


def _larger(one: Amount, other: Amount) -> Amount:
    """The larger of two amounts, element by element."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def _provenance(device: DeviceShape) -> dict[str, object]:
    return {
        "what": "datasheet roofline, not measured",
        "bandwidth_gbs": device.bandwidth / 1e9,
        "tflops": device.flops / 1e12,
        "step_overhead_us": device.step_overhead_s * 1e6,
        "layer_overhead_us": device.layer_overhead_s * 1e6,
    }
