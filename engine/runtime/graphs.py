"""Decode steps as recorded graphs: one launch instead of thousands, with nothing left for Python to do in between.

One recording per batch size, largest first, all in one memory pool. Inputs lie in buffers that never move; before a
replay the step is written into them and the whole padded tail is set back, because what a larger earlier batch left
there is the classic mistake. Padded rows write to no slot and read no token.

How a pass is recorded is the recorder's business: a CUDA graph, or, to test everything else without a GPU, the same
pass run again on the same buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.runtime.batch import StepBatch
from engine.runtime.decoded import Decoded, decode
from engine.runtime.kv_pool import KVPool
from engine.runtime.model import LoadedModel
from engine.runtime.spans import NO_SPANS
from engine.runtime.static_plan import StaticInputs, StaticPlan
from engine.runtime.step import PagedStep
from paged_kernels import Workspace

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
