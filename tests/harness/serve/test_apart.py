"""The HTTP server in a process of its own: the same answers, and signals that reach both."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import httpx
import pytest
from serve_cases import PATIENCE_S, build_engine, served, wait_until
from tiny_models import SHAPE

BODY = {"prompt": "the cat", "temperature": 0, "ignore_eos": True}


def ask(address, **fields):
    return httpx.post(f"{address}/v1/completions", json=BODY | fields, timeout=PATIENCE_S)


def told_of(address):
    """What a server says of itself, of an error, and of outputs whose parts come back through the pipe."""
    words = ask(address, max_tokens=4, logprobs=1, echo=True).json()
    choices = [{**choice, "logprobs": choice["logprobs"]["tokens"]} for choice in words["choices"]]
    wrong = ask(address, max_tokens=4, n=500, use_beam_search=True)
    form = ask(address, max_tokens=8, structured_outputs={"choice": ["a cat"]}, ignore_eos=False)
    page = httpx.get(f"{address}/metrics").text
    counted = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return choices, words["usage"], (wrong.status_code, wrong.json()), form.json()["choices"], counted


def stopped(address):
    """The last lines of a stream that a signal interrupts."""
    body = BODY | {"max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(os.getpid(), signal.SIGTERM)
        return [line for line in lines if line][-2:]


def test_a_server_apart_answers_as_one_beside_its_engine_and_ends_its_streams_at_a_signal(monkeypatch):
    import torch

    from engine.runtime.async_engine import EngineFacts, EngineThread
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec
    from harness.serve.apart import Apart

    torch.set_num_threads(1)
    listener, came = socket.create_server(("127.0.0.1", 0)), []
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))

    try:
        with Apart(listener, model="tiny") as apart, ThreadPoolExecutor() as pool:
            engine = build_engine(load_model(ModelSpec(kv_heads=2, **SHAPE)))
            with served(engine) as beside:
                wanted = told_of(beside)
            engine = build_engine(load_model(ModelSpec(kv_heads=2, **SHAPE)))
            thread, step = EngineThread(engine), engine.step

            def held():  # the stream has not ended when the signal comes
                if engine.counters.generation_tokens == 30:
                    assert wait_until(lambda: not thread._inbox.empty())
                return step()

            monkeypatch.setattr(engine, "step", held)
            clients = pool.submit(lambda: (told_of(address), stopped(address)))
            apart.run(EngineFacts.of(engine), thread)
            found, last = clients.result()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == wanted
    assert "the engine has ended" in last[0]
    assert last[1] == "data: [DONE]"
    assert came == [signal.SIGTERM]


# what `serve` has loaded when it makes the process
FORKS = """
import os, socket
from engine.runtime.async_engine import EngineFacts, EngineThread
from engine.runtime.llm import sampling_defaults
from harness.serve import build_engine
from harness.serve.apart import Apart
sampling_defaults(None)
with Apart(socket.create_server(("127.0.0.1", 0)), model="tiny") as apart:
    assert type(apart._process).__name__ == "ForkProcess"
    assert len(os.listdir("/proc/self/task")) == 1
"""


@pytest.mark.nightly
def test_at_a_fork_no_thread_lives_but_the_main_one():
    subprocess.run([sys.executable, "-c", FORKS], check=True)


def test_beside_a_thread_no_fork_is_asked_for(monkeypatch):
    """By night the next test makes the process."""
    from harness.serve import apart

    class EnoughError(Exception):
        pass

    def context(kind):
        raise EnoughError(kind)

    monkeypatch.setattr(apart.multiprocessing, "get_context", context)
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    with pytest.raises(EnoughError, match="spawn"):
        apart.Apart(None)
    over.set()


@pytest.mark.nightly
def test_beside_a_thread_the_process_is_no_fork():
    """The thread may hold a lock, which a fork would keep for ever."""
    from harness.serve.apart import Apart

    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    with Apart(socket.create_server(("127.0.0.1", 0)), model="tiny") as apart:
        process = apart._process
        assert type(process).__name__ == "SpawnProcess"
    over.set()
    assert process.exitcode == 0  # it ends where no engine comes


def test_what_a_step_counted_stays_as_it_was_while_it_waits_to_be_sent():
    import torch

    from engine.runtime.async_engine import Add, EngineThread
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec
    from engine.runtime.params import OutputKind, SamplingParams

    torch.set_num_threads(1)
    engine = build_engine(load_model(ModelSpec(kv_heads=2, **SHAPE)))
    thread, waiting = EngineThread(engine), []
    params = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0, output_kind=OutputKind.DELTA)
    thread.put(Add(0, "one", [1, 2, 3], params, 0, ""))
    thread.start(waiting.append)
    assert wait_until(lambda: any(output.finished for one in list(waiting) for _, output in one.items))
    thread.stop()
    steps = [one for one in waiting if one.items]
    assert [one.counters.steps for one in steps] == [1, 2, 3, 4, 5]
    assert [one.counters.finished["length"] for one in steps] == [0, 0, 0, 0, 1]
    assert [len(output.metrics.gaps_s) for one in steps for _, output in one.items] == [0, 1, 1, 1, 1]


class OddError(Exception):
    """An error of somebody's policy: pickle makes it of its text alone, and fails."""

    def __init__(self, what, where):
        super().__init__(f"{what} at {where}")


def test_an_error_that_the_other_process_cannot_make_still_reaches_the_clients():
    from engine.runtime.async_engine import Delivery
    from engine.runtime.engine import EngineCounters
    from engine.runtime.errors import ParamsError
    from harness.serve.apart import Apart

    apart, outbox = Apart.__new__(Apart), SimpleQueue()
    apart._connection, theirs = multiprocessing.Pipe()
    threading.Thread(target=apart._send, args=(outbox,), daemon=True).start()
    own = ParamsError("n", "is too many")
    outbox.put(Delivery([(1, OddError("a", "b")), (2, own)], EngineCounters(), OddError("c", "d")))
    assert theirs.poll(PATIENCE_S)
    items, _, ended = theirs.recv()
    assert [(number, str(error)) for number, error in items] == [(1, "OddError: a at b"), (2, str(own))]
    assert (type(items[1][1]), items[1][1].field) == (ParamsError, "n")
    assert str(ended) == "OddError: c at d"
    theirs.close()
