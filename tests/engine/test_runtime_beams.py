"""Beam search equals `generate(num_beams=k)` in all k sequences and their scores, on forked block tables."""

import pytest
import torch

from engine.core.limits import SchedulerLimits

TOKENS = 12


def run(loaded, prompts, width, budget=512, **options):
    from engine.runtime.llm import LLM, SamplingParams

    llm = LLM(loaded, limits=SchedulerLimits(budget, 32, max_model_len=64), audit="full", **options)
    return llm.generate(prompts, SamplingParams(TOKENS, beam_width=width)), llm


def assert_equal(found, generate, family, prompts, width):
    for completion, prompt in zip(found, prompts, strict=True):
        sequences, scores = generate(family, prompt, TOKENS, width)
        assert completion.token_ids == sequences
        assert completion.scores == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("width", [2, 4])
def test_sequences_and_scores_equal_generate(family, width, model_of, generate, prompts):
    found, _ = run(model_of(family), prompts, width, block_size=8)
    assert_equal(found, generate, family, prompts, width)


def test_preempted_beams_catch_up_and_change_nothing(model_of, generate, prompts):
    found, llm = run(model_of(), prompts, 4, budget=24, block_size=4, pool_tokens=144)
    assert sum(stats.preemptions for stats in llm.scheduler.stats.values()) > 0
    assert_equal(found, generate, "llama", prompts, 4)


def test_contiguous_beams_copy_what_they_cannot_share(model_of, generate, prompts):
    found, _ = run(model_of(), prompts[:3], 2, contiguous=True, pool_tokens=300)
    assert_equal(found, generate, "llama", prompts[:3], 2)


def test_one_beam_is_greedy(model_of, generate, prompts):
    found, _ = run(model_of(), prompts[:2], 1)
    assert [done.token_ids for done in found] == [generate("llama", p, TOKENS)[0] for p in prompts[:2]]


def test_selection_takes_the_best_of_all_continuations():
    from engine.runtime.beam import select_beams

    logits = torch.log_softmax(torch.tensor([[[0.0, 3.0, 1.0], [2.0, 0.0, 1.9]]]), dim=-1)
    beams = select_beams(logits, torch.tensor([[0.0, -0.1]]), 2)
    assert beams.parents.tolist() == [[0, 1]]
    assert beams.tokens.tolist() == [[1, 0]]
    assert beams.scores[0, 1].item() == pytest.approx(-0.1 + logits[0, 1, 0].item())


def test_a_final_score_is_divided_by_the_generated_length():
    from engine.runtime.beam import final_score

    assert final_score(-6.0, 4) == -1.5
    assert final_score(-6.0, 4, length_penalty=0.0) == -6.0
