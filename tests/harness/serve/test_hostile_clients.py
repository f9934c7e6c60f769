"""Clients that send nonsense, too much, or nothing at all: a 4xx that says so, and the server serves on."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiny_models import SHAPE

from harness.serve.limits import Connection


@pytest.fixture(scope="module", name="engine")
def engine_fixture():
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    return build_engine(load_model(ModelSpec(kv_heads=2, **SHAPE)))


@pytest.fixture(scope="module", name="address")
def address_fixture(engine):
    with served(engine, most_requests=40) as address:
        yield address


def post(address, body, path="/v1/completions"):
    return httpx.post(f"{address}{path}", json=body, timeout=PATIENCE_S)


def serves(address):
    answer = post(address, {"prompt": "the cat", "max_tokens": 2, "temperature": 0})
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2


def is_idle(engine):
    return not engine.has_unfinished_requests and engine.scheduler.manager.usage(None).token == 0


HUGE = 10**30
WRONG = {
    "a prompt of nothing": {"prompt": ""},
    "no prompts": {"prompt": []},
    "an empty list of ids": {"prompt": [[]]},
    "ids outside of the vocabulary": {"prompt": [5, 512]},
    "a negative id": {"prompt": [-1]},
    "an id that no integer type holds": {"prompt": [HUGE]},
    "a length penalty beyond all numbers": {
        "prompt": [5],
        "n": 2,
        "use_beam_search": True,
        "length_penalty": 1e300,
    },
    "a flag as an id": {"prompt": [True, False]},
    "a salt of a megabyte": {"prompt": [5], "cache_salt": "a" * 2**20},
    "text and ids together": {"prompt": ["a", 5]},
    "a prompt that is a number": {"prompt": 5},
    "an over-long prompt": {"prompt": [5] * 4000},
    "more tokens than there is room for": {"prompt": [5], "max_tokens": 100_000},
    "tokens without end": {"prompt": [5], "max_tokens": HUGE},
    "fewer than none": {"prompt": [5], "max_tokens": -1},
    "more samples than run": {"prompt": [5], "n": 1000},
    "samples without end": {"prompt": [5], "n": HUGE},
    "no samples": {"prompt": [5], "n": 0},
    "too many beams": {"prompt": [5], "n": 500, "use_beam_search": True},
    "a cold temperature": {"prompt": [5], "temperature": -1},
    "top_p above one": {"prompt": [5], "top_p": 1.5},
    "top_k below none": {"prompt": [5], "top_k": -7},
    "a top_k beyond every integer": {"prompt": [5], "top_k": HUGE},
    "a seed beyond every integer": {"prompt": [5], "seed": HUGE * HUGE, "top_k": -7},
    "an end token that does not exist": {"prompt": [5], "stop_token_ids": [10**9]},
    "an empty stop string": {"prompt": [5], "stop": [""]},
    "stop strings by the thousand": {"prompt": [5], "stop": ["x"] * 5000},
    "logprobs without end": {"prompt": [5], "logprobs": HUGE},
    "negative logprobs": {"prompt": [5], "logprobs": -1},
    "a priority beyond every integer": {"prompt": [5], "priority": HUGE, "n": 0},
    "an unknown field": {"prompt": [5], "mirostat": 2},
    "a list": [1, 2],
    "a string": "prompt",
    "null": None,
}


@pytest.mark.parametrize("name", WRONG)
def test_nonsense_is_a_4xx_with_an_error_body(name, address, engine):
    answer = post(address, WRONG[name])
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]
    assert is_idle(engine)


RAW = {
    "a temperature that is no number": b'{"prompt": [5], "temperature": NaN}',
    "an endless temperature": b'{"prompt": [5], "temperature": Infinity}',
    "a top_p that is no number": b'{"prompt": [5], "top_p": NaN}',
    "a length penalty that is no number": b'{"prompt": [5], "n": 2, "use_beam_search": true, "length_penalty": NaN}',
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "bytes that are no text": b'{"prompt": "\xff\xfe"}',
    "brackets by the thousand": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an unfinished body": b'{"prompt": [5',
    "nothing": b"",
}


@pytest.mark.parametrize("name", RAW)
def test_a_body_that_no_client_library_would_send_is_a_4xx(name, address):
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{address}/v1/completions", content=RAW[name], headers=headers, timeout=PATIENCE_S)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]
    assert serves(address)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}, 5],
        [{"content": "no role"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
)
def test_a_chat_that_is_none_is_a_4xx(messages, address):
    answer = post(address, {"messages": messages}, "/v1/chat/completions")
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["message"]


def test_more_prompts_than_the_server_takes_are_turned_away(address, engine):
    answer = post(address, {"prompt": [[5]] * 41, "max_tokens": 2})
    assert answer.status_code == 400  # trying again would not help
    assert "41 prompts; this server takes 40 at once" in answer.json()["error"]["message"]
    assert serves(address)


@pytest.mark.parametrize(("size", "status"), [((16 << 20) - 14, 400), ((16 << 20) - 13, 413)])
def test_a_body_above_the_limit_is_not_parsed(size, status, address):
    body = b'{"prompt": "' + b"a" * size + b'"}'
    answer = httpx.post(f"{address}/v1/completions", content=body, timeout=PATIENCE_S)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert serves(address)


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_no_tokens_of_the_longest_sequence_hold_is_not_encoded(
    chat, address, engine, monkeypatch
):
    most = 128 * max(map(len, engine.tokenizer.get_vocab()))
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *rest, **more: pytest.fail("encoded"))
    monkeypatch.setattr(
        type(engine.tokenizer), "apply_chat_template", lambda *rest, **more: pytest.fail("encoded")
    )
    text = "a" * (most + 1)
    place, body = (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        if chat
        else ("/v1/completions", {"prompt": text})
    )
    answer = post(address, body, place)
    assert answer.status_code == 400
    assert f"{most + 1:,} characters; allowed are {most:,}" in answer.json()["error"]["message"]


def test_connections_that_never_send_a_request_stop_nobody(address):
    place = urlsplit(address)
    idle = [socket.create_connection((place.hostname, place.port)) for _ in range(50)]
    for one in idle[::2]:
        one.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{")
    try:
        assert serves(address)
    finally:
        for one in idle:
            one.close()
    assert serves(address)


def test_clients_that_come_and_go_leave_nothing_behind(address, engine):
    async def come_and_go(client, number):
        body = {
            "prompt": [number % 500] * 9,
            "max_tokens": 100,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        try:
            async with asyncio.timeout(0.01 * (number % 9)):
                await client.post("/v1/completions", json=body)
        except (TimeoutError, httpx.HTTPError):
            return

    async def all_of_them():
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(come_and_go(client, number) for number in range(120)))

    asyncio.run(all_of_them())
    assert serves(address)  # after this, the server has read what the clients before had sent
    assert wait_until(lambda: is_idle(engine))
    engine.scheduler.manager.check()
    assert not engine.scheduler.stats
    assert serves(address)


# -- clients that are slow ----------------------------------------------------------------------------------------


def answer_to(address, head, wait_s=PATIENCE_S):
    """What the server sends to a client that sends `head` and nothing more, until it closes the connection."""
    at = urlsplit(address)
    with socket.create_connection((at.hostname, at.port), timeout=wait_s) as client:
        client.sendall(head)
        parts = []
        while part := client.recv(4096):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"])
def test_a_request_whose_head_never_ends_is_closed(head, address, monkeypatch):
    monkeypatch.setattr("harness.serve.limits.HEAD_S", 0.05)
    assert answer_to(address, head) == b""


def test_what_is_written_does_not_wait_until_the_client_has_acknowledged_what_came_before(
    address, monkeypatch
):
    received, at_once = Connection.data_received, []

    def noting(connection, data):
        ours = connection.transport.get_extra_info("socket")
        at_once.append(ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", noting)
    assert serves(address)
    assert at_once
    assert all(at_once)


def test_a_body_that_does_not_go_on_is_a_408(address, monkeypatch):
    monkeypatch.setattr("harness.serve.limits.BODY_S", 0.05)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\nconnection: close\r\n\r\n{"
    assert answer_to(address, head).startswith(b"HTTP/1.1 408")


def test_large_bodies_are_given_one_after_the_other_and_others_between_them(address, monkeypatch):
    """Parsing one keeps all others waiting; their parts arrive at once."""
    monkeypatch.setattr("harness.serve.limits.GAP_S", 0.2)
    large = {"prompt": "a", "cache_salt": "a" * (2**20 + 1)}
    begun = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        sent = [pool.submit(post, address, large) for _ in range(4)]
        assert serves(address)
        assert {one.result().status_code for one in sent} == {400}
    assert time.perf_counter() - begun >= 3 * 0.2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/completions",
            {"prompt": "wait for me" + "." * 600, "max_tokens": 1, "truncate_prompt_tokens": 8},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "wait for me"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "wait for me"}),
    ],
)
def test_a_text_that_takes_long_to_encode_stops_nobody_else(path, body, engine, address, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    encode, template = engine.tokenizer.encode, engine.tokenizer.apply_chat_template

    def slowly(work, text, *given, **named):
        if "wait for me" in str(text):
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return work(text, *given, **named)

    monkeypatch.setattr(engine.tokenizer, "encode", partial(slowly, encode))
    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", partial(slowly, template))
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(post, address, body, path)
        assert begun.wait(PATIENCE_S)
        assert serves(address)
        assert not slow.done()
        go_on.set()
        assert slow.result().status_code == 200


def test_a_stream_that_a_stop_interrupts_ends_with_an_event_that_says_so():
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    engine, stop = build_engine(load_model(ModelSpec(kv_heads=2, **SHAPE))), []
    step = engine.step

    def one_step():
        if engine.counters.steps == 3:
            stop[0]()
        return step()

    engine.step = one_step
    body = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with (
        served(engine, stop=stop) as address,
        httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer,
    ):
        lines = [line for line in answer.iter_lines() if line]
    assert "the engine has ended" in lines[-2]
    assert lines[-1] == "data: [DONE]"
