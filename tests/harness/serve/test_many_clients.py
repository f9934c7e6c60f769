"""Many clients at once: answers, disconnects and bodies that are too large, and nothing is left afterwards."""

import asyncio
import gc
import os

import httpx
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiers import tier

CLIENTS = tier(50, 500)
KINDS = 5


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
    with served(engine, most_requests=2 * CLIENTS) as address:
        yield address


def prompt_of(number):
    return [number % 16 + 1, 9, 2]


async def one(client, number):
    """The status of one client's request, or None where the client went away."""
    kind, body = (
        number % KINDS,
        {"prompt": prompt_of(number), "temperature": 0, "max_tokens": 6, "ignore_eos": True},
    )
    if kind == 3:
        body["prompt"] = [7] * 5000
    if kind == 4:
        body |= {"max_tokens": 100, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                return None, None  # leaves after the first line
    answer = await client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()


async def crowd(address):
    limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE_S, limits=limits) as client:
        return await asyncio.gather(*(one(client, number) for number in range(CLIENTS)))


def gauge(address, name):
    lines = httpx.get(f"{address}/metrics", timeout=PATIENCE_S).text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def is_idle(address):
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return all(gauge(address, name) == 0 for name in names)


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.nightly  # by day test_api.py has many
def test_many_clients_get_their_own_answers_and_leave_nothing(engine, address):
    alone = {
        number: httpx.post(
            f"{address}/v1/completions",
            json={"prompt": prompt_of(number), "temperature": 0, "max_tokens": 6, "ignore_eos": True},
            timeout=PATIENCE_S,
        ).json()["choices"][0]["text"]
        for number in range(16)
    }
    found = asyncio.run(crowd(address))
    for number, (status, body) in enumerate(found):
        if number % KINDS < 3:
            assert status == 200, body
            assert body["choices"][0]["text"] == alone[number % 16]
        elif number % KINDS == 3:
            assert status == 400, body
            assert body["error"]["param"] == "prompt"
    assert wait_until(lambda: is_idle(address))
    assert wait_until(lambda: not engine.has_unfinished_requests)
    engine.scheduler.manager.check()
    assert not engine.scheduler.stats


@pytest.mark.nightly
def test_a_second_crowd_needs_no_more_files_than_the_first(address):
    asyncio.run(crowd(address))
    assert wait_until(lambda: is_idle(address))
    before = open_files()
    asyncio.run(crowd(address))
    assert wait_until(lambda: is_idle(address))
    assert wait_until(lambda: open_files() <= before + 4)
