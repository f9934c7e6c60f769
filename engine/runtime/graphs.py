"""Decode steps as recorded CUDA graphs: one launch per step instead of thousands.

There is one recording per batch size, from the largest to the smallest, all in one memory pool. The inputs are in
buffers that never move. Before a replay all padded rows are reset, because an earlier, larger batch may have left
values there. Padded rows write to no slot and read no token. `EagerRecorder` runs the same code without a graph, so
that everything except CUDA's recording can be tested without a GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.runtime.attention.layer import NO_TIMER, PagedStep
from engine.runtime.batch import StepBatch
from engine.runtime.decoding.choose import ForwardOutput, forward_output
from engine.runtime.kv_pool import KVPool
from engine.runtime.models.load import LoadedModel
from paged_kernels import Scoring, Workspace, paged_attention_decode, torch_backend

if TYPE_CHECKING:
    from paged_kernels.triton.decode import PartsOfStep

ForwardPass = Callable[[], ForwardOutput]
_WARM_UPS = 2  # passes before a recording: they compile kernels and make all allocations


class StaticInputs:
    """Input buffers for the largest decode batch: `most` rows, block tables of at most `widest` blocks.

    A smaller batch uses the first rows, and the other rows are cleared.
    """

    def __init__(self, most: int, widest: int, device: torch.device) -> None:
        columns = -(-widest // 16) * 16  # a row stride that the compiler may rely on
        self.ids = torch.zeros(1, most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(1, most, dtype=torch.int64, device=device)
        self.slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(most, columns, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(most, dtype=torch.int32, device=device)

    def clear(self, start: int = 0) -> None:
        """Turn the rows from `start` on into padding, which writes to no slot and reads no token."""
        self.ids[:, start:] = 0
        self.positions[:, start:] = 0
        self.slots[start:] = -1
        self.tables[start:] = 0
        self.lengths[start:] = 0

    def write(self, batch: StepBatch) -> None:
        """Copy a decode batch into the first rows and clear the other rows."""
        rows, width = batch.layout.tables.shape
        self.clear(rows)
        self.ids[:, :rows] = batch.input_ids
        self.positions[:, :rows] = batch.position_ids
        self.slots[:rows] = batch.slots
        self.tables[:rows, :width] = torch.from_numpy(batch.layout.tables).to(self.tables)
        self.tables[:rows, width:] = 0
        self.lengths[:rows] = torch.from_numpy(batch.layout.lengths).to(self.lengths)


class StaticMetadata:
    """Attention metadata of the first `size` rows of the buffers; their content is read when the graph runs.

    It never uses a cascade, and the device balances the parts: a recording has fixed grids, but the rows that share
    blocks change from step to step. The first layer of each pass lists the parts, so every replay lists them anew. The
    memory of `workspace` must not move after the recording.
    """

    def __init__(self, inputs: StaticInputs, size: int, backend: str, workspace: Workspace) -> None:
        self._workspace = workspace
        self._tables, self._lengths = inputs.tables[:size], inputs.lengths[:size]
        self._backend = "torch" if backend == "native" else backend
        self._parts: PartsOfStep | None = None

    def begin_pass(self) -> None:
        """Forget what depends on the lengths, which may have changed since the last pass."""
        self._parts = None

    def store(self, cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write new rows `[size, kv_heads, dim]` to their slots; padded rows are not written."""
        if self._backend == "triton":
            from paged_kernels.triton import cache as triton_cache

            triton_cache.store(cache, rows, slots)
            return
        wanted = slots >= 0
        torch_backend.store(cache, rows[wanted], slots[wanted])

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring, out: torch.Tensor
    ) -> None:
        """Fill `out` `[size, heads, dv]`."""
        if self._backend == "triton":
            from paged_kernels.triton import decode as triton_decode
            from paged_kernels.triton.decode import PartsOfStep

            self._parts = self._parts or PartsOfStep()
            rows, scratch = (self._tables, self._lengths), self._workspace
            triton_decode.run_decode(
                q, keys, values, *rows, scoring, out, workspace=scratch, parts=self._parts
            )
            return
        options = {name: getattr(scoring, name) for name in ("scale", "window", "softcap", "sinks")}
        tensors, scratch = (q, keys, values, self._tables, self._lengths), self._workspace
        paged_attention_decode(*tensors, **options, out=out, workspace=scratch, backend=self._backend)


class GraphRecorder(Protocol):
    """Turns a forward pass into one that can be replayed."""

    def record(self, run: ForwardPass) -> ForwardPass:
        """A replay of `run`, which must read and write the same tensors every time."""


class EagerRecorder:
    """Records nothing: a replay runs the pass again."""

    def record(self, run: ForwardPass) -> ForwardPass:
        """The pass itself."""
        return run


class CudaRecorder:
    """Records CUDA graphs on a stream of their own. All graphs share one memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None

    def record(self, run: ForwardPass) -> ForwardPass:
        """Record one pass. Other threads may use the device meanwhile (error mode `thread_local`)."""
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

        def replay() -> ForwardOutput:
            graph.replay()
            return result

        return replay


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that are recorded: 1, 2, 4, 8, multiples of 16, and the largest batch `most`."""
    return [size for size in (1, 2, 4, 8) if size < most] + [*range(16, most, 16), most]


class DecodeGraphs:
    """Recorded decode passes of one model over one pool, for batches of at most `most` rows.

    All sizes are recorded at construction. Ask `fits` whether a batch can be replayed, then call `run`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        *,
        backend: str,
        most: int,
        longest: int,
        recorder: GraphRecorder,
    ) -> None:
        self.replays = 0
        self._loaded, self._pool, self._backend = loaded, pool, backend
        self._inputs = StaticInputs(most, -(-longest // pool.block_size), pool.device)
        self._sizes = graph_sizes(most)
        self._passes: dict[int, ForwardPass] = {}
        # its own: steps outside of the graphs may need more scratch memory, and then theirs moves
        self._workspace = Workspace()
        with torch.inference_mode():
            if backend == "triton":
                # The largest batch runs once, so that the scratch memory has its final address before the first
                # recording. The Triton kernels need scratch memory by rows alone. torch, which tests record, needs
                # more for longer contexts.
                self._inputs.clear()
                self._pass(self._sizes[-1])()
                self._workspace.freeze()
            for size in reversed(self._sizes):
                self._inputs.clear()
                self._passes[size] = recorder.record(self._pass(size))

    def _pass(self, size: int) -> ForwardPass:
        inputs = self._inputs
        metadata = StaticMetadata(inputs, size, self._backend, self._workspace)
        paged = PagedStep(metadata, inputs.slots[:size], self._pool, NO_TIMER)

        def run() -> ForwardOutput:
            metadata.begin_pass()
            return forward_output(
                self._loaded.logits(inputs.ids[:, :size], inputs.positions[:, :size], paged)
            )

        return run

    def fits(self, batch: StepBatch) -> bool:
        """Whether every row of a batch has one token and is sampled, and no more rows than were recorded."""
        rows, plain = len(batch.layout.lengths), not (batch.scored or batch.layout.prefills)
        return plain and 0 < rows <= self._sizes[-1] and len(batch.sampled) == rows

    def run(self, batch: StepBatch) -> ForwardOutput:
        """Replay the recording for a batch that fits. The returned tensors are valid until the next replay."""
        rows = len(batch.layout.lengths)
        size = next(size for size in self._sizes if size >= rows)
        self._inputs.write(batch)
        self.replays += 1
        return self._passes[size]().first(rows)


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """Which decode graphs to record: batches of at most `most` rows, sequences of at most `longest` tokens.

    Without a `recorder` they are CUDA graphs.
    """

    most: int
    longest: int
    recorder: GraphRecorder | None = None

    def record(self, loaded: LoadedModel, pool: KVPool, backend: str) -> DecodeGraphs:
        """Record all batch sizes for a model and its pool."""
        sizes, recorder = {"most": self.most, "longest": self.longest}, self.recorder or CudaRecorder()
        return DecodeGraphs(loaded, pool, backend=backend, **sizes, recorder=recorder)
