"""Parallel samples depend on seed, request, branch and position, and on nothing around them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiers import cases

from engine.core.options import SchedulerLimits

TOKENS = 12


def run(loaded, prompts, n=3, budget=512, params=None, **options):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

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


def test_a_low_temperature_is_nearly_greedy():
    from engine.runtime.decoding.sample import draw, uniforms

    logits = torch.arange(500.0)[torch.stack([torch.randperm(500) for _ in range(50)])]
    chance = uniforms(3, list(range(50)), [0] * 50, [5] * 50)
    assert torch.equal(draw(logits, 0.01, chance), logits.argmax(dim=1))


def test_draws_follow_the_distribution():
    from engine.runtime.decoding.sample import draw, uniforms

    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3)
    chance = uniforms(3, list(range(20_000)), [0] * 20_000, [5] * 20_000)
    share = np.bincount(draw(logits, 1.0, chance).numpy(), minlength=3) / 20_000
    assert share == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


def test_uniforms_do_not_depend_on_their_neighbours():
    from engine.runtime.decoding.sample import uniforms

    many = uniforms(9, [1, 2, 3], [0, 1, 2], [7, 7, 7])
    assert many[1] == uniforms(9, [2], [1], [7])[0]
    assert len(set(many.tolist())) == 3


@cases("alone", [True, False], day=1)
def test_a_seed_gives_the_same_samples_whatever_is_around(alone, model_of, prompts):
    asked = {"seed": 11, "temperature": 0.9, "top_p": 0.9, "top_k": 50}
    found, _ = run(model_of(), prompts[2:3] if alone else prompts, budget=512 if alone else 13, params=asked)
    again, _ = run(model_of(), prompts[2:3], params=asked, seed=99, block_size=4)
    assert found[0 if alone else 2] == again[0]


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.7, 0), (7, 1.0, 0), (20, 0.5, 0), (0, 1.0, 0.05), (1, 1.0, 0), (30, 0.9, 0.02)],
)
def test_only_what_transformers_would_keep_can_be_drawn(top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from engine.runtime.decoding.sample import restrict

    torch.manual_seed(3)
    logits = torch.randn(16, 64) * 2
    column = torch.ones(16)
    found = restrict(logits, (column * top_k).long(), column * top_p, column * min_p)
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    assert torch.equal(found, expected)


def test_a_restricted_draw_stays_within_its_limits():
    from engine.runtime.decoding.sample import draw, restrict, uniforms

    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(4000, 4)
    limits = torch.full((4000,), 0, dtype=torch.int64), torch.full((4000,), 0.6), torch.zeros(4000)
    chance = uniforms(3, list(range(4000)), [0] * 4000, [5] * 4000)
    share = np.bincount(draw(restrict(logits, *limits), 1.0, chance).numpy(), minlength=4) / 4000
    assert share == pytest.approx([4 / 7, 3 / 7, 0, 0], abs=0.03)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_limit_that_leaves_one_token_is_greedy_at_any_temperature(limit, model_of, generate, prompts):
    samples, _ = run(model_of(), prompts[:2], n=1, params={**limit, "temperature": 2.0})
    assert samples == [generate("llama", prompt, TOKENS)[0] for prompt in prompts[:2]]


def test_requests_with_and_without_limits_share_a_step(model_of, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    kinds = [{"top_k": 3}, {}, {"top_p": 0.4}, {"temperature": 0}, {"min_p": 0.2, "n": 2}]
    params = [SamplingParams(**{"max_tokens": TOKENS, "seed": 4, **kind}) for kind in kinds]
    together = LLM(model_of(), pool_tokens=1024).generate(prompts[:5], params)
    for prompt, one, done in zip(prompts, params, together, strict=False):
        alone = LLM(model_of(), pool_tokens=1024).generate([prompt], one)[0]
        assert [out.token_ids for out in done.outputs] == [out.token_ids for out in alone.outputs]


def test_logprobs_are_those_of_the_model(model_of, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import original_model
    from engine.runtime.params import SamplingParams

    params = SamplingParams(max_tokens=6, temperature=0.8, seed=2, logprobs=3)
    llm = LLM(model_of(), pool_tokens=512)
    out = llm.generate([prompts[1]], params)[0].outputs[0]
    with original_model(model_of()) as model, torch.inference_mode():
        logits = model(torch.tensor([list(prompts[1]) + out.token_ids])).logits[0, len(prompts[1]) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    for entry, row in zip(out.logprobs, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
        assert [token for token, _ in entry.best] == row.topk(3).indices.tolist()
    total = sum(entry.logprob for entry in out.logprobs)
    assert out.cumulative_logprob == pytest.approx(total)
    llm.engine.add_request("a", prompts[1], replace(params, output_kind="delta"))
    parts = [output.outputs[0] for output in llm.engine.run()]
    sums = np.cumsum([entry.logprob for part in parts for entry in part.logprobs])
    assert len(parts) > 2  # of all tokens so far, as in vLLM
    assert [part.cumulative_logprob for part in parts if part.logprobs] == pytest.approx(sums)


def test_logprobs_are_read_by_token_id_with_the_chosen_token_first():
    from engine.runtime.decoding.generation import Logprob, TokenLogprobs

    entry = TokenLogprobs(token=7, logprob=-0.9, rank=3, best=((2, -0.1), (5, -0.5)))
    assert dict(entry) == {7: Logprob(-0.9, 3), 2: Logprob(-0.1, 1), 5: Logprob(-0.5, 2)}
    assert list(entry) == [7, 2, 5]
    assert 1 not in entry
