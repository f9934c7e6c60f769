"""The tensors as an independent witness: they agree with the counters at every step, and planted bugs are caught."""

from dataclasses import replace

import numpy as np
import pytest
from tiers import cases

from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import Row, SlotUsage, StepPlan
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler


def make_llm(loaded, **options):
    from engine.runtime.llm import LLM

    limits = SchedulerLimits(options.pop("budget", 64), 32, max_model_len=64)
    return LLM(loaded, limits=limits, audit=options.pop("audit", "full"), **options)


def drive(loaded, prompts, change, *, width=1, decoding=Decoding.greedy, blocks=60, audit="full"):
    """Serve the prompts with block size 4, every plan passed through `change` (the planted bug) on its way."""
    from engine.runtime.runner import Runner

    scheduler = Scheduler(PagedManager(blocks, 4), SchedulerLimits(64, 32, max_model_len=64))
    runner = Runner(loaded, num_blocks=blocks, block_size=4, audit=audit)
    for number, prompt in enumerate(prompts):
        request = Request(number, len(prompt), 10, width, decoding)
        scheduler.submit(request)
        runner.add(request, np.array(prompt))
    while scheduler.has_work:
        plan = scheduler.schedule()
        result, _ = runner.execute(change(plan))
        scheduler.commit(plan, result)
    return runner


@pytest.mark.parametrize("decoding", [{"temperature": 0}, {"n": 3}, {"beam_width": 3}])
@cases("cache", [{"block_size": 4}, {"block_size": 16}, {"cache": "contiguous_max"}], day=1)
def test_written_slots_equal_the_books_at_every_step(model_of, prompts, decoding, cache):
    from engine.runtime.params import SamplingParams

    llm = make_llm(model_of(), pool_tokens=400, budget=24, **cache)
    llm.generate(prompts, SamplingParams(max_tokens=10, **decoding))
    assert llm.runner.audits > 10


def test_nothing_is_left_behind_without_a_cache(model_of, prompts):
    from engine.runtime.params import SamplingParams

    llm = make_llm(model_of(), prefix_caching=False, block_size=4)
    llm.generate(prompts, SamplingParams(max_tokens=10))
    llm.runner.pool.poison(llm.scheduler.manager.drain_frees())
    assert llm.runner.written_slots() == 0


def test_the_null_block_is_never_written(model_of, prompts):
    from engine.runtime.params import SamplingParams

    llm = make_llm(model_of(), block_size=16)
    llm.generate(prompts, SamplingParams(max_tokens=10))
    assert not any(bool(each[0].float().any()) for each in (*llm.runner.pool.keys, *llm.runner.pool.values))


def test_audits_happen_every_so_many_steps(model_of, prompts):
    runner = drive(model_of(), prompts[:1], lambda plan: plan, audit="sampled")
    assert runner.audits == 1  # 10 steps, one audit every 16, the first at step 0


def test_a_token_written_to_the_wrong_slot_is_caught(model_of, prompts):
    from engine.runtime.errors import RunError

    def wrong_block(plan):
        rows = [row._replace(table=[*row.table[:-1], row.table[-1] + 20]) for row in plan.rows]
        return replace(plan, rows=rows) if plan.step == 3 else plan

    with pytest.raises(RunError, match=r"step [34]"):
        drive(model_of(), [prompts[1][:15]], wrong_block)


def test_a_block_freed_too_early_is_caught_as_nan(model_of, prompts):
    from engine.runtime.errors import NaNLogitsError

    def free_early(plan):
        return replace(plan, frees=[plan.rows[0].table[0]]) if plan.step == 4 else plan

    with pytest.raises(NaNLogitsError, match="step 4, request 0 branch 0: NaN"):
        drive(model_of(), prompts[1:2], free_early, audit="sampled")


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("block", [0, 1, -2])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_nan_anywhere_in_a_sequence_ends_its_request_alone(model_of, backend, block, what):
    from engine.runtime.errors import NaNLogitsError
    from engine.runtime.params import SamplingParams
    from paged_kernels.native import why_unavailable

    if backend == "native" and why_unavailable():
        pytest.skip("no compiled kernels")
    engine = make_llm(model_of(), block_size=4, backend=backend, audit="off").engine
    params = SamplingParams(max_tokens=6, temperature=0)
    for name, size in (("hit", 22), ("other", 13)):
        engine.add_request(name, list(range(size, 2 * size)), params)
    execute = engine.runner.execute

    def with_nan(plan):
        if plan.step == 2:
            (table,) = [row.table for row in plan.rows if row.request_id == 0]
            for cache in getattr(engine.runner.pool, what):
                cache[table[block], 1] = float("nan")
        return execute(plan)

    engine.runner.execute = with_nan
    errors = {output.request_id: output.error for output in engine.run() if output.finished}
    assert isinstance(errors["hit"], NaNLogitsError)
    assert errors["other"] is None


def test_a_missing_copy_is_caught(model_of, prompts):
    from engine.runtime.errors import RunError

    with pytest.raises(RunError, match="step 1"):
        drive(
            model_of(),
            prompts[1:2],
            lambda plan: replace(plan, copies=()),
            width=3,
            decoding=Decoding.sample,
        )


def test_a_copy_that_comes_too_late_is_caught(model_of, prompts):
    from engine.runtime.errors import RunError

    held = []

    def late(plan):
        held.append(plan.copies)
        return replace(plan, copies=held[-2] if len(held) > 1 else ())

    with pytest.raises(RunError):
        drive(model_of(), prompts[1:2], late, width=3, decoding=Decoding.beam)


def test_a_forgotten_free_is_caught_by_the_count(model_of, prompts):
    from engine.runtime.errors import AuditError

    with pytest.raises(AuditError, match=r"slots of the pool are written, the scheduler counts \d+"):
        drive(model_of(), [prompts[0], prompts[3], prompts[1]] * 3, lambda plan: replace(plan, frees=()))


def test_a_table_that_misses_its_prefix_is_caught(model_of, prompts):
    from engine.runtime.errors import RunError

    def swap(plan):
        rows = [row._replace(table=[row.table[0] + 30, *row.table[1:]]) for row in plan.rows]
        return replace(plan, rows=rows) if plan.step == 2 else plan

    with pytest.raises(RunError, match="step 2"):
        drive(model_of(), prompts[1:2], swap)


def test_a_broken_model_is_an_error_that_names_step_and_sequence(model_of, prompts, monkeypatch):
    import torch

    from engine.runtime.errors import NaNLogitsError

    head = model_of().model.lm_head
    monkeypatch.setattr(head, "forward", lambda hidden: torch.full((*hidden.shape[:2], 512), float("nan")))
    with pytest.raises(
        NaNLogitsError, match="step 0, request 0 branch 0: NaN in the logits after position 16"
    ):
        drive(model_of(), prompts[1:2], lambda plan: plan)


def test_copies_read_every_source_before_any_destination_is_written(model_of):
    import torch

    from engine.runtime.kv_pool import KVPool

    pool = KVPool(
        model_of().kv_shapes, num_blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    for block in (1, 2):
        pool.keys[1][block] = float(block)
    pool.copy([(1, 2), (2, 3)])
    assert [float(pool.keys[1][block, 0, 0, 0]) for block in (1, 2, 3)] == [1.0, 1.0, 2.0]


def test_layers_of_different_shapes_live_in_one_pool():
    import torch

    from engine.runtime.kv_pool import KVPool

    shapes = [((2, 8), (2, 4)), ((1, 8), (1, 8)), ((2, 8), (2, 4))]
    pool = KVPool(shapes, num_blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert [tuple(key.shape[2:]) for key in pool.keys] == [(2, 8), (1, 8), (2, 8)]
    assert [tuple(value.shape[2:]) for value in pool.values] == [(2, 4), (1, 8), (2, 4)]
    pool.keys[2][1] = 1.0
    assert pool.written_slots() == 0
    pool.keys[0][3, :2] = 1.0
    assert pool.written_slots() == 2
    pool.poison([3])
    assert pool.written_slots() == 0


def test_a_plan_that_repeats_is_refused(model_of):
    from engine.core.errors import CoreError
    from engine.runtime.runner import Runner

    runner = Runner(model_of(), num_blocks=4, block_size=4)
    with pytest.raises(CoreError, match="one step at a time, not 3"):
        runner.execute(StepPlan(step=0, rows=(), num_steps=3))


def test_an_unsampled_chunk_returns_no_parents_and_times_itself(model_of, prompts):
    from engine.runtime.runner import Runner

    ticks = iter(range(10_000))
    runner = Runner(model_of(), num_blocks=9, block_size=8, audit="off", clock=lambda: float(next(ticks)))
    runner.add(Request(5, 17, 4), np.array(prompts[1]))
    usage = SlotUsage(9, 0, 0, 0, 0, 0, 0, 0)
    result, times = runner.execute(StepPlan(0, [Row(5, 0, 0, 9, False, [4, 2])], usage=usage))
    assert result.parents == {}
    assert runner.outputs(5) == [[]]
    assert runner.written_slots() == 9
    assert times.attention_s == len(model_of().kv_shapes)
    assert times.forward_s == 2 * times.attention_s + 3


def test_prompt_ids_must_match_the_request(model_of):
    from engine.core.errors import CoreError
    from engine.runtime.runner import Runner

    runner = Runner(model_of(), num_blocks=4, block_size=4)
    with pytest.raises(CoreError, match="request 3: 4 prompt ids for 5 prompt tokens"):
        runner.add(Request(3, 5, 4), np.arange(4))
