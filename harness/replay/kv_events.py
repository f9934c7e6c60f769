"""What a replay keeps of its prefix cache: changes as a file of KV events, lookups and sampled blocks as tables."""

from collections.abc import Sequence

import numpy as np

from engine.core.identity import BlockHash
from engine.core.memory.block_pool import (
    BlockOrigin,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    ResidencySampler,
)
from engine.core.memory.group_pages import GroupWaste
from engine.core.memory.grouped import GroupedManager
from engine.core.memory.paged import PagedManager
from harness.metrics.log import LOOKUP_COLUMNS, RESIDENCY_COLUMNS, WASTE_COLUMNS, Column
from harness.replay.arrivals import NS_PER_S
from traces.formats import kv_events as schema


class KvEventRecorder:
    """Collects the changes of one prefix cache as messages in vLLM's schema, one for each step that changed something.

    The time of a message is the start of its step, in virtual seconds: the scheduler enters blocks when it plans them.
    Requests that are identified by prefix keys have no tokens, so their events have none either.
    """

    def __init__(self, manager: PagedManager) -> None:
        self._pool = manager.pool
        self._block_size = manager.block_size
        self._messages: list[bytes] = []

    def note(self, now_ns: int) -> None:
        """A step that began at `now_ns` is committed."""
        batch = self.batch(now_ns / NS_PER_S)
        if batch is not None:
            self._messages.append(schema.encode(batch))

    def batch(self, now_s: float) -> schema.EventBatch | None:
        """The changes since the last call, with this time; None if there are none."""
        events = [self._event(event) for event in self._pool.drain_events()]
        return schema.EventBatch(now_s, events) if events else None

    def file(self) -> bytes:
        """All messages, one after the other."""
        return b"".join(self._messages)

    def _event(self, event: CacheEvent) -> schema.KvEvent:
        if isinstance(event, BlocksRemoved):
            return schema.BlockRemoved([_published(one) for one in event.hashes])
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
        )


def _extra_keys(origin: BlockOrigin, block: int, items: Sequence[tuple[str, int]]) -> list[object] | None:
    """What was hashed beside the tokens of the event's block `block`, in vLLM's order: adapter, items, salt."""
    adapter = [] if origin.adapter is None else [origin.adapter]
    salt = [origin.salt] if origin.salt and origin.parent is None and not block else []
    return [*adapter, *map(list, items), *salt] or None


def _published(block_hash: BlockHash) -> bytes:
    assert isinstance(block_hash, bytes)  # private blocks, whose hashes are numbers, are not reported
    return block_hash


def lookup_table(manager: PagedManager) -> dict[str, Column]:
    """The lookups that a manager has kept, in the columns of `LOOKUP_COLUMNS`."""
    rows = [(one.request_id, one.asked_blocks, one.hit_blocks) for one in manager.lookups or ()]
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), len(LOOKUP_COLUMNS)).T
    return dict(zip(LOOKUP_COLUMNS, columns, strict=True))


def residency_table(sampler: ResidencySampler) -> dict[str, Column]:
    """The residencies that have ended, in the columns of `RESIDENCY_COLUMNS`; the latest gap comes first."""
    rows = [
        (one.lifetime_s, one.idle_s, *(*one.reuse_gaps_s[::-1], *[np.nan] * 3)[:3]) for one in sampler.drain()
    ]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(RESIDENCY_COLUMNS)).T
    return dict(zip(RESIDENCY_COLUMNS, columns, strict=True))


def waste_table(manager: GroupedManager) -> dict[str, Column]:
    """Where the bytes of the pools went, int64 bytes of each step in the columns of `WASTE_COLUMNS`.

    Columns `group_0` and following have the bytes of the pages that each group had in use.
    """
    assert manager.waste is not None
    rows = np.array(manager.waste, dtype=np.int64).reshape(len(manager.waste), len(GroupWaste._fields))
    assert GroupWaste._fields == tuple(WASTE_COLUMNS)
    groups = len(manager.layout.groups)
    held = np.array(manager.held, dtype=np.int64).reshape(len(manager.held), groups)
    names = (f"group_{index}" for index in range(groups))
    return {**dict(zip(WASTE_COLUMNS, rows.T, strict=True)), **dict(zip(names, held.T, strict=True))}
