"""A host tier below the pool: what it brings back gives the tokens of `generate()`, and a copy left out is NaN."""

import pytest
from tiers import cases

from engine.core.options import SchedulerLimits, TierStore

TOKENS = 12


def run(loaded, prompts, rounds=2, params=None, **options):
    """Completions of the prompts, asked `rounds` times on a pool that holds a few of them, and the engine."""
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    sizes = {"block_size": 4, "pool_tokens": 120, "tier_blocks": 60} | options
    llm = LLM(loaded, limits=SchedulerLimits(40, 4, max_model_len=64), audit="full", **sizes)
    params = params or SamplingParams(max_tokens=TOKENS, temperature=0)
    found = [llm.generate(prompts, params) for _ in range(rounds)]
    return [[list(out.token_ids) for out in done.outputs] for each in found for done in each], llm


def loaded_blocks(llm):
    return llm.engine.scheduler.manager.tiers.counts.hit_blocks[0]


@cases("store", list(TierStore), day=1)
@cases("family", ["llama", "gpt2", "mistral"], day=1)
def test_what_a_tier_brings_back_gives_the_tokens_of_generate(store, family, model_of, generate, prompts):
    found, llm = run(model_of(family), prompts, tier_store=store)
    assert loaded_blocks(llm) > 20
    assert found == 2 * [[generate(family, prompt, TOKENS)[0][0]] for prompt in prompts]


def test_a_tier_beside_swapped_requests_changes_no_token(model_of, generate, prompts):
    from engine.core.options import Preemption

    limits = SchedulerLimits(40, 6, max_model_len=64, preemption=Preemption.swap)
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    llm = LLM(
        model_of("llama"),
        limits=limits,
        audit="full",
        block_size=4,
        pool_tokens=100,
        host_blocks=40,
        tier_blocks=50,
    )
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    found = [list(done.outputs[0].token_ids) for _ in range(2) for done in llm.generate(prompts, params)]
    assert loaded_blocks(llm) > 0
    assert llm.engine.counters.swaps > 0
    assert found == 2 * [generate("llama", prompt, TOKENS)[0][0] for prompt in prompts]


@pytest.mark.nightly
@cases("preemption", ["recompute", "swap"], day=["swap"])
@cases("store", list(TierStore), day=1)
@cases("branches", [{"beam_width": 3}, {"n": 3, "temperature": 1.0, "seed": 5}], day=1)
def test_branches_of_two_tenants_beside_a_tier_change_no_token(
    branches, store, preemption, model_of, prompts
):
    """Beams and samples of prompts of two salts, preempted, with a tier and without."""
    from engine.core.options import Preemption
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    limits = SchedulerLimits(40, 6, max_model_len=64, preemption=Preemption(preemption))
    texts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in "ab" for prompt in prompts]
    found = {}
    for tier_blocks in (0, 60):
        sizes = {"block_size": 4, "pool_tokens": 100, "host_blocks": 40, "tier_blocks": tier_blocks}
        llm = LLM(model_of("llama"), limits=limits, audit="full", tier_store=store, **sizes)
        asked = SamplingParams(max_tokens=20, **{"temperature": 0, **branches})
        done = [each for _ in range(2) for each in llm.generate(texts, asked)]
        found[tier_blocks] = [[list(out.token_ids) for out in each.outputs] for each in done]
        assert llm.engine.counters.preemptions > 0
        assert (llm.engine.counters.swaps > 0) == (preemption == "swap")
    assert loaded_blocks(llm) > 0
    assert found[0] == found[60]


@pytest.mark.parametrize("name", ["swap_in", "swap_out"])
def test_a_copy_that_is_left_out_is_noticed(name, model_of, prompts, monkeypatch):
    from engine.runtime.errors import AuditError
    from engine.runtime.kv_pool import KVPool

    monkeypatch.setattr(KVPool, name, lambda pool, pairs: None)
    with pytest.raises(AuditError, match="slots of the pool are written"):
        run(model_of("llama"), prompts)
