"""Observers that keep what a replay does to its memory, beside the steps: each fills one field of the run log.

`KvEvents`, `Lookups` and `Residencies` are of a prefix cache, `Wastes` of layers in groups.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from engine.core.identity import BlockHash
from engine.core.memory.block_pool import (
    BlockOrigin,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    ResidencySampler,
)
from engine.core.memory.group_pages import GroupAccount, GroupWaste
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.memory.tiers import Tiers
from engine.core.plan import StepPlan
from harness.metrics.log import LOOKUP_COLUMNS, RESIDENCY_COLUMNS, WASTE_COLUMNS, Column
from harness.replay.arrivals import NS_PER_S
from harness.replay.loop import Observer, StepRecord
from traces.formats import kv_events as schema


class MemoryObserver(Observer, ABC):
    """An observer whose `value()`, once the replay has ended, is the field `field` of the run log."""

    field: str

    @abstractmethod
    def value(self) -> Any:
        """What it has kept."""

    def summed(self) -> "MemoryObserver | None":
        """The observer in its place where no rows are kept; None where nothing but rows tells of it."""
        return None


class KvEvents(MemoryObserver):
    """Collects the changes of one prefix cache as messages in vLLM's schema, one for each step that changed something.

    The time of a message is the start of its step, in virtual seconds: the scheduler enters blocks when it plans them.
    Requests that are identified by prefix keys have no tokens, so their events have none either.
    """

    field = "kv_events"

    def __init__(self, manager: PagedManager) -> None:
        self._pool = manager.pool
        self._block_size = manager.block_size
        self._messages: list[bytes] = []

    def committed(self, step: StepRecord) -> None:
        """Take the changes of the step."""
        batch = self.batch(step.start_ns / NS_PER_S)
        if batch is not None:
            self._messages.append(schema.encode(batch))

    def batch(self, now_s: float) -> schema.EventBatch | None:
        """The changes since the last call, with this time; None if there are none."""
        events = [self._event(event) for event in self._pool.drain_events()]
        return schema.EventBatch(now_s, events) if events else None

    def value(self) -> bytes:
        """All messages, one after the other."""
        return b"".join(self._messages)

    def _event(self, event: CacheEvent) -> schema.KvEvent:
        if isinstance(event, BlocksRemoved):
            return schema.BlockRemoved([_published(one) for one in event.hashes], group_idx=0)
        if not isinstance(event, BlocksStored):
            return schema.AllBlocksCleared()
        origin = event.origin
        items = origin.items or [()] * len(event.hashes)
        extra = [_extra_keys(origin, block, own) for block, own in enumerate(items)]
        return schema.BlockStored(
            [_published(one) for one in event.hashes],
            None if origin.parent is None else _published(origin.parent),
            origin.token_ids,
            self._block_size,
            origin.adapter,
            extra if any(extra) else None,
            group_idx=0,
        )


def _extra_keys(origin: BlockOrigin, block: int, items: Sequence[tuple[str, int]]) -> list[object] | None:
    """What was hashed beside the tokens of the event's block `block`, in vLLM's order: adapter, items, salt."""
    adapter = [] if origin.adapter is None else [origin.adapter]
    salt = [origin.salt] if origin.salt and origin.parent is None and not block else []
    return [*adapter, *map(list, items), *salt] or None


def _published(block_hash: BlockHash) -> schema.EventHash:
    """A hash as vLLM publishes it (`maybe_convert_block_hash`): its last 64 bits, or, where the environment says so,
    all of it.
    """
    assert isinstance(block_hash, bytes)  # private blocks, whose hashes are numbers, are not reported
    if os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") == "0":
        return block_hash
    return int.from_bytes(block_hash[-8:], "big")


class Lookups(MemoryObserver):
    """The lookups of a prefix cache, in the columns of `LOOKUP_COLUMNS`."""

    field = "lookups"

    def __init__(self, manager: PagedManager) -> None:
        self._manager = manager

    def value(self) -> dict[str, Column]:
        """The table."""
        rows = [(one.request_id, one.asked_blocks, one.hit_blocks) for one in self._manager.lookups or ()]
        return _table(rows, LOOKUP_COLUMNS, np.int64)


class Residencies(MemoryObserver):
    """The residencies that have ended, in the columns of `RESIDENCY_COLUMNS`; the latest gap comes first."""

    field = "residency"

    def __init__(self, sampler: ResidencySampler) -> None:
        self._sampler = sampler

    def value(self) -> dict[str, Column]:
        """The table."""
        rows = [
            (one.lifetime_s, one.idle_s, *(*one.reuse_gaps_s[::-1], *[np.nan] * 3)[:3])
            for one in self._sampler.drain()
        ]
        return _table(rows, RESIDENCY_COLUMNS, np.float64)


class TierUse(MemoryObserver):
    """What tiers below the pool did: metrics by their names."""

    field = "tiers"

    def __init__(self, tiers: Tiers, block_size: int, kv_bytes_per_token: int) -> None:
        self.tiers, self._size, self._bytes = tiers, block_size, block_size * kv_bytes_per_token

    def value(self) -> dict[str, float]:
        """The metrics."""
        counts, unit = self.tiers.counts, self.tiers.chunk * self._bytes
        found = {f"tier_{name}": getattr(counts, name) for name in ("load_s", "saved_s", "write_s")}
        for tier, hits in zip(self.tiers.tiers, counts.hit_blocks, strict=True):
            amounts = {"hit_tokens": hits * self._size, "read_bytes": tier.read * unit}
            amounts["written_bytes"] = tier.written * unit
            found |= {f"{tier.spec.name}_{what}": amount for what, amount in amounts.items()}
        return found

    def summed(self) -> "TierUse":
        """Counts take no memory."""
        return self


class Wastes(MemoryObserver):
    """Where the bytes of the pools go, int64 bytes of each step in the columns of `WASTE_COLUMNS`.

    Columns `group_0` and following have the bytes of the pages that each group has in use.
    """

    field = "waste"

    def __init__(self, account: GroupAccount) -> None:
        self._account = account
        self._rows: list[tuple[int, ...]] = []

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        """Note the bytes of the step, before the commit moves its sequences on."""
        self._rows.append((*self._account.waste(plan.usage), *self._account.held_bytes()))

    def value(self) -> dict[str, Column]:
        """The table."""
        assert GroupWaste._fields == tuple(WASTE_COLUMNS)
        groups = (f"group_{index}" for index in range(len(self._account.held_bytes())))
        return _table(self._rows, [*WASTE_COLUMNS, *groups], np.int64)

    def summed(self) -> "WasteTimes":
        """Sums over time take no memory."""
        return WasteTimes(self._account)


class WasteTimes(MemoryObserver):
    """The same in constant memory: bytes times seconds of all steps together, by the columns of `WASTE_COLUMNS`."""

    field = "waste"

    def __init__(self, account: GroupAccount) -> None:
        self._account = account
        self._step = self._times = np.zeros(len(WASTE_COLUMNS))

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        """Note the bytes of the step, before the commit moves its sequences on."""
        self._step = np.array(self._account.waste(plan.usage), np.float64)

    def committed(self, step: StepRecord) -> None:
        """Weigh them with the time that the step took."""
        self._times = self._times + self._step * (step.took_ns / NS_PER_S)

    def value(self) -> dict[str, float]:
        """The sums."""
        return dict(zip(WASTE_COLUMNS, self._times.tolist(), strict=True))


def memory_observers(manager: KVCacheManager, kv_bytes_per_token: int) -> list[MemoryObserver]:
    """The observers of what `manager` was asked to keep."""
    if not isinstance(manager, PagedManager):
        return []
    if manager.groups is not None:
        return [Wastes(manager.groups.account)]
    kept: list[MemoryObserver] = []
    if manager.tiers is not None:
        kept.append(TierUse(manager.tiers, manager.block_size, kv_bytes_per_token))
    if manager.pool.events is not None:
        kept.append(KvEvents(manager))
    if manager.lookups is not None:
        kept.append(Lookups(manager))
    if manager.residency is not None:
        kept.append(Residencies(manager.residency))
    return kept


def _table(rows: Sequence[tuple[Any, ...]], names: Collection[str], dtype: type) -> dict[str, Column]:
    columns: Column = np.array(rows, dtype=dtype).reshape(len(rows), len(names)).T
    return dict(zip(names, columns, strict=True))
