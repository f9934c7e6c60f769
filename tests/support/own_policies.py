"""Policies of a user's own, to be named `own_policies:Class` in an override."""

from collections.abc import Sequence

from engine.core.memory.eviction import EvictionPolicy, Released
from engine.core.request import Request
from engine.core.sequence import Group


class LongestFirst:
    """Preempt whoever has the most tokens."""

    def choose(self, candidates: Sequence[Group]) -> int:
        return max(range(len(candidates)), key=lambda index: candidates[index].tokens)


class ShortPromptsFirst:
    """Serve short prompts first."""

    def key(self, request: Request, rank: int) -> tuple[int, ...]:
        return (request.prompt_tokens, rank)


class MostRecentFirst(EvictionPolicy):
    """Evict what was released last."""

    def __init__(self) -> None:
        super().__init__()
        self._order: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        self._order.update(dict.fromkeys(blocks))

    def reuse(self, blocks: Sequence[int], queued: Sequence[int]) -> None:
        for block in queued:
            del self._order[block]

    def pop(self, count: int) -> list[int]:
        return [self._order.popitem()[0] for _ in range(count)]

    def blocks(self) -> list[int]:
        return list(self._order)[::-1]
