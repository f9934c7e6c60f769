"""The KV tensors of a model whose layers are in groups, and a count of the written slots of each group.

How pages lie is decided by the core (`GroupPages`). With `uniform`, layer i of every group lies in the same tensor, so
a page that one group has given back serves another. With `separate` each group has tensors of its own. With `lcm` pages
of different sizes lie in one memory, as the core places them there. Slots start as NaN, and
become NaN again when the core says that their page is void, as in `KVPool`. The pool notes which group wrote a page,
from the slots that it was told to write: so the tensors are a witness that does not ask the core whose a page is.

A view has the layers of one group: K and V of tokens (`GroupView`), or the states of sequences (`StateView`). A state
is what transformers' cache holds for a layer with linear attention, a state space or a short convolution:
`conv_states` and `recurrent_states` of one sequence. A page holds those of all layers of its group after one token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch

from engine.core.memory.block_pool import NULL_BLOCK
from engine.core.memory.block_tables import GroupTables
from engine.core.memory.group_chunks import ChunkPages, pages_of
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.options import GroupKind, GroupPages
from engine.core.plan import IntArray, StepPlan
from engine.runtime.errors import AuditError, ModelError
from engine.runtime.kv_pool import KVPool, LayerShape, SlotMarks, kv_dtype_of, memory_on, storage_of
from engine.runtime.options import KVDtype
from paged_kernels.arguments import storable

# The window of a layer with a state: a token needs what stands at the token before it.
SEES_ITS_STATE = 2
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
    """What the layers of one group share. `layers` are their numbers in the model, `index` is that of the group.

    `offset` is what the core's page numbers have more than those of the tensors. `keys[layer]` and `values[layer]` are
    the layers' tensors.
    """

    index: int
    group: KVGroup
    layers: tuple[int, ...]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    offset: int
    device: torch.device

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.group.block_size

    def local(self, table: Sequence[int]) -> list[int]:
        """A block table in the numbers of the tensors; NULL_BLOCK stays."""
        offset = self.offset
        if not offset:
            return list(table)
        return [page - offset if page != NULL_BLOCK else NULL_BLOCK for page in table]


@dataclass(frozen=True, slots=True)
class GroupView(PageView):
    """The layers of one group, as the attention of a step needs them.

    `keys[layer]` and `values[layer]` are `[pages + 1, block_size, kv_heads, dim]`. `window` is what the layers tell
    their attention, 0 for none. In 8 bits `marks` says which slots were written.
    """

    window: int = 0
    token_bytes: int = 0
    marks: SlotMarks | None = None

    def written(self, pages: torch.Tensor) -> set[int]:
        """How many slots of `pages`, numbers of the tensors, hold something: of K and V of each layer, or by marks."""
        if self.marks is not None:
            return {int(self.marks.table[pages].sum())}
        return {
            int(torch.isfinite(cache[layer].index_select(0, pages)[:, :, 0, 0]).sum())
            for cache in (self.keys, self.values)
            for layer in self.layers
        }

    def holds(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Whether the first layer holds something at slots `[tokens]` of pages `[tokens]`."""
        if self.marks is not None:
            return self.marks.table[pages, slots]
        return torch.isfinite(self.keys[self.layers[0]][pages, slots, 0, 0])


# What the attention of a step reads and writes: K and V of all layers, or of those of one group.
CacheTensors = KVPool | GroupView


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

    def holds(self, pages: torch.Tensor) -> torch.Tensor:
        """Whether any layer holds a part of a state in `pages`: bool `[pages]`."""
        return torch.stack([self._held(layer, pages) for layer in self.layers]).any(0)

    def written(self, pages: torch.Tensor) -> set[int]:
        """How many of `pages` hold a whole state: of each part of each layer."""
        counts: set[int] = set()
        for layer in self.layers:
            held = self._held(layer, pages)
            parts = self.read(layer, pages).values()
            counts.update(int((torch.isfinite(part.flatten(1)).all(1) & held).sum()) for part in parts)
        return counts

    def _held(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Whether a layer holds a part of a state in `pages`, where not all numbers are void: bool `[pages]`."""
        raw = self._raw(layer, pages)
        _, void = storage_of(raw.dtype)
        return ~(raw.isnan() if raw.is_floating_point() else raw == void).all(1)

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


# The owner of a page that no group has written since it became void.
NOBODY = -1


@dataclass(frozen=True, slots=True)
class _Pages:
    """Numbered pages in tensors: (tensor, axis of its pages, what is in a void one), each with a null page in front.

    The core's number of a page is `offset` + its place in the tensors; places are 1 to `count`.
    """

    tensors: list[tuple[torch.Tensor, int, float]]
    count: int
    offset: int

    def places(self, numbers: IntArray) -> IntArray:
        """The places of those of the core's page numbers that are pages of these tensors."""
        places: IntArray = numbers - self.offset
        return places[(places >= 1) & (places <= self.count)]


# a page in host memory: its part of each tensor, its owner, its notes
_Saved = tuple[list[torch.Tensor], int, list[IntArray]]
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
        kv_dtype: KVDtype | str = KVDtype.model,
    ) -> None:
        self.layout, self.device = layout, device
        states, numbers = states or {}, kv_dtype_of(kv_dtype, dtype)
        dtype, void = storage_of(numbers)
        layers = layers_of(layout, shapes, windows, dtype.itemsize, states)
        # a state is as the K of one token: so a page of states is a page of K
        kept = {layer: ((1, state_numbers(shape, dtype)), (0, 0)) for layer, shape in states.items()}
        sent = [
            [kept[layer] if group.kind is GroupKind.state else shapes[layer] for layer in own]
            for own, group in zip(layers, layout.groups, strict=True)
        ]
        make = _in_one_memory if layout.pages is GroupPages.lcm else _in_pools
        self._pages, self._of_group, caches = make(layout, page_counts, sent, dtype, device)
        for held in self._pages:
            for tensor, axis, _ in held.tensors:
                tensor.fill_(void).select(axis, 0).zero_()
        self.group_of = [0] * len(shapes)
        self.views: list[GroupView | StateView] = []
        for index, (group, own) in enumerate(zip(layout.groups, layers, strict=True)):
            keys, values = [torch.empty(0)] * len(shapes), [torch.empty(0)] * len(shapes)
            pages, keeps = self._of_group[index], group.kind is GroupKind.state
            for layer, pair in zip(own, caches[index], strict=True):
                keys[layer], values[layer] = pair if keeps else (each.view(numbers) for each in pair)
            shared = index, group, tuple(own), keys, values, pages.offset, device
            if keeps:
                parts = {layer: states[layer] for layer in own}
                self.views.append(StateView(*shared, parts, new_ends(len(own), pages.count + 1)))
                continue
            marks = None
            if numbers.itemsize == 1:
                marks = SlotMarks(pages.count, group.block_size, device)
                pages.tensors.append((marks.table, 0, False))
            self.views.append(GroupView(*shared, windows[own[0]], group.layer_bytes, marks))
            for layer in own:
                self.group_of[layer] = index
        last = max(pages.offset + pages.count for pages in self._pages)
        self._owner = np.full(last + 1, NOBODY, dtype=np.int64)
        self._host: dict[int, _Saved] = {}
        self.draft_view: GroupView | None = None

    def add_draft(self, shapes: Sequence[LayerShape], dtype: torch.dtype) -> GroupView:
        """Memory for K and V of a draft model's layers, beside the pages of a group that keeps every token.

        It is poisoned, copied and swapped with them. `dtype` is the element type. Raises ModelError where there is no
        such group, and beside states.
        """
        if any(isinstance(view, StateView) for view in self.views):
            raise ModelError("layers in groups: a state takes no draft token back; leave out the draft model")
        whole = next((view for view in self.views if not view.group.forgets), None)
        if whole is None:
            raise ModelError(
                "layers in groups: every layer of the model has a window, so that no group keeps the tokens that a "
                "draft model reads; leave out the draft model, or set groups=off"
            )
        pages, (stored, void), caches = self._of_group[whole.index], storage_of(dtype), []
        for heads, dim in (each for shape in shapes for each in shape):
            cache = memory_on(self.device, (pages.count + 1, whole.block_size, heads, dim), stored).fill_(
                void
            )
            cache[0] = 0
            pages.tensors.append((cache, 0, void))
            caches.append(cache.view(dtype))
        keys, values = caches[0::2], caches[1::2]
        most = max(key[0, 0].nbytes + value[0, 0].nbytes for key, value in zip(keys, values, strict=True))
        shared = whole.index, whole.group, tuple(range(len(shapes))), keys, values, whole.offset, self.device
        self.draft_view = GroupView(*shared, token_bytes=most)
        return self.draft_view

    @property
    def bytes(self) -> int:
        """Bytes of all K, V and states, those of a draft model and the null pages included."""
        storages = [
            tensor.untyped_storage()
            for pages in self._pages
            for tensor, *_ in pages.tensors
            if tensor.dtype is not torch.bool
        ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def poison(self, pages: Sequence[int]) -> None:
        """Set all slots of `pages` to NaN in every layer; they belong to no group then."""
        numbers = np.asarray(pages, dtype=np.int64)
        self._owner[numbers] = NOBODY
        for held in self._pages:
            index = torch.from_numpy(held.places(numbers)).to(self.device)
            for tensor, axis, void in held.tensors:
                tensor.index_fill_(axis, index, void)
        for page in pages:
            for ends in self._ends_of(page):
                ends[:] = UNWRITTEN

    def poison_slots(self, spans: Sequence[tuple[int, int, int]]) -> None:
        """Set slots `first … end - 1` of each (page, first, end) to NaN: their tokens were taken back."""
        for view in (*self.views, self.draft_view):
            if not isinstance(view, GroupView):
                continue
            own = [span for span in spans if self._owner[span[0]] == view.index]
            cut = [(page - view.offset, slot) for page, first, end in own for slot in range(first, end)]
            if not cut:
                continue
            pages, slots = torch.tensor(cut, device=self.device).T
            if view.marks is not None:
                view.marks.table[pages, slots] = False
            for cache in (each[layer] for layer in view.layers for each in (view.keys, view.values)):
                storable(cache)[pages, slots] = storage_of(cache.dtype)[1]

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages to host memory; pairs (page, host block)."""
        for page, host in pairs:
            parts = [part.cpu().clone() for part in self._parts_of(page)]
            self._host[host] = parts, int(self._owner[page]), [ends.copy() for ends in self._ends_of(page)]

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages back from host memory, which forgets them; pairs (host block, page)."""
        for host, page in pairs:
            parts, self._owner[page], kept = self._host.pop(host)
            for mine, saved in zip(self._parts_of(page), parts, strict=True):
                mine.copy_(saved)
            for ends, before in zip(self._ends_of(page), kept, strict=True):
                ends[:] = before

    def _parts_of(self, page: int) -> Iterator[torch.Tensor]:
        """A page in each of its tensors."""
        for held in self._pages:
            for place in held.places(np.array([page])).tolist():
                yield from (tensor.select(axis, place) for tensor, axis, _ in held.tensors)

    def _ends_of(self, page: int) -> Iterator[IntArray]:
        """The notes of a page, if it may hold states."""
        for view in self.views:
            if isinstance(view, StateView) and 0 < page - view.offset < view.ends.shape[1]:
                yield view.ends[:, page - view.offset]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) pages; all sources are read before any destination is written."""
        sources, targets = np.array(copies, dtype=np.int64).T
        self._owner[targets] = self._owner[sources]
        for held in self._pages:
            pairs = [torch.from_numpy(held.places(each)).to(self.device) for each in (sources, targets)]
            for tensor, axis, _ in held.tensors:
                tensor.index_copy_(axis, pairs[1], tensor.index_select(axis, pairs[0]))
        kept = [[ends.copy() for ends in self._ends_of(page)] for page in sources]
        for page, notes in zip(targets, kept, strict=True):
            for ends, before in zip(self._ends_of(page), notes, strict=True):
                ends[:] = before

    # -- the audit -----------------------------------------------------------------------------------------

    def note_writes(self, group: int, slots: IntArray) -> None:
        """Note that `group` writes the slots `[tokens]` of its tensors in this step; the null page is not noted."""
        view = self.views[group]
        pages = slots // view.block_size
        self._owner[pages[pages > 0] + view.offset] = group

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
            page = slot // view.block_size + view.offset
            reason = f"{what}: group {group} writes page {page}, slot {slot % view.block_size}, twice"
            raise AuditError(reason)

    def check_state(self, group: int, page: int, tokens: int, what: str) -> None:
        """Raise AuditError unless `page` holds the state after `tokens` tokens, in every layer of a state group."""
        view = self.views[group]
        assert isinstance(view, StateView)
        for layer, end in zip(view.layers, view.ends[:, page - view.offset].tolist(), strict=True):
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
            raise AuditError(f"{what}: group {group} writes page {place + view.offset}, a state, twice")

    def written_units(self) -> list[int]:
        """How many tokens each group has in its pages, or states, counted in the tensors.

        Raises AuditError if two layers of a group hold different numbers of them.
        """
        found = []
        for index, view in enumerate(self.views):
            pages = np.flatnonzero(self._owner == index) - view.offset
            counts = view.written(torch.from_numpy(pages).to(self.device))
            if len(counts) > 1:
                reason = f"the layers of group {index} hold different numbers of tokens: {sorted(counts)}"
                raise AuditError(reason)
            found.append(counts.pop())
        return found

    def written_slots(self) -> int:
        """The written tokens of all groups, each as many as the slots of the layout that it fills."""
        slot = self.layout.slot_bytes
        units = zip(self.written_units(), self.layout.groups, strict=True)
        return sum(count * (group.unit_bytes // slot) for count, group in units)


class BlockOperations:
    """Applies the block operations of a step plan to several pools with the same block ids.

    Call in this order: `poison_stale`, `swap_out`, `poison_freed`, `swap_in_and_copy`. The calls that poison are needed
    for the audit only.
    """

    def __init__(self, pools: Sequence[KVPool | GroupedPool]) -> None:
        self.pools = pools

    def poison_stale(self, plan: StepPlan) -> None:
        """Set stale slots of used blocks to NaN, before a swap can save them with their block."""
        for pool in self.pools if plan.stale else ():
            pool.poison_slots(plan.stale)

    def swap_out(self, plan: StepPlan) -> None:
        """Save blocks in host memory, before other sequences write to them."""
        for pool in self.pools if plan.swap_out else ():
            pool.swap_out(plan.swap_out)

    def poison_freed(self, plan: StepPlan) -> None:
        """Set freed blocks to NaN."""
        for pool in self.pools if plan.frees else ():
            pool.poison(plan.frees)

    def swap_in_and_copy(self, plan: StepPlan) -> None:
        """Bring swapped blocks back, then copy blocks."""
        for pool in self.pools:
            if plan.swap_in:
                pool.swap_in(plan.swap_in)
            if plan.copies:
                pool.copy(plan.copies)

    def poison_copied(self, plan: StepPlan) -> None:
        """Set to NaN what a copied page has behind the tokens of its new sequence: a hit may end inside a page."""
        copied = {target for _, target in plan.copies}
        for pool in self.pools if copied else ():
            if isinstance(pool, GroupedPool) and pool.layout.inside:
                for row in plan.other_rows:
                    tables = cast(GroupTables, row.table).groups
                    for group, table in zip(pool.layout.groups, tables, strict=True):
                        place, first = divmod(row.context_len, group.block_size)
                        if (page := table[place]) in copied:
                            pool.poison_slots([(page, first, group.block_size)])


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
    told = "; ".join(
        f"{len(layers)} with a state of {size} bytes"
        if window == _STATE
        else f"{len(layers)} of {size} bytes a token{f' and a window of {window}' if window else ''}"
        for (window, size), layers in kinds.items()
    )
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
                f"layers for it; its layers: {told}"
            )
        found.append(layers)
    here, there = sum(map(len, found)), sum(map(len, kinds.values()))
    if here != there:
        raise ModelError(f"the groups have {here} layers, the model has {there}: {told}")
    return found


# all pages, and by group: its pages, its layers
_Made = tuple[list[_Pages], list[_Pages], list[_LayerCaches]]


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
        counted = [(layout.groups[one], shape) for one in token_groups or owned for shape in shapes[one]]
        sizes = {_numbers(group, shape) for group, shape in counted}
        if len(sizes) != 1:
            raise ModelError(
                f"pages of {layout.pages} groups {', '.join(map(str, owned))} have different sizes in K and V "
                f"({sorted(sizes)} numbers): the engine pads no pages; use groups=separate"
            )
        places = max(layout.groups[group].layers for group in owned)
        stacks = [memory_on(device, (places, count + 1, size), dtype) for size in sizes.pop()]
        pages = _Pages([(stack, 1, storage_of(dtype)[1]) for stack in stacks], count, offset)
        made.append(pages)
        for group in owned:
            of_group.append(pages)
            blocks = zip(*stacks, shapes[group], strict=False)  # a group may have fewer layers than places
            caches.append([_shaped(k, v, layout.groups[group], shape) for k, v, shape in blocks])
        offset += count
    return made, of_group, caches


def _in_one_memory(
    layout: GroupLayout,
    page_counts: Sequence[int],
    shapes: Sequence[Sequence[LayerShape]],
    dtype: torch.dtype,
    device: torch.device,
) -> _Made:
    """One memory in which a page of a group lies where the core places it, all of its layers one after the other.

    In front of the memory lies a null page of the largest size, which every group ends in its own.
    """
    core = pages_of(layout, page_counts)
    assert isinstance(core, ChunkPages)
    sizes = [group.page_bytes // dtype.itemsize for group in layout.groups]
    front, memory = max(sizes), core.memory // dtype.itemsize
    flat = memory_on(device, (front + memory,), dtype)
    made, caches = [], []
    for index, (group, size) in enumerate(zip(layout.groups, sizes, strict=True)):
        count, first = core.pools[index].num_blocks, core.page(index, 0)
        pages = flat[front - size : front + count * size].view(count + 1, size)
        made.append(_Pages([(pages, 0, storage_of(dtype)[1])], count, first - 1))
        own = []
        for layer, shape in zip(
            pages.view(count + 1, group.layers, -1).unbind(1), shapes[index], strict=False
        ):
            k, _ = _numbers(group, shape)  # K and V of a layer lie one after the other in its part of a page
            own.append(_shaped(layer[:, :k], layer[:, k:], group, shape))
        caches.append(own)
    return made, made, caches


def _numbers(group: KVGroup, shape: LayerShape) -> tuple[int, int]:
    """How many numbers of K and of V a page has in one layer."""
    (heads, dk), (v_heads, dv) = shape
    return group.units * heads * dk, group.units * v_heads * dv


def _shaped(
    k: torch.Tensor, v: torch.Tensor, group: KVGroup, shape: LayerShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, `[pages + 1, numbers]`, as `[pages + 1, block_size, kv_heads, dim]`; of states as it is."""
    if group.kind is GroupKind.state:
        return k, v
    (heads, dk), (v_heads, dv) = shape
    size = group.block_size
    return k.view(-1, size, heads, dk), v.view(-1, size, v_heads, dv)
