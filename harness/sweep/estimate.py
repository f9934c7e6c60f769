"""How long the points of a sweep will take, learned from the points that a store holds.

The seconds of a point are taken as proportional to its requests, and for a measured one to its runs: one simulated and
`replay.repeats` measured. The factor is the median over earlier points of the same kind. Where there is none, nothing
is said: a guess without a measurement would be taken for one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.config.schema import RunConfig
from harness.store.reading import Record
from harness.sweep.plan import PlannedPoint


@dataclass(frozen=True)
class Pace:
    """Seconds a request and run, by whether a point is measured, and from how many earlier points."""

    seconds: Mapping[bool, float]
    points: int

    def duration_s(self, todo: Iterable[PlannedPoint], workers: int) -> float | None:
        """Seconds that `todo` takes: measured points one after the other, the others on `workers`. None: not known."""
        took = {True: 0.0, False: 0.0}
        for point in todo:
            measured = point.config.measure
            if measured not in self.seconds:
                return None
            took[measured] += self.seconds[measured] * work_of(point.config)
        return took[True] + took[False] / workers


def pace_of(records: Iterable[Record]) -> Pace:
    """The pace of earlier points. Records of older versions, which hold no seconds, do not count."""
    seen: dict[bool, list[float]] = {}
    for record in records:
        found = _seconds_a_unit(record)
        if found is not None:
            seen.setdefault(bool(record["config"].get("measure")), []).append(found)
    return Pace({kind: median(values) for kind, values in seen.items()}, sum(map(len, seen.values())))


def _seconds_a_unit(record: Record) -> float | None:
    seconds = (record.get("seconds") or {}).get("point")
    requests = (record.get("trace") or {}).get("requests")
    if not isinstance(seconds, float) or not isinstance(requests, int) or requests < 1:
        return None
    return seconds / (requests * _runs(record["config"]))


def _runs(config: Mapping[str, Any]) -> int:
    repeats = (config.get("replay") or {}).get("repeats")
    return 1 + repeats if config.get("measure") and isinstance(repeats, int) else 1


def work_of(config: RunConfig) -> int:
    """The size of a point: requests times runs; a trace in a file without a limit counts as 1,000 requests."""
    return (config.workload.num_requests or 1000) * (1 + config.replay.repeats if config.measure else 1)
