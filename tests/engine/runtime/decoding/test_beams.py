"""Beam search equals `generate(num_beams=k)` in all k sequences and their scores, on forked block tables."""

import pytest
import torch
from tiers import cases

from engine.core.options import SchedulerLimits

TOKENS = 12


def run(loaded, prompts, width, budget=512, **options):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    llm = LLM(loaded, limits=SchedulerLimits(budget, 32, max_model_len=64), audit="full", **options)
    return llm.generate(prompts, SamplingParams(max_tokens=TOKENS, beam_width=width, temperature=0)), llm


def assert_equal(found, generate, family, prompts, width):
    for completion, prompt in zip(found, prompts, strict=True):
        sequences, scores = generate(family, prompt, TOKENS, width)
        assert [beam.token_ids for beam in completion.outputs] == sequences
        if width > 1:
            assert [beam.score for beam in completion.outputs] == pytest.approx(scores, abs=1e-4)


@cases("family", ["llama", "gpt2"], day=2)
@pytest.mark.parametrize("width", [2, 4])
def test_sequences_and_scores_equal_generate(family, width, model_of, generate, prompts):
    found, _ = run(model_of(family), prompts, width, block_size=8)
    assert_equal(found, generate, family, prompts, width)


def test_preempted_beams_catch_up_and_change_nothing(model_of, generate, prompts):
    found, llm = run(model_of(), prompts, 4, budget=24, block_size=4, pool_tokens=144)
    assert llm.engine.counters.preemptions > 0
    assert_equal(found, generate, "llama", prompts, 4)


def test_contiguous_beams_copy_what_they_cannot_share(model_of, generate, prompts):
    found, _ = run(model_of(), prompts[:3], 2, cache="contiguous_max", pool_tokens=300)
    assert_equal(found, generate, "llama", prompts[:3], 2)


def test_one_beam_is_greedy(model_of, generate, prompts):
    found, _ = run(model_of(), prompts[:2], 1)
    assert_equal(found, generate, "llama", prompts[:2], 1)


def test_the_best_of_all_continuations_are_candidates():
    from engine.runtime.decoding.generation import best_continuations

    logits = torch.log_softmax(torch.tensor([[[0.0, 3.0, 1.0], [2.0, 0.0, 1.9]]]), dim=-1)
    best = best_continuations(logits, torch.tensor([[0.0, -0.1]]), 2)
    assert best.parents.tolist() == [[0, 1]]
    assert best.tokens.tolist() == [[1, 0]]
    assert best.scores[0, 1].item() == pytest.approx(-0.1 + logits[0, 1, 0].item())
