"""From a step plan to tensors: all tokens of a step in one flat batch, and the KV slot of each token.

Rows of one token (decode, or the last token of a prompt) come first, sorted by length so that there is little padding.
Longer rows follow. Everything is built in NumPy and copied to the device once per step.

Where layers are in groups, a row lies in every group at the same tokens and in other pages. What a window has left is
no longer in the group's table, so the row begins there at its first page: attention depends on distances alone. The
audit of such a step knows the windows (`check_step`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from engine.core.memory.block_pool import NULL_BLOCK
from engine.core.memory.block_tables import GroupTables
from engine.core.options import GroupKind
from engine.core.plan import IntArray, Row
from engine.runtime.attention.layer import AttentionTimer, LatentStep, LayerAttention, LayerCall, PagedStep
from engine.runtime.attention.metadata import PrefillRow, StepLayout, attention_metadata, slots_of
from engine.runtime.attention.state import StateStep, first_written
from engine.runtime.decoding.generation import Generation, ScoredSpan
from engine.runtime.errors import AuditError
from engine.runtime.group_pool import GroupedPool, PageView, StateView
from paged_kernels import Workspace

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
    # [sampled + scored], flat positions: the last token of each sampled row, and scored
    logit_index: torch.Tensor
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
    singles = sorted(
        (row for row in rows if row.query_len == 1), key=lambda row: row.context_len, reverse=True
    )
    return singles, [row for row in rows if row.query_len > 1]


def place_rows(singles: Sequence[Row], chunks: Sequence[Row], block_size: int) -> tuple[StepLayout, IntArray]:
    """Where the rows lie in their blocks, and the KV slot of each token of the batch, int64 `[tokens]`."""
    context = np.array([row.context_len for row in singles], dtype=np.int64)
    needed, lengths = context // block_size + 1, context + 1
    tables = _padded_tables(singles, needed)
    blocks = tables[np.arange(len(singles)), needed - 1]
    parts, prefills = [blocks * block_size + context % block_size], []
    start = len(singles)
    for row in chunks:
        end = row.context_len + row.query_len
        table = _table_array(row.table, -(-end // block_size))
        prefills.append(PrefillRow(table, start, row.query_len, end))
        parts.append(slots_of(table, row.context_len, end, block_size))
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
    last = [generations[row.request_id].tokens[row.branch, row.context_len] for row in singles]
    ids = [np.array(last, dtype=np.int64)]
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


def build_group_batch(rows: Sequence[Row], generations: Generations, pool: GroupedPool) -> StepBatch:
    """Lay out the rows of a step in the pages of every group, decode rows first."""
    singles, chunks = decode_first(rows)
    places = []
    for view in pool.views:
        ones, others = ([in_group(row, view) for row in part] for part in (singles, chunks))
        places.append(place_rows(ones, others, view.block_size))
    return step_batch(singles, chunks, generations, places, pool.device)


def in_group(row: Row, view: PageView) -> Row:
    """The row in the tensors of one group: without the pages that its window has left, and the tokens in them."""
    tables = _tables(row)
    held = tables.held[view.index]
    table = view.local(tables.groups[view.index][held:])
    return row._replace(table=table, context_len=row.context_len - held * view.block_size)


def _tables(row: Row) -> GroupTables:
    assert isinstance(row.table, GroupTables)  # of a manager of groups
    return row.table


class GroupedStep:
    """The tensors of all groups and the places of a step in them: stands for the `PagedStep` of each group.

    `states` has the step of each layer that keeps a state; see `StateStep` for `singly`.
    """

    def __init__(
        self,
        batch: StepBatch,
        pool: GroupedPool,
        workspace: Workspace,
        backend: str,
        timer: AttentionTimer,
        *,
        singly: bool = False,
    ) -> None:
        self._group_of = pool.group_of
        self._steps: dict[int, LayerAttention] = {}
        self.states: dict[int, StateStep] = {}
        for index, (view, (layout, slots)) in enumerate(zip(pool.views, batch.groups, strict=True)):
            if isinstance(view, StateView):
                step = StateStep(layout, view, batch.position_ids[0].cpu().numpy(), singly=singly)
                self.states |= dict.fromkeys(view.layers, step)
            elif view.group.kind is GroupKind.latent:
                self._steps[index] = LatentStep(layout, slots, view, timer, workspace, backend)
            else:
                metadata = attention_metadata(layout, view, workspace, backend)
                self._steps[index] = PagedStep(metadata, slots, view, timer)

    def attend(self, call: LayerCall) -> torch.Tensor:
        """Attention of one layer, in the pages of its group; see `PagedStep.attend`."""
        return self._steps[self._group_of[call.module.layer_idx]].attend(call)


def check_step(step: int, rows: Sequence[Row], batch: StepBatch, pool: GroupedPool) -> None:
    """Raise AuditError for a row that would read what it must not, or write where something is. Call it before the
    forward pass and after `GroupedPool.note_writes`.

    In each group the table must have every page from the first token that the row sees, by the window of the layers
    themselves, and each of these pages must have been written by that group. A row that goes on must find the state
    after the token before it.
    """
    for row in rows:
        for index, view in enumerate(pool.views):
            what = f"step {step}, request {row.request_id}"
            held, table = _tables(row).held[index], _tables(row).groups[index]
            sees = 0 if view.window == 0 else max(0, row.context_len - view.window + 1)
            if held * view.block_size > sees:
                raise AuditError(
                    f"{what}: token {row.context_len} sees token {sees} in group {index}, whose pages begin at token "
                    f"{held * view.block_size}"
                )
            end = row.context_len + row.query_len
            seen = table[sees // view.block_size : -(-end // view.block_size)]
            if isinstance(view, StateView):  # states of a row's other blocks are kept where they have a page
                seen = [seen[0], *filter(None, seen[1:-1]), seen[-1]] if row.context_len else seen[-1:]
            if NULL_BLOCK in seen:
                place = sees // view.block_size + seen.index(NULL_BLOCK)
                raise AuditError(f"{what}: group {index} has no page for block {place}, which the row sees")
            pool.check_reads(index, seen, what)
            if isinstance(view, StateView) and row.context_len:
                pool.check_state(index, seen[0], row.context_len, what)
    for index, (layout, slots) in enumerate(batch.groups):
        view = pool.views[index]
        if isinstance(view, StateView):
            pool.check_void_states(index, first_written(layout, view.group), f"step {step}")
        else:
            pool.check_void(index, slots, f"step {step}")


def check_units(step: int, expected: Sequence[int], pool: GroupedPool) -> None:
    """Raise AuditError unless the tensors of each group hold as many tokens, or states, as the core's account of it
    says.
    """
    for index, (found, counted) in enumerate(zip(pool.written_units(), expected, strict=True)):
        if found != counted:
            kind = pool.views[index].group.kind
            unit = "states" if kind is GroupKind.state else "tokens"
            raise AuditError(
                f"step {step}: group {index} ({kind}) has {found} {unit} in its tensors, the scheduler counts {counted}"
            )
