"""The layers of one group in the tensors of a `GroupedPool`: K and V of tokens, or the states of sequences.

A state is what transformers' cache holds for a layer with linear attention, a state space or a short convolution:
`conv_states` and `recurrent_states` of one sequence. A page holds those of all layers of its group after one token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from engine.core.memory.group_layout import KVGroup
from engine.core.memory.group_tables import NO_PAGE
from engine.core.plan import IntArray
from engine.runtime.errors import ModelError
from engine.runtime.kv_pool import SlotMarks

SEES_ITS_STATE = 2
"""The window of a layer with a state: a token needs what stands at the token before it."""
UNWRITTEN = -1


class StatePart(NamedTuple):
    """One tensor of a layer's state, of one sequence.

    `kind` and `number` say where transformers' cache holds it: `conv_states[number]` or `recurrent_states[number]`.
    """

    kind: str
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of one sequence."""
        return prod(self.shape) * self.dtype.itemsize


StateShape = tuple[StatePart, ...]


def state_bytes(shape: StateShape) -> int:
    """Bytes of the state of one layer and sequence."""
    return sum(part.bytes for part in shape)


def state_numbers(shape: StateShape, dtype: torch.dtype) -> int:
    """How many numbers of the pool's type a state takes. Raises ModelError where it takes no whole number of them."""
    for part in shape:
        if part.bytes % dtype.itemsize:
            raise ModelError(f"a state of {part.bytes} bytes does not fill whole numbers of {dtype}")
    return state_bytes(shape) // dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageView:
    """What the layers of one group share. `layers` are their numbers in the model.

    `offset` is what the core's page numbers have more than those of the tensors; with `sign` -1 these count down from
    it. `keys[layer]` and `values[layer]` are the layers' tensors.
    """

    group: KVGroup
    layers: tuple[int, ...]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    offset: int
    sign: int
    device: torch.device

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.group.block_size

    def local(self, table: Sequence[int]) -> list[int]:
        """A block table in the numbers of the tensors; NO_PAGE stays."""
        offset, sign = self.offset, self.sign
        if not offset and sign > 0:
            return list(table)
        return [(page - offset) * sign if page != NO_PAGE else NO_PAGE for page in table]


@dataclass(frozen=True, slots=True)
class GroupView(PageView):
    """The layers of one group, as the attention of a step needs them: a `CacheTensors`.

    `keys[layer]` and `values[layer]` are `[pages + 1, block_size, kv_heads, dim]`. `window` is what the layers tell
    their attention, 0 for none.
    """

    window: int = 0
    token_bytes: int = 0
    marks: SlotMarks | None = None

    def written(self, pages: torch.Tensor) -> set[int]:
        """How many slots of `pages`, numbers of the tensors, hold something: of K and V of each layer."""
        return {
            int(torch.isfinite(cache[layer].index_select(0, pages)[:, :, 0, 0]).sum())
            for cache in (self.keys, self.values)
            for layer in self.layers
        }

    def holds(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Whether the first layer holds something at slots `[tokens]` of pages `[tokens]`."""
        return torch.isfinite(self.keys[self.layers[0]][pages, slots, 0, 0])


@dataclass(frozen=True, slots=True)
class StateView(PageView):
    """The layers of one group that keep states. A page of it holds one state of each layer.

    `keys[layer]` and `values[layer]` are `[pages + 1, numbers]`, the memory that K and V of a token group have in such
    a page; a state fills the first numbers of both together. `shapes` has the parts of each layer's state. `ends`
    `[layers, pages + 1]` notes after how many tokens of its sequence each state was written, which no counter of the
    core says.
    """

    shapes: Mapping[int, StateShape]
    ends: IntArray

    @property
    def window(self) -> int:
        """Tokens that a token needs, itself included."""
        return SEES_ITS_STATE

    def read(self, layer: int, pages: torch.Tensor) -> dict[StatePart, torch.Tensor]:
        """The parts of a layer's states in `pages`, each `[pages, *shape]`, as copies."""
        raw, parts, first = self._raw(layer, pages), {}, 0
        for part in self.shapes[layer]:
            numbers = part.bytes // raw.element_size()
            own = raw[:, first : first + numbers].clone(memory_format=torch.contiguous_format)
            parts[part] = own.view(part.dtype).view(-1, *part.shape)
            first += numbers
        return parts

    def write(
        self, layer: int, pages: torch.Tensor, parts: Mapping[StatePart, torch.Tensor], ends: IntArray
    ) -> None:
        """Write parts `[pages, *shape]` of a layer's states, which stand after `ends` tokens of their sequences."""
        keys, values = self.keys[layer], self.values[layer]
        first = 0
        for part in self.shapes[layer]:
            numbers = part.bytes // keys.element_size()
            if part in parts:
                raw = parts[part].contiguous().view(len(pages), -1).view(keys.dtype)
                _put(keys, pages, first, raw)
                _put(values, pages, first - keys.shape[1], raw)
            first += numbers
        self.ends[self.layers.index(layer), pages.cpu().numpy()] = ends

    def forget(self, pages: IntArray) -> None:
        """Pages, numbers of the tensors, became void."""
        self.ends[:, pages] = UNWRITTEN

    def holds(self, pages: torch.Tensor) -> torch.Tensor:
        """Whether any layer holds a part of a state in `pages`: bool `[pages]`."""
        held = [~self._raw(layer, pages).isnan().all(1) for layer in self.layers]
        return torch.stack(held).any(0)

    def written(self, pages: torch.Tensor) -> set[int]:
        """How many of `pages` hold a whole state: of each part of each layer."""
        counts = set()
        for layer in self.layers:
            held = ~self._raw(layer, pages).isnan().all(1)
            for part in self.read(layer, pages).values():
                counts.add(int((torch.isfinite(part.flatten(1)).all(1) & held).sum()))
        return counts

    def _raw(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """The states of a layer as numbers of the pool, `[pages, numbers]`."""
        keys, values = self.keys[layer], self.values[layer]
        numbers = state_numbers(self.shapes[layer], keys.dtype)
        from_keys = min(numbers, keys.shape[1])
        own = [keys[:, :from_keys].index_select(0, pages)]
        if numbers > from_keys:
            own.append(values[:, : numbers - from_keys].index_select(0, pages))
        return torch.cat(own, dim=1)


def _put(cache: torch.Tensor, pages: torch.Tensor, first: int, numbers: torch.Tensor) -> None:
    """Write rows `[pages, numbers]` into `cache` from column `first` on; what lies beyond its columns is left out."""
    begin, end = max(first, 0), min(first + numbers.shape[1], cache.shape[1])
    if begin < end:
        cache[:, begin:end].index_copy_(0, pages, numbers[:, begin - first : end - first])


def new_ends(layers: int, places: int) -> IntArray:
    """Notes of a pool whose `places` pages, the null page included, hold no state yet."""
    return np.full((layers, places), UNWRITTEN, dtype=np.int64)
