"""A cost model from published timings of operators: attention, dense layers and links at the shapes of a step.

`PublishedCost` prices a step from four lattices. `harness.cost.aiconfigurator` fills them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.cost.lattice import Lattice
from harness.cost.roofline import RooflineCost
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import feature_index

(_TOKENS, _SAMPLED, _DECODES, _DECODE_KV, _CHUNKS, _CHUNK_TOKENS, _WORK) = feature_index(
    (
        *("tokens", "sampled_rows", "decode_rows", "decode_kv"),
        *("prefill_rows", "prefill_tokens", "prefill_work"),
    )
)


@dataclass(frozen=True)
class StepTables:
    """Seconds of all layers of one device.

    `dense(tokens)`: everything that depends on the tokens of a step alone. `decode_dense(rows)`: the same in a step of
    decode rows alone, which an engine replays from a graph. `sample(rows)`: the output embedding. `decode(rows, slots a
    row)`: attention of decode rows. `prefill(chunks, query tokens a chunk, earlier tokens a chunk)`: attention of
    chunks of prompts.
    """

    dense: Lattice
    decode_dense: Lattice
    sample: Lattice
    decode: Lattice
    prefill: Lattice


class PublishedCost:
    """The seconds of a step: the device's step overhead, dense layers, sampling, attention, and moved blocks.

    What the features of a step say of its rows is mapped to the tables thus:

    * decode rows read `decode_kv / decode_rows` slots each: the mean stands for rows of unequal length;
    * chunks of prompts have `prefill_tokens / prefill_rows` query tokens each, and as many earlier tokens as give the
      step's number of query-key pairs (`prefill_work`), so that one chunk is priced exactly and unequal chunks by their
      mean length and the sum of their pairs;
    * a step that mixes both adds the seconds of both, as kernels run one after the other;
    * copied slots and swapped blocks cost what `moves`, the roofline of the same device, says.

    `moves.device.step_overhead_s` is added to every step. Overheads of layers and rows are not: the tables have them.
    """

    def __init__(self, tables: StepTables, moves: RooflineCost, source: CostSource) -> None:
        self.tables = tables
        self.moves = moves
        self.source = source
        self._step_s = moves.device.step_overhead_s

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        tables, chunks = self.tables, features[_CHUNKS]
        attention = self._decode(features) + self._prefill(features)
        dense = _where(chunks, tables.dense, tables.decode_dense, features[_TOKENS])
        sample = _where(features[_SAMPLED], tables.sample, None, features[_SAMPLED])
        seconds = dense + sample + attention + self._step_s
        return Price(seconds + self.moves.moving(features), attention)

    def _decode(self, features: Sequence[Amount]) -> Amount:
        rows = features[_DECODES]
        if isinstance(rows, np.ndarray):
            return np.where(rows == 0, 0.0, self.tables.decode.at(rows, features[_DECODE_KV] / _some(rows)))
        return self.tables.decode.at(rows, features[_DECODE_KV] / rows) if rows else 0.0

    def _prefill(self, features: Sequence[Amount]) -> Amount:
        chunks, tokens, work = features[_CHUNKS], features[_CHUNK_TOKENS], features[_WORK]
        if isinstance(chunks, np.ndarray):
            each = tokens / _some(chunks)
            earlier = np.maximum(work / _some(tokens) - (each + 1) / 2, 0.0)
            return np.where(chunks == 0, 0.0, self.tables.prefill.at(chunks, each, earlier))
        if not chunks:
            return 0.0
        mean = tokens / chunks
        return self.tables.prefill.at(chunks, mean, max(work / tokens - (mean + 1) / 2, 0.0))


def _where(condition: Amount, one: Lattice, other: Lattice | None, place: Amount) -> Amount:
    """`one` at `place` where the condition is not 0, else `other`, or 0."""
    if isinstance(condition, np.ndarray):
        otherwise = 0.0 if other is None else other.at(place)
        return np.where(condition == 0, otherwise, one.at(place))
    if condition:
        return one.at(place)
    return 0.0 if other is None else other.at(place)


def _some(count: Amount) -> Amount:
    """At least one, to divide by."""
    return np.maximum(count, 1.0)
