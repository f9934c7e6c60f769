"""An SLO: bounds on metrics, read from a text such as `ttft_p99<2,tpot_mean<0.1`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from harness.config.errors import UserError
from harness.metrics import METRICS

# Seconds that every run has where it has the events: those of tiers are of a part that a run may be without.
LATENCIES = {one.name for one in METRICS.values() if one.unit == "s" and not one.name.startswith("tier_")}
_GOAL = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*")


@dataclass(frozen=True, slots=True)
class Goal:
    """`metric` must be at most `bound` if `upper`, otherwise at least `bound`, in the metric's unit."""

    metric: str
    bound: float
    upper: bool

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run meets the goal. One without a latency (no output of two tokens) is below any bound.

        One without another figure meets none: it is a figure of what the run did not have, as groups of layers, tiers.
        """
        value = metrics.get(self.metric)
        if value is None:
            return self.upper and self.metric in LATENCIES
        return value <= self.bound if self.upper else value >= self.bound

    def share(self, metrics: Mapping[str, float]) -> float:
        """The figure as a multiple of its bound, above 1 where it is broken; a run without the metric has 0 of it, or
        where it meets no goal without it, any number."""
        value = metrics.get(self.metric, inf if self.upper and not self.holds(metrics) else 0.0)
        return value / max(self.bound, 1e-12) if self.upper else self.bound / max(value, 1e-12)

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.upper else '≥'} {self.bound:g} {METRICS[self.metric].unit}"


Slo = tuple[Goal, ...]


def parse_slo(text: str) -> Slo:
    """The goals of a text such as 'ttft_p99<2,tpot_mean<0.05'. Raises UserError if it cannot be read."""
    goals = []
    for part in text.split(","):
        found = _GOAL.fullmatch(part)
        if not found:
            raise UserError(
                f"--slo: '{part.strip()}' is no goal; write METRIC<NUMBER or METRIC>NUMBER, as ttft_p99<2"
            )
        name, sign, number = found.groups()
        if name not in METRICS:
            raise UserError(f"--slo: there is no metric '{name}'; {_like(name)}")
        try:
            bound = float(number)
        except ValueError:
            raise UserError(f"--slo: '{number}' in '{part.strip()}' is no number") from None
        if not 0 <= bound < inf or (sign == "<" and not bound):
            reason = f"--slo: '{part.strip()}' can be met by no run, or by every run; no metric is below 0"
            raise UserError(reason)
        goals.append(Goal(name, bound, sign.startswith("<")))
    return tuple(goals)


def _like(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, METRICS, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see the report's section on metrics"


def broken_goals(slo: Slo, metrics: Mapping[str, float]) -> Slo:
    """The goals that a run does not meet."""
    return tuple(goal for goal in slo if not goal.holds(metrics))
