"""A cost model for devices that are not available: bytes moved, operations, and fixed times."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import feature_index

TOKENS, ROWS, SAMPLED, DECODE_KV, PREFILL_KV, PREFILL_WORK, COPIED = feature_index(
    ("tokens", "rows", "sampled_rows", "decode_kv", "prefill_kv", "prefill_work", "copied_slots")
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
    """Each of `parallel` devices: datasheet rates, the shares of them that kernels reach, fixed times, and the links.

    `bandwidth` (bytes/s) and `flops` (FLOP/s) are the datasheet's. Of the bandwidth, reading weights reaches
    `bandwidth_efficiency` and reading KV in attention `kv_efficiency`; of the FLOP/s, dense layers reach
    `compute_efficiency` and attention of prompts `attention_efficiency`. A step costs `step_overhead_s` of host time,
    each layer `layer_overhead_s` and for its attention `attention_overhead_s`, and each row of the batch
    `row_overhead_s` per layer. With `overlaps` false the dense layers take the larger of reading and computing, as on a
    datasheet; with true the fourth root of the sum of their fourth powers, because near the balance of both neither is
    hidden whole.

    `link_bandwidth` is the rate at which one device sends to the others in bytes/s, `link_latency_s` the cost of an
    all-reduce beside its bytes. `host_bandwidth` is the rate of the link between each device and the host, one way,
    `host_latency_s` the cost of a transfer over it beside its bytes.
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
    bandwidth_efficiency: float = 1.0
    kv_efficiency: float = 1.0
    compute_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    attention_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    overlaps: bool = False

    @property
    def bound(self) -> "DeviceShape":
        """The same device at its datasheet's rates, without any fixed time: no step can take less."""
        return DeviceShape(
            *(self.name, self.bandwidth, self.flops, 0.0, 0.0, self.parallel),
            *(self.link_bandwidth, 0.0, self.host_bandwidth, 0.0),
        )


_EFFICIENCIES = ("bandwidth_efficiency", "kv_efficiency", "compute_efficiency", "attention_efficiency")


class RooflineCost:
    """The seconds of a step from bytes, operations and fixed times.

        step + layers x (layer + attention overhead + rows x row overhead)
        + dense layers: reading all weights, and computing (the larger, or a smooth maximum of both)
        + attention: KV slots that decode rows read, and of prompts the larger of their slots and their pairs
        + copied slots, swapped blocks, the links between devices, draft passes

    Causal attention does 4 x heads x head_dim FLOP per query-key pair. With tensor parallelism (Megatron-LM's split,
    Shoeybi et al. 2019) each device holds and reads its share of weights and heads, and every layer ends in two
    all-reduces of the activations, in which a ring sends 2 (n - 1) / n of their bytes. A swapped block is 2 x layers
    transfers, K and V of each layer lying apart: the smaller the block, the more a byte costs (SOSP'23 paper on paged
    attention, section 7.3). `draft` is the model that proposes tokens, with its own KV.

    On `DeviceShape.bound` the price is a lower bound. On any other device it is an expected value: efficiencies and
    fixed times are assumed or fitted.
    """

    def __init__(self, model: ModelShape, device: DeviceShape, draft: ModelShape | None = None) -> None:
        self.model = model
        self.device = device
        name = f"roofline:{device}:{model}" + (f":{draft}" if draft else "")
        self.source = CostSource("roofline", device.name, name, _provenance(device))
        share = 1.0 / device.parallel
        compute = device.flops * device.compute_efficiency
        self._weights_s = share * model.step_bytes / (device.bandwidth * device.bandwidth_efficiency)
        self._token_s = share * 2.0 * model.layers * model.layer_weights / compute
        self._sample_s = share * 2.0 * model.hidden * model.vocab / compute
        self._kv_s = share * model.kv_bytes_per_token / (device.bandwidth * device.kv_efficiency)
        pair_flops = 4.0 * model.heads * model.head_dim * model.layers
        self._pair_s = share * pair_flops / (device.flops * device.attention_efficiency)
        lanes = [shape for shape in (model, draft) if shape]
        lanes_bytes = share * sum(shape.kv_bytes_per_token for shape in lanes)
        self._copy_s = 2.0 * lanes_bytes / (device.bandwidth * device.bandwidth_efficiency)
        self._swap_s = lanes_bytes / device.host_bandwidth
        self._transfer_s = 2.0 * sum(shape.layers for shape in lanes) * device.host_latency_s
        self._draft = _Draft(draft, device) if draft else None
        self._host_s = device.step_overhead_s + model.layers * device.layer_overhead_s
        self._attention_s = model.layers * device.attention_overhead_s
        self._row_s = model.layers * device.row_overhead_s
        self._link_s, self._reduce_s = _all_reduces(model, device)

    @property
    def rates(self) -> tuple[float, ...]:
        """What the compiled replay prices with, in seconds.

        Per token, sampled row, all weights, KV slot, query-key pair; host, attention's fixed time, per row; link per
        token, all-reduces; 1 if the dense layers overlap.
        """
        return (
            *(self._token_s, self._sample_s, self._weights_s, self._kv_s, self._pair_s),
            *(self._host_s, self._attention_s, self._row_s, self._link_s, self._reduce_s),
            float(self.device.overlaps),
        )

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        tokens, rows = features[TOKENS], features[ROWS]
        prompts = _larger(features[PREFILL_KV] * self._kv_s, features[PREFILL_WORK] * self._pair_s)
        decodes = _larger(features[DECODE_KV] * self._kv_s, features[DECODE_KV] * self._pair_s)
        attention = decodes + prompts + (self._attention_s + rows * self._row_s)
        computing = tokens * self._token_s + features[SAMPLED] * self._sample_s
        dense = (_smoothly_larger if self.device.overlaps else _larger)(computing, self._weights_s)
        seconds = dense + attention + features[COPIED] * self._copy_s + self._host_s
        if self._reduce_s or self._link_s:
            seconds = seconds + (tokens * self._link_s + self._reduce_s)
        seconds = seconds + (features[SWAPPED] * self._swap_s + features[SWAPPED_BLOCKS] * self._transfer_s)
        if self._draft:
            seconds = seconds + self._draft.seconds(features)
        return Price(seconds, attention)


class _Draft:
    """The draft model's passes: each reads its weights and costs its layers' fixed times."""

    def __init__(self, model: ModelShape, device: DeviceShape) -> None:
        share = 1.0 / device.parallel
        link_s, reduce_s = _all_reduces(model, device)
        work = model.layers * model.layer_weights + model.hidden * model.vocab
        self._token_s = share * 2.0 * work / (device.flops * device.compute_efficiency)
        self._weights_s = share * model.step_bytes / (device.bandwidth * device.bandwidth_efficiency)
        self._kv_s = share * model.kv_bytes_per_token / (device.bandwidth * device.kv_efficiency)
        self._pass_s = model.layers * (device.layer_overhead_s + device.attention_overhead_s) + reduce_s
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


def _smoothly_larger(one: Amount, other: float) -> Amount:
    """(one^4 + other^4)^(1/4): at least the larger of both, 19 % more where they are equal.

    Square roots are rounded alike everywhere, so that numbers, arrays and compiled code give the same bits.
    """
    square = one * one
    total = square * square + other * other * (other * other)
    if type(total) is float:
        return sqrt(sqrt(total))
    roots: FloatArray = np.sqrt(np.sqrt(total))
    return roots


def _provenance(device: DeviceShape) -> dict[str, object]:
    return {
        "what": "datasheet rates times efficiencies, plus fixed times; an expected value and no bound",
        "not priced": "block size: attention takes as long at any block size",
        "bandwidth_gbs": device.bandwidth / 1e9,
        "tflops": device.flops / 1e12,
        **{name: getattr(device, name) for name in _EFFICIENCIES},
        "step_overhead_us": device.step_overhead_s * 1e6,
        "layer_overhead_us": device.layer_overhead_s * 1e6,
        "attention_overhead_us": device.attention_overhead_s * 1e6,
        "row_overhead_us": device.row_overhead_s * 1e6,
        "tensor_parallel": device.parallel,
        "link_gbs": device.link_bandwidth / 1e9,
        "link_latency_us": device.link_latency_s * 1e6,
        "host_link_gbs": device.host_bandwidth / 1e9,
        "host_link_latency_us": device.host_latency_s * 1e6,
    }
