"""The engine between its owner and the policy: news, text, metrics, and what happens when something breaks."""

import asyncio

import pytest
import torch
from serve_cases import build_engine, tokenizer
from tiers import cases

from engine.core.options import SchedulerLimits


def make(model_of, **options):
    return build_engine(model_of(), **options)


def params(**values):
    from engine.runtime.params import SamplingParams

    return SamplingParams(**{"max_tokens": 12, "temperature": 0, **values})


def finish(engine):
    """Run everything to its end: last outputs by name."""
    done = {output.request_id: output for output in engine.run() if output.finished}
    engine.scheduler.manager.check()
    assert engine.scheduler.manager.usage(None).token == 0
    return done


def ids_of(output):
    return [one.token_ids for one in output.outputs]


# -- the face --------------------------------------------------------------------------------------------------


def test_three_lines_are_enough(tmp_path, model_of):
    from engine.runtime.llm import LLM
    from engine.runtime.models.load import original_model

    with original_model(model_of()) as model:
        model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)

    llm = LLM(tmp_path)
    outputs = llm.generate(["the cat", "a dog"], params())
    assert [output.prompt for output in outputs] == ["the cat", "a dog"]
    assert all(output.outputs[0].text for output in outputs)


def test_each_prompt_may_have_parameters_of_its_own(model_of, prompts):
    from engine.runtime.llm import LLM

    llm = LLM(model_of(), pool_tokens=1024)
    outputs = llm.generate(prompts[:2], [params(max_tokens=3), params(max_tokens=5)])
    assert [len(ids_of(output)[0]) for output in outputs] == [3, 5]


def test_all_or_none_of_a_batch_is_queued(model_of, prompts):
    from engine.runtime.errors import PromptError
    from engine.runtime.llm import LLM

    llm = LLM(model_of(), pool_tokens=1024)
    with pytest.raises(PromptError, match="token id 9999 in the prompt is outside of the vocabulary"):
        llm.generate([prompts[0], [9999]], params())
    assert not llm.engine.has_unfinished_requests


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_news_come_as_asked_for(kind, model_of, prompts):
    from engine.runtime.params import OutputKind

    engine = make(model_of)
    engine.add_request("a", prompts[0], params(output_kind=OutputKind(kind)))
    news = [output.outputs[0].token_ids for output in engine.run()]
    whole = news[-1] if kind != "delta" else [token for part in news for token in part]
    assert len(whole) == 12
    sizes = {"cumulative": list(range(1, 13)), "delta": [1] * 12, "final": [12]}
    assert [len(part) for part in news] == sizes[kind]


def test_metrics_say_when_things_happened_and_what_was_cached(model_of, prompts):
    ticks = iter(range(10_000))
    from engine.runtime.engine import Engine
    from engine.runtime.options import EngineOptions

    engine = Engine(
        model_of(), EngineOptions(pool_tokens=512, block_size=8), clock=lambda: float(next(ticks))
    )
    engine.add_request("a", prompts[3], params(max_tokens=4))
    first = finish(engine)["a"].metrics
    engine.add_request("b", prompts[3], params(max_tokens=4))
    second = finish(engine)["b"].metrics
    assert first.cached_tokens == 0
    assert second.cached_tokens == 32
    assert (second.prompt_tokens, second.output_tokens, second.steps) == (40, 4, 4)
    assert (
        second.arrival_s < second.scheduled_s < second.first_token_s < second.last_token_s < second.finished_s
    )
    assert second.tpot_s == pytest.approx((second.last_token_s - second.first_token_s) / 3)
    assert second.e2e_s == second.finished_s - second.arrival_s > second.ttft_s > second.queue_s > 0


def test_the_next_turn_of_a_conversation_finds_what_was_generated(model_of, prompts):
    engine = make(model_of)
    engine.add_request("first", prompts[2], params(max_tokens=25))
    said = ids_of(finish(engine)["first"])[0]
    turn = [*prompts[2], *said, 7, 8, 9]
    engine.add_request("second", turn, params())
    second = finish(engine)["second"]
    assert (
        second.metrics.cached_tokens == (len(prompts[2]) + 24) // 8 * 8
    )  # the last token was never fed back
    assert ids_of(second)[0] == greedy(model_of, turn).token_ids


def test_preemptions_are_reported(model_of, prompts):
    engine = make(model_of, pool_tokens=104)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params())
    done = finish(engine)
    assert sum(output.metrics.preemptions for output in done.values()) == engine.counters.preemptions > 0


def test_the_pool_is_sized_from_bytes_and_says_so(model_of):
    engine = make(model_of, pool_tokens=None, kv_cache_memory_bytes=1 << 20, block_size=16)
    per_token = model_of().kv_bytes_per_token
    assert engine.capacity.blocks == (1 << 20) // per_token // 16 - 1
    assert engine.capacity.bytes == engine.runner.pool.bytes
    tokens = engine.capacity.tokens
    assert str(engine.capacity) == f"KV pool: {tokens // 16:,} blocks of 16 = {tokens:,} tokens, 1.0 MiB"


def test_a_budget_that_holds_no_block_is_refused(model_of):
    from engine.runtime.errors import ModelError

    with pytest.raises(ModelError, match="holds no block of 16 tokens; raise kv_cache_memory_bytes"):
        make(model_of, pool_tokens=None, kv_cache_memory_bytes=1000, block_size=16)


# -- how a sequence ends ---------------------------------------------------------------------------------------


def greedy(model_of, prompt, **values):
    engine = make(model_of)
    engine.add_request("a", prompt, params(**values))
    return finish(engine)["a"].outputs[0]


def test_a_stop_token_ends_a_sequence_and_is_its_last(model_of, prompts):
    whole = greedy(model_of, prompts[0]).token_ids
    cut = greedy(model_of, prompts[0], stop_token_ids=[whole[4]])
    assert cut.token_ids == whole[: whole.index(whole[4]) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", whole[4])


def test_the_models_end_token_counts_unless_ignored(model_of, prompts, monkeypatch):
    from dataclasses import replace

    whole = greedy(model_of, prompts[0]).token_ids
    ending = replace(model_of(), end_ids=(whole[3],))
    assert len(greedy(lambda: ending, prompts[0]).token_ids) == whole.index(whole[3]) + 1
    assert greedy(lambda: ending, prompts[0], ignore_eos=True).token_ids == whole


def test_samples_of_a_group_end_one_by_one(model_of, prompts):
    engine = make(model_of)
    asked = params(n=4, temperature=1.0, seed=1, max_tokens=20)
    engine.add_request("whole", prompts[1], asked)
    whole = ids_of(finish(engine)["whole"])
    stop = whole[2][5]
    engine.add_request(
        "cut", prompts[1], params(n=4, temperature=1.0, seed=1, max_tokens=20, stop_token_ids=[stop])
    )
    cut = finish(engine)["cut"]
    assert ids_of(cut) == [ids[: ids.index(stop) + 1] if stop in ids else ids for ids in whole]
    assert {one.finish_reason for one in cut.outputs} == {"stop", "length"}


def test_a_group_whose_samples_have_all_ended_ends_early(model_of, prompts):
    engine = make(model_of)
    every = list(range(512))
    engine.add_request("a", prompts[0], params(n=3, temperature=1.0, stop_token_ids=every))
    done = finish(engine)["a"]
    assert [len(ids) for ids in ids_of(done)] == [1, 1, 1]
    assert engine.counters.steps == 1


def test_text_is_never_half_a_character(model_of):
    words = tokenizer()
    from engine.runtime.text import Detokenizer

    text = Detokenizer(words)
    seen = ["".join(_steps(text, words.encode("naïve café 日本 🙂")))]
    assert seen == ["naïve café 日本 🙂"]


def _steps(text, ids):
    shown = 0
    for token in ids:
        text.add([token])
        assert "\N{REPLACEMENT CHARACTER}" not in text.text
        yield text.text[shown:]
        shown = len(text.text)


def test_bytes_are_tokens_where_there_is_no_tokenizer():
    from engine.runtime.text import ByteTokenizer

    words = ByteTokenizer(3)
    assert words.decode(words.encode("añ")) == "añ"
    assert words.decode([900]) == "<900>"


# -- limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": 0}, "n: 0 is not 1 or more"),
        ({"n": 16385}, "n: 16385 is not between 1 and 16384"),
        ({"temperature": 1e300}, "temperature: 1e\\+300 is not between 0 and 2"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": 0.0}, "top_p: 0.0"),
        ({"top_k": -2}, "top_k: -2"),
        ({"min_p": 1.5}, "min_p: 1.5 is not between 0 and 1"),
        ({"logprobs": 21}, "logprobs: 21 is not between 0 and 20"),
        ({"stop": ""}, "stop: must be strings, none of them empty"),
        ({"beam_width": 2, "n": 2}, "n: beam search returns beam_width sequences"),
        ({"n": 2, "temperature": 0}, "n: 2 samples at temperature 0 would all be the same"),
        ({"beam_width": 2, "stop": "x"}, "beam search supports neither stop strings"),
        ({"early_stopping": "always"}, "early_stopping: 'always'"),
    ],
    ids=str,
)
def test_parameters_that_mean_nothing_are_refused_by_name(values, words):
    from engine.runtime.errors import ParamsError

    with pytest.raises(ParamsError, match=words) as caught:
        params(**{"temperature": 1.0, **values})
    assert words.startswith(caught.value.field) or "beam" in words


def test_what_can_never_be_served_is_refused_and_nothing_is_queued(model_of, prompts):
    from engine.core.errors import NeverFitsError
    from engine.runtime.errors import ParamsError, PromptError

    engine = make(model_of, pool_tokens=96)
    for prompt, values, error, words in (
        ([], {}, PromptError, "empty"),
        (range(100), {}, PromptError, "prompt and output together take 96 at most"),
        (prompts[1], {"max_tokens": 90}, PromptError, "max_tokens is 90"),
        (
            prompts[1],
            {"n": 70, "temperature": 1.0},
            ParamsError,
            "n: 70 sequences; this engine runs 64 at most",
        ),
        (prompts[1], {"beam_width": 70}, ParamsError, "beam_width: 70 sequences"),
        (prompts[1], {"n": 20, "temperature": 1.0}, NeverFitsError, "needs .* blocks"),
        (prompts[1], {"stop_token_ids": [600]}, ParamsError, "stop_token_ids: 600"),
    ):
        with pytest.raises(error, match=words):
            engine.add_request("x", list(prompt), params(**values))
    assert not engine.has_unfinished_requests
    engine.add_request("y", prompts[1], params())
    assert finish(engine)["y"].error is None


def test_a_name_is_used_by_one_live_request(model_of, prompts):
    from engine.runtime.errors import RequestError

    engine = make(model_of)
    engine.add_request("a", prompts[0], params())
    with pytest.raises(RequestError, match="'a' is already running or waiting"):
        engine.add_request("a", prompts[0], params())


# -- what breaks -----------------------------------------------------------------------------------------------


def test_poison_that_one_request_reads_ends_that_request_alone(model_of, prompts):
    from engine.runtime.errors import NaNLogitsError

    engine = make(model_of, audit="off")
    for name, prompt in (("bad", prompts[1]), ("good", prompts[3])):
        engine.add_request(name, prompt, params())
    engine.step()
    (bad,) = [g for g in engine.scheduler.running if g.request.prompt_tokens == len(prompts[1])]
    engine.runner.pool.poison([int(bad.sequences[0].table[0])])
    done = finish(engine)
    assert isinstance(done["bad"].error, NaNLogitsError)
    assert "step 1, request 0 branch 0" in str(done["bad"].error)
    assert done["bad"].outputs[0].finish_reason == "error"
    assert ids_of(done["good"])[0] == greedy(model_of, prompts[3]).token_ids


def test_what_a_poisoned_request_left_in_the_cache_is_not_found_again(model_of, prompts):
    engine = make(model_of, audit="off")
    engine.add_request("bad", prompts[3], params())
    engine.step()
    engine.runner.pool.poison([int(engine.scheduler.running[0].sequences[0].table[0])])
    finish(engine)
    engine.add_request("again", prompts[3], params())
    done = finish(engine)["again"]
    assert done.metrics.cached_tokens == 0
    assert ids_of(done)[0] == greedy(model_of, prompts[3]).token_ids


@cases(
    "decoding",
    [{}, {"n": 2, "temperature": 1.0}, {"beam_width": 2}],
    day=4,
    ids=str,
)
@pytest.mark.parametrize("failing_step", [0, 1, 3])
def test_out_of_memory_ends_the_requests_of_the_step_and_the_engine_serves_on(
    decoding, failing_step, model_of, prompts, monkeypatch
):
    from engine.runtime.errors import StepError

    engine = make(model_of, limits=SchedulerLimits(24, 8, max_model_len=128), audit="off")
    engine.add_request("hit", prompts[3], params(**decoding))
    for _ in range(failing_step):
        engine.step()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_forward", fail)
        (lost,) = engine.step()
    assert isinstance(lost.error, StepError)
    assert f"step {failing_step} with 1 requests failed: CUDA out of memory" in str(lost.error)
    engine.scheduler.manager.check()
    engine.add_request("after", prompts[3], params())
    done = finish(engine)["after"]
    assert done.metrics.cached_tokens == 0  # blocks that were to be filled then hold nothing
    assert ids_of(done)[0] == greedy(model_of, prompts[3]).token_ids


@pytest.mark.parametrize("error", [OverflowError("too large"), ValueError("odd"), KeyError("lost")], ids=repr)
def test_whatever_a_step_raises_ends_its_requests_and_no_others(error, model_of, prompts, monkeypatch):
    engine = make(
        model_of, audit="off"
    )  # the counters hold what the step would have written until it is evicted
    engine.add_request("lost", prompts[3], params())

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_forward", fail)
        (lost,) = engine.step()
    assert str(error) in str(lost.error)
    engine.add_request("after", prompts[3], params())
    assert ids_of(finish(engine)["after"])[0] == greedy(model_of, prompts[3]).token_ids


def test_wrong_books_are_never_served_on(model_of, prompts, monkeypatch):
    from engine.core.errors import CoreError

    engine = make(model_of)
    engine.add_request("one", prompts[3], params())

    def fail(*_):
        raise CoreError("a position was sampled twice")

    monkeypatch.setattr(engine.runner, "_forward", fail)
    with pytest.raises(CoreError, match="sampled twice"):
        engine.step()


class Dead:
    """A tokenizer that fails after so many calls."""

    def __init__(self, encode=True, decode=True):
        self._encode, self._decode = encode, decode

    def encode(self, text):
        if not self._encode:
            raise RuntimeError("vocabulary is gone")
        return list(text.encode())

    def decode(self, token_ids, skip_special_tokens=False):
        if not self._decode:
            raise RuntimeError("vocabulary is gone")
        return " ".join(map(str, token_ids))


def test_a_tokenizer_that_cannot_encode_fails_the_request_at_the_door(model_of):
    from engine.runtime.errors import TokenizerError

    engine = make(model_of, tokenizer=Dead(encode=False))
    with pytest.raises(TokenizerError, match="cannot encode the prompt: vocabulary is gone"):
        engine.add_request("a", "text", params())
    engine.add_request("b", [1, 2, 3], params())
    assert finish(engine)["b"].error is None


@pytest.mark.parametrize("values", [{}, {"stop": "x"}, {"beam_width": 2}], ids=str)
def test_a_tokenizer_that_cannot_decode_fails_the_request_and_no_other(values, model_of, prompts):
    from engine.runtime.errors import TokenizerError

    engine = make(model_of, tokenizer=Dead(decode=False))
    engine.add_request("text", prompts[0], params(**values))
    engine.add_request("tokens", prompts[1], params(detokenize=False))
    done = finish(engine)
    assert isinstance(done["text"].error, TokenizerError)
    assert done["tokens"].error is None
    assert len(ids_of(done["tokens"])[0]) == 12


def test_an_engine_without_a_tokenizer_takes_token_ids_alone(model_of):
    from engine.runtime.errors import TokenizerError
    from engine.runtime.llm import LLM

    with pytest.raises(TokenizerError, match="give the prompt as token ids"):
        LLM(model_of(), pool_tokens=512).generate("text")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_aborted_request_gives_its_blocks_back(after, model_of, prompts):
    engine = make(model_of, limits=SchedulerLimits(24, 8, max_model_len=128))
    engine.add_request("gone", prompts[3], params(n=2, temperature=1.0))
    engine.add_request("stays", prompts[1], params())
    for _ in range(after):
        engine.step()
    assert engine.abort("gone")
    assert not engine.abort("gone")
    done = finish(engine)
    assert done["gone"].outputs[0].finish_reason == "abort"
    assert ids_of(done["stays"])[0] == greedy(model_of, prompts[1]).token_ids


# -- streams ---------------------------------------------------------------------------------------------------


def test_async_streams_bring_every_token_and_end(model_of, prompts):
    from engine.runtime.async_engine import AsyncEngine
    from engine.runtime.params import OutputKind

    engine = make(model_of)

    async def read(served, number, prompt):
        asked = params(output_kind=OutputKind.DELTA)
        return [
            token
            async for output in served.generate(str(number), prompt, asked)
            for token in output.outputs[0].token_ids
        ]

    async def all_of_them():
        served = AsyncEngine(engine)
        served.start()
        try:
            return await asyncio.gather(*(read(served, n, p) for n, p in enumerate(prompts)))
        finally:
            served.stop()

    assert asyncio.run(all_of_them()) == [greedy(model_of, prompt).token_ids for prompt in prompts]


def test_streams_of_an_engine_that_dies_end_with_the_reason(model_of, prompts, monkeypatch):
    from engine.runtime.async_engine import AsyncEngine
    from engine.runtime.errors import EngineDeadError

    engine = make(model_of)

    async def ask():
        served = AsyncEngine(engine)
        served.start()
        monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        with pytest.raises(EngineDeadError, match="division by zero"):
            await anext(served.generate("a", prompts[0], params()))
        assert not served.alive
        with pytest.raises(EngineDeadError, match="does not run"):
            await anext(served.generate("b", prompts[0], params()))

    asyncio.run(ask())
