"""The KV tensors of a model whose layers are in groups, and a count of the written slots of each group.

How pages lie is decided by the core (`GroupPages`). With `uniform`, layer i of every group lies in the same tensor, so
a page that one group has given back serves another. With `separate` each group has tensors of its own. With `moving`,
`lcm` and `two_ended` pages of different sizes lie in one memory, as the core places them there. Slots start as NaN, and
become NaN again when the core says that their page is void, as in `KVPool`. The pool notes which group wrote a page,
from the slots that it was told to write: so the tensors are a witness that does not ask the core whose a page is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.errors import CoreError
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.memory.group_memory import MemoryPages
from engine.core.memory.grouped import pages_of
from engine.core.options import GroupKind, GroupPages
from engine.core.plan import IntArray
from engine.runtime import huge_pages
from engine.runtime.errors import AuditError, ModelError
from engine.runtime.group_views import (
    UNWRITTEN,
    GroupView,
    StateShape,
    StateView,
    new_ends,
    state_bytes,
    state_numbers,
)
from engine.runtime.kv_pool import LayerShape

NOBODY = -1
"""The owner of a page that no group has written since it became void."""


@dataclass(frozen=True, slots=True)
class _Pages:
    """Numbered pages in tensors: (tensor, axis of its pages), each with a null page in front.

    The core's number of a page is `offset` + `sign` x its place in the tensors; places are 1 to `count`.
    """

    tensors: tuple[tuple[torch.Tensor, int], ...]
    count: int
    offset: int
    sign: int = 1

    def places(self, numbers: IntArray) -> IntArray:
        """The places of those of the core's page numbers that are pages of these tensors."""
        places: IntArray = (numbers - self.offset) * self.sign
        return places[(places >= 1) & (places <= self.count)]


_LayerCaches = list[tuple[torch.Tensor, torch.Tensor]]  # K and V of each layer of a group


class GroupedPool:
    """Pages of all groups of a model as tensors. `views` has each group's layers, `group_of` the group of each layer's
    K and V.

    `page_counts` are the pages of each pool, as in `PoolPages`, whose page numbers are used; `shapes` and `windows`
    those of the model's layers, `states` the states that layers keep. Raises ModelError where they are not those of
    the layout, and for what has no tensors.
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
        states: Mapping[int, StateShape] | None = None,
    ) -> None:
        self.layout, self.device = layout, device
        states = states or {}
        layers = layers_of(layout, shapes, windows, dtype.itemsize, states)
        sent = [
            [_as_layer(states[layer], dtype) for layer in own]
            if group.kind is GroupKind.state
            else [shapes[layer] for layer in own]
            for own, group in zip(layers, layout.groups, strict=True)
        ]
        make = _in_one_memory if layout.pages in _ONE_MEMORY else _in_pools
        self._pages, pages_of_group, caches = make(layout, page_counts, sent, dtype, device)
        self.group_of = [0] * len(shapes)
        self.views: list[GroupView | StateView] = []
        for index, (group, own) in enumerate(zip(layout.groups, layers, strict=True)):
            keys, values = [torch.empty(0)] * len(shapes), [torch.empty(0)] * len(shapes)
            for layer, (k, v) in zip(own, caches[index], strict=True):
                keys[layer], values[layer] = k, v
            pages = pages_of_group[index]
            shared = group, tuple(own), keys, values, pages.offset, pages.sign, device
            if group.kind is GroupKind.state:
                parts = {layer: states[layer] for layer in own}
                self.views.append(StateView(*shared, parts, new_ends(len(own), pages.count + 1)))
            else:
                self.views.append(GroupView(*shared, windows[own[0]], group.layer_bytes))
                for layer in own:
                    self.group_of[layer] = index
        last = max(max(pages.offset, pages.offset + pages.sign * pages.count) for pages in self._pages)
        self._owner = np.full(last + 1, NOBODY, dtype=np.int64)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, the null pages included."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for pages in self._pages
            for tensor, _ in pages.tensors
        }
        return sum(storages.values())

    def poison(self, pages: Sequence[int]) -> None:
        """Set all slots of `pages` to NaN in every layer; they belong to no group then."""
        numbers = np.asarray(pages, dtype=np.int64)
        self._owner[numbers] = NOBODY
        for held in self._pages:
            index = torch.from_numpy(held.places(numbers)).to(self.device)
            for tensor, axis in held.tensors:
                tensor.index_fill_(axis, index, float("nan"))
        for view in self.views:
            if isinstance(view, StateView):
                places = (numbers - view.offset) * view.sign
                view.forget(places[(places >= 1) & (places < view.ends.shape[1])])

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
        self._owner[slots // view.block_size * view.sign + view.offset] = group

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
        assert isinstance(view, GroupView)
        held = view.holds(slots // view.block_size, slots % view.block_size)
        if bool(held.any()):
            slot = int(slots[held][0])
            page = slot // view.block_size * view.sign + view.offset
            raise AuditError(
                f"{what}: group {group} writes page {page}, slot {slot % view.block_size}, twice"
            )

    def check_state(self, group: int, page: int, tokens: int, what: str) -> None:
        """Raise AuditError unless `page` holds the state after `tokens` tokens, in every layer of a state group."""
        view = self.views[group]
        assert isinstance(view, StateView)
        for layer, end in zip(
            view.layers, view.ends[:, (page - view.offset) * view.sign].tolist(), strict=True
        ):
            if end != tokens:
                held = "no state" if end == UNWRITTEN else f"the state after {end} tokens"
                raise AuditError(
                    f"{what}: group {group} begins with the state after {tokens} tokens, page {page} holds {held} in "
                    f"layer {layer}"
                )

    def check_void_states(self, group: int, pages: IntArray, what: str) -> None:
        """Raise AuditError if one of `pages`, numbers of the tensors, holds a state before it is first written."""
        view = self.views[group]
        assert isinstance(view, StateView)
        held = view.holds(torch.from_numpy(pages).to(self.device)).cpu().numpy()
        for place in pages[held].tolist():
            raise AuditError(
                f"{what}: group {group} writes page {place * view.sign + view.offset}, a state, twice"
            )

    def written_units(self) -> list[int]:
        """How many tokens each group has in its pages, or states, counted in the tensors.

        Raises AuditError if two layers of a group hold different numbers of them.
        """
        found = []
        for index, view in enumerate(self.views):
            pages = (np.flatnonzero(self._owner == index) - view.offset) * view.sign
            counts = view.written(torch.from_numpy(pages).to(self.device))
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
        """Whether null pages hold zeros, and nothing beside them and the pages that a group has written holds anything.

        It reads all memory, and writes to a part of it for that time.
        """
        tensors = [each for pages in self._pages for each in pages.tensors]
        nulls = [tensor.select(axis, 0) for tensor, axis in tensors]
        if any(bool(null.any()) for null in nulls):
            return False
        memory = {tensor.untyped_storage().data_ptr(): tensor for tensor, _ in tensors}
        whole = [
            torch.empty(0, dtype=tensor.dtype, device=self.device).set_(tensor.untyped_storage())
            for tensor in memory.values()
        ]
        saved, owner = [each.clone() for each in whole], self._owner.copy()
        self.poison(np.flatnonzero(owner != NOBODY).tolist())
        for null in nulls:
            null.fill_(float("nan"))
        held = any(bool(torch.isfinite(each).any()) for each in whole)
        for each, before in zip(whole, saved, strict=True):
            each.copy_(before)
        self._owner = owner
        return not held


_STATE = -1  # in place of a window


def layers_of(
    layout: GroupLayout,
    shapes: Sequence[LayerShape],
    windows: Sequence[int],
    item_bytes: int,
    states: Mapping[int, StateShape],
) -> list[list[int]]:
    """The layers of each group, by their number in the model: those that keep what the group keeps.

    Several groups of one kind take turns, as in vLLM. `windows` are those that the layers themselves tell, 0 for none;
    layers without K and V send shapes of 0. Raises ModelError where the layers are not those of the layout.
    """
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, (((heads, dk), (v_heads, dv)), window) in enumerate(zip(shapes, windows, strict=True)):
        if size := (heads * dk + v_heads * dv) * item_bytes:
            kinds.setdefault((window, size), []).append(layer)
    for layer, shape in sorted(states.items()):
        kinds.setdefault((_STATE, state_bytes(shape)), []).append(layer)
    wanted = [
        (_STATE if group.kind is GroupKind.state else group.window or 0, group.layer_bytes)
        for group in layout.groups
    ]
    found = []
    for index, (group, kind) in enumerate(zip(layout.groups, wanted, strict=True)):
        layers = kinds.get(kind, [])[wanted[:index].count(kind) :: wanted.count(kind)]
        if len(layers) != group.layers:
            unit = "sequence" if group.kind is GroupKind.state else "token"
            raise ModelError(
                f"group {index} has {group.layers} {group.kind} layers of {kind[1]} bytes a {unit}"
                f"{f' and a window of {group.window}' if group.window else ''}, the model has {len(layers)} such "
                f"layers for it; its layers: {'; '.join(_told(each, those) for each, those in kinds.items())}"
            )
        found.append(layers)
    here, there = sum(map(len, found)), sum(map(len, kinds.values()))
    if here != there:
        told = "; ".join(_told(each, those) for each, those in kinds.items())
        raise ModelError(f"the groups have {here} layers, the model has {there}: {told}")
    return found


def _told(kind: tuple[int, int], layers: Sequence[int]) -> str:
    """Layers of one kind in words."""
    window, size = kind
    if window == _STATE:
        return f"{len(layers)} with a state of {size} bytes"
    return f"{len(layers)} of {size} bytes a token{f' and a window of {window}' if window else ''}"


def _as_layer(shape: StateShape, dtype: torch.dtype) -> LayerShape:
    """A state as if it were the K of one token: so a page of states is a page of K."""
    return (1, state_numbers(shape, dtype)), (0, 0)


_Made = tuple[
    list[_Pages], list[_Pages], list[_LayerCaches]
]  # all pages, and by group: its pages, its layers


def _in_pools(
    layout: GroupLayout,
    page_counts: Sequence[int],
    shapes: Sequence[Sequence[LayerShape]],
    dtype: torch.dtype,
    device: torch.device,
) -> _Made:
    """Pools of pages of one size: `[places, pages + 1, numbers of a page in a layer]` for K and for V of each pool.

    Raises ModelError where layers of one pool have different pages.
    """
    groups = range(len(layout.groups))
    pools = [list(groups)] if layout.pages is GroupPages.uniform else [[group] for group in groups]
    made, of_group, caches = [], [], []
    offset = 0
    for count, owned in zip(page_counts, pools, strict=True):
        token_groups = [group for group in owned if layout.groups[group].kind is not GroupKind.state]
        sizes = {
            _numbers(layout.groups[group], shape)
            for group in token_groups or owned
            for shape in shapes[group]
        }
        if len(sizes) != 1:
            raise ModelError(
                f"pages of {layout.pages} groups {', '.join(map(str, owned))} have different sizes in K and V "
                f"({sorted(sizes)} numbers): the engine pads no pages; use groups=separate"
            )
        places = max(layout.groups[group].layers for group in owned)
        stacks = [_memory((places, count + 1, size), dtype, device) for size in sizes.pop()]
        for stack in stacks:
            stack[:, 0] = 0
        pages = _Pages(tuple((stack, 1) for stack in stacks), count, offset)
        made.append(pages)
        for group in owned:
            of_group.append(pages)
            blocks = zip(*stacks, shapes[group], strict=False)  # a group may have fewer layers than places
            caches.append([_shaped(k, v, layout.groups[group], shape) for k, v, shape in blocks])
        offset += count
    return made, of_group, caches


_ONE_MEMORY = (GroupPages.lcm, GroupPages.moving, GroupPages.two_ended)


def _in_one_memory(
    layout: GroupLayout,
    page_counts: Sequence[int],
    shapes: Sequence[Sequence[LayerShape]],
    dtype: torch.dtype,
    device: torch.device,
) -> _Made:
    """One memory in which a page of a group lies where the core places it, all of its layers one after the other.

    In front of the memory lies a null page of the largest size, which every group ends in its own. Raises ModelError
    where the pages that come from the end do not begin at the memory's begin: then there is no place for their null.
    """
    core = pages_of(layout, page_counts)
    assert isinstance(core, MemoryPages)
    sizes = [group.page_bytes // dtype.itemsize for group in layout.groups]
    front, memory = max(sizes), core.memory // dtype.itemsize
    flat = _memory((front + memory,), dtype, device)
    flat[:front] = 0
    made, caches = [], []
    for index, (group, size) in enumerate(zip(layout.groups, sizes, strict=True)):
        count, first = core.counts[index], core.page(index, 0)
        from_end = core.span(index, first)[0] > 0
        if from_end and memory % size:
            raise ModelError(
                f"{layout.pages}: the pool has {core.memory:,} bytes, which is no multiple of the {group.page_bytes:,} "
                f"bytes of a page of group {index}; choose a pool that is"
            )
        pages = flat[front - size : front + count * size].view(count + 1, size)
        made.append(
            _Pages(((pages, 0),), count, first + count, -1)
            if from_end
            else _Pages(((pages, 0),), count, first - 1)
        )
        layers = pages.view(count + 1, group.layers, -1)
        caches.append([_cut(layers[:, place], group, shape) for place, shape in enumerate(shapes[index])])
    return made, made, caches


def _numbers(group: KVGroup, shape: LayerShape) -> tuple[int, int]:
    """How many numbers of K and of V a page has in one layer."""
    (heads, dk), (v_heads, dv) = shape
    return group.units * heads * dk, group.units * v_heads * dv


def _cut(layer: torch.Tensor, group: KVGroup, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, which lie one after the other in its part of a page."""
    k, _ = _numbers(group, shape)
    return _shaped(layer[:, :k], layer[:, k:], group, shape)


def _shaped(
    k: torch.Tensor, v: torch.Tensor, group: KVGroup, shape: LayerShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, `[pages + 1, numbers]`, as `[pages + 1, block_size, kv_heads, dim]`; of states as it is."""
    if group.kind is GroupKind.state:
        return k, v
    (heads, dk), (v_heads, dv) = shape
    size = group.block_size
    return k.view(-1, size, heads, dk), v.view(-1, size, v_heads, dv)


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory full of NaN."""
    if device.type == "cpu":
        return huge_pages.empty(shape, dtype).fill_(float("nan"))
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
