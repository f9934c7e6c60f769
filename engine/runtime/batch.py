"""From a step plan to tensors: all tokens of a step in one flat batch, and the KV slot of each token.

Rows of one token (decode, or the last token of a prompt) come first, sorted by length so that there is little padding.
Longer rows follow. Everything is built in NumPy and copied to the device once per step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.core.plan import IntArray, Row
from engine.runtime.attention.metadata import PrefillRow, StepLayout
from engine.runtime.decoding.generation import Generation, ScoredSpan

Generations = Mapping[int, Generation]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step. Tensors are int64 and on the device.

    `sampled` are the rows whose last logits are wanted. A row with drafts has one entry for every position that
    verifies or follows a draft.
    """

    input_ids: torch.Tensor  # [1, tokens]
    position_ids: torch.Tensor  # [1, tokens]
    slots: torch.Tensor  # [tokens], the KV slot of each token
    layout: StepLayout
    sampled: tuple[Row, ...]
    logit_index: (
        torch.Tensor
    )  # [sampled + scored], the flat position of the last token of each sampled row, and scored
    scored: tuple[ScoredSpan, ...] = ()  # parts of prompts whose log-probabilities are wanted
    groups: tuple[tuple[StepLayout, torch.Tensor], ...] = ()  # layout and slots in each group of layers


def build_batch(
    rows: Sequence[Row], generations: Generations, block_size: int, device: torch.device
) -> StepBatch:
    """Lay out the rows of a step, decode rows first. The block tables of the rows are copied."""
    singles, chunks = decode_first(rows)
    layout, slots = place_rows(singles, chunks, block_size)
    return step_batch(singles, chunks, generations, [(layout, slots)], device)


def decode_first(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows in the order of the batch: those of one token, the longest sequence first, and the longer ones."""
    singles = sorted((row for row in rows if row.query_len == 1), key=_context_len, reverse=True)
    return singles, [row for row in rows if row.query_len > 1]


def place_rows(singles: Sequence[Row], chunks: Sequence[Row], block_size: int) -> tuple[StepLayout, IntArray]:
    """Where the rows lie in their blocks, and the KV slot of each token of the batch, int64 `[tokens]`."""
    tables, lengths, slots = _decode_places(singles, block_size)
    parts, prefills = [slots], []
    start = len(singles)
    for row in chunks:
        prefill, slots = _prefill_place(row, start, block_size)
        prefills.append(prefill)
        parts.append(slots)
        start += row.query_len
    return StepLayout(tables, lengths, prefills), np.concatenate(parts)


def step_batch(
    singles: Sequence[Row],
    chunks: Sequence[Row],
    generations: Generations,
    places: Sequence[tuple[StepLayout, IntArray]],
    device: torch.device,
) -> StepBatch:
    """The inputs of a step whose rows are placed: once, or once in each group of layers."""
    positions = [np.array([row.context_len for row in singles], dtype=np.int64)]
    ids = [
        np.array(
            [generations[row.request_id].tokens[row.branch, row.context_len] for row in singles],
            dtype=np.int64,
        )
    ]
    for row in chunks:
        end = row.context_len + row.query_len
        positions.append(np.arange(row.context_len, end))
        ids.append(generations[row.request_id].tokens[row.branch, row.context_len : end])
    columns = np.stack([np.concatenate(ids), np.concatenate(positions), *(slots for _, slots in places)])
    sampled, positions_of_logits = _sampled_rows([*singles, *chunks])
    scored, positions_of_scores = _scored_spans([*singles, *chunks], generations)
    positions_of_logits += positions_of_scores
    tokens, where, *slots = torch.from_numpy(columns).to(device)
    return StepBatch(
        input_ids=tokens.unsqueeze(0),
        position_ids=where.unsqueeze(0),
        slots=slots[0],
        layout=places[0][0],
        sampled=tuple(sampled),
        logit_index=torch.tensor(positions_of_logits, dtype=torch.int64, device=device),
        scored=tuple(scored),
        groups=tuple((layout, own) for (layout, _), own in zip(places, slots, strict=True)),
    )


def _sampled_rows(ordered: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """The rows whose logits are wanted, and the positions of these logits in the flat batch."""
    sampled, positions, end = [], [], 0
    for row in ordered:
        end += row.query_len
        if row.drafts:
            for behind in range(row.drafts, -1, -1):
                sampled.append(row._replace(query_len=row.query_len - behind, drafts=0))
                positions.append(end - 1 - behind)
        elif row.samples:
            sampled.append(row)
            positions.append(end - 1)
    return sampled, positions


def _scored_spans(ordered: Sequence[Row], generations: Generations) -> tuple[list[ScoredSpan], list[int]]:
    """The prompt tokens that these rows score, and the positions in the flat batch of the logits that do it.

    The logits of a token score the next one. What was scored before a preemption is not scored again.
    """
    spans: list[ScoredSpan] = []
    positions: list[int] = []
    start = 0
    for row in ordered:
        generation = generations[row.request_id]
        if generation.rules.prompt_logprobs is not None:
            first = max(row.context_len, len(generation.prompt_logprobs))
            last = min(row.context_len + row.query_len, generation.request.prompt_tokens - 1)
            if first < last:
                spans.append(ScoredSpan(row.request_id, first + 1, last - first))
                positions += range(start + first - row.context_len, start + last - row.context_len)
        start += row.query_len
    return spans, positions


def _context_len(row: Row) -> int:
    return row.context_len


def _decode_places(rows: Sequence[Row], block_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Block tables, lengths and slots `[rows]` of one-token rows."""
    context = np.array([row.context_len for row in rows], dtype=np.int64)
    needed = context // block_size + 1
    tables = _padded_tables(rows, needed)
    blocks = tables[np.arange(len(rows)), needed - 1]
    return tables, context + 1, blocks * block_size + context % block_size


def _padded_tables(rows: Sequence[Row], needed: IntArray) -> IntArray:
    """Block tables `[rows, widest]`, padded with the null block 0."""
    width, counts = int(needed.max(initial=0)), needed.tolist()
    tables = np.zeros((len(rows), width), dtype=np.int64)
    if any(isinstance(row.table, range) for row in rows):
        for index, row in enumerate(rows):
            tables[index, : counts[index]] = _table_array(row.table, counts[index])
        return tables
    flat = chain.from_iterable(row.table[:count] for row, count in zip(rows, counts, strict=True))
    filled = np.arange(width) < needed[:, None]
    tables[filled] = np.fromiter(flat, dtype=np.int64, count=sum(counts))
    return tables


def _table_array(table: Sequence[int], count: int) -> IntArray:
    """The first `count` block ids. A contiguous reservation is a range and needs no loop."""
    head = table[:count]
    if isinstance(head, range):
        return np.arange(head.start, head.stop, dtype=np.int64)
    return np.fromiter(head, dtype=np.int64, count=count)


def _prefill_place(row: Row, start: int, block_size: int) -> tuple[PrefillRow, IntArray]:
    """The layout of a longer row, and its slots `[queries]`."""
    end = row.context_len + row.query_len
    table = _table_array(row.table, -(-end // block_size))
    position = np.arange(row.context_len, end)
    slots = table[position // block_size] * block_size + position % block_size
    return PrefillRow(table, start, row.query_len, end), slots
