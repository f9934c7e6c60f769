"""How fast the device is just now, by a fixed probe that has nothing to do with any predicted workload.

Shared machines and warm chips change their pace by tens of per cent within minutes. The same small run is timed during
calibration and between a point's measured runs; the ratio scales the prediction, and the record says so and keeps the
error without it.
"""

from dataclasses import asdict, dataclass
from statistics import median

from harness.config.schema import RunConfig
from harness.measured.engine import measure
from harness.measured.plan import CalibrationCase, case_workload

PROBE = CalibrationCase("probe", 6, (20, 140), (16, 32), 1.5)
"""Prompts, and steps of one to three rows, as light load has them: larger batches suffer more from other work on the
machine than most workloads do, and single rows less."""

_STEP_NS = (3_000_000,) * 10_000
_LONE_S = 0.08  # a request of the probe alone, by that clock


@dataclass(frozen=True)
class Pace:
    """Probe times beside a point's runs over the probe time at calibration: above 1 the device is slower now."""

    ratio: float
    low: float
    high: float
    probes: int

    def section(self) -> dict[str, float]:
        """As the record keeps it."""
        return asdict(self)


def probe_s(config: RunConfig) -> float:
    """Seconds of the probe's steps, by the clock of the measured runs; its plans are the same on every device."""
    run = measure(config, case_workload(config, PROBE, _LONE_S), seed=0, step_ns=_STEP_NS)
    return float(run.log.steps["seconds"].sum())


def pace_of(probes: list[float], calibrated_s: float) -> Pace:
    """The median pace of several probes."""
    ratios = [seconds / calibrated_s for seconds in probes]
    return Pace(median(ratios), min(ratios), max(ratios), len(ratios))
