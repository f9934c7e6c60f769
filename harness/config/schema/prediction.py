"""What predicts: the simulated device, its cost model, and how a replay runs."""

from dataclasses import dataclass
from enum import StrEnum


class CostKind(StrEnum):
    """What predicts a step's seconds."""

    auto = "auto"  # fitted where this device and model are or will be calibrated, else roofline
    fitted = "fitted"
    roofline = "roofline"


class Clock(StrEnum):
    """What a measured second is."""

    auto = "auto"  # cpu on a CPU device, wall on CUDA
    wall = "wall"
    cpu = "cpu"  # CPU-seconds of the engine's thread: steady on a shared machine


@dataclass
class DeviceConfig:
    """Datasheet of the simulated device, for `cost=roofline` and for the pool size."""

    name: str = "cpu"
    memory_gb: float = 8.0  # 10^9 bytes
    bandwidth_gbs: float = 20.0  # 10^9 bytes per second
    tflops: float = 0.1  # dense, at the model's dtype
    step_overhead_us: float = 1000.0  # host time of a step beside the device
    layer_overhead_us: float = 250.0  # host or launch time per layer
    memory_utilization: float = 0.9


@dataclass
class CostConfig:
    """The cost model of the simulated side."""

    kind: CostKind = CostKind.auto
    recalibrate: bool = False  # measure again although this device is calibrated
    follow_pace: bool = True  # scale a fitted prediction by how fast the device is now, by a fixed probe
    cache_dir: str | None = None  # where calibrations are kept; null: the user's cache directory


@dataclass
class ReplayConfig:
    """How a replay runs."""

    clock: Clock = Clock.auto
    repeats: int = 3  # measured runs; their spread stands beside every error
