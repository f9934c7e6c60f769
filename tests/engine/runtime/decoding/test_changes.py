"""Penalties, bias and forbidden tokens change which token is chosen, as vLLM and transformers define them."""

import numpy as np
import pytest
import torch
from serve_cases import build_engine, tokenizer

PROMPT = [5, 9, 2, 9, 30]


@pytest.fixture(name="llm")
def llm_fixture(model_of):
    from engine.runtime.llm import LLM

    return LLM(model_of(), pool_tokens=1024, block_size=8, tokenizer=tokenizer(), audit="full")


def said(llm, prompt=PROMPT, **params):
    from engine.runtime.params import SamplingParams

    return llm.generate(prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0} | params))[0].outputs[0]


def generation(prompt, output, **params):
    from engine.core.request import Request
    from engine.runtime.decoding.generation import Generation
    from engine.runtime.params import SamplingParams

    request = Request(0, len(prompt), len(output) + 1)
    made = Generation(request, np.array(prompt), SamplingParams(**params).rules([]))
    for offset, token in enumerate(output):
        made.append(0, len(prompt) + offset, token)
    return made


def changed(logits, prompt, output, **params):
    from engine.runtime.decoding.sample import change_logits

    logits = torch.tensor(logits)
    change_logits(logits, generation(prompt, output, **params), 0, len(prompt) + len(output))
    return logits.tolist()


def test_the_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    logits = torch.randn(20)
    ours = changed(logits.tolist(), [1, 2, 2], [7, 3], repetition_penalty=1.7)
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 2, 7, 3]]), logits[None].clone())[0]
    assert ours == pytest.approx(theirs.tolist())


def test_frequency_and_presence_count_the_output_alone():
    ours = changed([0.0] * 5, [1, 1], [2, 2, 3], frequency_penalty=0.5, presence_penalty=0.25)
    assert ours == [0.0, 0.0, -1.25, -0.75, 0.0]


def test_a_bad_word_loses_its_last_token_where_the_others_stand():
    from engine.runtime.decoding.sample import _ends_of_bad_words

    words = [(4,), (7, 8), (6, 7, 9), (1, 2, 3, 4, 5)]
    assert _ends_of_bad_words(words, np.array([6, 7])) == [4, 8, 9]
    assert _ends_of_bad_words(words, np.array([], dtype=np.int64)) == [4]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_only_allowed_tokens_come(llm, temperature):
    allowed = [3, 40, 77]
    tokens = said(llm, allowed_token_ids=allowed, temperature=temperature, max_tokens=20).token_ids
    assert set(tokens) <= set(allowed)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_bias_forces_a_token(llm, temperature):
    assert said(llm, logit_bias={41: 100}, temperature=temperature).token_ids == [41] * 12


def test_a_negative_bias_keeps_a_token_away(llm):
    plain = said(llm).token_ids
    assert plain[0] not in said(llm, logit_bias={plain[0]: -100}).token_ids


def test_a_bad_word_does_not_come(llm):
    ids = llm.engine.tokenizer.encode("a")
    assert len(ids) == 1
    assert said(llm, logit_bias={ids[0]: 100}).token_ids == ids * 12
    assert ids[0] not in said(llm, logit_bias={ids[0]: 100}, bad_words=["a"]).token_ids


def test_a_sequence_does_not_end_before_min_tokens(llm):
    plain = said(llm).token_ids
    ends = {"stop_token_ids": plain[2:3]}
    assert len(said(llm, **ends).token_ids) <= 3
    longer = said(llm, min_tokens=6, **ends).token_ids
    assert len(longer) >= 6
    assert plain[2] not in longer[:6]


def test_a_stop_string_of_several_tokens_ends_the_text_before_it(llm):
    plain = said(llm).text
    stop = plain[2:5]
    assert said(llm, stop=stop).text == plain[: plain.index(stop)]


def test_a_stop_string_is_not_looked_for_before_min_tokens(llm):
    plain = said(llm)
    stop = plain.text[1]
    assert len(said(llm, stop=stop, min_tokens=5).token_ids) >= 5 > len(said(llm, stop=stop).token_ids)


def test_reported_log_probabilities_are_those_of_the_model(llm):
    plain, biased = said(llm, logprobs=1), said(llm, logprobs=1, logit_bias={41: 100})
    assert biased.logprobs[0].token == 41
    assert biased.logprobs[0].best == plain.logprobs[0].best


def test_changes_are_the_same_with_a_draft_model(model_of):
    from engine.runtime.llm import LLM

    params = {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "bad_words": ["a"], "max_tokens": 16}
    plain = LLM(model_of(), pool_tokens=512, tokenizer=tokenizer())
    drafting = LLM(model_of(), pool_tokens=512, tokenizer=tokenizer(), draft=model_of(), draft_tokens=3)
    assert said(drafting, **params).token_ids == said(plain, **params).token_ids


def test_other_requests_of_the_batch_are_not_changed(model_of):
    from engine.runtime.params import SamplingParams

    engine = build_engine(model_of())
    plain = SamplingParams(max_tokens=8, temperature=0)
    engine.add_request("alone", PROMPT, plain)
    alone = [output.outputs[0].token_ids for output in engine.run() if output.finished]
    engine.add_request("biased", PROMPT, SamplingParams(max_tokens=8, temperature=0, logit_bias={41: 100}))
    engine.add_request("beside", PROMPT, plain)
    beside = {output.request_id: output.outputs[0].token_ids for output in engine.run() if output.finished}
    assert [beside["beside"]] == alone


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "word"}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 30}, "min_tokens"),
        ({"beam_width": 2, "logit_bias": {3: 1}}, "beam_width"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 100}, "prompt_logprobs"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(params, field):
    from engine.runtime.errors import ParamsError
    from engine.runtime.params import SamplingParams

    with pytest.raises(ParamsError) as refused:
        SamplingParams(**params)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {10**6: 1.0}},
        {"allowed_token_ids": [10**6]},
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2},
    ],
)
def test_tokens_that_the_model_does_not_have_and_no_choice_at_all_are_refused(llm, params):
    from engine.runtime.errors import ParamsError

    with pytest.raises(ParamsError):
        said(llm, **params)
    assert not llm.engine.has_unfinished_requests


def test_log_probabilities_of_a_prompt_are_those_of_the_model(llm):
    from engine.core.options import SchedulerLimits
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import original_model
    from engine.runtime.params import SamplingParams

    prompt = list(range(20, 57))
    small = LLM(
        llm.loaded,
        pool_tokens=256,
        block_size=8,
        limits=SchedulerLimits(8, 4, max_model_len=64),
        audit="full",
    )
    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=2)
    for _ in range(2):  # the second time it would be found in the prefix cache
        (output,) = small.generate(prompt, params)
        with original_model(llm.loaded) as model, torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        assert output.prompt_logprobs[0] is None
        found = [entry.logprob for entry in output.prompt_logprobs[1:]]
        wanted = expected[torch.arange(36), torch.tensor(prompt[1:])].tolist()
        assert found == pytest.approx(wanted, abs=1e-4)
        best = expected[5].topk(2).indices.tolist()
        assert [token for token, _ in output.prompt_logprobs[6].best] == best


def test_log_probabilities_of_prompts_survive_a_preemption(llm):
    from engine.core.options import SchedulerLimits
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    prompts = [list(range(start, start + 16)) for start in (10, 40, 70)]
    params = SamplingParams(max_tokens=14, temperature=0, prompt_logprobs=0)
    limits = SchedulerLimits(64, 8, max_model_len=64)
    tight = LLM(llm.loaded, pool_tokens=56, block_size=4, limits=limits, audit="full")
    calm = LLM(llm.loaded, pool_tokens=512, block_size=4, limits=limits)
    ours, theirs = tight.generate(prompts, params), calm.generate(prompts, params)
    assert tight.engine.counters.preemptions > 0
    for one, other in zip(ours, theirs, strict=True):
        assert len(one.prompt_logprobs) == 16
        assert [entry.token for entry in one.prompt_logprobs[1:]] == [
            e.token for e in other.prompt_logprobs[1:]
        ]


def test_a_prompt_is_cut_to_its_last_tokens(llm):
    whole = said(llm, list(range(20, 40))[-6:])
    assert said(llm, list(range(20, 40)), truncate_prompt_tokens=6).token_ids == whole.token_ids


def test_two_tenants_do_not_find_each_others_blocks(model_of):
    from engine.runtime.params import SamplingParams

    engine, hits = build_engine(model_of()), []
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "")):
        engine.add_request(
            name, list(range(40)), SamplingParams(max_tokens=2, temperature=0), cache_salt=salt
        )
        hits += [output.metrics.cached_tokens for output in engine.run() if output.finished]
    assert hits == [0, 0, 32, 0]


def test_nothing_is_found_after_the_prefix_cache_was_reset(model_of):
    from engine.runtime.params import SamplingParams

    engine, hits = build_engine(model_of()), []
    for name in "abc":
        engine.add_request(name, list(range(40)), SamplingParams(max_tokens=2, temperature=0))
        hits += [output.metrics.cached_tokens for output in engine.run() if output.finished]
        if name == "b":
            engine.reset_prefix_cache()
    assert hits == [0, 32, 0]
