"""How fast the device is at the moment, beside how fast it was.

The pace of the device changes with its clocks and with other work on the machine. On a CPU a yardstick between the
steps follows it, and measured times are divided by it (`harness.measure.executor`). A GPU has no such yardstick: a
fixed probe that no prediction uses runs beside the measured runs, and predictions are scaled by it. `Stability`
describes whether the pace was constant during a calibration.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import numpy as np

from harness.measure.cases import CalibrationCase, case_point
from harness.measure.engine import measure
from harness.measure.executor import Reading
from harness.replay.recorder import MeasuredRun
from harness.workload.deployment import Deployment

# Prompts and steps of one to three rows, as under light load. Other work on the machine slows larger batches down more
# than most workloads, and single rows less.
PROBE = CalibrationCase("probe", 6, (20, 140), (16, 32), 1.5)

# Probes within this share of their median have the same pace; measurements beside other probes are repeated.
STEADY = 0.10

# Beyond this share the pace has changed, and the calibration warns.
MOVED = 0.15

_STEP_NS = (3_000_000,) * 10_000
_LONE_S = 0.08  # seconds of a lone request of the probe, by the durations above


class PaceSource(StrEnum):
    """What told the pace."""

    probe = "probe"
    yardstick = "yardstick"


@dataclass(frozen=True)
class Pace:
    """The device's pace during a point's runs over that at calibration; above 1 it is slower now.

    By probes: their median, lowest and highest ratio. By the yardstick: the ratio of clock time to the times of the
    record, and the 5th and 95th percentile of the steps' paces. `since` says what the pace is relative to; without a
    calibration that is the first warm-up of the process.
    """

    by: PaceSource
    ratio: float
    low: float
    high: float
    probes: int
    since: str = "calibration"

    def section(self) -> dict[str, float | str]:
        """The section of the record."""
        return asdict(self)


def probe_s(deployment: Deployment) -> float:
    """Seconds of the probe's steps, by the clock of the measured runs. Its step plans are the same on every device.

    1 where the yardstick has divided the pace out of every time already.
    """
    if deployment.has_yardstick:
        return 1.0
    run = measure(case_point(deployment, PROBE, _LONE_S), seed=0, step_ns=_STEP_NS)
    return float(run.log.steps["seconds"].sum())


def pace_of(probes: Sequence[float], calibrated_s: float) -> Pace:
    """The median pace of several probes."""
    ratios = [seconds / calibrated_s for seconds in probes]
    return Pace(PaceSource.probe, median(ratios), min(ratios), max(ratios), len(ratios))


def pace_of_runs(runs: Sequence[MeasuredRun]) -> Pace:
    """The pace that the yardstick told during measured runs."""
    paces = np.concatenate([run.log.steps["pace"] for run in runs])
    clocked = sum(float(run.clocked_s.sum()) for run in runs)
    seconds = sum(float(run.log.steps["seconds"].sum()) for run in runs)
    low, high = np.quantile(paces, (0.05, 0.95))
    return Pace(PaceSource.yardstick, clocked / seconds, float(low), float(high), len(np.unique(paces)))


def reference_of(provenance: Mapping[str, Any]) -> Reading | None:
    """The yardstick at the calibration that `provenance` describes; None where it had none."""
    seconds = provenance.get("yardstick_s")
    return Reading(*seconds) if seconds else None


@dataclass(frozen=True)
class Stability:
    """Probe times (on a CPU: paces of the runs) over their median, and the machine's load before and after."""

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
    """From the probe times of a calibration, in seconds, or from the paces of its runs."""
    middle = median(probes_s)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return Stability(min(probes_s) / middle, max(probes_s) / middle, len(probes_s), load_before, load, cores)


def is_steady(ratio: float) -> bool:
    """Whether a probe that took `ratio` times the usual time still has the usual pace; probes scatter."""
    return abs(ratio - 1) <= STEADY


def off_pace(probes_s: Sequence[float]) -> list[int]:
    """Numbers of the probes that are further from the median than STEADY."""
    middle = median(probes_s)
    return [place for place, probe in enumerate(probes_s) if not is_steady(probe / middle)]
