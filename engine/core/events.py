"""What happened to the prefix cache, for whoever wants to follow it: the events and lookups of serving systems."""

from dataclasses import dataclass

from engine.core.names import BlockName


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became findable under `names`, in prefix order. Blocks private to a request are not announced."""

    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer findable: they were evicted, or their names were dropped."""

    names: tuple[BlockName, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Every name was dropped at once."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class LookupRecord:
    """One lookup: how many leading blocks were asked for, how many of them hit, and the first name that missed."""

    request_id: int
    asked_blocks: int
    hit_blocks: int
    missed: BlockName | None
