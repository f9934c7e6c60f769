"""What a metric is. The table of all of them: `harness.metrics.definitions`."""

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", "neither"]

SHARE = "share"
"""Unit of the metrics that are a share of a whole, 0 to 1; their errors are differences, not ratios."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of merit: `name` is its key in records, `label` and `unit` go on axes."""

    name: str
    label: str
    unit: str
    definition: str
    better: Better = "neither"

    @property
    def is_share(self) -> bool:
        """Compared by difference, since a relative error of a share near zero says nothing."""
        return self.unit == SHARE
