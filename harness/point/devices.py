"""Whether the engine can run here as it is asked to, found out before any point runs and without torch."""

import os

from harness.config.errors import ConfigError
from harness.config.schema import Backend, EngineConfig, EngineDevice
from harness.environment import engine_device, gpu_names


def check_engine(engine: EngineConfig) -> None:
    """Raises ConfigError for a device that is not here, or kernels that do not run on the device."""
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
