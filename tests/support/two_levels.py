"""A pool and tiers as an LRU of blocks on several levels, written down once more, for requests one after the other."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class Level:
    """A tier: keys in order of eviction."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.written = blocks, 0
        self.keys = OrderedDict[Hashable, None]()

    def touch(self, keys: Sequence[Hashable]) -> None:
        """The last key of a prefix is evicted first."""
        for key in reversed(keys):
            if key in self.keys:
                self.keys.move_to_end(key)

    def store(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """What is evicted for `keys`, in the order of a prefix."""
        wanted = list(dict.fromkeys(keys))[: self.blocks]
        kept = set(wanted)
        fresh = [key for key in wanted if key not in self.keys]
        self.written += len(fresh)
        lost: list[Hashable] = []
        others = (key for key in self.keys if key not in kept)
        while len(self.keys) + len(fresh) - len(lost) > self.blocks:
            lost.append(next(others))
        for key in lost:
            del self.keys[key]
        for key in reversed(wanted):
            self.keys[key] = None
            self.keys.move_to_end(key)
        return lost


class TwoLevels:
    """A pool of `blocks` blocks of `size` tokens, and `levels` below it, filled as requests end or blocks leave it."""

    def __init__(self, blocks: int, size: int, levels: Sequence[int], *, written: bool) -> None:
        self.blocks, self.size, self.written = blocks, size, written
        self.levels = [Level(count) for count in levels]
        self._pool = OrderedDict[int, Hashable]()  # block: key, in order of eviction
        self._of_key: dict[Hashable, list[int]] = {}
        self._given = 0

    def request(self, rid: int, keys: Sequence[Hashable], prompt: int, output: int) -> tuple[int, ...]:
        """Hits in the pool and in each level, in blocks; `keys` are those of the prompt that others may have."""
        asked = keys[: (prompt - 1) // self.size]
        hits: list[int] = []
        while len(hits) < len(asked) and self._of_key.get(asked[len(hits)]):
            hits.append(self._of_key[asked[len(hits)]][0])
        found = [0] * len(self.levels)
        for key in asked[len(hits) :]:
            level = next((index for index, each in enumerate(self.levels) if key in each.keys), None)
            if level is None:
                break
            found[level] += 1
        prefix = list(asked[: len(hits) + sum(found)])
        if len(hits) < (prompt - 1) // self.size:  # else nothing is looked for below
            for each in self.levels:
                each.touch(prefix)
        for block in hits:
            del self._pool[block]
        computed = prompt + output - 1
        whole, full = -(-computed // self.size), computed // self.size
        used = len(hits)
        for end in (len(prefix), -(-prompt // self.size), *range(-(-prompt // self.size) + 1, whole + 1)):
            self._evict(end - used, end)
            used = max(used, end)
        names = [*keys, *((rid, place) for place in range(len(keys), full))][:full]
        if self.written:
            self._store(names)
        blocks = [*hits, *range(self._given, self._given + full - len(hits))]
        self._given += full - len(hits)
        for block, key in zip(blocks[len(hits) :], names[len(hits) :], strict=True):
            self._of_key.setdefault(key, []).append(block)
        for block, key in zip(reversed(blocks), reversed(names), strict=True):
            self._pool[block] = key
        return (len(hits), *found)

    def _evict(self, count: int, in_use: int) -> None:
        lost = []
        while len(self._pool) + in_use > self.blocks and len(lost) < count:
            block, key = self._pool.popitem(last=False)
            self._of_key[key].remove(block)
            lost.append(key)
        if not self.written:
            self._store(lost[::-1])

    def _store(self, keys: Sequence[Hashable]) -> None:
        for level in self.levels:
            keys = level.store(keys)[::-1]
