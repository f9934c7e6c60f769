"""Groups of layers that keep different things of a sequence, and the pages in which they keep them.

A model is a list of `LayerSet`s. `uniform_layout` turns them into groups as vLLM does: pages of one size, and as many
layers in every group. `separate_layout` gives each set one group with a page of its own size, for pools of their own or
in one memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from engine.core.errors import CoreError
from engine.core.options import GroupKind, GroupPages, StateMode, WindowHits

_SPANS = (GroupKind.window, GroupKind.chunk)  # kinds that see so many tokens alone
_ENDLESS = 1 << 30  # tokens of a block that never ends: one state serves a whole sequence
_STATE_KEEPS = 2  # a state stands for all tokens before it: like a window that sees the token before alone
# attention blocks beside a state are multiples of a block that has at least so many tokens, or latent vectors
_ALIGNED_TOKENS = 16, 128


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Layers of a model that keep the same of a sequence.

    `layer_bytes` are those of a token in one layer; of a state, those of a sequence in one layer. `window`: tokens, of
    `chunk` those of a chunk. Raises CoreError if the values do not fit together.
    """

    kind: GroupKind
    layers: int
    layer_bytes: int
    window: int | None = None

    def __post_init__(self) -> None:
        if min(self.layers, self.layer_bytes) < 1:
            raise CoreError(
                f"{self.kind} layers: {self.layers} layers of {self.layer_bytes} bytes, both must be at least 1"
            )
        if (self.kind in _SPANS) != (self.window is not None) or (self.window or 1) < 1:
            raise CoreError(
                f"{self.kind} layers with window {self.window}: a window of at least 1 token, and for `window` and "
                "`chunk` alone"
            )

    def seen(self, tokens: int) -> int:
        """Of the first `tokens` tokens those that the last one sees."""
        if self.kind is GroupKind.chunk:
            return (tokens - 1) % (self.window or tokens) + 1
        return min(tokens, self.window or tokens)


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table. All sizes are in bytes, `block_size` in tokens.

    A block is stored in one page of `page_bytes`, the sum over `layers` real layers and the empty places of
    `padding_layers`. Of a page, `unit_bytes` hold one token of the real layers; of a state, the whole state. `padding`
    is what the block leaves free because pages have one size, `imbalance` the empty places of the padding layers.
    `states` says which states are kept; with `none` there is a single block, which has no end.
    """

    kind: GroupKind
    layers: int
    padding_layers: int
    block_size: int
    layer_bytes: int
    page_bytes: int
    window: int | None = None
    states: StateMode = StateMode.align

    @property
    def aligned(self) -> bool:
        """Whether a row takes a page for its last block alone, and those of a prompt end at the end of a block."""
        return self.kind is GroupKind.state and self.states is StateMode.align

    @property
    def keeps(self) -> int | None:
        """The next token needs the last `keeps - 1` tokens before it; None: all of them, or those of its chunk."""
        if self.kind is GroupKind.chunk:
            return None
        return _STATE_KEEPS if self.kind is GroupKind.state else self.window

    @property
    def forgets(self) -> bool:
        """Whether a sequence leaves blocks behind that no later token needs."""
        return self.kind in _SPANS or self.kind is GroupKind.state

    @property
    def unit_bytes(self) -> int:
        """Bytes of one token in the real layers; of a state, bytes of the state."""
        return self.layers * self.layer_bytes

    @property
    def units(self) -> int:
        """How often a full page has `unit_bytes`: once for each token, or one state."""
        return 1 if self.kind is GroupKind.state else self.block_size

    @property
    def imbalance(self) -> int:
        """Bytes of a page that belong to no layer."""
        return self.page_bytes * self.padding_layers // (self.layers + self.padding_layers)

    @property
    def padding(self) -> int:
        """Bytes of a page's real layers that no token or state fills."""
        return self.page_bytes - self.imbalance - self.units * self.unit_bytes

    def blocks(self, tokens: int) -> int:
        """Entries of the block table for `tokens` tokens, those behind the window included."""
        return -(-tokens // self.block_size)

    def unseen(self, computed: int) -> int:
        """Leading tokens that no token after the first `computed` needs."""
        if self.kind is GroupKind.chunk and self.window:
            return computed // self.window * self.window
        return 0 if self.keeps is None else max(0, computed - self.keeps + 1)

    def skipped(self, computed: int) -> int:
        """Leading blocks that no token after the first `computed` needs."""
        return self.unseen(computed) // self.block_size

    def leaves(self, block: int) -> int | None:
        """After how many computed tokens no later one needs block number `block`; None: it is always needed."""
        if self.kind is GroupKind.chunk and self.window:
            return (block * self.block_size // self.window + 1) * self.window
        return None if self.keeps is None else (block + 1) * self.block_size + self.keeps - 1

    def most_blocks(self, tokens: int, chunk: int) -> int:
        """The most pages that a sequence of `tokens` tokens holds at once, computed in chunks of at most `chunk`.

        Source: `max_admission_blocks_per_request` of `SlidingWindowSpec` and `ChunkedLocalAttentionSpec` in
        vllm/v1/kv_cache_interface.py. One more than the window and a chunk fill, because a window may begin inside a
        block; chunks of attention do not.
        """
        if self.kind is GroupKind.chunk and self.window:
            return min(self.blocks(tokens), self.blocks(self.window + chunk))
        if self.keeps is None:
            return self.blocks(tokens)
        if self.aligned:  # the state that a row begins with, and the one that it ends with
            return min(self.blocks(tokens), 2)
        return min(self.blocks(tokens), self.blocks(self.keeps - 1 + chunk) + 1)

    def keeps_as(self, other: "KVGroup") -> bool:
        """Whether the layers of both keep the same of a sequence, in blocks of one size."""
        return (self.kind, self.window, self.block_size, self.layer_bytes) == (
            *(other.kind, other.window, other.block_size, other.layer_bytes),
        )

    def hit_blocks(self, rule: WindowHits) -> int | None:
        """Blocks that a prefix hit needs before its end; None: all of them, or where not `hits_whole`, of its chunk."""
        if self.keeps is None or (rule is WindowHits.all and self.kind is GroupKind.window):
            return None
        return -(-(self.keeps - 1) // self.block_size)

    def hits_whole(self, rule: WindowHits) -> bool:
        """Whether a prefix hit needs all blocks."""
        if self.kind is GroupKind.chunk:
            return rule is WindowHits.all
        return self.hit_blocks(rule) is None


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The groups of a model and how their pages share the memory.

    `match_unit` is the length in tokens of which the end of every prefix hit is a multiple: the least common multiple
    of the block sizes, or what is asked for, `unit`, so that hits may end inside a block. `slot_bytes` is the largest
    size of which pages, tokens and states are multiples.

    Raises CoreError where chunks of attention do not begin with a block, or blocks beside them differ in length, as
    vLLM's `ChunkedLocalAttentionManager` does; and where hits cannot end with every `unit`.
    """

    pages: GroupPages
    groups: tuple[KVGroup, ...]
    unit: int | None = None

    def __post_init__(self) -> None:
        self._check_unit()
        sizes = {group.block_size for group in self.groups}
        for chunk in (group.window for group in self.groups if group.kind is GroupKind.chunk):
            if chunk and (len(sizes) > 1 or chunk % max(sizes)):
                raise CoreError(
                    f"attention in chunks of {chunk} tokens, with blocks of {', '.join(map(str, sorted(sizes)))} "
                    "tokens: all blocks must be equally long, and divide the chunk; choose another block size"
                )

    def _check_unit(self) -> None:
        """vLLM's rules of `prefix_match_unit` (`resolve_kv_cache_block_sizes`, `partial_hash_hits_enabled`).

        It takes a unit beside windows, or without states, too, and matches whole blocks then: that is refused here.
        """
        unit, sizes = self.unit, {group.block_size for group in self.groups}
        if unit is None or sizes == {unit}:
            return
        if any(size % unit for size in sizes):
            blocks = " and ".join(map(str, sorted(sizes)))
            raise CoreError(
                f"a match unit of {unit} tokens must divide the blocks of all groups, of {blocks} tokens"
            )
        spans = any(group.kind in _SPANS for group in self.groups)
        if spans or self.pages is not GroupPages.uniform or not any(group.aligned for group in self.groups):
            raise CoreError(
                f"a match unit of {unit} tokens: hits end inside a block in pages of one size (uniform) alone, beside "
                "aligned states, and where no layer has a window or attends in chunks"
            )

    @property
    def match_unit(self) -> int:
        """Tokens."""
        return self.unit if self.unit and self.inside else self.whole_unit

    @property
    def whole_unit(self) -> int:
        """Tokens after which a block of every group ends."""
        return lcm(*(group.block_size for group in self.groups if group.block_size < _ENDLESS))

    @property
    def inside(self) -> bool:
        """Whether hits may end inside a block: where the unit is smaller than the blocks of states."""
        return any(group.aligned and (self.unit or _ENDLESS) < group.block_size for group in self.groups)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in which the states of the pool are counted."""
        return gcd(*(size for group in self.groups for size in (group.page_bytes, group.unit_bytes)))

    @property
    def chunk_bytes(self) -> int:
        """The compatible page of `lcm`: the smallest size that pages of every group divide."""
        return lcm(*(group.page_bytes for group in self.groups))

    def page_slots(self, group: int) -> int:
        """Slots of a page of a group."""
        return self.groups[group].page_bytes // self.slot_bytes

    def tokens_bytes(self, tokens: int, chunk: int) -> int:
        """The most bytes of pages that one sequence of `tokens` tokens holds at once, in chunks of at most `chunk`."""
        return sum(group.most_blocks(tokens, chunk) * group.page_bytes for group in self.groups)

    def page_counts(self, memory: int, longest: int, chunk: int) -> tuple[int, ...]:
        """Pages in `memory` bytes: of the one pool, or of each group's pool; or chunks (`lcm`).

        Fixed shares are as the needs of one sequence of `longest` tokens: so many of them fit into each pool alike.
        """
        if self.pages is GroupPages.uniform:
            return (memory // self.groups[0].page_bytes,)
        if self.pages is GroupPages.lcm:
            return (memory // self.chunk_bytes,)
        whole = self.tokens_bytes(longest, chunk)
        return tuple(memory * group.most_blocks(longest, chunk) // whole for group in self.groups)


def unseen_share(sets: Sequence[LayerSet], tokens: int) -> float:
    """The share of K and V that a sequence of `tokens` tokens no longer needs, where every layer keeps every token.

    It is what a pool without groups loses at that length (vllm#11382). Layers with states do not count.
    """
    kept = [each for each in sets if each.kind is not GroupKind.state]
    whole = sum(each.layers * each.layer_bytes * tokens for each in kept)
    seen = sum(each.layers * each.layer_bytes * each.seen(tokens) for each in kept)
    return 1 - seen / whole if whole else 0.0


def uniform_layout(
    sets: Sequence[LayerSet], block_size: int, states: StateMode = StateMode.align
) -> GroupLayout:
    """One page size, as vLLM's unification; `block_size` in tokens.

    Pages of a layer get one size: smaller ones hold more tokens where that divides, else they are padded. Beside a
    state, attention blocks get so long that a page of a layer holds the state, and a state is kept at the end of each
    block. Sets are then divided into groups of as many layers each, with empty places in the last ones.

    Not followed: where all layers keep the same of a sequence and differ in bytes alone (every token, latent vectors
    included), vLLM has one group of them (`UniformTypeKVCacheSpecs`), here each size has its own. And where it is told
    to lay out blocks before layers (`VLLM_KV_CACHE_LAYOUT=BLHNC`), it packs pages of several sizes beside each other.

    Source: `unify_kv_cache_spec_page_size` and `_get_kv_cache_groups_uniform_page_size` in
    vllm/v1/core/kv_cache_planning.py, `_align_hybrid_block_size` in vllm/platforms/interface.py (vLLM 0.33).

    Raises:
        CoreError: a latent page cannot be padded to another size, or there are states alone.
    """
    _check_sets(sets, block_size)
    recurrent = [each for each in sets if each.kind is GroupKind.state]
    tokens = [each for each in sets if each.kind is not GroupKind.state]
    if not tokens:
        raise CoreError("the layers keep states alone: no page of tokens could set the size of a page")
    size = block_size
    if recurrent:
        state_bytes = max(each.layer_bytes for each in recurrent)
        token_bytes = max(each.layer_bytes for each in tokens)
        aligned = max(block_size, *(_ALIGNED_TOKENS[each.kind is GroupKind.latent] for each in tokens))
        size = -(-state_bytes // (aligned * token_bytes)) * aligned
    page = size * max(each.layer_bytes for each in tokens)
    counts = [each.layers for each in sets]
    group_layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups: list[KVGroup] = []
    for each in sets:
        parts, keeps = -(-each.layers // group_layers), (each.window, states)
        length, whole = _block_size(each, size, page, states), page * group_layers
        for part in range(parts):
            layers = len(range(part, each.layers, parts))
            empty = group_layers - layers
            groups.append(KVGroup(each.kind, layers, empty, length, each.layer_bytes, whole, *keeps))
    return GroupLayout(GroupPages.uniform, tuple(groups))


def _block_size(layers: LayerSet, size: int, page: int, states: StateMode) -> int:
    """Tokens of a block whose page in one layer has `page` bytes."""
    if layers.kind is GroupKind.state:
        return _ENDLESS if states is StateMode.none else size
    own = size * layers.layer_bytes
    if page % own == 0:
        return size * (page // own)
    if layers.kind is GroupKind.latent:
        raise CoreError(
            f"a latent page of {own} bytes does not divide the largest page, {page} bytes, and cannot be padded; "
            "use separate pools, or another block size"
        )
    return size


def separate_layout(
    sets: Sequence[LayerSet],
    block_size: int,
    *,
    state_every: int | None = None,
    pages: GroupPages = GroupPages.separate,
    states: StateMode = StateMode.align,
) -> GroupLayout:
    """One group for each set, with pages of its own size. `state_every`: tokens between two states that are kept.

    None keeps them at the ends of blocks. `pages` says how these share the memory.
    """
    _check_sets(sets, block_size)
    groups = []
    for each in sets:
        state = each.kind is GroupKind.state
        size = (state_every or block_size) if state else block_size
        page = each.layers * each.layer_bytes * (1 if state else size)
        size = _ENDLESS if state and states is StateMode.none else size
        groups.append(KVGroup(each.kind, each.layers, 0, size, each.layer_bytes, page, each.window, states))
    return GroupLayout(pages, tuple(groups))


def layout_of(
    pages: GroupPages, sets: Sequence[LayerSet], block_size: int, state_every: int | None, states: StateMode
) -> GroupLayout:
    """The groups of a model's layers in pages of a kind; see `uniform_layout` and `separate_layout`."""
    if pages is GroupPages.uniform:
        return uniform_layout(sets, block_size, states)
    return separate_layout(sets, block_size, state_every=state_every, pages=pages, states=states)


def _check_sets(sets: Sequence[LayerSet], block_size: int) -> None:
    if not sets:
        raise CoreError("a layout needs at least one set of layers")
    if block_size < 1:
        raise CoreError(f"block size is {block_size} tokens, must be at least 1")
