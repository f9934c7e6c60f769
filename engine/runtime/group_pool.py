"""The KV tensors of a model whose layers are in groups, and a count of the written slots of each group.

Pages of one pool have one size (`GroupPages.uniform`): layer i of every group lies in the same tensor, so a page that
one group has given back serves another. With `separate` each group has tensors of its own. Slots start as NaN, and
become NaN again when the core says that their page is void, as in `KVPool`. The pool notes which group wrote a page,
from the slots that it was told to write: so the tensors are a witness that does not ask the core whose a page is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.errors import CoreError
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.memory.group_tables import NO_PAGE
from engine.core.options import GroupKind, GroupPages
from engine.core.plan import IntArray
from engine.runtime import huge_pages
from engine.runtime.errors import AuditError, ModelError
from engine.runtime.kv_pool import LayerShape, SlotMarks

NOBODY = -1
"""The owner of a page that no group has written since it became void."""


@dataclass(frozen=True, slots=True)
class _Store:
    """The tensors of one pool: `[places, pages + 1, numbers of a page]` for K and for V.

    The core's page numbers are `offset` above those of the tensors.
    """

    keys: torch.Tensor
    values: torch.Tensor
    offset: int

    @property
    def pages(self) -> int:
        return self.keys.shape[1] - 1


@dataclass(frozen=True, slots=True)
class GroupView:
    """The layers of one group, as the attention of a step needs them: a `CacheTensors`.

    `keys[layer]` and `values[layer]` are `[pages + 1, block_size, kv_heads, dim]`. `layers` are the group's layers by
    their number in the model, `window` is what they tell their attention, 0 for none. `offset` is what the core's page
    numbers have more than those of the tensors.
    """

    group: KVGroup
    layers: tuple[int, ...]
    window: int
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    offset: int
    token_bytes: int
    device: torch.device
    marks: SlotMarks | None = None

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.group.block_size

    def local(self, table: Sequence[int]) -> list[int]:
        """A block table in the numbers of the tensors; NO_PAGE stays."""
        offset = self.offset
        return [page - offset if page != NO_PAGE else NO_PAGE for page in table] if offset else list(table)


class GroupedPool:
    """Pages of all groups of a model as tensors. `views` has each group's layers, `group_of` the group of each layer.

    `page_counts` are the pages of each pool, as in `PoolPages`, whose page numbers are used; `shapes` and `windows`
    those of the model's layers. Raises ModelError where they are not those of the layout, and for what has no tensors.
    """

    def __init__(
        self,
        layout: GroupLayout,
        page_counts: Sequence[int],
        *,
        shapes: Sequence[LayerShape],
        windows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout, self.device = layout, device
        layers = layers_of(layout, shapes, windows, dtype.itemsize)
        owners = _owners(layout)
        self._stores: list[_Store] = []
        for count, owned in zip(page_counts, owners, strict=True):
            sizes = {
                _numbers(layout.groups[group], shapes[each]) for group in owned for each in layers[group]
            }
            self._stores.append(
                _store(count, layout, owned, sizes, sum(s.pages for s in self._stores), dtype, device)
            )
        store_of = {
            group: store for store, owned in zip(self._stores, owners, strict=True) for group in owned
        }
        keys, values = [torch.empty(0)] * len(shapes), [torch.empty(0)] * len(shapes)
        self.group_of = [0] * len(shapes)
        for index, group in enumerate(layout.groups):
            store = store_of[index]
            for place, layer in enumerate(layers[index]):
                (heads, dk), (_, dv) = shapes[layer]
                keys[layer] = store.keys[place].view(-1, group.block_size, heads, dk)
                values[layer] = store.values[place].view(-1, group.block_size, heads, dv)
                self.group_of[layer] = index
        self.views = [
            GroupView(
                *(group, tuple(layers[i]), windows[layers[i][0]], keys, values, store_of[i].offset),
                *(group.layer_bytes, device),
            )
            for i, group in enumerate(layout.groups)
        ]
        self._owner = np.full(1 + sum(store.pages for store in self._stores), NOBODY, dtype=np.int64)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, the null pages included."""
        return sum(store.keys.nbytes + store.values.nbytes for store in self._stores)

    def poison(self, pages: Sequence[int]) -> None:
        """Set all slots of `pages` to NaN in every layer; they belong to no group then."""
        numbers = np.asarray(pages, dtype=np.int64)
        self._owner[numbers] = NOBODY
        for store in self._stores:
            own = numbers[(numbers > store.offset) & (numbers <= store.offset + store.pages)] - store.offset
            index = torch.from_numpy(own).to(self.device)
            store.keys.index_fill_(1, index, float("nan"))
            store.values.index_fill_(1, index, float("nan"))

    def poison_slots(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Raises CoreError: nothing of a sequence is cut."""
        raise CoreError("slots of a page became void: a cache with groups cuts nothing")

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raises CoreError: there is no host memory."""
        raise CoreError("pages are swapped out: a cache with groups swaps nothing")

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raises CoreError: there is no host memory."""
        raise CoreError("pages are swapped in: a cache with groups swaps nothing")

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Raises CoreError: no two sequences of a request share a page."""
        raise CoreError("pages are copied: a cache with groups copies nothing")

    # -- the audit -----------------------------------------------------------------------------------------

    def note_writes(self, group: int, slots: IntArray) -> None:
        """Note that `group` writes the slots `[tokens]` of its tensors in this step."""
        view = self.views[group]
        self._owner[slots // view.block_size + view.offset] = group

    def check_reads(self, group: int, pages: Sequence[int], what: str) -> None:
        """Raise AuditError unless `group` wrote all of `pages`; `what` names the row."""
        owners = self._owner[np.asarray(pages, dtype=np.int64)]
        wrong = next(iter(np.flatnonzero(owners != group).tolist()), None)
        if wrong is not None:
            whose = "nobody" if owners[wrong] == NOBODY else f"group {owners[wrong]}"
            raise AuditError(f"{what}: group {group} reads page {pages[wrong]}, which {whose} has written")

    def check_void(self, group: int, slots: torch.Tensor, what: str) -> None:
        """Raise AuditError if one of the slots `[tokens]` that `group` is about to write holds something."""
        view = self.views[group]
        flat = view.keys[view.layers[0]].flatten(0, 1)[slots, 0, 0]
        if bool(torch.isfinite(flat).any()):
            slot = int(slots[torch.isfinite(flat)][0])
            page = slot // view.block_size + view.offset
            raise AuditError(
                f"{what}: group {group} writes page {page}, slot {slot % view.block_size}, twice"
            )

    def written_units(self) -> list[int]:
        """How many tokens each group has in its pages, counted in the tensors.

        Raises AuditError if two layers of a group hold different numbers of them.
        """
        found = []
        for index, view in enumerate(self.views):
            pages = np.flatnonzero(self._owner == index) - view.offset
            own = torch.from_numpy(pages).to(self.device)
            counts = {
                int(torch.isfinite(cache[layer].index_select(0, own)[:, :, 0, 0]).sum())
                for cache in (view.keys, view.values)
                for layer in view.layers
            }
            if len(counts) > 1:
                raise AuditError(
                    f"the layers of group {index} hold different numbers of tokens: {sorted(counts)}"
                )
            found.append(counts.pop())
        return found

    def written_slots(self) -> int:
        """The written tokens of all groups, each as many as the slots of the layout that it fills."""
        slot = self.layout.slot_bytes
        units = zip(self.written_units(), self.layout.groups, strict=True)
        return sum(count * (group.unit_bytes // slot) for count, group in units)

    def unowned_are_void(self) -> bool:
        """Whether pages that no group has written since they became void hold nothing, the null pages only zeros."""
        for store in self._stores:
            pages = np.arange(1, store.pages + 1)
            own = torch.from_numpy(pages[self._owner[pages + store.offset] == NOBODY]).to(self.device)
            for stack in (store.keys, store.values):
                if bool(stack[:, 0].any()) or bool(torch.isfinite(stack.index_select(1, own)).any()):
                    return False
        return True


def layers_of(
    layout: GroupLayout, shapes: Sequence[LayerShape], windows: Sequence[int], item_bytes: int
) -> list[list[int]]:
    """The layers of each group, by their number in the model: those that keep what the group keeps.

    Several groups of one kind take turns, as in vLLM. `windows` are those that the layers themselves tell, 0 for none.
    Raises ModelError where the layers are not those of the layout.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, (((heads, dk), (v_heads, dv)), window) in enumerate(zip(shapes, windows, strict=True)):
        kinds.setdefault((window, (heads * dk + v_heads * dv) * item_bytes), []).append(layer)
    wanted = [(group.window or 0, group.layer_bytes) for group in layout.groups]
    found = []
    for index, (group, kind) in enumerate(zip(layout.groups, wanted, strict=True)):
        if group.kind is GroupKind.state:
            raise ModelError(f"group {index} keeps states, for which the engine has no tensors")
        layers = kinds.get(kind, [])[wanted[:index].count(kind) :: wanted.count(kind)]
        if len(layers) != group.layers:
            raise ModelError(
                f"group {index} has {group.layers} {group.kind} layers of {kind[1]} bytes a token"
                f"{f' and a window of {kind[0]}' if kind[0] else ''}, the model has {len(layers)} such layers for it; "
                f"its layers by (window, bytes): { {each: len(those) for each, those in kinds.items()} }"
            )
        found.append(layers)
    if sum(map(len, found)) != len(shapes):
        raise ModelError(f"the groups have {sum(map(len, found))} layers, the model has {len(shapes)}")
    return found


def _owners(layout: GroupLayout) -> list[range]:
    """The groups of each pool. Raises ModelError for a page policy that has no tensors."""
    if layout.pages is GroupPages.uniform:
        return [range(len(layout.groups))]
    if layout.pages is GroupPages.separate:
        return [range(index, index + 1) for index in range(len(layout.groups))]
    raise ModelError(f"the engine has tensors for uniform and separate pages, not for {layout.pages}")


def _numbers(group: KVGroup, shape: LayerShape) -> tuple[int, int]:
    """How many numbers of K and of V a page has in one layer."""
    (heads, dk), (v_heads, dv) = shape
    return group.block_size * heads * dk, group.block_size * v_heads * dv


def _store(
    count: int,
    layout: GroupLayout,
    groups: Sequence[int],
    sizes: set[tuple[int, int]],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Store:
    if len(sizes) != 1:
        raise ModelError(
            f"pages of {layout.pages} groups {', '.join(map(str, groups))} have different sizes in K and V "
            f"({sorted(sizes)} numbers): the engine pads no pages; use groups=separate"
        )
    ((k, v),) = sizes
    places = max(layout.groups[group].layers for group in groups)
    stacks = [_memory((places, count + 1, numbers), dtype, device) for numbers in (k, v)]
    for stack in stacks:
        stack.fill_(float("nan"))
        stack[:, 0] = 0
    return _Store(stacks[0], stacks[1], offset)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype)
    return torch.empty(*shape, dtype=dtype, device=device)
