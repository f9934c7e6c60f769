"""Parallel samples depend on seed, request, branch and position, and on nothing around them."""

import numpy as np
import pytest
import torch

from engine.core.limits import SchedulerLimits

TOKENS = 12


def run(loaded, prompts, n=3, budget=512, params=None, **options):
    from engine.runtime.llm import LLM, SamplingParams

    llm = LLM(loaded, limits=SchedulerLimits(budget, 32, max_model_len=64), audit="full", **options)
    done = llm.generate(prompts, SamplingParams(max_tokens=TOKENS, n=n, **params or {}))
    return [[one.token_ids for one in request.outputs] for request in done], llm


def test_the_same_seed_gives_the_same_samples(model_of, prompts):
    assert run(model_of(), prompts[:3])[0] == run(model_of(), prompts[:3])[0]


def test_another_seed_gives_other_samples(model_of, prompts):
    assert run(model_of(), prompts[:3])[0] != run(model_of(), prompts[:3], seed=1)[0]


def test_samples_of_a_request_differ_from_each_other(model_of, prompts):
    samples, _ = run(model_of(), prompts[:1], n=4)
    assert len({tuple(sample) for sample in samples[0]}) == 4


def test_the_batch_around_a_request_does_not_matter(model_of, prompts):
    alone, _ = run(model_of(), prompts[:1])
    beside, _ = run(model_of(), prompts, budget=11, block_size=4)
    assert alone[0] == beside[0]


def test_preemption_does_not_change_samples(model_of, prompts):
    calm, _ = run(model_of(), prompts)
    tight, llm = run(model_of(), prompts, budget=24, block_size=4, pool_tokens=128)
    assert llm.engine.counters.preemptions > 0
    assert calm == tight


def test_a_low_temperature_is_nearly_greedy(model_of, generate, prompts):
    samples, _ = run(model_of(), prompts[:2], n=1, params={"temperature": 1e-4})
    assert samples == [generate("llama", prompt, TOKENS)[0] for prompt in prompts[:2]]


def test_draws_follow_the_distribution():
    from engine.runtime.sampling import draw, uniforms

    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    chance = uniforms(3, list(range(20_000)), [0] * 20_000, [5] * 20_000)
    share = np.bincount(draw(logits, 1.0, chance).numpy(), minlength=3) / 20_000
    assert share == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


def test_uniforms_do_not_depend_on_their_neighbours():
    from engine.runtime.sampling import uniforms

    many = uniforms(9, [1, 2, 3], [0, 1, 2], [7, 7, 7])
    assert many[1] == uniforms(9, [2], [1], [7])[0]
    assert len(set(many.tolist())) == 3
