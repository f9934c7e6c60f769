"""What a service promises: bounds on metrics."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.config.errors import UserError
from harness.metrics import METRICS

_GOAL = re.compile(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*")


@dataclass(frozen=True, slots=True)
class Goal:
    """`metric` must be at most `bound`, or, if not `upper`, at least; in the metric's unit."""

    metric: str
    bound: float
    upper: bool

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Whether a run meets it; a run without the metric (no output of two tokens, say) does not break it."""
        value = metrics.get(self.metric)
        if value is None:
            return True
        return value <= self.bound if self.upper else value >= self.bound

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.upper else '≥'} {self.bound:g} {METRICS[self.metric].unit}"


Slo = tuple[Goal, ...]


def parse_slo(text: str) -> Slo:
    """Goals from 'ttft_p99<2,tpot_mean<0.05'; raises UserError that names what is wrong and what there is."""
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
        goals.append(Goal(name, _number(number, part), sign.startswith("<")))
    return tuple(goals)


def _number(text: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"--slo: '{text}' in '{part.strip()}' is no number") from None


def _like(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, METRICS, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else "see the report's section on metrics"


def met(slo: Slo, metrics: Mapping[str, float]) -> bool:
    """Whether a run meets every goal."""
    return all(goal.holds(metrics) for goal in slo)
