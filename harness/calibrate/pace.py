"""The pace of the device now, measured with a fixed probe that no prediction uses.

`Stability` describes whether the pace was constant during a calibration.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from harness.calibrate.design import CalibrationCase, case_workload
from harness.config.schema import RunConfig
from harness.measure.engine import measure

PROBE = CalibrationCase("probe", 6, (20, 140), (16, 32), 1.5)
"""Prompts and steps of one to three rows, as under light load. Other work on the machine slows larger batches down more
than most workloads, and single rows less."""

STEADY = 0.10
"""Probes within this share of their median have the same pace; measurements beside other probes are repeated."""

MOVED = 0.15
"""Beyond this share the pace has changed, and the calibration warns."""

_STEP_NS = (3_000_000,) * 10_000
_LONE_S = 0.08  # seconds of a lone request of the probe, by the durations above


@dataclass(frozen=True)
class Pace:
    """Probe times beside a point's runs over the probe time at calibration; above 1 the device is slower now."""

    ratio: float
    low: float
    high: float
    probes: int

    def section(self) -> dict[str, float]:
        """The section of the record."""
        return asdict(self)


def probe_s(config: RunConfig) -> float:
    """Seconds of the probe's steps, by the clock of the measured runs. Its step plans are the same on every device."""
    run = measure(config, case_workload(config, PROBE, _LONE_S), seed=0, step_ns=_STEP_NS)
    return float(run.log.steps["seconds"].sum())


def pace_of(probes: list[float], calibrated_s: float) -> Pace:
    """The median pace of several probes."""
    ratios = [seconds / calibrated_s for seconds in probes]
    return Pace(median(ratios), min(ratios), max(ratios), len(ratios))


@dataclass(frozen=True)
class Stability:
    """Probe times over their median, and the machine's load before and after."""

    low: float
    high: float
    probes: int
    load_before: float
    load_after: float
    cores: int

    @property
    def moved(self) -> bool:
        """Whether the pace changed by more than MOVED."""
        return self.low < 1 - MOVED or self.high > 1 + MOVED

    @property
    def crowded(self) -> bool:
        """Whether the load was higher than the number of cores."""
        return max(self.load_before, self.load_after) > self.cores

    def section(self) -> dict[str, float | bool]:
        """The section of the calibration file."""
        return {**asdict(self), "moved": self.moved, "crowded": self.crowded}

    def warnings(self) -> list[str]:
        """Warnings to print before a user trusts the calibration."""
        found = []
        if self.moved:
            found.append(
                f"the device changed its pace while it was measured (probes from {self.low:.2f} to {self.high:.2f} of "
                "their median): clocks moved, or something else ran. Calibrate again when it is quiet"
            )
        if self.crowded:
            found.append(
                f"the machine was crowded (load average {self.load_before:.1f} before, {self.load_after:.1f} after, "
                f"{self.cores} cores)"
            )
        return found


def stability_of(probes_s: Sequence[float], load_before: float) -> Stability:
    """From the probe times of a calibration, in seconds."""
    middle = median(probes_s)
    return Stability(
        min(probes_s) / middle,
        max(probes_s) / middle,
        len(probes_s),
        load_before,
        os.getloadavg()[0],
        os.cpu_count() or 1,
    )


def is_steady(ratio: float) -> bool:
    """Whether a probe that took `ratio` times the usual time still has the usual pace; probes scatter."""
    return abs(ratio - 1) <= STEADY


def off_pace(probes_s: Sequence[float]) -> list[int]:
    """Numbers of the probes that are further from the median than STEADY."""
    middle = median(probes_s)
    return [place for place, probe in enumerate(probes_s) if not is_steady(probe / middle)]
