"""From a step plan to tensors: every row's tokens in one flat batch, and where its K and V lie.

Rows of one token (decode, or the last token of a prompt) come first and run together, sorted by length so that
padding is small; longer rows follow one by one. Everything is built in NumPy and crosses to the device once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.core.plan import IntArray, Row
from engine.runtime.kv_pool import KVPool
from engine.runtime.sequences import Generation
from paged_kernels.torch_decode import DecodePlan, plan_decode
from paged_kernels.torch_prefill import PrefillPlan, plan_prefill


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's inputs. Tensors are on the device, int64, `[tokens]` unless said otherwise."""

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    slots: torch.Tensor  # where each token's K and V go
    decode: DecodePlan | None  # tokens 0 : decode_rows
    decode_rows: int
    prefills: tuple[PrefillPlan, ...]
    sampled: tuple[Row, ...]  # rows whose last logits are wanted, in the order of `logit_index`
    logit_index: torch.Tensor  # [sampled rows], the flat position of each one's last token


def build_batch(rows: Sequence[Row], generations: dict[int, Generation], pool: KVPool) -> StepBatch:
    """Lay out a step's rows, decode rows first. The plan's tables are read now and not kept."""
    singles = sorted((row for row in rows if row.query_len == 1), key=_context_len, reverse=True)
    chunks = [row for row in rows if row.query_len > 1]
    parts = [_decode_part(singles, generations, pool)] if singles else []
    prefills = []
    start = len(singles)
    for row in chunks:
        part, prefill = _prefill_part(row, start, generations[row.request_id], pool)
        parts.append(part)
        prefills.append(prefill)
        start += row.query_len
    ids, positions, slots = np.concatenate([part.columns for part in parts], axis=1)
    last = np.cumsum([row.query_len for row in chain(singles, chunks)]) - 1
    wanted = [index for index, row in enumerate(chain(singles, chunks)) if row.samples]
    ordered = [*singles, *chunks]
    return StepBatch(
        input_ids=_tensor(ids, pool).unsqueeze(0),
        position_ids=_tensor(positions, pool).unsqueeze(0),
        slots=_tensor(slots, pool),
        decode=parts[0].plan if singles else None,
        decode_rows=len(singles),
        prefills=tuple(prefills),
        sampled=tuple(ordered[index] for index in wanted),
        logit_index=_tensor(last[wanted], pool),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Token ids, positions and slots `[3, tokens]` of some rows."""

    columns: IntArray
    plan: DecodePlan | None = None


def _context_len(row: Row) -> int:
    return row.context_len


def _decode_part(rows: Sequence[Row], generations: dict[int, Generation], pool: KVPool) -> _Part:
    size = pool.block_size
    context = np.array([row.context_len for row in rows], dtype=np.int64)
    needed = context // size + 1
    tables = _padded_tables(rows, needed)
    ids = [generations[row.request_id].tokens[row.branch, row.context_len] for row in rows]
    blocks = tables[np.arange(len(rows)), needed - 1]
    columns = np.stack([np.array(ids, dtype=np.int64), context, blocks * size + context % size])
    plan = plan_decode(tables, context + 1, size, token_bytes=pool.token_bytes, device=pool.device)
    return _Part(columns, plan)


def _padded_tables(rows: Sequence[Row], needed: IntArray) -> IntArray:
    """Block tables `[rows, widest]`, padded with the null block 0."""
    width = int(needed.max())
    tables = np.zeros((len(rows), width), dtype=np.int64)
    filled = np.arange(width) < needed[:, None]
    counts = needed.tolist()
    if any(isinstance(row.table, range) for row in rows):
        for index, row in enumerate(rows):
            tables[index, : counts[index]] = table_array(row.table, counts[index])
        return tables
    flat = chain.from_iterable(row.table[:count] for row, count in zip(rows, counts, strict=True))
    tables[filled] = np.fromiter(flat, dtype=np.int64, count=sum(counts))
    return tables


def table_array(table: Sequence[int], count: int) -> npt.NDArray[np.int64]:
    """The first `count` block ids; a contiguous reservation is a range and costs no loop."""
    head = table[:count]
    if isinstance(head, range):
        return np.arange(head.start, head.stop, dtype=np.int64)
    return np.fromiter(head, dtype=np.int64, count=count)


def _prefill_part(row: Row, start: int, generation: Generation, pool: KVPool) -> tuple[_Part, PrefillPlan]:
    size, end = pool.block_size, row.context_len + row.query_len
    table = table_array(row.table, -(-end // size))
    position = np.arange(row.context_len, end)
    ids = generation.tokens[row.branch, row.context_len : end]
    slots = table[position // size] * size + position % size
    plan = plan_prefill(table, start, row.query_len, end, size, device=pool.device)
    return _Part(np.stack([ids, position, slots])), plan


def _tensor(values: IntArray, pool: KVPool) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(pool.device)
