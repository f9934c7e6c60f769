"""What every cost model can do, and the place of each in the record."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.sim.features import FloatArray


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted seconds of consecutive steps, float64 `[steps]`: the whole step, and its attention over all layers."""

    seconds: FloatArray
    attention_s: FloatArray


@dataclass(frozen=True)
class CostSource:
    """Where a cost model's numbers come from: printed in the report beside everything they predict.

    `heldout` holds the error on measurements that the fit never saw, per `step` and `attention`; empty for a model
    that was not fitted. `beam_churn` is the chance that a hypothesis is re-parented, by beam width.
    """

    kind: str
    name: str
    fingerprint: str
    provenance: dict[str, Any] = field(default_factory=dict)
    heldout: dict[str, dict[str, float]] = field(default_factory=dict)
    beam_churn: dict[int, float] = field(default_factory=dict)


class CostModel(Protocol):
    """Predicts the duration of a step from its features alone."""

    @property
    def source(self) -> CostSource:
        """Where its numbers come from."""
        ...

    def price(self, features: FloatArray) -> Price:
        """Price steps with `features` `[steps, len(FEATURES)]`."""
        ...


@dataclass(frozen=True)
class PacedCost:
    """A cost model whose device runs `ratio` times slower than when it was measured."""

    cost: CostModel
    ratio: float

    @property
    def source(self) -> CostSource:
        """The unscaled model's."""
        return self.cost.source

    def price(self, features: FloatArray) -> Price:
        """The unscaled price, times the ratio."""
        price = self.cost.price(features)
        return Price(price.seconds * self.ratio, price.attention_s * self.ratio)
