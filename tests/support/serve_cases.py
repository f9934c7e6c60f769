"""A tiny model with a real tokenizer behind a real server on a free port, for tests that drive it as clients do."""

import signal
import socket
import threading
import time
from contextlib import contextmanager, nullcontext

PATIENCE_S = 600.0  # a safety net: no test rests on it; 500 clients of one busy core wait for minutes
TEXT = "the cat sat on a mat and saw the quick brown fox jump over that lazy dog, again; naïve café 日本 🙂"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer():
    """A byte-level BPE of 512 tokens, with an end token and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    base.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<end>", chat_template=TEMPLATE)


def build_engine(loaded, **options):
    from engine.core.options import SchedulerLimits
    from engine.runtime.engine import Engine
    from engine.runtime.options import EngineOptions

    limits = options.pop("limits", None) or SchedulerLimits(256, 64, max_model_len=128)
    words = options.pop("tokenizer", None) or tokenizer()
    given = {"pool_tokens": 2048, "block_size": 8, "audit": "full", **options}
    return Engine(loaded, EngineOptions(limits=limits, **given), tokenizer=words)


@contextmanager
def served(engine, **options):
    """The engine behind uvicorn; gives the address. `stop` gets the function that a signal to stop would call."""
    from engine.runtime.async_engine import AsyncEngine, EngineThread
    from harness.serve.app import build_app
    from harness.serve.limits import Listener

    stop, publisher = options.pop("stop", None), options.pop("kv_events", None)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    observe = publisher.observe if publisher else lambda: None
    app = build_app(AsyncEngine(engine, EngineThread(engine, observe)), model="tiny", **options)
    server = Listener(app, log_level="error", timeout_graceful_shutdown=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    if stop is not None:
        stop.append(lambda: server.handle_exit(signal.SIGTERM, None))
    while not server.started:
        time.sleep(0.01)
    with publisher or nullcontext():
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def wait_until(condition, seconds=PATIENCE_S):
    """Whether `condition` comes true; the limit is a safety net and no part of what is tested."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False
