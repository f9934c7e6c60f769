"""The index of the prefix cache: which blocks hold which hash."""

from collections.abc import Iterator, Sequence

from engine.core.identity import BlockHash


class HashIndex:
    """A map from block hash to blocks. Several blocks may have the same hash; a lookup finds the oldest entry."""

    def __init__(self) -> None:
        self._first: dict[BlockHash, int] = {}
        self._others: dict[BlockHash, list[int]] = {}

    def add(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Add `blocks` under `hashes`, which must differ from each other."""
        found = list(map(self._first.setdefault, hashes, blocks))
        if found == blocks:
            return
        for block_hash, block, oldest in zip(hashes, blocks, found, strict=True):
            if oldest != block:
                self._others.setdefault(block_hash, []).append(block)

    def drop(self, hashes: Sequence[BlockHash], blocks: Sequence[int]) -> None:
        """Remove `blocks`. A hash is removed with its last block."""
        first = self._first
        if not self._others:
            for block_hash in hashes:
                del first[block_hash]
            return
        for block_hash, block in zip(hashes, blocks, strict=True):
            self._drop_one(block_hash, block)

    def _drop_one(self, block_hash: BlockHash, block: int) -> None:
        others = self._others.get(block_hash)
        if others is None:
            del self._first[block_hash]
            return
        if self._first[block_hash] == block:
            self._first[block_hash] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._others[block_hash]

    def first(self, block_hash: BlockHash) -> int | None:
        """The block that was added first under `block_hash`, or None."""
        return self._first.get(block_hash)

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is in the index. Changes nothing."""
        blocks: list[int] = []
        first = self._first
        for block_hash in hashes:
            block = first.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def copies(self) -> Iterator[tuple[BlockHash, list[int]]]:
        """The hashes that several blocks have, each with its blocks, the oldest first."""
        return ((block_hash, [self._first[block_hash], *more]) for block_hash, more in self._others.items())

    def clear(self) -> None:
        """Remove every hash."""
        self._first.clear()
        self._others.clear()

    def pairs(self) -> list[tuple[int, BlockHash]]:
        """Every (block, hash) pair, sorted by block."""
        more = [(block, block_hash) for block_hash, blocks in self._others.items() for block in blocks]
        return sorted(
            [*((block, block_hash) for block_hash, block in self._first.items()), *more],
            key=lambda pair: pair[0],
        )
