"""One step of a model whose layers are in groups: the rows in each group's pages, and an audit that knows windows.

A row lies in every group at the same tokens and in other pages. What a window has left is no longer in the group's
table, so the row begins there at its first page: attention depends on distances alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine.core.memory.group_tables import NO_PAGE, GroupTables
from engine.core.options import GroupKind
from engine.core.plan import Row
from engine.runtime.attention.latent import LatentStep
from engine.runtime.attention.layer import AttentionTimer, LayerAttention, PagedStep
from engine.runtime.attention.select import attention_metadata
from engine.runtime.attention.state import StateStep, first_written
from engine.runtime.batch import Generations, StepBatch, decode_first, place_rows, step_batch
from engine.runtime.errors import AuditError
from engine.runtime.group_pool import GroupedPool
from engine.runtime.group_views import StateView
from paged_kernels import Scoring, Workspace


def build_group_batch(rows: Sequence[Row], generations: Generations, pool: GroupedPool) -> StepBatch:
    """Lay out the rows of a step in the pages of every group, decode rows first."""
    singles, chunks = decode_first(rows)
    places = []
    for index, view in enumerate(pool.views):
        ones, others = ([_in_group(row, index, pool) for row in part] for part in (singles, chunks))
        places.append(place_rows(ones, others, view.block_size))
    return step_batch(singles, chunks, generations, places, pool.device)


def _in_group(row: Row, index: int, pool: GroupedPool) -> Row:
    """The row in the tensors of one group: without the pages that its window has left, and the tokens in them."""
    tables, view = _tables(row), pool.views[index]
    held = tables.held[index]
    table = view.local(tables.groups[index][held:])
    return row._replace(table=table, context_len=row.context_len - held * view.block_size)


def _tables(row: Row) -> GroupTables:
    assert isinstance(row.table, GroupTables)  # of a `GroupedManager`
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
                self._steps[index] = LatentStep(layout, slots, view, timer)
            else:
                metadata = attention_metadata(layout, view, workspace, backend)
                self._steps[index] = PagedStep(metadata, slots, view, timer)

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        rest: Mapping[str, Any],
    ) -> torch.Tensor:
        """Attention of one layer, in the pages of its group; see `PagedStep.attend`."""
        step: LayerAttention = self._steps[self._group_of[module.layer_idx]]
        return step.attend(module, query, key, value, scoring, rest)


def note_writes(batch: StepBatch, pool: GroupedPool) -> None:
    """Note which pages each group writes in this step. Needed in every step of an audited run."""
    for index, (_, slots) in enumerate(batch.groups):
        pool.note_writes(index, slots.cpu().numpy())


def check_step(step: int, rows: Sequence[Row], batch: StepBatch, pool: GroupedPool) -> None:
    """Raise AuditError for a row that would read what it must not, or write where something is. Call it before the
    forward pass and after `note_writes`.

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
            if NO_PAGE in seen:
                place = sees // view.block_size + seen.index(NO_PAGE)
                raise AuditError(f"{what}: group {index} has no page for block {place}, which the row sees")
            pool.check_reads(index, seen, what)
            if isinstance(view, StateView) and row.context_len:
                pool.check_state(index, seen[0], row.context_len, what)
    for index, (layout, slots) in enumerate(batch.groups):
        view = pool.views[index]
        if isinstance(view, StateView):
            pool.check_void_states(index, first_written(layout, view.block_size), f"step {step}")
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
