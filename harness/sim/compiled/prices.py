"""Cost models that the compiled replay can price with."""

import numpy as np

from harness.sim.compiled.state import Prices
from harness.sim.cost import CostModel, PacedCost
from harness.sim.fitted import FittedCost
from harness.sim.roofline import RooflineCost

ROOFLINE, LINEAR = 0, 1


def prices_of(cost: CostModel) -> Prices | None:
    """`cost` as numbers; None for a model that is neither a roofline nor linear in its features."""
    if isinstance(cost, PacedCost):
        paced = prices_of(cost.cost)
        return None if paced is None else paced._replace(ratio=paced.ratio * cost.ratio)
    if type(cost) is RooflineCost:
        return Prices(ROOFLINE, np.array(cost.rates), np.zeros(0, dtype=np.int64), 0, 1.0)
    if type(cost) is FittedCost:
        terms = [*cost.attention_terms, *cost.rest_terms]
        columns = np.array([column for column, _ in terms], dtype=np.int64)
        rates = np.array([seconds for _, seconds in terms], dtype=np.float64)
        return Prices(LINEAR, rates, columns, len(cost.attention_terms), 1.0)
    return None
