"""A cost model from datasheets, for devices that are not available: bytes moved, operations, host time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import feature_index

TOKENS, SAMPLED, DECODE_KV, PREFILL_KV, PREFILL_WORK, COPIED = feature_index(
    ("tokens", "sampled_rows", "decode_kv", "prefill_kv", "prefill_work", "copied_slots")
)
SWAPPED, SWAPPED_BLOCKS, DRAFT_PASSES, DRAFT_TOKENS, DRAFT_KV = feature_index(
    ("swapped_slots", "swapped_blocks", "draft_passes", "draft_tokens", "draft_kv")
)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a decoder. `mlp_matrices` is 3 with a gate (Llama, Qwen), 2 without."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    bytes_per_element: int
    mlp_matrices: int = 3
    kv_bytes_per_element: int | None = None  # None: as the weights
    tied_embeddings: bool = False  # one matrix serves as input and as output embedding

    @property
    def layer_weights(self) -> int:
        """Elements of one layer's matrices."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * query + 2 * key_value) + self.mlp_matrices * self.hidden * self.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; tied embeddings count once."""
        embeddings = (1 if self.tied_embeddings else 2) * self.hidden * self.vocab
        return (self.layers * self.layer_weights + embeddings) * self.bytes_per_element

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that a step reads: all layers and the output embedding.

        Of the input embedding a step reads one row a token, which is left out.
        """
        return (self.layers * self.layer_weights + self.hidden * self.vocab) * self.bytes_per_element

    @property
    def kv_bytes_per_token(self) -> int:
        """2 x layers x kv_heads x head_dim x bytes."""
        width = self.kv_bytes_per_element or self.bytes_per_element
        return 2 * self.layers * self.kv_heads * self.head_dim * width


@dataclass(frozen=True)
class DeviceShape:
    """Datasheet of each of `parallel` devices: bytes/s, FLOP/s, host seconds per step and per layer, and the link.

    `bandwidth` and `flops` are what kernels reach of the datasheet's figures. `link_bandwidth` is the rate at which one
    device sends to the others in bytes/s, `link_latency_s` the cost of an all-reduce beside its bytes.
    `host_bandwidth` is the rate of the link between each device and the host, one way, `host_latency_s` the cost of a
    transfer over it beside its bytes.
    """

    name: str
    bandwidth: float
    flops: float
    step_overhead_s: float
    layer_overhead_s: float
    parallel: int = 1
    link_bandwidth: float = 300e9
    link_latency_s: float = 10e-6
    host_bandwidth: float = 32e9
    host_latency_s: float = 2e-6


class RooflineCost:
    """Each part of a step takes the longer of its bytes over bandwidth and its FLOP over peak; host time is added.

    Dense layers read all weights once a step; decode attention reads every KV slot; causal prefill does
    4 x heads x head_dim FLOP per query-key pair. With tensor parallelism (Megatron-LM's split, Shoeybi et al. 2019)
    each device holds and reads its share of weights and heads, and every layer ends in two all-reduces of the
    activations, in which a ring sends 2 (n - 1) / n of their bytes. A swapped block is 2 x layers transfers, K and V of
    each layer lying apart: the smaller the block, the more a byte costs (SOSP'23 paper on paged attention, section
    7.3). `draft` is the model that proposes tokens, with its own KV.

    The bytes and operations alone are a bound; the sum is none, because the host times of a step and of a layer are
    assumptions.
    """

    def __init__(self, model: ModelShape, device: DeviceShape, draft: ModelShape | None = None) -> None:
        self.model = model
        self.device = device
        name = f"roofline:{device}:{model}" + (f":{draft}" if draft else "")
        self.source = CostSource("roofline", device.name, name, _provenance(device))
        share = 1.0 / device.parallel
        self._weights_s = share * model.step_bytes / device.bandwidth
        self._token_s = share * 2.0 * model.layers * model.layer_weights / device.flops
        self._sample_s = share * 2.0 * model.hidden * model.vocab / device.flops
        self._kv_s = share * model.kv_bytes_per_token / device.bandwidth
        self._pair_s = share * 4.0 * model.heads * model.head_dim * model.layers / device.flops
        lanes = [shape for shape in (model, draft) if shape]
        lanes_bytes = share * sum(shape.kv_bytes_per_token for shape in lanes)
        self._copy_s = 2.0 * lanes_bytes / device.bandwidth
        self._swap_s = lanes_bytes / device.host_bandwidth
        self._transfer_s = 2.0 * sum(shape.layers for shape in lanes) * device.host_latency_s
        self._draft = _Draft(draft, device) if draft else None
        self._host_s = device.step_overhead_s + model.layers * device.layer_overhead_s
        self._link_s, self._reduce_s = _all_reduces(model, device)

    @property
    def rates(self) -> tuple[float, ...]:
        """Seconds per token, sampled row, all weights, KV slot, query-key pair; host, link per token, all-reduces."""
        return (
            *(self._token_s, self._sample_s, self._weights_s, self._kv_s, self._pair_s),
            *(self._host_s, self._link_s, self._reduce_s),
        )

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds by the roofline of each part."""
        tokens, decode_kv = features[TOKENS], features[DECODE_KV]
        attention = _larger(
            (decode_kv + features[PREFILL_KV]) * self._kv_s,
            (decode_kv + features[PREFILL_WORK]) * self._pair_s,
        )
        dense = _larger(tokens * self._token_s + features[SAMPLED] * self._sample_s, self._weights_s)
        seconds = dense + attention + features[COPIED] * self._copy_s + self._host_s
        if self._reduce_s:
            seconds = seconds + (tokens * self._link_s + self._reduce_s)
        seconds = seconds + (features[SWAPPED] * self._swap_s + features[SWAPPED_BLOCKS] * self._transfer_s)
        if self._draft:
            seconds = seconds + self._draft.seconds(features)
        return Price(seconds, attention)


class _Draft:
    """The draft model's passes: each reads its weights and costs its layers' host time."""

    def __init__(self, model: ModelShape, device: DeviceShape) -> None:
        share = 1.0 / device.parallel
        link_s, reduce_s = _all_reduces(model, device)
        work = model.layers * model.layer_weights + model.hidden * model.vocab
        self._token_s = share * 2.0 * work / device.flops
        self._weights_s = share * model.step_bytes / device.bandwidth
        self._kv_s = share * model.kv_bytes_per_token / device.bandwidth
        self._pass_s = model.layers * device.layer_overhead_s + reduce_s
        self._link_s = link_s

    def seconds(self, features: Sequence[Amount]) -> Amount:
        """Seconds of all draft passes of a step."""
        passes, tokens = features[DRAFT_PASSES], features[DRAFT_TOKENS]
        dense = _larger(tokens * self._token_s, passes * self._weights_s)
        return dense + (features[DRAFT_KV] * self._kv_s + passes * self._pass_s + tokens * self._link_s)


def _all_reduces(model: ModelShape, device: DeviceShape) -> tuple[float, float]:
    """Seconds per token and per step of the all-reduces after attention and after the MLP of every layer."""
    if device.parallel == 1:
        return 0.0, 0.0
    sent = 2.0 * (device.parallel - 1) / device.parallel * model.hidden * model.bytes_per_element
    return 2.0 * model.layers * sent / device.link_bandwidth, 2.0 * model.layers * device.link_latency_s


def _larger(one: Amount, other: Amount) -> Amount:
    """The larger of two amounts, element by element."""
    if type(one) is float and type(other) is float:
        return one if one > other else other
    return np.maximum(one, other)


def _provenance(device: DeviceShape) -> dict[str, object]:
    return {
        "what": "datasheet roofline plus assumed host times, not measured and no bound",
        "not priced": "block size: attention takes as long at any block size",
        "bandwidth_gbs": device.bandwidth / 1e9,
        "tflops": device.flops / 1e12,
        "step_overhead_us": device.step_overhead_s * 1e6,
        "layer_overhead_us": device.layer_overhead_s * 1e6,
        "tensor_parallel": device.parallel,
        "host_link_gbs": device.host_bandwidth / 1e9,
        "host_link_latency_us": device.host_latency_s * 1e6,
    }
