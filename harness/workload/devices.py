"""Checks that the engine can run on this machine as configured. They run before any point, and without torch."""

import os
import re

from engine.runtime.attention.native.compile import why_unavailable
from engine.runtime.options import Backend
from harness.config.errors import ConfigError
from harness.config.schema import Clock, EngineConfig, EngineDevice, RunConfig
from harness.environment import device_identity, engine_device, gpu_names


def clock_of(config: RunConfig) -> Clock:
    """The clock; `auto` is CPU-seconds of the engine's thread where one CPU thread does all work, else wall time."""
    if config.replay.clock is not Clock.auto:
        return config.replay.clock
    single = engine_device(config.engine.device) == "cpu" and config.engine.threads == 1
    return Clock.cpu if single else Clock.wall


def has_yardstick(config: RunConfig) -> bool:
    """Whether a yardstick between the steps follows the pace (`cost.follow_pace`). It describes a core, not a GPU."""
    return config.cost.follow_pace and engine_device(config.engine.device) == "cpu"


def is_predicted_device(config: RunConfig) -> bool:
    """Whether `device`, which the simulation predicts, is the device that the engine runs on.

    Only then do seconds measured here say anything about it. `device=cpu`, the default, stands for the machine at
    hand. Of any other name the first part must be a word of the GPU's: `h100_sxm` is an "NVIDIA H100 80GB HBM3". The
    memory must be equal where both name it, and a PCIe card must be called one.
    """
    name = config.device.name.lower()
    if name == EngineDevice.cpu.value:
        return True
    if engine_device(config.engine.device) == "cpu":
        return False
    parts, words = name.split("_"), re.findall(r"[a-z0-9]+", device_identity(config.engine.device).lower())
    sizes = [{word for word in some if re.fullmatch(r"\d+gb", word)} for some in (parts, words)]
    same_memory = sizes[0] == sizes[1] or not all(sizes)
    return (
        parts[0] in words and parts[0] != "nvidia" and same_memory and ("pcie" in words) == ("pcie" in parts)
    )


_SHARE = 0.8  # of the machine's memory: the model, its activations and Python need the rest


def check_memory(pool_bytes: int, engine: EngineConfig) -> None:
    """Check that the machine's memory holds the pool; a CUDA device is not checked here.

    Raises:
        ConfigError: it does not.
    """
    _check_fits(
        pool_bytes,
        engine,
        "cache.pool_tokens",
        "the pool takes",
        "Take fewer tokens, or measure=false to predict alone",
    )


def check_weights(weight_bytes: int, engine: EngineConfig) -> None:
    """Check the same for a model's weights."""
    _check_fits(
        weight_bytes, engine, "model", "its weights take", "A sweep with measure=false predicts without them"
    )


def _check_fits(size: int, engine: EngineConfig, key: str, what: str, remedy: str) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if engine_device(engine.device) == "cpu" and size > _SHARE * memory:
        raise ConfigError(
            key,
            f"{what} {size / 1e9:,.1f} GB, this machine has {memory / 1e9:,.1f} GB; "
            f"allowed: {_SHARE:.0%} of that. {remedy}",
        )


def check_engine(engine: EngineConfig) -> None:
    """Check the device and its kernels.

    Raises:
        ConfigError: the device does not exist, or the kernels do not run on it.
    """
    if engine.device is EngineDevice.cuda and not gpu_names():
        raise ConfigError(
            "engine.device",
            "cuda, but the NVIDIA driver shows no device on this machine; use engine.device=cpu (or auto), "
            "or measure=false to predict alone",
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if engine.backend is Backend.triton and engine_device(engine.device) == "cpu" and not interpreted:
        raise ConfigError(
            "engine.backend",
            "triton kernels need a CUDA device and this run is on the CPU; use engine.backend=torch",
        )
    if engine.backend is Backend.native:
        _check_native(engine)
    if engine.cuda_graphs and (engine_device(engine.device) == "cpu" or engine.backend is Backend.torch):
        raise ConfigError(
            "engine.cuda_graphs",
            "true, but only triton kernels on a CUDA device can be recorded; leave it out, or use engine=cuda",
        )


def _check_native(engine: EngineConfig) -> None:
    on_cpu = engine_device(engine.device) == "cpu"
    reason = why_unavailable() if on_cpu else "this run is on a GPU"
    if reason:
        raise ConfigError(
            "engine.backend", f"native kernels are compiled for CPUs: {reason}; use engine.backend=auto"
        )


def engine_kernels(engine: EngineConfig) -> list[str]:
    """The kernels of the engine on this machine: that of attention (`auto` resolved), and on a CPU that of all else.

    They depend on the C compiler and on `PAGETWIN_NATIVE`, too.
    """
    if engine_device(engine.device) != "cpu":
        return ["triton" if engine.backend is Backend.auto else str(engine.backend)]
    rest = "torch" if why_unavailable() else "native"
    return [rest if engine.backend is Backend.auto else str(engine.backend), rest]
