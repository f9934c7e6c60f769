"""The schema of a run: plain dataclasses that Hydra fills. Ranges live in `harness.config.checks`.

Each field's comment is its documentation: unit, meaning, and what `null` stands for.
"""

from harness.config.schema.arrivals import (
    OnError,
    Oversize,
    SharingModel,
    Ticks,
    TraceArrivals,
    TraceConfig,
    TraceFormat,
    Widths,
    WorkloadConfig,
)
from harness.config.schema.engine import (
    Audit,
    Backend,
    Dtype,
    EngineConfig,
    EngineDevice,
    KvDtype,
    ModelConfig,
)
from harness.config.schema.policy import (
    CacheConfig,
    CachePolicy,
    DecodingConfig,
    DecodingMode,
    DraftPlace,
    HashRule,
    PlacementRule,
    PreemptionRule,
    RetentionRule,
    SchedulerConfig,
    SchedulingRule,
)
from harness.config.schema.prediction import (
    Clock,
    Compiled,
    CostConfig,
    CostKind,
    DeviceConfig,
    ReplayConfig,
    ReplayMode,
)
from harness.config.schema.run import ReportConfig, RunConfig

__all__ = [
    "Audit",
    "Backend",
    "CacheConfig",
    "CachePolicy",
    "Clock",
    "Compiled",
    "CostConfig",
    "CostKind",
    "DecodingConfig",
    "DecodingMode",
    "DeviceConfig",
    "DraftPlace",
    "Dtype",
    "EngineConfig",
    "EngineDevice",
    "HashRule",
    "KvDtype",
    "ModelConfig",
    "OnError",
    "Oversize",
    "PlacementRule",
    "PreemptionRule",
    "ReplayConfig",
    "ReplayMode",
    "ReportConfig",
    "RetentionRule",
    "RunConfig",
    "SchedulerConfig",
    "SchedulingRule",
    "SharingModel",
    "Ticks",
    "TraceArrivals",
    "TraceConfig",
    "TraceFormat",
    "Widths",
    "WorkloadConfig",
]
