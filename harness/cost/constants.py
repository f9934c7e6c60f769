"""The constants of a device's prices, and where each comes from: a datasheet, an assumption, the user, or a fit."""

import re
from collections.abc import Mapping
from functools import cache

from harness.config.groups import groups, option_file
from harness.config.schema import DeviceConfig, EngineDevice

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
"""The keys that a fit to the log of one device moves (`harness.twin.fit.CONSTANTS`)."""


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
