"""The eviction order: which cached free block is taken first. The default is least recently used.

`CheckpointRule` says which blocks of windows and states are cached at all.

`KeepQueue` knows whose blocks are cached: sessions with a time to live, pins, priorities, dead turns. Its rules put
blocks into ranks; the lowest rank is evicted first, within a rank the least recently released table, and within a
table the last block.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from engine.core.errors import CoreError, OutOfBlocksError
from engine.core.memory.group_layout import KVGroup
from engine.core.options import GroupKind, Keep
from engine.core.request import Request


class EvictionQueue(Protocol):
    """The cached blocks with reference count 0, in the order in which they are evicted.

    A user's own order (`cache.eviction=module:Class`) has these methods. Each block is in the queue at most once.
    """

    def __len__(self) -> int:
        """The number of blocks in the queue."""

    def push(self, blocks: Sequence[int]) -> None:
        """Add blocks of one table, which were just released, in table order."""

    def remove(self, block: int) -> None:
        """Remove `block`, because a sequence refers to it again."""

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks to evict, in order of eviction."""

    def blocks(self) -> list[int]:
        """All blocks in order of eviction."""


class LruQueue:
    """Least recently released table first; within a table, the last block first.

    A released table is kept as one run, so pushing and popping are cheap per block. A block that is used again stays
    in its run as a stale entry, which `pop` skips. The runs are rewritten when there are more stale entries than live
    ones. So all operations are O(1) amortised in time and space.
    """

    def __init__(self) -> None:
        self._runs: deque[list[int]] = deque()
        self._stale: dict[int, int] = {}
        self._stale_entries = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, blocks: Sequence[int]) -> None:
        """Add one run. Its last block is evicted first."""
        if blocks:
            self._runs.append(list(blocks))
            self._size += len(blocks)

    def remove(self, block: int) -> None:
        """Mark the block's oldest entry as stale."""
        self.remove_all((block,))

    def remove_all(self, blocks: Sequence[int]) -> None:
        """Mark the oldest entry of each of `blocks`, which are different, as stale."""
        stale = self._stale
        if stale.keys().isdisjoint(blocks):
            stale.update(dict.fromkeys(blocks, 1))
        else:
            for block in blocks:
                stale[block] = stale.get(block, 0) + 1
        self._stale_entries += len(blocks)
        self._size -= len(blocks)
        if self._stale_entries > 64 + 2 * self._size:
            kept = self.blocks()
            self._runs, self._stale, self._stale_entries, self._size = deque(), {}, 0, 0
            self.push(kept[::-1])

    def pop(self, count: int) -> list[int]:
        """Remove and return blocks from the oldest runs.

        Raises OutOfBlocksError, and changes nothing, if the queue has fewer than `count` blocks.
        """
        if count > self._size:
            raise OutOfBlocksError(f"{count} blocks to evict were asked for, {self._size} are in the queue")
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


class EvictionOrder:
    """Cached pages of groups: least recently released first, within a table the last block first.

    Where `behind_first`, pages that a window has left come before all others: they help only a hit that ends inside of
    the prefix. `pushes_behind` says whether the next pages are such.
    """

    def __init__(self, *, behind_first: bool) -> None:
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

    def push(self, blocks: Sequence[int]) -> None:
        """Add pages, in table order."""
        queue = self._behind if self.pushes_behind and self._behind_first else self._others
        queue.update(dict.fromkeys(reversed(blocks)))

    def remove(self, block: int) -> None:
        """Remove a page, because a sequence refers to it again or it is evicted."""
        del (self._behind if block in self._behind else self._others)[block]

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` pages to evict."""
        victims = list(islice(self, count))
        for page in victims:
            self.remove(page)
        return victims

    def blocks(self) -> list[int]:
        """All pages in order of eviction."""
        return list(self)


Blocks = OrderedDict[int, None]


@dataclass(frozen=True, slots=True)
class TurnOf:
    """The session of a request, and its place in it."""

    session: str
    turn: int


class KeepQueue:
    """The cached blocks without references, under a rule of `Keep` other than `recent`.

    * `ttl`: blocks of a session that were released less than `seconds` ago are evicted last.
    * `pin`: the first `pinned` blocks of a sequence are evicted last.
    * `priority`: blocks of requests with a higher `Request.priority` number, which matter less, are evicted first.
    * `superseded`: what a later turn of a session has not taken up is evicted first, once that turn is released.

    `turns` names the sessions. The manager sets `owner` to the request whose table it releases. `clock` gives the time
    in ns.
    """

    def __init__(
        self,
        rule: Keep,
        turns: Mapping[int, TurnOf],
        *,
        seconds: float = 0.0,
        pinned: int = 0,
        clock: Callable[[], int] = lambda: 0,
    ) -> None:
        self._rule, self._turns = rule, turns
        self._ttl_ns, self._pinned = round(seconds * 1e9), pinned
        self.owner: Request | None = None
        self.clock = clock
        self._ranks: dict[int, Blocks] = {}
        self._rank_of: dict[int, int] = {}
        self._since: dict[int, int] = {}  # ttl: block of a session: when it was released, ns
        self._session_of: dict[int, str] = {}  # superseded: block: the session that released it last
        self._of_session: dict[str, Blocks] = {}

    def __len__(self) -> int:
        return len(self._rank_of)

    def push(self, blocks: Sequence[int]) -> None:
        """Add blocks of one table of `owner`, in table order."""
        owner = self.owner
        turn = None if owner is None else self._turns.get(owner.request_id)
        if self._rule is Keep.superseded and turn is not None:
            self._supersede(turn.session)
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            self._add(block, self._rank(index, owner, turn))
            if turn is None:
                continue
            if self._rule is Keep.ttl:
                self._since[block] = self.clock()
            elif self._rule is Keep.superseded:
                self._session_of[block] = turn.session
                self._of_session.setdefault(turn.session, OrderedDict())[block] = None

    def _rank(self, index: int, owner: Request | None, turn: TurnOf | None) -> int:
        if self._rule is Keep.pin:
            return int(index < self._pinned)
        if self._rule is Keep.priority:
            return 0 if owner is None else -owner.priority
        return int(self._rule is Keep.superseded or turn is not None)

    def _add(self, block: int, rank: int) -> None:
        self._rank_of[block] = rank
        self._ranks.setdefault(rank, OrderedDict())[block] = None

    def _supersede(self, session: str) -> None:
        """What earlier turns left in the queue was not taken up by the turn that is released now."""
        for block in self._of_session.pop(session, ()):
            del self._session_of[block]
            del self._ranks[self._rank_of[block]][block]
            self._add(block, 0)

    def remove(self, block: int) -> None:
        """Remove a block, because a sequence refers to it again or it is evicted."""
        del self._ranks[self._rank_of.pop(block)][block]
        self._since.pop(block, None)
        session = self._session_of.pop(block, None)
        if session is not None:
            del self._of_session[session][block]

    def _expire(self) -> None:
        """Blocks whose time is over fall to the rank that is evicted first, behind what is there."""
        now, kept = self.clock(), self._ranks.get(1, OrderedDict[int, None]())
        while kept and now - self._since[next(iter(kept))] >= self._ttl_ns:
            block, _ = kept.popitem(last=False)
            del self._since[block]
            self._add(block, 0)

    def pop(self, count: int) -> list[int]:
        """Remove and return the next blocks to evict.

        Raises OutOfBlocksError, and changes nothing, if there are fewer.
        """
        if count > len(self):
            raise OutOfBlocksError(f"{count} blocks to evict were asked for, {len(self)} are in the queue")
        if self._rule is Keep.ttl:
            self._expire()
        victims: list[int] = []
        for rank in sorted(self._ranks):
            queue = self._ranks[rank]
            while queue and len(victims) < count:
                victims.append(next(iter(queue)))
                self.remove(victims[-1])
        return victims

    def blocks(self) -> list[int]:
        """All blocks in order of eviction, as if no time passed."""
        return [block for rank in sorted(self._ranks) for block in self._ranks[rank]]


class CheckpointRule:
    """Which blocks of windows and states enter the prefix cache: the retention rule of vLLM 0.33.

    Kept are the blocks that a hit at a checkpoint needs: of a window's layers those before its end alone, of a state's
    the last one. A checkpoint is a position at which a later prompt may resume: one token before the prompt's end,
    where a request found that other layers know more of its prefix (a shared junction, so it is kept after the second
    request missed there), and, if asked, every so many tokens.

    `interval` in tokens: 0 keeps the checkpoints of a request alone, None one at every match unit.

    `unit` is the match unit in tokens, of which a positive interval must be a multiple: else CoreError. Source:
    `reachable_block_mask` of `SlidingWindowManager` and `MambaManager`, and `replay_boundaries`, in vllm/v1/core.
    """

    def __init__(self, interval: int | None, unit: int) -> None:
        if interval is not None and (interval < 0 or interval % unit):
            raise CoreError(f"retention interval {interval}: must be 0 or a multiple of {unit} tokens")
        self._interval, self._unit = interval, unit

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
