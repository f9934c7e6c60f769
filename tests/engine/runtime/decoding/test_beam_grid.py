"""Beam search with end tokens, penalties and every way of stopping equals `generate(num_beams=k)`."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from tiers import cases, nights_share

from engine.core.options import SchedulerLimits

NEW = 20
STOPPING = (False, True, "never")
PENALTIES = (-1.0, 0.0, 1.0, 2.0)


def prompt_of(size):
    return np.random.default_rng(size).integers(0, 512, size).tolist()


@pytest.fixture(scope="module", name="ends_of")
def ends_of_fixture(model_of):
    """Up to six tokens that beams of this model like to say, so that hypotheses do end."""
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    found = {}

    def ends(family):
        if family not in found:
            llm = LLM(model_of(family), pool_tokens=4096)
            params = SamplingParams(max_tokens=NEW, beam_width=8)
            outputs = llm.generate([prompt_of(size) for size in (7, 16, 33)], params)
            said = [Counter(t for beam in done.outputs for t in set(beam.token_ids[3:])) for done in outputs]
            found[family] = sorted({token for one in said for token, _ in one.most_common(2)})
        return found[family]

    return ends


def reference(loaded, prompt, width, penalty, stopping, ends):
    """All k hypotheses of transformers without their padding, and their scores."""
    from engine.runtime.models.load import original_model

    with original_model(loaded) as model:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=stopping,
            eos_token_id=ends or None,
            pad_token_id=511 if ends else None,
            return_dict_in_generate=True,
            output_scores=True,
        )
    cut = []
    for row in out.sequences[:, len(prompt) :].tolist():
        stop = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        cut.append(row[:stop])
    return cut, out.sequences_scores.tolist()


def searched(loaded, prompt, width, penalty, stopping, ends, block_size=8):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    llm = LLM(loaded, pool_tokens=2048, block_size=block_size, limits=SchedulerLimits(512, 32), audit="full")
    params = SamplingParams(
        max_tokens=NEW,
        beam_width=width,
        length_penalty=penalty,
        early_stopping=stopping,
        stop_token_ids=ends,
    )
    (done,) = llm.generate([prompt], params)
    llm.scheduler.manager.check()
    assert llm.scheduler.manager.usage(None).token == 0
    return [beam.token_ids for beam in done.outputs], [beam.score for beam in done.outputs]


def assert_same(loaded, case, ends, block_size=8):
    size, width, penalty, stopping = case
    found = searched(loaded, prompt_of(size), width, penalty, stopping, ends, block_size)
    expected = reference(loaded, prompt_of(size), width, penalty, stopping, ends)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-3)


# every pair of (width, penalty), (width, stopping) and (penalty, stopping); prompts around block boundaries
SOME = [
    (size, width, penalty, stopping)
    for index, (width, (place, penalty)) in enumerate(
        itertools.product((1, 2, 3, 4, 8), enumerate(PENALTIES))
    )
    for stopping in (STOPPING[(index + place) % 3],)
    for size in ((7, 16, 33)[index % 3],)
    if width > 1
]


@cases("family", ["llama", "gpt2"], day=2)
@cases("case", SOME, day=SOME[::6], ids=str)
def test_end_tokens_penalties_and_stopping(family, case, model_of, ends_of):
    assert_same(model_of(family), case, ends_of(family))


@cases("stopping", STOPPING, day=1)
def test_without_end_tokens_every_way_of_stopping_runs_to_the_limit(stopping, model_of):
    assert_same(model_of(), (15, 3, 0.0, stopping), [])


@pytest.mark.nightly
def test_a_penalty_that_no_float32_holds_still_gives_all_hypotheses(model_of, ends_of):
    loaded, prompt = model_of("llama"), prompt_of(7)
    for penalty in (-30.0, 30.0):
        beams, scores = searched(loaded, prompt, 3, penalty, "never", [])
        assert [len(beam) for beam in beams] == [NEW] * 3
        assert beams == searched(loaded, prompt, 3, 1.0, "never", [])[0]
        assert sorted(scores, reverse=True) == scores


def test_hypotheses_do_end_early(model_of, ends_of):
    texts, _ = searched(model_of(), prompt_of(16), 4, 1.0, True, ends_of("llama"))
    assert min(len(text) for text in texts) < NEW


def test_one_end_token_looks_at_twice_as_many_candidates(model_of, ends_of):
    assert_same(model_of(), (16, 4, 1.0, False), ends_of("llama")[:1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "block_size", "stopping", "penalty", "width"),
    nights_share(itertools.product(["llama", "gpt2"], [1, 8, 16], STOPPING, PENALTIES, range(2, 9)), 40),
)
def test_the_grid(family, block_size, stopping, penalty, width, model_of, ends_of):
    for size, ends in itertools.product((7, 16, 33), (ends_of(family), ends_of(family)[:1], [])):
        assert_same(model_of(family), (size, width, penalty, stopping), ends, block_size)


def test_copies_are_what_copy_on_write_theory_says(model_of):
    """k - (distinct parents) copies in the step after one, if the tail is partly filled; else none."""
    from engine.core.memory.paged import PagedManager
    from engine.core.options import Decoding
    from engine.core.request import Request
    from engine.core.scheduling.scheduler import Scheduler
    from engine.runtime.runner import Runner

    scheduler = Scheduler(PagedManager(200, 8), SchedulerLimits(64, 32))
    runner = Runner(model_of(), num_blocks=200, block_size=8, audit="full")
    request = Request(0, 21, NEW, 4, Decoding.beam)
    scheduler.submit(request)
    runner.add(request, np.array(prompt_of(21)))
    distinct, seen = 0, 0
    while scheduler.has_work:
        plan = scheduler.schedule()
        context = int(plan.context_len[0])
        if context:
            assert len(plan.copies) == (0 if context % 8 == 0 else 4 - distinct)
            seen += len(plan.copies)
        result, _ = runner.execute(plan)
        distinct = len(set(result.parents[0]))
        scheduler.commit(plan, result)
    assert seen > 5
