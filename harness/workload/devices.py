"""Checks that the engine can run on this machine as configured. They run before any point, and without torch."""

import os

from engine.runtime.attention.native import why_unavailable
from engine.runtime.options import Backend
from harness.config.errors import ConfigError
from harness.config.schema import EngineConfig, EngineDevice
from harness.environment import ENGINE, check_installed, engine_device, gpu_names

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
    """Check that the engine is installed, its device and its kernels.

    Raises:
        UserError: torch or transformers is missing.
        ConfigError: the device does not exist, or the kernels do not run on it.
    """
    check_installed("engine", ENGINE)
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
