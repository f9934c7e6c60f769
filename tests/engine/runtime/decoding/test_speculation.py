"""Speculation changes how many steps it takes, and nothing else."""

import functools

import pytest
import torch
from tiers import cases

from engine.core.options import Preemption, SchedulerLimits

TOKENS = 24


@functools.cache
def draft_of(noise):
    """The target with noise on its weights: how often it is right falls with the noise."""
    from tiny_models import SHAPE

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    loaded = load_model(ModelSpec(name=f"draft-{noise}", family="llama", kv_heads=2, **SHAPE))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return loaded


def run(loaded, prompts, noise=None, params=None, preemption=Preemption.recompute, budget=256, **options):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    limits = SchedulerLimits(budget, 32, max_model_len=96, preemption=preemption)
    draft = None if noise is None else draft_of(noise)
    given = {"pool_tokens": 1024, "block_size": 8, "audit": "full", **options}
    llm = LLM(loaded, draft=draft, limits=limits, pack_weights=False, **given)
    outputs = llm.generate(
        prompts, SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, **(params or {})})
    )
    llm.scheduler.manager.check()
    assert llm.scheduler.manager.usage(None).token == 0
    return [output.outputs[0].token_ids for output in outputs], llm, outputs


def rate(outputs):
    drafted = sum(output.metrics.drafted_tokens for output in outputs)
    return sum(output.metrics.accepted_tokens for output in outputs) / drafted


@cases("mode", ["lookahead", "fork"], day=1)
@cases(
    ("noise", "low", "high"),
    [(0.0, 0.999, 1.0), (0.006, 0.3, 0.7), (0.018, 0.05, 0.2), (3.0, 0, 0.02)],
    day=((0.006, 0.3, 0.7),),
)
def test_greedy_speculation_equals_plain_greedy(mode, noise, low, high, model_of, prompts):
    found, llm, outputs = run(model_of(), prompts[:3], noise, draft_mode=mode)
    plain, _, _ = run(model_of(), prompts[:3])
    assert found == plain
    assert low <= rate(outputs) <= high
    assert (llm.engine.counters.copies == 0) == (mode == "lookahead")


def test_a_perfect_draft_takes_a_fifth_of_the_steps(model_of, prompts):
    _, fast, _ = run(model_of(), prompts[:1], 0.0)
    _, slow, _ = run(model_of(), prompts[:1])
    assert fast.engine.counters.steps <= slow.engine.counters.steps / 4
    assert fast.engine.counters.generation_tokens == slow.engine.counters.generation_tokens == TOKENS


@pytest.mark.nightly
@cases("tokens", [1, 2, 7], day=(7,))
def test_any_number_of_draft_tokens(tokens, model_of, prompts):
    assert run(model_of(), prompts[:3], 0.006, draft_tokens=tokens)[0] == run(model_of(), prompts[:3])[0]


def test_samples_are_those_of_plain_sampling(model_of, prompts):
    params = {"temperature": 0.7, "seed": 3, "top_p": 0.9}
    found, _, outputs = run(model_of(), prompts[:3], 0.006, params)
    assert found == run(model_of(), prompts[:3], None, params)[0]
    assert 0 < rate(outputs) < 1  # both kinds of draft occurred


def test_an_end_token_among_the_accepted_ones_is_the_last(model_of, prompts):
    whole = run(model_of(), prompts[:1])[0][0]
    params = {"stop_token_ids": [whole[6]]}
    assert run(model_of(), prompts[:1], 0.0, params)[0][0] == whole[: whole.index(whole[6]) + 1]


@cases("preemption", list(Preemption), day=(Preemption.swap,))
@cases("mode", ["lookahead", "fork"], day=1)
def test_preempted_speculation_goes_on_as_before(mode, preemption, model_of, prompts):
    tight = {"pool_tokens": 160, "block_size": 4, "host_blocks": 64, "draft_mode": mode, "budget": 64}
    found, llm, _ = run(model_of(), prompts, 0.006, preemption=preemption, **tight)
    assert llm.engine.counters.preemptions > 0
    assert found == run(model_of(), prompts)[0]


def test_what_one_request_cached_serves_the_drafts_of_the_next(model_of, prompts):
    found, _, outputs = run(model_of(), [prompts[3], prompts[3], prompts[5]], 0.0, budget=48)
    assert sum(output.metrics.cached_tokens for output in outputs) > 0
    assert rate(outputs) > 0.99
    assert found == run(model_of(), [prompts[3], prompts[3], prompts[5]])[0]


def test_groups_run_beside_speculating_requests(model_of, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    params = [SamplingParams(max_tokens=9, temperature=0), SamplingParams(max_tokens=9, beam_width=3),
              SamplingParams(max_tokens=9, n=3, seed=1)]  # fmt: skip
    said = []
    for draft in (draft_of(0.006), None):
        llm = LLM(model_of(), draft=draft, pool_tokens=1024, audit="full", pack_weights=False)
        said.append([[one.token_ids for one in out.outputs] for out in llm.generate(prompts[:3], params)])
    assert said[0] == said[1]


def test_logprobs_of_accepted_tokens_are_reported_once(model_of, prompts):
    _, _, outputs = run(model_of(), prompts[:2], 0.006, {"logprobs": 1})
    for output in outputs:
        one = output.outputs[0]
        assert [entry.token for entry in one.logprobs] == one.token_ids


def test_a_draft_lane_that_is_not_copied_is_noticed(model_of, prompts, monkeypatch):
    from engine.runtime.errors import RunError
    from engine.runtime.group_pool import BlockOperations

    def only_the_first(self, plan):
        if plan.copies:
            self.pools[0].copy(plan.copies)

    monkeypatch.setattr(BlockOperations, "swap_in_and_copy", only_the_first)
    with pytest.raises(RunError, match="draft model"):
        run(model_of(), prompts, 0.0, draft_mode="fork")


def test_a_draft_with_another_vocabulary_is_refused(model_of):
    from dataclasses import replace

    from engine.runtime.errors import ModelError
    from engine.runtime.llm import LLM

    with pytest.raises(ModelError, match="it cannot propose"):
        LLM(model_of(), draft=replace(draft_of(0.0), vocab_size=100), pool_tokens=64)
