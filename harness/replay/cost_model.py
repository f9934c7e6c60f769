"""The protocol of all cost models, and the provenance that a cost model puts into the record."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from harness.metrics.log import FloatArray

Amount = float | FloatArray
"""A feature of one step, or of consecutive steps, float64 `[steps]`. Both are priced with the same operations in the
same order, so that a fast-forward costs to the bit what its steps cost one by one."""


class Price(NamedTuple):
    """Predicted seconds: of the whole step, and of its attention over all layers."""

    seconds: Amount
    attention_s: Amount


@dataclass(frozen=True)
class CostSource:
    """The source of a cost model's numbers; the report prints it beside every prediction.

    `heldout` is the error on measurements that were not used for the fit, per `step` and `attention`; it is empty for a
    model that was not fitted. `hull` is the measured range of step columns (see `harness.replay.folds`); a
    prediction outside is an extrapolation. `beam_churn` and `beam_evenness` describe by beam width how beams coalesce
    (see `harness.replay.beams`). `draft_acceptance` is the share of draft tokens that were right. `validation` is the
    free-running error and the spread of repeats on whole held-out workloads, by workload and metric.
    """

    kind: str
    name: str
    fingerprint: str
    provenance: dict[str, Any] = field(default_factory=dict)
    heldout: dict[str, dict[str, float]] = field(default_factory=dict)
    beam_churn: dict[int, float] = field(default_factory=dict)
    beam_evenness: dict[int, float] = field(default_factory=dict)
    draft_acceptance: float | None = None
    hull: dict[str, tuple[float, float]] = field(default_factory=dict)
    validation: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)


class CostModel(Protocol):
    """Predicts the seconds of a step from its features alone: `price(features)`."""

    @property
    def source(self) -> CostSource:
        """The source of its numbers."""

    def price(self, features: Sequence[Amount]) -> Price:
        """Price steps with `features` in the order of FEATURES."""


@dataclass(frozen=True)
class PacedCost:
    """A cost model for a device that is now `ratio` times slower than when the model was measured."""

    cost: CostModel
    ratio: float

    @property
    def source(self) -> CostSource:
        """The unscaled model's."""
        return self.cost.source

    def price(self, features: Sequence[Amount]) -> Price:
        """The unscaled price times `ratio`."""
        price = self.cost.price(features)
        return Price(price.seconds * self.ratio, price.attention_s * self.ratio)


def price_table(cost: CostModel, features: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Seconds and attention seconds of steps with features `[steps, len(FEATURES)]`, each `[steps]`."""
    price = cost.price(list(features.T))
    return (
        np.broadcast_to(np.asarray(price.seconds, dtype=np.float64), len(features)),
        np.broadcast_to(np.asarray(price.attention_s, dtype=np.float64), len(features)),
    )
