"""The server, driven by the official OpenAI client over a real socket."""

import asyncio
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiers import tier

CLIENTS = tier(50, 500)
LOADED = {}


def loaded():
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    if not LOADED:
        shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
        LOADED["model"] = load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape))
    return LOADED["model"]


@pytest.fixture(scope="module", name="engine")
def engine_fixture():
    import torch

    torch.set_num_threads(1)
    return build_engine(loaded())


@pytest.fixture(scope="module", name="address")
def address_fixture(engine):
    with served(engine) as address:
        yield address


@pytest.fixture(name="client")
def client_fixture(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def direct(engine, prompt, **params):
    """What the engine says without a server."""
    from engine.runtime.llm import LLM
    from engine.runtime.params import SamplingParams

    llm = LLM(engine.loaded, tokenizer=engine.tokenizer, pool_tokens=2048)
    return llm.generate(prompt, SamplingParams(**params))[0]


def is_idle(engine):
    return not engine.has_unfinished_requests and engine.scheduler.manager.usage(None).token == 0


def test_a_completion_is_what_the_engine_says(client, engine):
    answer = client.completions.create(model="tiny", prompt="the cat sat", max_tokens=12, temperature=0)
    expected = direct(engine, "the cat sat", max_tokens=12, temperature=0).outputs[0]
    assert answer.choices[0].text == expected.text != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(engine.tokenizer.encode("the cat sat"))


def test_a_stream_adds_up_to_the_whole(client):
    asked = {"model": "tiny", "prompt": "quick brown", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert len(chunks) > 10
    assert chunks[-1].usage.completion_tokens == 20
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"


def test_a_stream_can_have_the_usage_so_far_in_every_chunk(client):
    """GuideLLM and `vllm bench` ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"model": "tiny", "prompt": "quick brown", "max_tokens": 6, "temperature": 0}
    chunks = list(client.completions.create(**asked, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 5, 6, 6]
    talk = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 3,
        "n": 2,
        "seed": 1,
    }
    chunks = list(client.chat.completions.create(**talk, stream=True, stream_options=options))
    for index in (0, 1):  # of each sequence, as in vLLM
        mine = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        assert [chunk.usage.completion_tokens for chunk in mine] == [0, 1, 2, 3]
    assert chunks[-1].usage.completion_tokens == 6


def test_a_chat_uses_the_template(client, engine):
    messages = [{"role": "system", "content": "sit"}, {"role": "user", "content": "the fox"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=9, temperature=0)
    text = "system: sit\nuser: the fox\nassistant: "
    assert (
        answer.choices[0].message.content == direct(engine, text, max_tokens=9, temperature=0).outputs[0].text
    )
    assert answer.choices[0].message.role == "assistant"


def test_a_streamed_chat_opens_with_its_role(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a dog"}]}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_several_prompts_and_samples_have_their_places(client):
    asked = {"model": "tiny", "prompt": ["the cat", "a mat"], "n": 2, "max_tokens": 6, "seed": 5}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    parts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in client.completions.create(**asked, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert [parts[index] for index in range(4)] == [choice.text for choice in answer.choices]


def test_token_ids_are_a_prompt_too(client, engine):
    ids = engine.tokenizer.encode("the lazy dog")
    answers = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0).choices[0].text
        for prompt in (ids, [ids], "the lazy dog")
    ]
    assert len(set(answers)) == 1


def test_beams_come_best_first(client, engine):
    answer = client.completions.create(
        model="tiny", prompt="the fox", max_tokens=8, n=3, extra_body={"use_beam_search": True}
    )
    expected = direct(engine, "the fox", max_tokens=8, beam_width=3)
    assert [choice.text for choice in answer.choices] == [beam.text for beam in expected.outputs]


def test_a_stop_string_is_cut_off_and_never_shown_in_a_stream(client, engine):
    text = direct(engine, "over that", max_tokens=24, temperature=0).outputs[0].text
    stop = text[5:9]
    asked = {"model": "tiny", "prompt": "over that", "max_tokens": 24, "temperature": 0, "stop": [stop]}
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_logprobs_name_the_best_tokens(client):
    answer = client.completions.create(model="tiny", prompt="again", max_tokens=4, temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == 4
    for logprob, best in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert max(best.values()) == pytest.approx(logprob)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2, 2, 2]


def test_a_prefix_that_comes_again_is_reported_as_cached(client):
    prompt = "brown fox jump over that lazy dog and the quick cat"
    for _ in range(2):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    assert answer.usage.prompt_tokens_details.cached_tokens >= 8


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1}, "temperature: -1"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n: 0 is not 1 or more"),
        ({"n": 65}, "n: 65 sequences; this engine runs 64 at most"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 500}, "output together take 128 at most"),
        ({"prompt": "cat " * 200}, "prompt and output together take 128 at most"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": []}, "at least one is needed"),
        ({"prompt": [1, 99999]}, "token id 99999"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "x", "logprobs": 99}, "logprobs"),
        ({"stop": ["a"] * 40}, "stop"),
        ({"extra_body": {"use_beam_search": True}, "n": 200}, "beam_width: 200 sequences"),
        ({"extra_body": {"best_off": 2}}, "best_off"),
        ({"suffix": "x"}, "suffix: this server knows only"),
        ({"best_of": 3}, "best_of"),
        ({"stream": True, "max_tokens": 500}, "output together take 128 at most"),
    ],
    ids=str,
)
def test_what_is_wrong_is_a_400_that_says_so(client, wrong, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "the cat", **wrong})
    assert words in caught.value.message


def test_a_body_that_is_no_json_is_a_400(address):
    head = {"content-type": "application/json"}
    answer = httpx.post(f"{address}/v1/completions", content=b"{", headers=head, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="has 'tiny'"):
        client.completions.create(model="gpt-9", prompt="x")


def test_an_unknown_address_is_not_found(address):
    assert httpx.get(f"{address}/v2/completions", timeout=PATIENCE_S).json()["error"]["code"] == 404


def test_health_and_metrics(client, address, engine):
    client.completions.create(model="tiny", prompt="metrics", max_tokens=5, temperature=0)
    assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200

    def page():
        return httpx.get(f"{address}/metrics", timeout=PATIENCE_S).text

    def value(name):
        lines = [line for line in page().splitlines() if line and not line.startswith("#")]
        values = dict(line.rsplit(" ", 1) for line in lines)
        first, second = ('{model_name="tiny",engine="0"}', '{engine="0",model_name="tiny"}')
        return float(values.get(f"vllm:{name}{first}") or values[f"vllm:{name}{second}"])

    assert value("generation_tokens_total") == engine.counters.generation_tokens >= 5
    # an answer is sent before the histograms and the books take it in
    assert wait_until(lambda: value("time_to_first_token_seconds_count") >= 1)
    assert wait_until(lambda: value("inter_token_latency_seconds_sum") > 0)
    assert wait_until(lambda: value("num_requests_running") == value("kv_cache_usage_perc") == 0)
    assert wait_until(lambda: 'finished_reason="length"' in page())


@pytest.fixture
def unending(engine, monkeypatch):
    """From the twentieth output on, no request gets any further: only a client that goes can end it."""
    step, outputs = engine.step, []

    def step_or_rest():
        if len(outputs) >= 20:
            time.sleep(0.001)
            return []
        outputs.extend(found := step())
        return found

    monkeypatch.setattr(engine, "step", step_or_rest)


@pytest.mark.usefixtures("unending")
def test_a_client_that_goes_in_the_middle_of_a_stream_gives_its_blocks_back(address, engine):
    body = {"model": "tiny", "prompt": "the cat", "max_tokens": 120, "stream": True, "ignore_eos": True}
    aborted = engine.counters.finished["abort"]
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    assert wait_until(lambda: engine.counters.finished["abort"] == aborted + 1 and is_idle(engine))


@pytest.mark.usefixtures("unending")
def test_a_client_that_goes_before_the_answer_gives_its_blocks_back(address, engine):
    body = json.dumps({"model": "tiny", "prompt": ["the cat"] * 30, "max_tokens": 120}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    aborted = engine.counters.finished["abort"]
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        assert wait_until(lambda: engine.scheduler.manager.usage(None).token)
    assert wait_until(lambda: engine.counters.finished["abort"] > aborted and is_idle(engine))
    engine.scheduler.manager.check()


def test_many_clients_at_once(address, engine):
    """All are served, each with its own answer, and nothing is left behind."""

    async def ask(client, number):
        body = {
            "model": "tiny",
            "prompt": [number % 7 + 3, 9, number % 500],
            "max_tokens": 3,
            "temperature": 0,
        }
        if number % 5 == 0:  # some stream
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: {")]
            return "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        return answer.json()["choices"][0]["text"]

    async def all_of_them():
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=address, limits=limits, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(CLIENTS)))

    answers = asyncio.run(all_of_them())
    for number in (0, 1, CLIENTS // 2, CLIENTS - 1):
        prompt = [number % 7 + 3, 9, number % 500]
        assert answers[number] == direct(engine, prompt, max_tokens=3, temperature=0).outputs[0].text
    assert wait_until(lambda: is_idle(engine))
    engine.scheduler.manager.check()


def test_a_priority_that_nothing_heeds_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="start it with scheduler"):
        client.completions.create(model="tiny", prompt="the cat", max_tokens=2, extra_body={"priority": 3})


def test_a_priority_is_taken_where_the_scheduler_heeds_it():
    from engine.core.options import SchedulerLimits, Scheduling

    limits = SchedulerLimits(256, 64, max_model_len=128, policy=Scheduling.priority)
    with (
        served(build_engine(loaded(), limits=limits)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.completions.create(
            model="tiny", prompt="the cat", max_tokens=2, extra_body={"priority": 3}
        )
    assert answer.usage.completion_tokens == 2
