"""Decode steps as recorded CUDA graphs: one launch per step instead of thousands.

There is one recording per batch size, from the largest to the smallest, all in one memory pool. The inputs are in
buffers that never move. Before a replay all padded rows are reset, because an earlier, larger batch may have left
values there. Padded rows write to no slot and read no token. `EagerRecorder` runs the same code without a graph, so
that everything except CUDA's recording can be tested without a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.runtime.attention.layer import NO_SPANS, PagedStep
from engine.runtime.batch import StepBatch
from engine.runtime.decoding.choose import Decoded, decode
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.load import LoadedModel
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


Pass = Callable[[], Decoded]
_WARM_UPS = 2  # passes before a recording: they compile kernels and settle allocations


class Recorder(Protocol):
    """Turns a pass into something that can be replayed."""

    def record(self, run: Pass) -> Pass:
        """A replay of `run`, which reads and writes the same tensors every time."""
        ...


class EagerRecorder:
    """Replays by running again."""

    def record(self, run: Pass) -> Pass:
        """The pass itself."""
        return run


class CudaRecorder:
    """CUDA graphs that share one memory pool; recorded on a stream of their own."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: Pass) -> Pass:
        """Record one pass. Other threads may use the device meanwhile (`thread_local` errors)."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = run()
        self._pool = self._pool or graph.pool()

        def replay() -> Decoded:
            graph.replay()
            return result

        return replay


def graph_sizes(most: int) -> list[int]:
    """Batch sizes with a recording: 1, 2, 4, 8, then multiples of 16 up to the largest batch."""
    sizes = [size for size in (1, 2, 4, 8) if size < most] + list(range(16, most, 16))
    return [*sizes, most]


class DecodeGraphs:
    """Recorded decode passes of one model over one pool, for batches of at most `most` rows."""

    def __init__(
        self, loaded: LoadedModel, pool: KVPool, *, backend: str, most: int, longest: int, recorder: Recorder
    ) -> None:
        self.replays = 0
        self._loaded, self._pool, self._backend = loaded, pool, backend
        self._inputs = StaticInputs(most, -(-longest // pool.block_size), pool.device)
        self._sizes = graph_sizes(most)
        self._passes: dict[int, Pass] = {}
        self._workspace = (
            Workspace()
        )  # its own: steps that run beside the graphs may need more, and move theirs
        with torch.inference_mode():
            if backend == "triton":
                self._settle()
            for size in reversed(self._sizes):
                self._inputs.clear()
                self._passes[size] = recorder.record(self._pass(size))

    def _settle(self) -> None:
        """Run the largest batch once, so that scratch has its final place before anything records addresses.

        What the kernels take depends on rows alone; torch's path, which tests record, takes more as contexts grow.
        """
        self._inputs.clear()
        self._pass(self._sizes[-1])()
        self._workspace.freeze()

    def _pass(self, size: int) -> Pass:
        inputs = self._inputs
        plan = StaticPlan(inputs, size, self._backend, self._workspace)
        paged = PagedStep(plan, inputs.slots[:size], self._pool, NO_SPANS)

        def run() -> Decoded:
            output = self._loaded.model(
                input_ids=inputs.ids[:, :size],
                position_ids=inputs.positions[:, :size],
                use_cache=False,
                paged=paged,
            )
            return decode(output.logits[0])

        return run

    def fits(self, batch: StepBatch) -> bool:
        """Whether a batch is one token a row, all of them sampled, and no more rows than were recorded."""
        rows = len(batch.layout.lengths)
        return not batch.layout.prefills and 0 < rows <= self._sizes[-1] and len(batch.sampled) == rows

    def run(self, batch: StepBatch) -> Decoded:
        """What a batch that fits leads to; valid until the next replay."""
        rows = len(batch.layout.lengths)
        size = self._size(rows)
        self._inputs.write(batch)
        self.replays += 1
        return self._passes[size]().front(rows)

    def _size(self, rows: int) -> int:
        return next(size for size in self._sizes if size >= rows)


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Batches of at most `most` rows, sequences of at most `longest` tokens; without a recorder CUDA graphs."""

    most: int
    longest: int
    recorder: Recorder | None = None

    def record(self, loaded: LoadedModel, pool: KVPool, backend: str) -> DecodeGraphs:
        """Record all sizes now."""
        recorder = self.recorder or CudaRecorder()
        return DecodeGraphs(
            loaded, pool, backend=backend, most=self.most, longest=self.longest, recorder=recorder
        )
