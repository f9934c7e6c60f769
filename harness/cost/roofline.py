"""A cost model for devices that are not available: bytes moved, operations, and fixed times.

The constants of a device come from a datasheet, an assumption, the user, or a fit; `origins` says which.

How the block size changes decode attention comes from a table of the static model of our Triton kernels:
`conf/block_sizes.csv` is made from the compiled kernels (`harness.kernel_speed.block_sizes`) and read here, where no
compiler is needed. It is a model and no measurement: no public table has the block size as an axis, so nothing could
judge this one.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from harness.config.errors import UserError
from harness.config.groups import conf_dir, groups, option_file
from harness.config.schema import DeviceConfig, EngineDevice
from harness.cost.model_shape import ModelShape
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import AT

T = TypeVar("T")


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

    `block_size_factor` multiplies the seconds of reading KV in decode attention, by the block size; None: not priced.

    With `expert_parallel` each device holds whole experts, else a slice of every expert. Both lie on the devices of all
    data-parallel `replicas`, which then run in lockstep.

    `multiprocessors`, `cache` (bytes of the L2) and `clock_ghz` are the datasheet's, 0 where they are not known. The
    roofline does not use them; the interpolation of timed operators does.

    `link_bandwidth` is the rate at which one device sends to the others in bytes/s, of which an all-reduce reaches
    `link_efficiency`; `link_latency_s` is what each of its rounds costs beside the bytes. `host_bandwidth` is the rate
    of the link between each device and the host, one way, `host_latency_s` the cost of a transfer over it beside its
    bytes.
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
    link_efficiency: float = 1.0
    attention_overhead_s: float = 0.0
    row_overhead_s: float = 0.0
    overlaps: bool = False
    expert_parallel: bool = False
    replicas: int = 1
    multiprocessors: int = 0
    cache: float = 0.0
    clock_ghz: float = 0.0
    block_size_factor: float | None = None

    @property
    def bound(self) -> "DeviceShape":
        """The same device at its datasheet's rates, without any fixed time: no step that reads a prefix once for each
        row can take less.
        """
        return DeviceShape(
            *(self.name, self.bandwidth, self.flops, 0.0, 0.0, self.parallel),
            *(self.link_bandwidth, 0.0, self.host_bandwidth, 0.0),
            expert_parallel=self.expert_parallel,
            replicas=self.replicas,
        )


_EFFICIENCIES = ("bandwidth_efficiency", "kv_efficiency", "compute_efficiency", "attention_efficiency")


class Rates(NamedTuple, Generic[T]):
    """What a roofline prices with beside the reading of weights, in seconds; the compiled replay has it as an array."""

    token: T
    sample: T  # a sampled row
    decode_pair: T  # of a decode row
    kv: T  # a KV slot
    pair: T  # of a prompt
    host: T
    attention: T  # its fixed time
    row: T
    link: T  # a token in one round
    links: T  # what all first rounds and the gather cost
    overlaps: T  # 1 if the dense layers overlap
    decode_kv: T  # a KV slot of a decode row
    copy: T  # a slot that is copied
    link_row: T  # a sampled row
    swap: T  # a slot that is swapped
    transfer: T  # a block that is swapped
    windowed: T  # the share of the layers that have a window
    drafts: T  # 1 if there is a draft model, else 0 as what follows
    draft_token: T
    draft_weights: T  # of a pass
    draft_kv: T
    draft_pass: T  # its fixed time
    draft_link: T  # a token
    link_in_two: T  # a token in two rounds
    second_links: T  # what the second rounds cost


RATE: Rates[int] = Rates(*range(len(Rates._fields)))
"""The place of each rate, by its name."""


class StepParts(NamedTuple):
    """Seconds of the parts of a step that a table of timed operators can replace."""

    dense: Amount
    decodes: Amount
    prompts: Amount


class RooflineCost:
    """The seconds of a step from bytes, operations and fixed times.

        step + layers x (layer + attention overhead + rows x row overhead)
        + dense layers: reading all weights, and computing (the larger, or a smooth maximum of both)
        + attention: KV slots that decode rows read, and of prompts the larger of their slots and their pairs
        + copied slots, swapped blocks, the links between devices, draft passes

    Causal attention does 4 x heads x head_dim FLOP per query-key pair. With tensor parallelism (Megatron-LM's split,
    Shoeybi et al. 2019) each device holds and reads its share of weights and heads, and every layer ends in two
    all-reduces of the activations. One takes the faster of two ways, as vLLM's custom all-reduce does by size: in one
    round each device gets (n - 1) times the bytes, in two (reduce-scatter and all-gather) 2 (n - 1) / n times. With one
    share and one latency that misses published timings of vLLM from 4 KB to 64 MB on two, four and eight A100, H100 or
    H200 by 8 to 10 %, on B200 by 15 % (AIConfigurator's tables). The logits of sampled rows are
    gathered once a step, in the element type of the model as vLLM's `LogitsProcessor` does: (n - 1) / n of their bytes.
    A swapped block is 2 x layers transfers, K and V of each layer lying apart: the smaller the block, the more a byte
    costs (SOSP'23 paper on paged attention, section 7.3). `draft` is the model that proposes tokens, with its own KV.

    Of a mixture of experts a step reads the experts that its tokens are expected to touch, if they choose independently
    of one another; on whole experts per device the expected load of the busiest device counts. Replicas in lockstep
    share them: the tokens of all touch them, and each layer with experts gathers the activations of all replicas and
    scatters the sums (vLLM's backend allgather_reducescatter): (r - 1) / r of their bytes each way.

    Windowed layers read and compute inside their window alone. Each device reads the whole latent vector of latent
    attention. Each row reads and writes its state once a step in every layer that has one.

    On `DeviceShape.bound` the price is a lower bound. On any other device it is an expected value: efficiencies and
    fixed times are assumed or fitted.
    """

    def __init__(self, model: ModelShape, device: DeviceShape, draft: ModelShape | None = None) -> None:
        self.model = model
        self.device = device
        self.draft = draft
        name = f"roofline:{device}:{model}" + (f":{draft}" if draft else "")
        self.source = CostSource("roofline", device.name, name, _provenance(model, device))
        share, kv_share = 1.0 / device.parallel, model.kv_share(device.parallel)
        compute = device.flops * device.compute_efficiency
        reading = device.bandwidth * device.bandwidth_efficiency
        reading_kv = device.bandwidth * device.kv_efficiency
        pairs = device.flops * device.attention_efficiency / model.attention_layers
        token_s = share * 2.0 * model.token_weights / compute
        kv_s = kv_share * model.kv_bytes_per_token / reading_kv
        factor = device.block_size_factor
        experts_s: FloatArray = np.zeros(1)
        self._group_tokens: int | None = None
        if model.experts:
            holders = device.parallel * device.replicas
            groups = holders if device.expert_parallel else 1
            each = model.expert_bytes / reading * (1.0 if device.expert_parallel else 1.0 / holders)
            experts_s = model.experts.touched(groups) * each
            busiest = model.experts.busiest(groups)
            routed = model.expert_layers * model.experts.active * model.expert_weights
            token_s += share * 2.0 * routed * (busiest - 1.0) / compute
            self._own_token_s = share * 2.0 * (model.token_weights - routed) / compute
            self._routed_s = 2.0 * routed * busiest / holders / compute
            sent = 2.0 * (device.replicas - 1) / device.replicas * model.hidden * model.bytes_per_element
            self._exchange_s = model.expert_layers * sent / (device.link_bandwidth * device.link_efficiency)
            self._exchanges_s = 2.0 * model.expert_layers * device.link_latency_s
        # seconds of reading the weights of a step of 0, 1, 2, ... tokens; more tokens take as long as the last
        self.reading: FloatArray = share * model.step_bytes / reading + experts_s
        lanes = [shape for shape in (model, draft) if shape]
        lanes_bytes = sum(shape.kv_share(device.parallel) * shape.kv_bytes_per_token for shape in lanes)
        states = share * 2.0 * model.state_layers * model.state_bytes / reading_kv
        self.rates = Rates(
            token=token_s,
            sample=share * 2.0 * model.hidden * model.vocab / compute,
            decode_pair=share * model.decode_pair_flops / pairs,
            kv=kv_s,
            pair=share * model.prompt_pair_flops / pairs,
            host=device.step_overhead_s + model.layers * device.layer_overhead_s,
            attention=model.layers * device.attention_overhead_s,
            row=model.layers * device.row_overhead_s + states,
            overlaps=float(device.overlaps),
            decode_kv=kv_s if factor is None else factor * kv_s,
            copy=2.0 * lanes_bytes / reading,
            swap=lanes_bytes / device.host_bandwidth,
            transfer=2.0 * sum(shape.layers for shape in lanes) * device.host_latency_s,
            windowed=model.windowed_layers / model.attention_layers if model.window else 0.0,
            **_links(model, device),
            **_draft_rates(draft, device),
        )

    def of_group(self, tokens: int | None) -> None:
        """Price the next steps as those of replicas in lockstep that together have so many tokens; None: alone."""
        self._group_tokens = tokens

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        parts = self.parts(features)
        attention = parts.decodes + parts.prompts + self.attention_fixed(features[AT.rows])
        return Price(self.total(features, parts.dense, attention), attention)

    def parts(self, features: Sequence[Amount]) -> StepParts:
        """Seconds of dense layers, and of attention over decode rows and over prompts without its fixed times."""
        routed = features[AT.tokens]
        computing = routed * self.rates.token
        if self._group_tokens is not None:
            routed = self._group_tokens
            computing = features[AT.tokens] * self._own_token_s + routed * self._routed_s
        dense = dense_of(features, self.rates, computing, self._reading(routed))
        return StepParts(dense, *attention_of(features, self.rates))

    def attention_fixed(self, rows: Amount) -> Amount:
        """Seconds of attention in all layers that depend on the number of rows alone."""
        return fixed_of(self.rates, rows)

    def total(self, features: Sequence[Amount], dense: Amount, attention: Amount) -> Amount:
        """Seconds of a step whose dense layers and attention take so long."""
        seconds = step_of(features, self.rates, dense, attention)
        if self._group_tokens is not None:
            seconds = seconds + self._group_tokens * self._exchange_s + self._exchanges_s
        return with_moves(features, self.rates, seconds)

    def moving(self, features: Sequence[Amount]) -> Amount:
        """Seconds of copied slots, swapped blocks and draft passes alone."""
        return with_moves(features, self.rates, features[AT.copied_slots] * self.rates.copy)

    def _reading(self, tokens: Amount) -> Amount:
        last = len(self.reading) - 1
        if isinstance(tokens, np.ndarray):
            return self.reading[np.minimum(tokens, last).astype(np.int64)]
        return float(self.reading[int(min(tokens, last))])


# -- the parts of a price, which the compiled replay calls too ---------------------------------------------------------


def attention_of(features: Sequence[Amount], rates: Sequence[float]) -> tuple[Amount, Amount]:
    """Seconds of attention over decode rows and over prompts, without its fixed times."""
    decode_kv, prompt_kv, pairs = features[AT.decode_kv], features[AT.prefill_kv], features[AT.prefill_work]
    windowed = rates[RATE.windowed]
    if windowed:
        decode_kv = decode_kv - features[AT.decode_unseen_kv] * windowed
        prompt_kv = prompt_kv - features[AT.prefill_unseen_kv] * windowed
        pairs = pairs - features[AT.prefill_unseen_work] * windowed
    decodes = larger(decode_kv * rates[RATE.decode_kv], decode_kv * rates[RATE.decode_pair])
    return decodes, larger(prompt_kv * rates[RATE.kv], pairs * rates[RATE.pair])


def fixed_of(rates: Sequence[float], rows: Amount) -> Amount:
    """Seconds of attention that depend on the number of rows alone."""
    return rates[RATE.attention] + rows * rates[RATE.row]


def dense_of(
    features: Sequence[Amount], rates: Sequence[float], computing: Amount, reading: Amount
) -> Amount:
    """Seconds of the dense layers, which compute for so long without the logits, and read weights for so long.

    Where both overlap it is (one^4 + other^4)^(1/4): at least the larger of both, 19 % more where they are equal.
    Square roots are rounded alike everywhere, so that numbers, arrays and compiled code give the same bits.
    """
    computing = computing + features[AT.sampled_rows] * rates[RATE.sample]
    if not rates[RATE.overlaps]:
        return larger(computing, reading)
    square = computing * computing
    return root(root(square * square + reading * reading * (reading * reading)))


def step_of(features: Sequence[Amount], rates: Sequence[float], dense: Amount, attention: Amount) -> Amount:
    """Seconds of dense layers, attention, copies, host and links."""
    tokens = features[AT.tokens]
    seconds = dense + attention + features[AT.copied_slots] * rates[RATE.copy] + rates[RATE.host]
    if rates[RATE.link] or rates[RATE.links]:
        in_two = tokens * rates[RATE.link_in_two] + rates[RATE.second_links]
        reduces = smaller(tokens * rates[RATE.link], in_two)
        gathers = features[AT.sampled_rows] * rates[RATE.link_row]
        seconds = seconds + (reduces + gathers + rates[RATE.links])
    return seconds


def with_moves(features: Sequence[Amount], rates: Sequence[float], seconds: Amount) -> Amount:
    """The same with swapped blocks, and all passes of the draft model: each reads its weights."""
    swapping = features[AT.swapped_slots] * rates[RATE.swap]
    seconds = seconds + (swapping + features[AT.swapped_blocks] * rates[RATE.transfer])
    if not rates[RATE.drafts]:
        return seconds
    passes, tokens = features[AT.draft_passes], features[AT.draft_tokens]
    dense = larger(tokens * rates[RATE.draft_token], passes * rates[RATE.draft_weights])
    reading = features[AT.draft_kv] * rates[RATE.draft_kv]
    return seconds + (dense + (reading + passes * rates[RATE.draft_pass] + tokens * rates[RATE.draft_link]))


def larger(one: Amount, other: Amount) -> Amount:
    """The larger of two amounts, element by element."""
    if isinstance(one, float) and isinstance(other, float):
        return max(one, other)
    return np.maximum(one, other)


def smaller(one: Amount, other: Amount) -> Amount:
    """The smaller of two amounts, element by element."""
    if isinstance(one, float) and isinstance(other, float):
        return min(one, other)
    return np.minimum(one, other)


def root(amount: Amount) -> Amount:
    """The square root of an amount, element by element."""
    return sqrt(amount) if isinstance(amount, float) else np.sqrt(amount)


SHARED = (larger, smaller, root, attention_of, fixed_of, dense_of, step_of, with_moves)


def _draft_rates(model: ModelShape | None, device: DeviceShape) -> dict[str, float]:
    """Those of the draft model: its part of `Rates`."""
    if model is None:
        return dict.fromkeys(("drafts", *(name for name in Rates._fields if name.startswith("draft_"))), 0.0)
    share, links = 1.0 / device.parallel, _links(model, device)
    work = model.token_weights + model.hidden * model.vocab
    kv_bytes = model.kv_share(device.parallel) * model.kv_bytes_per_token
    return {
        "drafts": 1.0,
        "draft_token": share * 2.0 * work / (device.flops * device.compute_efficiency),
        "draft_weights": share * model.step_bytes / (device.bandwidth * device.bandwidth_efficiency),
        "draft_kv": kv_bytes / (device.bandwidth * device.kv_efficiency),
        "draft_pass": model.layers * (device.layer_overhead_s + device.attention_overhead_s) + links["links"],
        "draft_link": links["link"] + links["link_row"],  # a pass has few tokens, and each has logits
    }


def _links(model: ModelShape, device: DeviceShape) -> dict[str, float]:
    """Those of the links. A token meets an all-reduce after attention and the MLP of every layer, a row an all-gather
    of its logits.
    """
    others, reduces = device.parallel - 1, 2 * model.layers
    sent_s = others * model.bytes_per_element / (device.link_bandwidth * device.link_efficiency)
    return {
        "link": reduces * model.hidden * sent_s,
        "link_in_two": reduces * model.hidden * sent_s * 2.0 / device.parallel,
        "second_links": reduces * device.link_latency_s,
        "link_row": model.vocab * sent_s / device.parallel,
        "links": min(others, 1) * (reduces + 1) * device.link_latency_s,
    }


EACH_ROW_READS = "prefixes that rows share: each row reads them, as without cascade attention"


def _not_priced(model: ModelShape, device: DeviceShape) -> Iterator[str]:
    """What the price leaves out, each in words."""
    if device.block_size_factor is None:
        yield "block size: attention takes as long at any block size"
    if model.bytes_per_element > 2 and device.name != EngineDevice.cpu.value:
        yield "arithmetic in float32: it runs at device.tflops, which presets have for 16 bits"
    if model.layer_bits is not None or model.expert_bits is not None:
        yield "arithmetic of quantised weights: it runs at device.tflops, as that of the model's element type"
    if model.experts and device.expert_parallel:
        yield "chance imbalance among devices: each has its expected load"
    if model.state_layers:
        yield "weights and operations of layers with a state: they count as those of a layer's projections in attention"
        yield "gates of the attention beside such layers"
    if model.latent:
        yield "unpacking latent keys of a prompt's earlier chunks"
    if device.parallel > 1:
        yield "the all-reduce of the input embedding"
    if device.parallel > (1 if model.latent else model.kv_heads):
        yield "weights of K and V that several devices hold: each is taken to hold its share"
    yield EACH_ROW_READS


def _provenance(model: ModelShape, device: DeviceShape) -> dict[str, object]:
    return {
        "what": "datasheet rates times efficiencies, plus fixed times; an expected value and no bound",
        "not priced": "; ".join(_not_priced(model, device)),
        "bandwidth_gbs": device.bandwidth / 1e9,
        "tflops": device.flops / 1e12,
        **{name: getattr(device, name) for name in _EFFICIENCIES},
        "step_overhead_us": device.step_overhead_s * 1e6,
        "layer_overhead_us": device.layer_overhead_s * 1e6,
        "attention_overhead_us": device.attention_overhead_s * 1e6,
        "row_overhead_us": device.row_overhead_s * 1e6,
        "tensor_parallel": device.parallel,
        "link_gbs": device.link_bandwidth / 1e9,
        "link_efficiency": device.link_efficiency,
        "link_round_us": device.link_latency_s * 1e6,
        "host_link_gbs": device.host_bandwidth / 1e9,
        "host_link_latency_us": device.host_latency_s * 1e6,
    }


HEAD_DIM, MOST_GROUP = 128, 16  # the shapes that share the code of the table's kernels
REFERENCE = 64  # the page size at which the tables were timed that `kv_efficiency` comes from
# The largest median error of the static model on a GPU, above 128 MB of KV (docs/kernel-speed.md). It is for whole
# times of a public kernel at one page size; how far errors at two block sizes cancel is not known.
UNCERTAINTY = 0.18


@dataclass(frozen=True)
class BlockSizeFactor:
    """Seconds of decode attention at a block size over those at the reference, and what limits the kernel there."""

    factor: float
    limit: str


def table_file() -> Path:
    """The table in `conf/`, in a checkout or in the installed package."""
    return conf_dir() / "block_sizes.csv"


@cache
def read_table() -> dict[tuple[str, int, int], BlockSizeFactor]:
    """Factors by device, bytes of a cached element, and block size.

    Raises:
        UserError: the file cannot be read as such a table.
    """
    file = table_file()
    found = {}
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        for row in csv.DictReader(lines):
            key = row["device"], int(row["element_bytes"]), int(row["block_size"])
            found[key] = BlockSizeFactor(float(row["factor"]), row["limit"])
        return found
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: no table of block sizes ({type(error).__name__}: {error})") from error


def block_size_factor(
    device: str, element_bytes: int, block_size: int, head_dim: int, group: int
) -> BlockSizeFactor:
    """The factor of one configuration.

    Raises:
        LookupError: the table does not hold it; the message says what it holds.
    """
    if head_dim != HEAD_DIM or group > MOST_GROUP:
        held = f"it holds heads of {HEAD_DIM} in groups up to {MOST_GROUP}"
        raise LookupError(f"heads of {head_dim} in groups of {group}; {held}")
    table = read_table()
    if (device, element_bytes, block_size) not in table:
        devices = sorted({name for name, *_ in table})
        sizes = sorted({size for name, width, size in table if (name, width) == (device, element_bytes)})
        if device not in devices:
            raise LookupError(f"device {device}; it holds {', '.join(devices)}")
        if not sizes:
            raise LookupError(f"a cache of {element_bytes} bytes an element on {device}")
        raise LookupError(f"block size {block_size}; it holds {', '.join(map(str, sizes))}")
    return table[device, element_bytes, block_size]


DATASHEET = (
    *("memory_gb", "bandwidth_gbs", "tflops", "multiprocessors", "l2_mib", "clock_ghz"),
    *("link_gbs", "host_link_gbs"),
)
ASSUMED: Mapping[str, tuple[float, float]] = {
    "bandwidth_efficiency": (0.65, 0.95),
    "kv_efficiency": (0.8, 1.0),
    "compute_efficiency": (0.5, 0.8),
    "attention_efficiency": (0.4, 0.6),
    "step_overhead_us": (200.0, 1500.0),
    "layer_overhead_us": (2.0, 15.0),
    "attention_overhead_us": (8.0, 16.0),
    "row_overhead_us": (0.07, 0.25),
    "link_efficiency": (0.06, 0.4),
    "link_round_us": (4.0, 16.0),
}
"""Keys of `device` that no datasheet gives, with the range in which they lie for GPUs from Ampere to Blackwell.

Shares and times of attention: published kernel timings of A100, H100, H200, B200, L40S and RTX PRO 6000, of whose
matrix products come 0.66 to 0.9 of the bandwidth too. Shares of dense layers and times of a step: fits to public logs
of vLLM on RTX 4090, RTX PRO 6000, A10G, L40S and RTX 5070 Ti, widened to both sides. Share and latency of the link:
published timings of vLLM's all-reduces (AIConfigurator's tables), the worst of four and eight GPUs over PCIe.
"""

ASSUMED_FRONT_END: Mapping[str, tuple[float, float]] = {
    "frontend_request_us": (1500.0, 20_000.0),
    "frontend_turn_us": (50.0, 1000.0),
}
"""The same of the server's front end, where a device prices one: time to first token of lone requests, less a step.

3 to 18 ms in public logs of clients beside their server; a network comes on top."""

TIMED = ("a100_40gb", "a100_80gb", "b200", "h100", "h200")
"""Devices whose decode attention has constants from published timings of the same GPU."""
ATTENTION_ERROR = {
    "timed": "fitted to published timings of this GPU: expect 6 to 11 % of error on a kernel's time",
    "other": "not fitted on this GPU: from one generation to another the form missed published timings by 23 to 59 %, "
    "mostly where the KV fits the L2 cache; cost=operators or cost=published takes timings of the GPU",
}
"""Errors of the plain form in results/reference/gpu-public (`scoreboard`, decode attention from tables)."""

FRONT_END = ("frontend_request_us", "frontend_token_us", "frontend_turn_us")
"""What a server takes before the scheduler's queue. No description of a device knows it; a log of a client shows it."""

_FROM_ELSEWHERE = ("attention_overhead_us", "link_efficiency", "link_round_us")
FITTED = (*(name for name in ASSUMED if name not in _FROM_ELSEWHERE), *FRONT_END)
"""The keys that a fit to the log of one device moves (`harness.twin.fit.CONSTANTS`)."""


def origins(device: DeviceConfig) -> dict[str, str]:
    """Where each constant of a device's prices comes from, by key."""
    if device.name == EngineDevice.cpu.value:
        return dict.fromkeys((*DATASHEET, *ASSUMED), "assumed for one core of a server CPU")
    known = {name: origin_of(device, name) for name in DATASHEET}
    known |= {name: f"assumed, usually {low:g} to {high:g}" for name, (low, high) in ASSUMED.items()}
    known |= {name: "as set" if getattr(device, name) else "not priced" for name in FRONT_END}
    if device.fitted_from is None:
        known["decode attention"] = ATTENTION_ERROR["timed" if device.name in TIMED else "other"]
    else:
        known |= dict.fromkeys(FITTED, f"fitted to {device.fitted_from}")
        if device.tensor_parallel > 1:
            link = f"fitted to {device.fitted_from} if its engine had several devices, else as in its description"
            known |= dict.fromkeys(("link_efficiency", "link_round_us"), link)
    return known


def origin_of(device: DeviceConfig, name: str) -> str:
    """Where a rate or a size comes from. A description of the user's may have the name of a preset."""
    value, preset = getattr(device, name), preset_rates(device.name)
    if name not in preset:
        return "as the description of the device has it"
    known, assumed = preset[name]
    if value != known:
        return f"as the user set it; the preset {device.name} has {known:g}"
    return f"assumed by the preset {device.name}; no datasheet has it" if assumed else "datasheet"


@cache
def preset_rates(name: str) -> dict[str, tuple[float, bool]]:
    """The rates and sizes of a preset, and whether its file marks each as assumed; none where `name` is no preset."""
    if name not in groups()["device"]:
        return {}
    text = option_file("device", name).read_text(encoding="utf-8")
    lines = re.findall(r"^(\w+): ([\d.]+) *(# assumed)?", text, flags=re.MULTILINE)
    return {key: (float(value), bool(mark)) for key, value, mark in lines if key in DATASHEET}
