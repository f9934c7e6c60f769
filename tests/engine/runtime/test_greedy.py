"""Greedy outputs equal transformers' `generate()` token for token in float32, however the scheduler cuts the work."""

import pytest
from tiers import cases

from engine.core.options import SchedulerLimits

TOKENS = 12
FAMILIES = ["llama", "qwen3", "gpt2", "opt", "mistral", "gemma2"]


def run(loaded, prompts, budget=512, running=32, mixed=True, **options):
    """Completions of the prompts and the engine that made them, audited at every step."""
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    limits = SchedulerLimits(budget, running, max_model_len=64, mixed_steps=mixed)
    llm = LLM(loaded, limits=limits, audit="full", **options)
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    return [done.outputs[0].token_ids for done in llm.generate(prompts, params)], llm


def expected(generate, family, prompts):
    return [generate(family, prompt, TOKENS)[0][0] for prompt in prompts]


@cases("family", FAMILIES, day=("mistral",))  # by day `test_families.py` has the others
def test_outputs_equal_generate(family, model_of, generate, prompts):
    found, _ = run(model_of(family), prompts)
    assert found == expected(generate, family, prompts)


def test_the_reference_text_varies(generate, prompts):
    texts = expected(generate, "llama", prompts)
    assert len({token for text in texts for token in text}) > 20


@cases("family", ["llama", "qwen3", "gpt2", "opt"], day=1)
def test_chunked_prefill_and_preemption_change_nothing(family, model_of, generate, prompts):
    found, llm = run(model_of(family), prompts, budget=10, pool_tokens=104, block_size=8)
    assert llm.engine.counters.preemptions > 0
    assert found == expected(generate, family, prompts)


@pytest.mark.parametrize("ahead", [True, False])
def test_steps_of_prompts_alone_change_nothing(ahead, model_of, generate, prompts):
    found, llm = run(
        model_of(), prompts, 24, 3, mixed=False, pool_tokens=104, block_size=8, async_scheduling=ahead
    )
    assert llm.engine.counters.preemptions > 0
    assert found == expected(generate, "llama", prompts)


@cases("family", ["llama", "qwen3", "gpt2", "opt"], day=2)
def test_prefix_hits_change_nothing(family, model_of, generate, prompts):
    from engine.runtime.params import SamplingParams

    first, llm = run(model_of(family), prompts, block_size=8)
    second = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, temperature=0))
    again = [done.outputs[0].token_ids for done in second]
    assert [done.metrics.cached_tokens for done in second] == [
        0,
        16,
        24,
        32,
        32,
        32,
        24,
    ]  # never the last token
    assert first == again == expected(generate, family, prompts)


@cases("block_size", [1, 8, 16, 32], day=(1, 16))
@cases("budget", [7, 40], day=(7,))
def test_any_block_size_and_budget(block_size, budget, model_of, generate, prompts):
    found, _ = run(model_of(), prompts, budget=budget, block_size=block_size)
    assert found == expected(generate, "llama", prompts)


def test_a_preempted_sequence_finds_its_own_blocks_again(model_of, generate, prompts):
    found, llm = run(model_of(), prompts, budget=64, pool_tokens=112, block_size=4)
    assert llm.engine.counters.preemptions > 0
    assert llm.engine.counters.resumed_hits > 0
    assert found == expected(generate, "llama", prompts)


def test_no_prefix_caching_gives_the_same_tokens(model_of, generate, prompts):
    found, llm = run(model_of(), prompts, prefix_caching=False)
    assert llm.engine.counters.prefix_hits == 0
    assert found == expected(generate, "llama", prompts)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_contiguous_reservations_give_the_same_tokens(family, model_of, generate, prompts):
    found, _ = run(model_of(family), prompts, budget=20, cache="contiguous_max", pool_tokens=200)
    assert found == expected(generate, family, prompts)


def test_a_long_prompt_runs_in_several_query_tiles(model_of, generate, monkeypatch):
    monkeypatch.setattr("paged_kernels.torch_backend.QUERY_TILE", 16)
    prompt = tuple(range(100, 150))
    found, _ = run(model_of(), [prompt], budget=45)
    assert found == expected(generate, "llama", [prompt])


def test_a_request_alone_equals_the_same_request_beside_a_long_one(model_of, prompts):
    alone, _ = run(model_of(), [prompts[0]])
    beside, _ = run(model_of(), [prompts[0], prompts[3]])
    assert alone[0] == beside[0]
