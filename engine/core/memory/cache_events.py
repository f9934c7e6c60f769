"""Events of the prefix cache: which blocks entered it and which left it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.identity import BlockHash


class BlockOrigin(NamedTuple):
    """Where cached blocks come from: the block before them, their tokens (empty where unknown), adapter and tenant.

    `items` has, for each block, its multimodal items with the place where each begins; it is empty where none has one.
    """

    parent: BlockHash | None = None
    token_ids: Sequence[int] = ()
    adapter: str | None = None
    salt: str = ""
    items: Sequence[Sequence[tuple[str, int]]] = ()


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks entered the prefix cache under `hashes`, in prefix order. Private blocks are not reported."""

    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]
    origin: BlockOrigin = BlockOrigin()  # noqa: RUF009  # a tuple


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks left the prefix cache: they were evicted, or their hashes were removed."""

    hashes: tuple[BlockHash, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """The whole prefix cache was emptied."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
UNKNOWN_ORIGIN = BlockOrigin()
