"""Names of full blocks from bytes: each is the digest of everything up to the block's end.

A running digest of the whole prefix is a chain: two blocks have one name only if all that comes before them is equal
too. It costs one pass over the bytes, and naming block by block gives the same names as naming all at once.
"""

import hashlib
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, Self

import xxhash


class HashAlgorithm(StrEnum):
    """What names are made with."""

    SHA256 = "sha256"  # safe against crafted collisions
    XXH3_128 = "xxh3_128"  # twice as fast, for prompts that nobody crafts


class _Running(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...

    def copy(self) -> Self: ...


_STARTS: dict[HashAlgorithm, Callable[[bytes], _Running]] = {
    HashAlgorithm.SHA256: hashlib.sha256,
    HashAlgorithm.XXH3_128: xxhash.xxh3_128,
}


class PrefixHasher:
    """Names the blocks of `block_bytes` bytes that its data fills; `names` grows as they fill."""

    def __init__(
        self, root: bytes, block_bytes: int, algorithm: HashAlgorithm = HashAlgorithm.SHA256
    ) -> None:
        self.names: list[bytes] = []
        self._running = _STARTS[algorithm](root)
        self._block_bytes = block_bytes
        self._rest = b""

    def extend(self, data: bytes) -> None:
        """Append `data`; every block that it fills gets its name."""
        data, width = self._rest + data, self._block_bytes
        update, digest, append = self._running.update, self._running.digest, self.names.append
        whole = len(data) - len(data) % width
        for start in range(0, whole, width):
            update(data[start : start + width])
            append(digest())
        self._rest = data[whole:]

    def copy(self) -> "PrefixHasher":
        """A hasher that goes on from here on its own."""
        twin = object.__new__(PrefixHasher)
        twin.names, twin._running = list(self.names), self._running.copy()
        twin._block_bytes, twin._rest = self._block_bytes, self._rest
        return twin
