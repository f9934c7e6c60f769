"""The eviction order: which cached free block is taken first. The default is least recently used.

`EvictionPolicy` is the seam: the pool tells a policy what is cached, used again and released, and asks whom to evict.
The other built-in rules are in `engine.core.memory.eviction_rules`. `CheckpointRule` says which blocks of windows and
states are cached at all, `EvictionOrder` is the order of pages of groups.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from engine.core.errors import CoreError, OutOfBlocksError
from engine.core.identity import BlockHash
from engine.core.memory.group_layout import GroupLayout, KVGroup
from engine.core.options import GroupKind
from engine.core.request import Request


@dataclass(slots=True)  # not frozen: one is made whenever a table is released
class Released:
    """A table whose blocks are released: `blocks` from its entry `first` on, of `request` (None where not known)."""

    blocks: Sequence[int]
    first: int = 0
    request: Request | None = None

    def places(self, of: Sequence[int]) -> Sequence[int]:
        """The place in its prefix, from 0 on, of each of `of`: some of the released blocks, in order."""
        places = range(self.first, self.first + len(self.blocks))
        if len(of) == len(self.blocks):
            return places
        place_of = dict(zip(self.blocks, places, strict=True))
        return [place_of[block] for block in of]


@dataclass(slots=True)
class PoolFacts:
    """What a policy may know of its pool: the size in blocks, and their tokens.

    `clock` gives the time in ns, `hash_of` the identity of a cached block. To compute the first n tokens of a prompt
    takes `token_s` x n + `pair_s` x n^2 / 2 seconds, those of the weights and of attention.
    """

    num_blocks: int = 0
    block_size: int = 1
    clock: Callable[[], int] = lambda: 0
    hash_of: Callable[[int], BlockHash | None] = lambda block: None
    token_s: float = 1.0
    pair_s: float = 0.0

    def seconds(self, tokens: int) -> float:
        """Seconds to compute the first `tokens` tokens of a prompt."""
        return tokens * (self.token_s + self.pair_s * tokens / 2)


class EvictionPolicy:
    """Which of the cached blocks without references is evicted first: the base of every policy.

    A user's own (`cache.eviction=module:Class`) derives from it, or from a built-in one. A policy overrides `push`,
    `reuse`, `pop`, `blocks` and `__len__`, and `forget` where it remembers blocks that are in use. `facts` is set
    before the first call. With `reads_clock` each step is replayed as one, so that the clock is that of the step; a
    policy that knows `changes_ns` needs that not.
    """

    reads_clock = False

    def __init__(self) -> None:
        self.facts = PoolFacts()

    def __len__(self) -> int:
        """The number of blocks that can be evicted."""
        raise NotImplementedError

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """`blocks`, in table order, have lost their last reference and stay cached; they are in no queue now."""
        raise NotImplementedError

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """A sequence refers to `blocks` again (a hit or a fork); `queued` of them had no reference, and leave."""
        raise NotImplementedError

    def forget(self, blocks: Sequence[int]) -> None:
        """The content of `blocks`, which are in use, is about to change: what comes under their numbers is new."""

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks to evict, in order. They are never spoken of again.

        Raises OutOfBlocksError, and changes nothing, if there are fewer.
        """
        raise NotImplementedError

    def blocks(self) -> list[int]:
        """All blocks in order of eviction, as if no time passed."""
        raise NotImplementedError

    def changes_ns(self) -> int | None:
        """The next time, by the clock, at which the order changes by itself; None: at none that is known."""
        return None

    def check_count(self, count: int) -> None:
        """Raise OutOfBlocksError where fewer than `count` blocks can be evicted."""
        if count > len(self):
            raise OutOfBlocksError(f"{count} blocks to evict were asked for, {len(self)} are in the queue")


class LruQueue(EvictionPolicy):
    """Least recently released table first; within a table, the last block first.

    A released table is kept as one run, so pushing and popping are cheap per block. A block that is used again stays
    in its run as a stale entry, which `pop` skips. The runs are rewritten when there are more stale entries than live
    ones. So all operations are O(1) amortised in time and space.
    """

    def __init__(self) -> None:
        super().__init__()
        self._runs: deque[list[int]] = deque()
        self._stale: dict[int, int] = {}
        self._stale_entries = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: Sequence[int], table: Released | None = None) -> None:
        """Add one run. Its last block is evicted first."""
        if blocks:
            self._runs.append(list(blocks))
            self._size += len(blocks)

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Mark the oldest entry of each of `queued`, which are different, as stale."""
        stale = self._stale
        for block in queued:
            stale[block] = stale.get(block, 0) + 1
        self._stale_entries += len(queued)
        self._size -= len(queued)
        if self._stale_entries > 64 + 2 * self._size:
            kept = self.blocks()
            self._runs, self._stale, self._stale_entries, self._size = deque(), {}, 0, 0
            self.push(kept[::-1])

    def pop(self, count: int) -> list[int]:
        """Remove and return blocks from the oldest runs.

        Raises OutOfBlocksError, and changes nothing, if the queue has fewer than `count` blocks.
        """
        self.check_count(count)
        victims: list[int] = []
        while len(victims) < count:
            run = self._runs[0]
            if self._stale:
                block = run.pop()
                if stale := self._stale.pop(block, 0):  # the entry is stale, and counted off
                    self._stale_entries -= 1
                    if stale > 1:
                        self._stale[block] = stale - 1
                else:
                    victims.append(block)
            else:
                short = count - len(victims)
                victims += run[: -short - 1 : -1]
                del run[-short:]
            if not run:
                self._runs.popleft()
        self._size -= count
        return victims

    def blocks(self) -> list[int]:
        """All live entries in order of eviction."""
        stale, kept = dict(self._stale), []
        for run in self._runs:
            for block in reversed(run):
                if stale.get(block, 0):
                    stale[block] -= 1
                else:
                    kept.append(block)
        return kept


class EvictionOrder(EvictionPolicy):
    """Cached pages of groups: least recently released first, within a table the last block first.

    Where `behind_first`, pages that a window has left come before all others: they help only a hit that ends inside of
    the prefix. `pushes_behind` says whether the next pages are such.
    """

    def __init__(self, *, behind_first: bool) -> None:
        super().__init__()
        self._behind: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict()
        self._behind_first = behind_first
        self.pushes_behind = False

    def __len__(self) -> int:
        return len(self._behind) + len(self._others)

    def __contains__(self, page: object) -> bool:
        return page in self._others or page in self._behind

    def __iter__(self) -> Iterator[int]:
        yield from self._behind
        yield from self._others

    def push(self, blocks: Sequence[int], table: Released | None = None) -> None:
        """Add pages, in table order."""
        queue = self._behind if self.pushes_behind and self._behind_first else self._others
        queue.update(dict.fromkeys(reversed(blocks)))

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        """Remove the pages."""
        for page in queued:
            del (self._behind if page in self._behind else self._others)[page]

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` pages to evict."""
        victims = list(islice(self, count))
        self.reuse((), victims)
        return victims

    def blocks(self) -> list[int]:
        """All pages in order of eviction."""
        return list(self)


class CheckpointRule:
    """Which blocks of windows and states enter the prefix cache: the retention rule of vLLM 0.33.

    Kept are the blocks that a hit at a checkpoint needs: of a window's layers those before its end alone, of a state's
    the last one. A checkpoint is a position at which a later prompt may resume: one token before the prompt's end,
    where a request found that other layers know more of its prefix (a shared junction, so it is kept after the second
    request missed there), and, if asked, every so many tokens.

    `interval` in tokens: 0 keeps the checkpoints of a request alone, None one at every match unit.

    A positive interval must be a multiple of the tokens after which a block of every group ends: else CoreError.
    Source: `reachable_block_mask` of `SlidingWindowManager` and `MambaManager`, and `replay_boundaries`, in
    vllm/v1/core.
    """

    def __init__(self, interval: int | None, layout: GroupLayout) -> None:
        whole = layout.whole_unit
        if interval is not None and (interval < 0 or interval % whole):
            raise CoreError(f"retention interval {interval}: must be 0 or a multiple of {whole} tokens")
        self._interval, self._unit = interval, layout.match_unit

    def kept(
        self, group: KVGroup, needed: int | None, first: int, end: int, checkpoints: Sequence[int]
    ) -> Sequence[int]:
        """The blocks of `group` to keep, of those from `first` to before `end`, in order.

        `needed`: how many blocks before its end a hit needs; None: all, so all are kept. `checkpoints` in tokens.
        """
        dense = self._interval is None
        if needed is None or (dense and group.kind is GroupKind.state):
            return range(first, end)
        kept: set[int] = set()
        segment = (self._unit if self._interval is None else self._interval) // group.block_size
        if segment:
            if needed >= segment:
                return range(first, end)
            kept.update(block for block in range(first, end) if block % segment >= segment - needed)
        for tokens in () if dense else checkpoints:
            behind = tokens // self._unit * self._unit // group.block_size
            kept.update(range(max(first, behind - needed), min(end, behind)))
        return sorted(kept)
