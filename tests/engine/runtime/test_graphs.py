"""Decode from buffers that never move equals the eager step; on a GPU the same holds for CUDA graphs."""

import numpy as np
import pytest
import torch

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler

TOKENS = 10


def serve(loaded, prompts, graphs=None, backend="auto", block_size=4):
    """Tokens of requests of different lengths, which leave the batch one by one."""
    from engine.runtime.runner import Runner

    scheduler = Scheduler(PagedManager(120, block_size), SchedulerLimits(64, 16, max_model_len=64))
    runner = Runner(
        loaded, num_blocks=120, block_size=block_size, audit="full", graphs=graphs, backend=backend
    )
    for number, prompt in enumerate(prompts):
        request = Request(number, len(prompt), 3 + number, 1, Decoding.greedy)
        scheduler.submit(request)
        runner.add(request, np.array(prompt))
    while scheduler.has_work:
        plan = scheduler.schedule()
        result, _ = runner.execute(plan)
        scheduler.commit(plan, result)
    return [runner.outputs(number)[0] for number in range(len(prompts))], runner


def options(**values):
    from engine.runtime.graphs import EagerRecorder, GraphOptions

    return GraphOptions(**{"most": 5, "longest": 64, "recorder": EagerRecorder(), **values})


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_replayed_decode_equals_eager_steps(family, model_of, prompts):
    found, runner = serve(model_of(family), prompts[:5], options())
    assert runner.graphs.replays > 4
    assert found == serve(model_of(family), prompts[:5])[0]


def test_batches_beyond_the_largest_recording_run_eagerly(model_of, prompts):
    found, runner = serve(model_of(), prompts, options(most=2))
    assert 0 < runner.graphs.replays < 9
    assert found == serve(model_of(), prompts)[0]


def test_every_size_up_to_sixteen_is_near():
    from engine.runtime.graphs import graph_sizes

    assert graph_sizes(1) == [1]
    assert graph_sizes(5) == [1, 2, 4, 5]
    assert graph_sizes(40) == [1, 2, 4, 8, 16, 32, 40]


def test_what_a_larger_batch_left_behind_is_cleared(model_of, prompts):
    from engine.runtime.graphs import StaticInputs

    inputs = StaticInputs(4, 3, torch.device("cpu"))
    for tensor in (inputs.ids, inputs.positions, inputs.slots, inputs.tables, inputs.lengths):
        tensor.fill_(7)
    inputs.clear(1)
    assert inputs.slots.tolist() == [7, -1, -1, -1]
    assert inputs.lengths.tolist() == [7, 0, 0, 0]
    assert (
        int(inputs.tables[1:].sum())
        == int(inputs.ids[:, 1:].sum())
        == int(inputs.positions[:, 1:].sum())
        == 0
    )


def test_a_tail_that_is_not_cleared_is_caught(model_of, prompts, monkeypatch):
    from engine.runtime.errors import RunError
    from engine.runtime.graphs import StaticInputs

    clear = StaticInputs.clear
    monkeypatch.setattr(StaticInputs, "clear", lambda self, start=0: None if start else clear(self))
    with pytest.raises(RunError):
        serve(model_of(), prompts[:5], options())


def test_the_best_token_is_chosen_within_the_recording(model_of, prompts, monkeypatch):
    """Nothing is left to choose when a greedy replay has run: the chooser is given tokens."""
    from engine.runtime import graphs
    from engine.runtime.decoding.choose import forward_output as real

    recorded = []
    monkeypatch.setattr(graphs, "forward_output", lambda logits: recorded.append(len(logits)) or real(logits))
    _, runner = serve(model_of(), prompts[:5], options())
    assert len(recorded) == runner.graphs.replays > 0
    assert set(recorded) <= set(graphs.graph_sizes(5))  # the padding too


def test_draws_after_a_replay_are_those_of_eager_steps(model_of, prompts):
    from engine.runtime.engine import Engine
    from engine.runtime.options import EngineOptions
    from engine.runtime.params import SamplingParams

    said = []
    for recorded in (False, True):
        engine = Engine(model_of(), EngineOptions(pool_tokens=1024, block_size=8, audit="full"))
        if recorded:
            engine.runner.graphs = options(most=16).record(engine.loaded, engine.runner.pool, "torch")
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=9, temperature=0.9 * (number % 2), top_k=40 * (number % 3), seed=3
            )
            engine.add_request(str(number), prompt, params)
        said.append({out.request_id: out.outputs[0].token_ids for out in engine.run() if out.finished})
    assert engine.runner.graphs.replays > 4
    assert said[0] == said[1]


def test_nan_in_a_replay_is_told_by_request(model_of, prompts, monkeypatch):
    from engine.runtime import graphs
    from engine.runtime.decoding.choose import forward_output as real
    from engine.runtime.errors import NaNLogitsError

    def spoil(logits):
        logits = logits.clone()
        logits[-1, 5] = float("nan")
        return real(logits)

    monkeypatch.setattr(graphs, "forward_output", spoil)
    with pytest.raises(NaNLogitsError, match="branch 0: NaN in the logits after position"):
        serve(model_of(), prompts[:1], options(most=1))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 32])
def test_cuda_graphs_equal_eager_steps_on_a_gpu(block_size, prompts):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from tiny_models import SHAPE

    from engine.runtime.graphs import GraphOptions
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    loaded = load_model(ModelSpec(family="llama", kv_heads=2, **SHAPE), device="cuda")
    found, runner = serve(loaded, prompts[:5], GraphOptions(5, 64), "triton", block_size)
    assert runner.graphs.replays > 4
    assert found == serve(loaded, prompts[:5], None, "triton", block_size)[0]
