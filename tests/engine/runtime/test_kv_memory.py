"""KV memory for real: every reservation policy, swaps to the host and back, copies at the fork."""

import pytest
from tiers import cases

from engine.core.options import Preemption, SchedulerLimits

TOKENS = 12


def run(loaded, prompts, budget=512, preemption=Preemption.recompute, decoding=None, **options):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    limits = SchedulerLimits(budget, 32, max_model_len=64, preemption=preemption)
    llm = LLM(loaded, limits=limits, audit="full", **options)
    params = SamplingParams(max_tokens=TOKENS, **{"temperature": 0, **(decoding or {})})
    outputs = llm.generate(prompts, params)
    llm.scheduler.manager.check()
    return [[one.token_ids for one in output.outputs] for output in outputs], llm


@cases("placement", ["first_fit", "buddy"], day=("buddy",))
@cases("cache", ["contiguous_max", "contiguous_pow2", "contiguous_oracle"], day=1)
@cases(
    "decoding",
    [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3}],
    day=({"beam_width": 3},),
    ids=str,
)
def test_every_reservation_policy_gives_the_tokens_of_paging(cache, placement, decoding, model_of, prompts):
    found, llm = run(
        model_of(), prompts, 30, decoding=decoding, cache=cache, placement=placement, pool_tokens=512
    )
    expected, _ = run(model_of(), prompts, decoding=decoding, pool_tokens=2048)
    assert found == expected
    assert llm.runner.audits > 10


@cases("decoding", [{}, {"n": 3, "temperature": 1.0, "seed": 5}, {"beam_width": 3}], ids=str, day=1)
def test_swapped_requests_come_back_as_they_were(decoding, model_of, prompts):
    tight = {"pool_tokens": 120, "block_size": 4, "prefix_caching": False}
    found, llm = run(model_of(), prompts, 64, Preemption.swap, decoding, host_blocks=64, **tight)
    expected, _ = run(model_of(), prompts, decoding=decoding, pool_tokens=2048)
    assert llm.engine.counters.swaps > 0
    assert found == expected


def test_a_swap_that_does_not_copy_is_caught(model_of, prompts, monkeypatch):
    from engine.runtime.errors import RunError
    from engine.runtime.kv_pool import KVPool

    monkeypatch.setattr(KVPool, "swap_in", lambda self, pairs: None)
    with pytest.raises(RunError):
        run(
            model_of(), prompts, 64, Preemption.swap, host_blocks=64,
            pool_tokens=120, block_size=4, prefix_caching=False,
        )  # fmt: skip


def test_branches_that_never_share_say_the_same(model_of, prompts):
    decoding = {"n": 3, "temperature": 1.0, "seed": 5}
    found, copying = run(model_of(), prompts, decoding=decoding, pool_tokens=2048, copy_at_fork=True)
    expected, sharing = run(model_of(), prompts, decoding=decoding, pool_tokens=2048)
    assert found == expected
    assert copying.engine.counters.copies > sharing.engine.counters.copies


def test_blocks_go_to_the_host_and_back_unharmed(model_of):
    import torch

    from engine.runtime.kv_pool import KVPool

    pool = KVPool(
        model_of().kv_shapes, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu"),
        host_blocks=2,
    )  # fmt: skip
    for layer in range(2):
        pool.keys[layer][3, :2] = layer + 1.0
    pool.swap_out([(3, 1), (4, 0)])
    pool.poison([3])
    pool.swap_in([(1, 2)])
    assert [float(pool.keys[layer][2, 1, 0, 0]) for layer in range(2)] == [1.0, 2.0]
    assert pool.written_slots() == 2  # what nobody had written came back as poison


def test_slots_that_were_taken_back_are_poisoned_alone(model_of):
    import torch

    from engine.runtime.kv_pool import KVPool

    pool = KVPool(
        model_of().kv_shapes, num_blocks=4, block_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    pool.keys[0][2] = 1.0
    pool.poison_slots([(2, 1, 3)])
    assert torch.isnan(pool.keys[0][2, :, 0, 0]).tolist() == [False, True, True, False]
