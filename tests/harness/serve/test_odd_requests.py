"""No request, of any type or value, ends anybody else's: random bodies and parameters, always followed by a proper one.

By day the first few run, by night others every date. A failure names the number of the case, and
`odd_values.seeded` gives the same case for it.
"""

import httpx
import odd_values
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiers import NIGHT_SEED, tier

NUMBERS = tier(range(60), range(NIGHT_SEED * 4_000, (NIGHT_SEED + 1) * 4_000))
PROPER = {"prompt": [5, 9, 2], "max_tokens": 3, "temperature": 0}


@pytest.fixture(scope="module", name="engine")
def engine_fixture():
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    return build_engine(load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape)))


def test_no_body_ends_the_server_or_anybody_elses_request(engine):
    with served(engine) as address, httpx.Client(base_url=address, timeout=PATIENCE_S) as client:
        expected = client.post("/v1/completions", json=PROPER).json()["choices"]
        for number in NUMBERS:
            chat = number % 3 == 0
            body = odd_values.body(odd_values.seeded(number), chat=chat)
            path = "/v1/chat/completions" if chat else "/v1/completions"
            answer = client.post(path, json=body)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (number, body, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["message"], (number, body)
                assert not error["message"].startswith("Value error"), (number, body, error)
            elif not answer.headers["content-type"].startswith("text/event-stream"):
                assert body.get("stream") is not True, (number, body)  # "0" means no
                assert answer.json()["choices"], (number, body)
            else:
                assert answer.text.endswith("data: [DONE]\n\n"), (number, body)
                assert "server_error" not in answer.text, (number, body, answer.text)
            if number % 10 == 0:
                assert client.post("/v1/completions", json=PROPER).json()["choices"] == expected, (
                    number,
                    body,
                )
        assert client.get("/health").status_code == 200
        assert wait_until(lambda: not engine.has_unfinished_requests)
        engine.scheduler.manager.check()
        assert engine.scheduler.manager.usage(None).token == 0
        assert not engine.counters.finished["error"]


def test_no_parameters_end_the_engine_or_anybody_elses_request(engine):
    from engine.core.errors import NeverFitsError
    from engine.runtime.engine import Engine
    from engine.runtime.errors import RequestError
    from engine.runtime.params import SamplingParams

    engine = Engine(engine.loaded, engine.options, tokenizer=engine.tokenizer)
    plain = SamplingParams(max_tokens=6, temperature=0)
    engine.add_request("alone", [5, 9, 2], plain)
    (expected,) = [output.outputs for output in engine.run() if output.finished]
    refused = 0
    for number in NUMBERS:
        engine.add_request("proper", [5, 9, 2], plain)
        given = odd_values.parameters(odd_values.seeded(number))
        try:
            params = SamplingParams(**given)
            engine.add_request("odd", odd_values.fitting(odd_values.seeded(number), "prompt"), params)
        except (RequestError, NeverFitsError):
            refused += 1
        done = {output.request_id: output for output in engine.run() if output.finished}
        assert done["proper"].outputs == expected, (number, given)
        assert all(output.error is None for output in done.values()), (number, given, done)
    assert refused > 15  # and many are not
    engine.scheduler.manager.check()
    assert engine.scheduler.manager.usage(None).token == 0
