"""A decode step in buffers that never move, and attention that finds everything in them."""

import torch

from engine.runtime.batch import StepBatch
from paged_kernels import Scoring, Workspace, paged_attention_decode
from paged_kernels.torch import cache as torch_cache


class StaticInputs:
    """Inputs of the largest decode batch; smaller ones use the front and clear the rest."""

    def __init__(self, most: int, widest: int, device: torch.device) -> None:
        columns = -(-widest // 16) * 16  # a row stride that the compiler may rely on
        self.ids = torch.zeros(1, most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, most, dtype=torch.int64, device=device)
        self.slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(most, columns, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)

    def clear(self, start: int = 0) -> None:
        """Make rows from `start` on padding: they write to no slot and read no token."""
        self.ids[:, start:] = 0
        self.positions[:, start:] = 0
        self.slots[start:] = -1
        self.tables[start:] = 0
        self.lengths[start:] = 0

    def write(self, batch: StepBatch) -> None:
        """Put a decode batch in front and clear everything behind it."""
        rows, width = batch.layout.tables.shape
        self.clear(rows)
        self.ids[:, :rows] = batch.input_ids
        self.positions[:, :rows] = batch.position_ids
        self.slots[:rows] = batch.slots
        self.tables[:rows, :width] = torch.from_numpy(batch.layout.tables).to(self.tables)
        self.tables[:rows, width:] = 0
        self.lengths[:rows] = torch.from_numpy(batch.layout.lengths).to(self.lengths)


class StaticPlan:
    """Attention of the first `size` rows of the buffers, as they are when it runs.

    Always flat, with parts balanced on the device: a recording keeps its grids, and which rows share blocks changes
    from step to step. `workspace` must not move once it is recorded.
    """

    def __init__(self, inputs: StaticInputs, size: int, backend: str, workspace: Workspace) -> None:
        self._workspace = workspace
        self._tables, self._lengths = inputs.tables[:size], inputs.lengths[:size]
        self._backend = "torch" if backend == "native" else backend

    def store(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write new rows `[size, kv_heads, dim]` to their slots; padded ones to none."""
        if self._backend == "triton":
            from paged_kernels.triton import cache as triton_cache

            triton_cache.store(cache, rows, slots)
            return
        wanted = slots >= 0
        torch_cache.store(cache, rows[wanted], slots[wanted])

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Fill `out` `[size, heads, dv]`."""
        if self._backend == "triton":
            from paged_kernels.triton import decode as triton_decode

            rows = (self._tables, self._lengths)
            triton_decode.run_decode(q, keys, values, *rows, scoring, out, workspace=self._workspace)
            return
        paged_attention_decode(
            q,
            keys,
            values,
            self._tables,
            self._lengths,
            scale=scoring.scale,
            window=scoring.window,
            softcap=scoring.softcap,
            sinks=scoring.sinks,
            out=out,
            workspace=self._workspace,
            backend=self._backend,
        )
