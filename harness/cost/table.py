"""A cost model that interpolates measured attention inside its grids and uses the fitted model outside of them.

`engine_overhead` estimates the time that the engine adds to a timed kernel: storing K and V, launches, Python.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from harness.cost.fitted import FittedCost
from harness.cost.grid import Grid, some, where_any, where_known
from harness.metrics.log import FloatArray
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import AT

_DECODE = (AT.decode_rows, AT.decode_kv, AT.decode_distinct_kv, AT.decode_padded_kv, AT.decode_padded_blocks)
_PREFILL = (AT.prefill_rows, AT.prefill_tokens, AT.prefill_kv, AT.prefill_blocks, AT.prefill_work)


@dataclass(frozen=True)
class TableCost:
    """Attention from grids: decode rows over (rows, KV slots a row), one prefill chunk over (tokens, context).

    `block_size` is that of the decode grid's measurement. Steps that mix decode rows and chunks, or hold several
    chunks, add the seconds of their parts. Without a prefill grid the fitted model prices chunks. With `own_tokens` the
    context of a chunk includes its own tokens.
    """

    fitted: FittedCost
    decode: Grid
    prefill: Grid | None
    block_size: int
    source: CostSource
    own_tokens: bool = False

    def price(self, features: Sequence[Amount]) -> Price:
        """Interpolated attention, the rest fitted."""
        attention = self._decode(features) + self._prefill(features)
        return Price(self.fitted.with_rest(features, attention), attention)

    def _decode(self, features: Sequence[Amount]) -> Amount:
        """The grid's seconds for rows of the mean length, plus the fitted costs of padding, block size and sharing."""
        rows, kv = features[AT.decode_rows], features[AT.decode_kv]
        if not np.any(rows):
            return 0.0
        even = kv * (1.0 / self.block_size)
        prices = self._coefficients
        padded = (features[AT.decode_padded_kv] - kv) * prices[AT.decode_padded_kv]
        uneven = padded + (features[AT.decode_padded_blocks] - even) * prices[AT.decode_padded_blocks]
        shared = (features[AT.decode_distinct_kv] - kv) * prices[AT.decode_distinct_kv]
        found = self.decode.at(rows, kv / some(rows)) + uneven + shared
        found = where_known(found, self._fitted(features, *_DECODE, floor=True))
        return where_any(rows, np.maximum(0.0, found))

    def _prefill(self, features: Sequence[Amount]) -> Amount:
        """The seconds of the mean chunk, times the number of chunks."""
        chunks = features[AT.prefill_rows]
        if not np.any(chunks):
            return 0.0
        if self.prefill is None:
            return self._fitted(features, *_PREFILL)
        tokens = features[AT.prefill_tokens] / some(chunks)
        context = features[AT.prefill_kv] / some(chunks)
        found = self.prefill.at(tokens, context if self.own_tokens else context - tokens) * chunks
        return where_any(chunks, np.maximum(0.0, where_known(found, self._fitted(features, *_PREFILL))))

    def _fitted(self, features: Sequence[Amount], *columns: int, floor: bool = False) -> Amount:
        """The fitted model's seconds for some of the attention's features."""
        total: Amount = self._coefficients[AT.decode_steps] if floor else 0.0
        for column in columns:
            total = total + features[column] * self._coefficients[column]
        return total

    @cached_property
    def _coefficients(self) -> list[float]:
        return list(self.fitted.coefficients().values())


class EngineOverhead(NamedTuple):
    """Seconds that the engine adds to a kernel: per step that calls it, and per unit of the grid's first axis."""

    step_s: float
    each_s: float


def engine_overhead(
    timed: Mapping[tuple[float, float], float], in_engine: Callable[[float, float], float | None]
) -> EngineOverhead:
    """The overhead that is missing in `timed`, the kernel's seconds of all layers by shape.

    `in_engine(across, along)` gives the calibrated seconds in the engine; None: not calibrated.
    """
    from scipy.optimize import nnls

    rows: list[tuple[float, float]] = []
    missing: list[float] = []
    for (across, along), kernel in timed.items():
        whole = in_engine(across, along)
        if whole is not None and whole > 0:
            rows.append((1 / whole, across / whole))
            missing.append((whole - kernel) / whole)
    if not rows:
        return EngineOverhead(0.0, 0.0)
    matrix: FloatArray = np.array(rows)
    unit = matrix.max(axis=0)
    found, _ = nnls(matrix / unit, np.array(missing))
    return EngineOverhead(*(float(value) for value in found / unit))


def with_overhead(grid: Grid, extra: EngineOverhead) -> Grid:
    """The grid with the overhead added. The overhead is linear in rows, so interpolation keeps it exact."""
    return replace(grid, seconds=grid.seconds + extra.step_s + extra.each_s * np.array(grid.axes[0])[:, None])
