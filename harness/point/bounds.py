"""What a roofline's prediction lies between: the datasheet's bound, and the ends of the ranges of what is assumed.

The bound replays the workload on the device at its datasheet's rates, without any fixed time. It is no prediction, and
the expected value is no bound: each stands in the record under its own name.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from harness.config.groups import groups, option_file
from harness.config.schema import DeviceConfig, EngineDevice, RunConfig
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.replay.cost_model import CostModel
from harness.workload.shapes import device_shape
from harness.workload.simulate import simulate_metrics
from harness.workload.workload import Workload

MOST_REQUESTS = 2_000
METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50", "output_throughput")
DATASHEET = (
    *("memory_gb", "bandwidth_gbs", "tflops", "multiprocessors", "l2_mib", "clock_ghz"),
    *("link_gbs", "host_link_gbs"),
)
ASSUMED: Mapping[str, tuple[float, float]] = {
    "bandwidth_efficiency": (0.75, 0.95),
    "kv_efficiency": (0.8, 1.0),
    "compute_efficiency": (0.5, 0.8),
    "attention_efficiency": (0.4, 0.6),
    "step_overhead_us": (200.0, 1500.0),
    "layer_overhead_us": (2.0, 15.0),
    "attention_overhead_us": (8.0, 16.0),
    "row_overhead_us": (0.1, 0.25),
    "link_efficiency": (0.24, 0.75),
    "link_latency_us": (5.0, 20.0),
}
"""Keys of `device` that no datasheet gives, with the range in which they lie for GPUs from Ampere to Blackwell.

Shares and times of attention: published kernel timings of A100, H100 and H200. Shares of dense layers and times of a
step: fits to public logs of vLLM on RTX 4090 and RTX PRO 6000, widened to both sides. Share of the link: published
timings of all-reduces of two GPUs (AIConfigurator's tables), the lowest without direct access over PCIe.
"""


TIMED = ("a100_40gb", "a100_80gb", "h100", "h200")
"""Devices whose decode attention has constants from published timings of the same GPU."""
ATTENTION_ERROR = {
    "timed": "fitted to published timings of this GPU: expect 6 to 11 % of error on a kernel's time",
    "other": "not fitted on this GPU: from one generation to another the form missed published timings by 23 to 59 %, "
    "mostly where the KV fits the L2 cache; cost=operators or cost=published takes timings of the GPU",
}
"""Errors of the plain form in results/reference/gpu-public (`scoreboard`, decode attention from tables)."""

FITTED = tuple(
    name for name in ASSUMED if name not in ("attention_overhead_us", "link_efficiency", "link_latency_us")
)
"""The keys that a fit to the log of one device moves (`harness.deployment.fit.CONSTANTS`)."""


def origins(device: DeviceConfig) -> dict[str, str]:
    """Where each constant of a device's prices comes from, by key."""
    if device.name == EngineDevice.cpu.value:
        return dict.fromkeys((*DATASHEET, *ASSUMED), "assumed for one core of a server CPU")
    known = {name: origin_of(device, name) for name in DATASHEET}
    known |= {name: f"assumed, usually {low:g} to {high:g}" for name, (low, high) in ASSUMED.items()}
    if device.fitted_from is None:
        known["decode attention"] = ATTENTION_ERROR["timed" if device.name in TIMED else "other"]
    else:
        known |= dict.fromkeys(FITTED, f"fitted to {device.fitted_from}")
        if device.tensor_parallel > 1:
            link = f"fitted to {device.fitted_from} if its engine had several devices, else as in its description"
            known |= dict.fromkeys(("link_efficiency", "link_latency_us"), link)
    return known


def origin_of(device: DeviceConfig, name: str) -> str:
    """Where a rate or a size comes from. A description of the user's may have the name of a preset."""
    value, preset = getattr(device, name), _preset(device.name)
    if name not in preset:
        return "as the description of the device has it"
    known, assumed = preset[name]
    if value != known:
        return f"as the user set it; the preset {device.name} has {known:g}"
    return f"assumed by the preset {device.name}; no datasheet has it" if assumed else "datasheet"


@cache
def _preset(name: str) -> dict[str, tuple[float, bool]]:
    """The rates and sizes of a preset, and whether its file marks each as assumed; none where `name` is no preset."""
    if name not in groups()["device"]:
        return {}
    text = option_file("device", name).read_text(encoding="utf-8")
    lines = re.findall(r"^(\w+): ([\d.]+) *(# assumed)?", text, flags=re.MULTILINE)
    return {key: (float(value), bool(mark)) for key, value, mark in lines if key in DATASHEET}


def bounds_of(config: RunConfig, workload: Workload, cost: CostModel) -> dict[str, Any] | None:
    """Metrics of the same workload at the datasheet's bound, and at both ends of the ranges of what is assumed.

    None where `cost` is no roofline of a GPU's datasheet, or `cost.bounds` is off. Without a word it is off for more
    than `MOST_REQUESTS` requests, because it takes three more simulations. The ends are left out where the
    assumed constants were fitted to a log. A value of the configuration that lies outside its range widens the range.
    """
    wanted = config.cost.bounds
    if wanted is None:
        wanted = len(workload.trace.requests) <= MOST_REQUESTS
    if not wanted or not isinstance(cost, RooflineCost):
        return None
    if config.device.name == EngineDevice.cpu.value:
        return None
    shape = device_shape(config)
    found: dict[str, Any] = {"datasheet": _metrics(config, workload, cost, shape.bound)}
    if config.device.fitted_from is None:
        fast, slow = (_at_end(config, fastest) for fastest in (True, False))
        found["fast_end"] = _metrics(config, workload, cost, fast)
        found["slow_end"] = _metrics(config, workload, cost, slow)
    return found


def _at_end(config: RunConfig, fastest: bool) -> DeviceShape:
    """The device with every assumed constant at the end of its range where steps are shortest, or longest."""
    device = config.device
    ends: dict[str, Any] = {}
    for name, (low, high) in ASSUMED.items():
        value = getattr(device, name)
        larger_is_faster = name.endswith("efficiency")
        ends[name] = max(high, value) if larger_is_faster == fastest else min(low, value)
    return device_shape(replace(config, device=replace(device, **ends)))


def _metrics(
    config: RunConfig, workload: Workload, cost: RooflineCost, device: DeviceShape
) -> dict[str, float]:
    other = RooflineCost(cost.model, device, cost.draft)
    metrics = simulate_metrics(workload, other, config.decoding.beam_churn).metrics
    return {name: metrics[name] for name in METRICS if name in metrics}
