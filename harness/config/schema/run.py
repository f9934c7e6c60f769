"""One point of a sweep."""

from dataclasses import dataclass, field

from harness.config.schema.arrivals import TraceConfig, WorkloadConfig
from harness.config.schema.engine import EngineConfig, ModelConfig
from harness.config.schema.policy import CacheConfig, DecodingConfig, SchedulerConfig
from harness.config.schema.prediction import CostConfig, DeviceConfig, ReplayConfig


@dataclass
class ReportConfig:
    """What the report shows beside the sweep's own points; no point depends on it."""

    kernels: str | None = (
        None  # folder or table of `bench kernels`; null: looked for beside the results; none: leave out
    )


@dataclass
class RunConfig:
    """One point of a sweep."""

    name: str = "default"  # of the sweep, shown in the report
    out: str = "results/default"  # store folder
    measure: bool = True  # false: simulation only
    workers: int = (
        0  # processes for simulation-only points; 0: one per core; measured points run one at a time
    )
    trace: TraceConfig = field(default_factory=TraceConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cost: CostConfig = field(default_factory=CostConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
