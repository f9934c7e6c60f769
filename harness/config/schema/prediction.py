"""What predicts: the simulated device, its cost model, and how a replay runs."""

from dataclasses import dataclass
from enum import StrEnum


class CostKind(StrEnum):
    """What predicts a step's seconds."""

    auto = "auto"  # table with cost.kernels, fitted where device and model are calibrated or will be, else roofline
    fitted = "fitted"
    table = "table"  # attention interpolated in a measured grid, the rest fitted
    roofline = "roofline"


class ReplayMode(StrEnum):
    """Who sends requests, and when."""

    trace = "trace"  # open loop: at the trace's times (scaled by workload.request_rate)
    poisson = "poisson"  # open loop: drawn anew, at workload.request_rate (null: the trace's mean rate)
    gamma = "gamma"  # the same with gaps of replay.burstiness
    closed = "closed"  # so many users, each of whom waits for an answer and pauses before asking again
    offline = "offline"  # everything is there at the start
    sessions = "sessions"  # a turn waits until its parent has ended and its user has thought


class Clock(StrEnum):
    """What a measured second is."""

    auto = "auto"  # cpu on a CPU device, wall on CUDA
    wall = "wall"
    cpu = "cpu"  # CPU-seconds of the engine's thread: steady on a shared machine


class Compiled(StrEnum):
    """Whether requests without content are replayed by compiled code; results are the same."""

    auto = "auto"  # where it can be had and there are enough requests
    never = "never"
    always = "always"  # refuse the point where it cannot be had


@dataclass
class DeviceConfig:
    """Datasheet of the simulated device, for `cost=roofline` and for the pool size; of each of several where
    `tensor_parallel` is above 1.
    """

    name: str = "cpu"
    memory_gb: float = 8.0  # 10^9 bytes
    bandwidth_gbs: float = 20.0  # 10^9 bytes per second
    tflops: float = 0.1  # dense, at the model's dtype
    step_overhead_us: float = 1000.0  # host time of a step beside the device
    layer_overhead_us: float = 250.0  # host or launch time per layer
    memory_utilization: float = 0.9
    bandwidth_efficiency: float = (
        1.0  # share of the bandwidth that kernels reach; 1 is an upper bound on speed
    )
    compute_efficiency: float = 1.0  # share of the peak FLOP/s that they reach
    tensor_parallel: int = 1  # devices among which every layer is split
    link_gbs: float = 300.0  # tensor_parallel > 1: 10^9 bytes per second that a device sends to the others
    link_latency_us: float = 10.0  # of one all-reduce, beside its bytes
    host_link_gbs: float = (
        10.0  # 10^9 bytes per second, one way, between a device and its host: swapped blocks
    )
    host_link_latency_us: float = (
        0.2  # of one transfer, beside its bytes; a swapped block is 2 x layers of them
    )


@dataclass
class CostConfig:
    """The cost model of the simulated side."""

    kind: CostKind = CostKind.auto
    recalibrate: bool = False  # measure again although this device is calibrated
    follow_pace: bool = True  # scale a fitted prediction by how fast the device is now, by a fixed probe
    cache_dir: str | None = None  # where calibrations are kept; null: the user's cache directory
    kernels: str | None = (
        None  # table: attention from this folder (or table) of bench kernels; null: from calibrate's grid
    )


@dataclass
class ReplayConfig:
    """How a replay runs."""

    clock: Clock = Clock.auto
    repeats: int = 3  # measured runs; their spread stands beside every error
    mode: ReplayMode = ReplayMode.trace
    users: int = 16  # mode=closed
    think_s: float = 0.0  # closed, sessions: mean of the users' exponential pauses, where the trace says none
    burstiness: float = 2.0  # gamma: coefficient of variation of the gaps; 1 is Poisson
    duration_s: float | None = (
        None  # stop then, in virtual time; what has not finished is named; null: when all is done
    )
    records: bool = True  # keep a row for every step and request; false: metrics alone, in constant memory
    compiled: Compiled = (
        Compiled.auto
    )  # simulate plain requests (one sequence, nothing shared) in machine code
