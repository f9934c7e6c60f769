"""What vLLM's server offers beyond OpenAI's interface, asked for over a real socket."""

import json
import math
from dataclasses import replace

import httpx
import openai
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiers import cases

USAGE = {"include_usage": True}


@pytest.fixture(scope="module", name="engine")
def engine_fixture():
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
    return build_engine(load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape)))


@pytest.fixture(scope="module", name="address")
def address_fixture(engine):
    with served(engine) as address:
        yield address


def post(address, path, **body):
    return httpx.post(address + path, json=body, timeout=PATIENCE_S)


def choice(address, **body):
    answer = post(
        address, "/v1/completions", **{"prompt": "the cat sat", "temperature": 0, "max_tokens": 6} | body
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_ends_where_the_sequence_does_and_one_of_more_tokens_than_that_is_refused(address, stream):
    """As in vLLM: `get_max_tokens` and `TokenizeParams`."""
    asked = {"prompt": [5] * 120, "temperature": 0, "ignore_eos": True, "stream": stream}
    found = post(
        address, "/v1/completions", **asked, max_tokens=128, stream_options=USAGE if stream else None
    )
    last = found.text.split("data: ")[-2] if stream else found.text
    assert json.loads(last)["usage"]["completion_tokens"] == 8
    assert '"finish_reason": "length"' in found.text.replace('":"', '": "')
    more = post(address, "/v1/completions", **asked, max_tokens=129)
    assert more.status_code == 400
    assert more.json()["error"]["param"] == "max_tokens"
    said = [{"role": "user", "content": "a cat"}]
    for name in ("max_tokens", "max_completion_tokens"):
        chat = {"messages": said, "ignore_eos": True}
        fits, wide = (
            post(address, "/v1/chat/completions", **chat, **{name: number}) for number in (128, 129)
        )
        assert (fits.status_code, wide.status_code) == (200, 400)
        assert fits.json()["usage"]["total_tokens"] == 128


def test_what_asks_for_nothing_is_taken(address):
    neutral = {"spaces_between_special_tokens": True, "vllm_xargs": {}, "session_id": "mine"}
    assert choice(address, **neutral) == choice(address)
    said = [{"role": "user", "content": "hi"}]
    before = {"role": "assistant", "content": "ho", "refusal": None, "tool_calls": [], "audio": None}
    for talk in ([*said, before, *said], [*said, before | {"annotations": []}, *said]):
        asked = {"messages": talk, "max_tokens": 2, "top_logprobs": 0}
        assert post(address, "/v1/chat/completions", **asked).status_code == 200
    calls = [before | {"tool_calls": [{"id": "a"}]}, *said]
    wrong = post(address, "/v1/chat/completions", messages=calls)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")
    assert post(address, "/v1/completions", prompt="x", vllm_xargs={"a": 1}).status_code == 400


def test_an_effort_reaches_the_template_as_in_vllm():
    """`ChatCompletionRequest.build_chat_params` there; `advise chat.jsonl` counts such prompts alike."""
    from serve_cases import tokenizer

    from engine.runtime.text import ByteTokenizer
    from harness.serve.protocol import ChatRequest

    words, plain = tokenizer(), ByteTokenizer()
    words.chat_template = "{{ messages[0]['content'] }} {{ enable_thinking }} {{ reasoning_effort }}"

    def prompt(by, **more):
        return by.decode(ChatRequest(messages=[{"role": "user", "content": "hi"}], **more).prompt_ids(by))

    own = {"enable_thinking": True}
    assert prompt(words) == "hi  "
    assert prompt(words, reasoning_effort="none") == "hi False none"
    assert prompt(words, reasoning_effort="low") == "hi True low"
    assert prompt(words, reasoning_effort="none", chat_template_kwargs=own) == "hi True none"
    assert prompt(plain, reasoning_effort="none") == prompt(plain)


def test_a_client_names_its_answer(address):
    body = {"prompt": "the cat", "max_tokens": 2}
    headers = {"X-Request-Id": "mine"}
    for path, prefix in (("/v1/completions", "cmpl-"), ("/v1/chat/completions", "chatcmpl-")):
        asked = body if prefix == "cmpl-" else {"messages": [{"role": "user", "content": "x"}]}
        by_field = post(address, path, **asked, request_id="own")
        by_header = httpx.post(
            address + path, json=asked | {"request_id": "own"}, headers=headers, timeout=PATIENCE_S
        )
        assert (by_field.json()["id"], by_header.json()["id"]) == (prefix + "own", prefix + "mine")


@pytest.mark.parametrize("chat", [False, True])
def test_no_answer_has_an_infinity_which_is_no_json(chat):
    """Of a token that the model's own logits exclude, as vLLM."""
    from engine.runtime.decoding.generation import TokenLogprobs
    from engine.runtime.requests import CompletionOutput, RequestMetrics, RequestOutput
    from harness.serve.answers import Envelope
    from harness.serve.protocol import AnswerOptions

    never = -math.inf
    entry = TokenLogprobs(7, never, 9, ((5, -0.5), (6, never)))
    one = CompletionOutput(0, "x", [7], [entry])
    request = RequestOutput("a", None, [1, 7], [one], True, RequestMetrics(0.0), None, [None, entry])
    envelope = Envelope("tiny", chat, None, AnswerOptions(prompt_logprobs=True))
    body = [envelope.choice(request, one, 0, chunk=False), envelope.prompt_fields(request)]
    assert json.dumps(body, allow_nan=False).count("-9999.0") == (4 if chat else 7)


def test_an_echo_puts_the_prompt_in_front(address):
    assert choice(address, echo=True)["text"] == "the cat sat" + choice(address)["text"]


def test_an_echo_beside_token_ids_has_the_prompt_among_them_alone(address, engine):
    """As in vLLM, which takes the prompt for an empty text then."""
    found = choice(address, echo=True, return_token_ids=True)
    assert found["text"] == choice(address)["text"]
    assert found["prompt_token_ids"] == engine.tokenizer.encode("the cat sat")


def test_no_tokens_but_an_echo_score_the_prompt(address, engine):
    """What lm-eval's loglikelihood requests ask for."""
    ids = engine.tokenizer.encode("the cat sat on a mat")
    found = choice(address, prompt=ids, echo=True, max_tokens=0, logprobs=1)
    longer = choice(address, prompt=ids, echo=True, max_tokens=1, logprobs=1)
    assert found["text"] == "the cat sat on a mat"
    assert found["finish_reason"] == "length"
    scores = found["logprobs"]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["text_offset"]) == len(ids)
    assert all(score < 0 for score in scores["token_logprobs"][1:])
    assert longer["logprobs"]["token_logprobs"][: len(ids)] == scores["token_logprobs"]


def test_a_scored_prompt_is_what_the_model_says(address, engine):
    import torch

    from engine.runtime.models.load import original_model

    ids = engine.tokenizer.encode("a quick brown fox")
    found = choice(address, prompt=ids, echo=True, max_tokens=0, logprobs=0)["logprobs"]["token_logprobs"]
    with original_model(engine.loaded) as model, torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    wanted = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
    assert found[1:] == pytest.approx(wanted, abs=1e-4)


def test_nothing_is_shown_and_counted_for_no_tokens(address):
    answer = post(address, "/v1/completions", prompt="the cat", max_tokens=0).json()
    assert answer["choices"][0]["text"] == ""
    assert answer["usage"]["completion_tokens"] == 0


def test_log_probabilities_of_the_prompt_by_token_id(address, engine):
    ids = engine.tokenizer.encode("the cat sat")
    scores = choice(address, prompt=ids, prompt_logprobs=2)["prompt_logprobs"]
    assert scores[0] is None
    for token, entry in zip(ids[1:], scores[1:], strict=True):
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert 2 <= len(entry) <= 3


def test_token_ids_come_back(address, engine):
    found = choice(address, return_token_ids=True)
    assert found["prompt_token_ids"] == engine.tokenizer.encode("the cat sat")
    assert engine.tokenizer.decode(found["token_ids"]) == found["text"]


def test_token_ids_come_back_in_a_stream(address, engine):
    import json

    body = {
        "prompt": "the cat",
        "max_tokens": 4,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    first, *rest = [line["choices"][0] for line in lines]
    assert first["prompt_token_ids"] == engine.tokenizer.encode("the cat")
    assert all("prompt_token_ids" not in one for one in rest)
    assert sum(len(one["token_ids"]) for one in (first, *rest)) == 4


@pytest.mark.parametrize("echo", [False, True])
def test_the_chunks_of_a_stream_go_on_with_the_places_of_their_tokens(address, echo):
    import json

    asked = {
        "prompt": "the cat",
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 1,
        "echo": echo,
    }
    body = asked | {"stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    chunks = [line["choices"][0]["logprobs"]["text_offset"] for line in lines]
    assert len(chunks) > 1
    assert [place for chunk in chunks for place in chunk] == choice(address, **asked)["logprobs"][
        "text_offset"
    ]


def test_tokens_can_be_called_by_their_ids(address):
    found = choice(address, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    assert found["logprobs"]["tokens"] == [f"token_id:{token}" for token in found["token_ids"]]


def test_penalties_bias_and_lists_reach_the_engine(address, engine):
    for bias in (100, 1e9):  # taken for 100, as vLLM
        assert choice(address, logit_bias={"41": bias}, return_token_ids=True)["token_ids"] == [41] * 6
    allowed = [40, 41, 42]
    found = choice(address, allowed_token_ids=allowed, temperature=1, return_token_ids=True)["token_ids"]
    assert set(found) <= set(allowed)
    penalised = choice(
        address,
        allowed_token_ids=allowed,
        frequency_penalty=2,
        repetition_penalty=100.0,
        return_token_ids=True,
    )
    assert len(set(penalised["token_ids"])) > 1
    (a,) = engine.tokenizer.encode("a")
    kept = choice(address, logit_bias={str(a): 100}, bad_words=["a"], return_token_ids=True)["token_ids"]
    assert a not in kept


def test_a_prompt_is_cut(address, engine):
    ids = engine.tokenizer.encode("the cat sat on a mat")
    found = choice(address, prompt=ids, truncate_prompt_tokens=4, return_token_ids=True)
    assert found["prompt_token_ids"] == ids[-4:]


def test_tenants_with_different_salts_do_not_share_blocks(address):
    def cached(**salt):
        body = {"prompt": [7, 8, 9, 10] * 8, "max_tokens": 1} | salt
        usage = post(address, "/v1/completions", **body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="one"), cached(cache_salt="two"), cached(cache_salt="one")] == [0, 0, 24]
    assert httpx.post(f"{address}/reset_prefix_cache", timeout=PATIENCE_S).status_code == 200
    assert cached(cache_salt="one") == 0


def test_texts_and_tokens_are_turned_into_each_other(address, engine):
    found = post(address, "/tokenize", prompt="the cat", return_token_strs=True).json()
    assert found["tokens"] == engine.tokenizer.encode("the cat")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 128)
    assert "".join(found["token_strs"]) == "the cat"
    assert post(address, "/detokenize", tokens=found["tokens"]).json() == {"prompt": "the cat"}
    messages = [{"role": "user", "content": "the fox"}]
    chat = post(address, "/tokenize", messages=messages).json()["tokens"]
    assert engine.tokenizer.decode(chat) == "user: the fox\nassistant: "


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a", "model": "other"}),
        ("/detokenize", {"tokens": ["a"]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**30]}),
    ],
)
def test_what_cannot_be_turned_is_a_4xx(path, body, address):
    assert 400 <= post(address, path, **body).status_code < 500


def test_the_model_is_found_by_its_name(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("huge")


def test_version_and_ping_answer(address):
    assert httpx.get(f"{address}/version", timeout=PATIENCE_S).json()["version"]
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{address}/ping", timeout=PATIENCE_S).status_code == 200


def test_chat_template_values_reach_the_template(engine, address):
    engine.tokenizer.chat_template += "{{ mood }}"
    try:
        body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"mood": "merry"}}
        found = post(address, "/tokenize", **body).json()["tokens"]
        assert engine.tokenizer.decode(found).endswith("assistant: merry")
        wrong = body | {"chat_template_kwargs": {"tokenize": False}}
        assert post(address, "/v1/chat/completions", **wrong).status_code == 400
    finally:
        engine.tokenizer.chat_template = engine.tokenizer.chat_template.removesuffix("{{ mood }}")


def test_a_conversation_is_gone_on_with(engine, address):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the ca"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert engine.tokenizer.decode(post(address, "/tokenize", **body).json()["tokens"]).endswith("the ca")
    del body["add_generation_prompt"]
    assert engine.tokenizer.decode(post(address, "/tokenize", **body).json()["tokens"]).endswith("the ca")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"continue_final_message": True, "add_generation_prompt": True}),
        ("/tokenize", {"continue_final_message": True, "add_generation_prompt": True}),
        ("/tokenize", {"add_special_tokens": True}),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(address, path, asked):
    """vLLM refuses the two together, and puts special tokens in front of a template's own."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the ca"}]
    found = post(address, path, messages=messages, **asked)
    assert found.status_code == 400
    assert next(iter(asked)) in found.json()["error"]["message"]
    neutral = dict.fromkeys(asked, False)
    assert post(address, "/tokenize", messages=messages, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"stop": ""}, "stop", "stop: must be strings, none of them empty"),
        ({"stop": ["a"] * 5}, "stop", "stop: at most 4 strings"),
        ({"seed": 2**63}, "seed", "seed: Input should be less than"),
        ({"temperature": 2.5}, "temperature", "temperature: 2.5 is not between 0 and 2"),
        ({"best_of": 3}, "best_of", "best_of: this server knows only 1, found 3"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs",
            "structured_outputs: set exactly one of json, regex, choice, grammar, json_object; found regex and",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: the type json_schema and a json_schema belong together",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "response_format.type: Input"),
        ({"stream_options": {}}, "stream_options", "stream_options: only with stream=true"),
        ({"temperature": "hot"}, "temperature", "temperature: Input should be"),
        ({"prompt": 5}, "prompt", "prompt.str: Input should be"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: 'a' is not a token id"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "prompt_logprobs: only without stream"),
        ({"prompt": [5, 5000]}, "prompt", "token id 5000 in the prompt"),
        ({"n": 500, "use_beam_search": True}, "n", "beam_width: 500 sequences"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt: String should have at least 1"),
    ],
)
def test_an_error_names_its_field(body, param, message, address):
    answer = post(address, "/v1/completions", **{"prompt": "the cat"} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == param
    assert error["message"].startswith(message)
    assert "Value error" not in error["message"]


def test_a_body_that_is_no_json_names_no_field(address):
    head = {"content-type": "application/json"}
    answer = httpx.post(f"{address}/v1/completions", content=b"{", headers=head, timeout=PATIENCE_S)
    assert answer.json()["error"]["param"] is None
    assert answer.json()["error"]["message"].startswith("the body is no JSON: ")


def test_gauges_are_right_when_the_last_client_has_gone(address, engine, monkeypatch):
    """It goes in the middle of its answer, and no step comes after it."""
    import time

    step, seen = engine.step, []

    def step_or_rest():
        if len(seen) > 3:
            time.sleep(0.001)
            return []
        seen.extend(found := step())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", step_or_rest)
        body = {"prompt": "the cat", "max_tokens": 100, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()  # kept: the connection closes with it
            assert next(lines).startswith("data: ")
            assert engine.counters.running == 1
        assert wait_until(lambda: not engine._states)
        found = httpx.get(f"{address}/metrics", timeout=PATIENCE_S).text
    gauges = dict(line.rsplit(" ", 1) for line in found.splitlines() if line and line[0] != "#")
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_cache_token_usage_perc",
    ):
        assert [float(value) for key, value in gauges.items() if key.startswith(f"vllm:{name}{{")] == [0.0]


def values_of(address):
    """The figures of the page of metrics, by name."""
    text = httpx.get(f"{address}/metrics", timeout=PATIENCE_S).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    return {key.partition("{")[0].removeprefix("vllm:"): float(value) for key, value in lines.items()}


@cases("stream", [False, True], day=1)
def test_every_gap_between_tokens_counts_once_streamed_or_not(address, engine, stream):
    asked = {"prompt": "the dog", "max_tokens": 7, "ignore_eos": True, "temperature": 0, "stream": stream}
    before, steps = values_of(address), engine.counters.steps
    assert post(address, "/v1/completions", **asked).status_code == 200
    count, ends = "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count"
    assert wait_until(lambda: values_of(address)[ends] == before[ends] + 1)
    found = values_of(address)
    assert found[count] - before[count] == 6
    counted = found["iteration_tokens_total_count"] - before["iteration_tokens_total_count"]
    assert counted == engine.counters.steps - steps


def test_a_request_that_is_ended_early_counts_its_last_gap_once(address, engine):
    count = "inter_token_latency_seconds_count"
    before, aborted = values_of(address)[count], engine.counters.finished["abort"]
    body = {"prompt": "the cat", "max_tokens": 100, "stream": True, "ignore_eos": True}
    made = engine.counters.generation_tokens
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        next(answer.iter_lines())
    assert wait_until(
        lambda: engine.counters.finished["abort"] > aborted or not engine.has_unfinished_requests
    )
    assert wait_until(
        lambda: values_of(address)[count] == before + engine.counters.generation_tokens - made - 1
    )


def test_metrics_know_the_phases_of_requests_and_the_tokens_of_steps(address, engine):
    choice(address)
    assert wait_until(lambda: values_of(address)["request_decode_time_seconds_count"] > 0)
    found = values_of(address)
    for name in ("request_prefill_time_seconds", "request_inference_time_seconds"):
        assert found[f"{name}_count"] == found["request_decode_time_seconds_count"]
    assert found["iteration_tokens_total_count"] <= engine.counters.steps
    assert found["iteration_tokens_total_sum"] > 6
    assert found["spec_decode_num_draft_tokens_total"] == 0


def test_a_step_counts_a_prompt_at_its_end_as_vllm(engine):
    """A step of a chunk alone has no output, so vLLM counts none; what was found in the cache is not computed."""
    from engine.runtime.engine import Engine
    from engine.runtime.params import SamplingParams

    limits = replace(engine.limits, max_batched_tokens=16)
    alone = Engine(engine.loaded, replace(engine.options, limits=limits), tokenizer=engine.tokenizer)
    for number, expected in enumerate(([0, 0, 41, 1], [9, 1])):
        alone.add_request(
            str(number), [*range(40)], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        )
        tokens = []
        while alone.has_unfinished_requests:
            alone.step()
            tokens.append(alone.counters.step_tokens)
        assert tokens == expected


def test_what_a_folder_says_bounds_every_request(engine):
    """vLLM's `--generation-config FOLDER`: its max_new_tokens is the most for completions and chats."""
    messages = [{"role": "user", "content": "the cat"}]
    with served(engine, defaults={"max_tokens": 5}, most_tokens=5) as address:
        for path, asked in (
            ("completions", {"prompt": "the cat"}),
            ("chat/completions", {"messages": messages}),
        ):
            for more in ({}, {"max_tokens": 9}, {"max_tokens": 3}):
                answer = post(address, f"/v1/{path}", **asked, **more, ignore_eos=True).json()
                assert answer["usage"]["completion_tokens"] == min(5, more.get("max_tokens", 5))


def test_a_key_is_asked_for_where_one_is_set():
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    loaded = load_model(
        ModelSpec(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, vocab=512)
    )
    with served(build_engine(loaded), api_keys=["first", "second"]) as address:
        for key, status in (("second", 200), ("third", 401), ("", 401)):
            head = {"authorization": f"Bearer {key}"} if key else {}
            answer = httpx.get(f"{address}/v1/models", headers=head, timeout=PATIENCE_S)
            assert answer.status_code == status
        assert answer.json()["error"]["type"] == "authentication_error"
        for path in ("/health", "/metrics", "/ping", "/version"):
            assert httpx.get(address + path, timeout=PATIENCE_S).status_code == 200
        with openai.OpenAI(base_url=f"{address}/v1", api_key="first", max_retries=0) as client:
            answer = client.completions.create(model="tiny", prompt="the cat", max_tokens=2, temperature=0)
        assert answer.usage.completion_tokens == 2
        assert post(address, "/tokenize", prompt="a").status_code == 401


def test_a_checkpoint_is_served_under_the_name_of_its_directory(tmp_path):
    from harness.config.schema import ModelConfig, RunConfig
    from harness.serve import served_name

    (tmp_path / "my-llama").mkdir()
    config = RunConfig(model=ModelConfig(path=str(tmp_path / "my-llama")))
    assert served_name(config) == "my-llama"
    assert served_name(RunConfig()) == RunConfig().model.name


def test_a_chat_in_python_is_the_servers(engine, address):
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    messages = [{"role": "user", "content": "the fox"}]
    llm = LLM(engine.loaded, tokenizer=engine.tokenizer, pool_tokens=512)
    ours = llm.chat(messages, SamplingParams(max_tokens=7, temperature=0))[0].outputs[0].text
    body = {"messages": messages, "max_tokens": 7, "temperature": 0}
    theirs = post(address, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
    assert ours == theirs
    assert [len(llm.chat([messages, messages])), len(llm.chat([messages]))] == [2, 1]


@pytest.mark.parametrize(
    "wrong", [[], "text", [[]], [{"role": "user"}], [5], [{"role": "user", "content": 5}]]
)
def test_what_is_no_conversation_is_refused(wrong, engine):
    from engine.runtime.errors import PromptError
    from engine.runtime.llm import LLM

    llm = LLM(engine.loaded, tokenizer=engine.tokenizer, pool_tokens=512)
    with pytest.raises(
        PromptError, match=r"a conversation is a list of messages|a message has|content of a message"
    ):
        llm.chat(wrong)


def test_the_output_has_the_form_that_is_asked_for(address):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    texts = ["yes", "no"]
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"enum": [5]}, "strict": True},
    }
    assert choice(address, structured_outputs={"choice": texts})["text"] in texts
    assert choice(address, response_format=schema)["text"].strip() == "5"


def test_the_openai_client_parses_an_answer_by_its_own_schema(address):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from typing import Literal

    from pydantic import BaseModel

    class Answer(BaseModel):
        colour: Literal["red", "blue"]

    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=PATIENCE_S)
    messages = [{"role": "user", "content": "the cat"}]
    found = client.chat.completions.parse(
        model="tiny", messages=messages, response_format=Answer, max_tokens=100, seed=1, temperature=1.5
    )
    assert found.choices[0].message.parsed.colour in ("red", "blue")


def test_a_form_that_cannot_be_compiled_is_refused_with_the_reason(address):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    answer = post(address, "/v1/completions", prompt="a", structured_outputs={"regex": "[ab"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert "invalid regex" in answer.json()["error"]["message"]


# -- defaults of the checkpoint ---------------------------------------------------------------------------------


def test_what_a_client_leaves_out_is_the_checkpoints_default_and_what_it_says_goes_before_it(engine):
    with served(engine, defaults={"temperature": 0.0, "max_tokens": 3}) as address:
        short = post(address, "/v1/completions", prompt="the cat").json()
        said = post(address, "/v1/completions", prompt="the cat", max_tokens=5).json()
        again = post(address, "/v1/completions", prompt="the cat", max_tokens=5, temperature=0).json()
        talk = post(address, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}]).json()
        none = post(address, "/v1/completions", prompt="the cat", max_tokens=None).json()
    # vLLM has a number of its own for completions: `normalize_null_max_tokens`
    assert short["choices"] == none["choices"]
    assert (short["usage"]["completion_tokens"], talk["usage"]["completion_tokens"]) == (16, 3)
    assert said["choices"] == again["choices"]
    assert said["usage"]["completion_tokens"] == 5


def test_a_template_sees_the_name_of_who_speaks(engine, monkeypatch):
    from harness.serve.protocol import ChatRequest

    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages[0].name }}")
    body = ChatRequest(messages=[{"role": "user", "content": "hi", "name": "the cat"}])
    assert body.prompt_ids(engine.tokenizer) == engine.tokenizer.encode("the cat")
