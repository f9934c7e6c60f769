"""KV cache events of the server over real sockets: published, captured, and read back as a trace."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from oracle_cases import PYTHON
from serve_cases import PATIENCE_S, build_engine, served, wait_until

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from harness.cli.main import main
from harness.config.errors import ConfigError, UserError
from harness.oracle.check import vllm_version
from harness.replay import memory
from harness.serve import kv_events
from harness.serve.kv_events import KvEventPublisher
from harness.trace.capture import Captured, capture
from traces.formats.kv_events import AllBlocksCleared, BlockStored, EventBatch, decode
from traces.reading import read_trace
from traces.trace import Trace

zmq = pytest.importorskip("zmq", reason="publishing events needs pagetwin[events]")
pytest.importorskip("msgpack", reason="KV events need pagetwin[events]")

BLOCK = 8
SHARED = list(range(20, 36))  # two blocks
PROMPTS = [
    [*SHARED, *range(40, 50)],
    [*SHARED, *range(60, 80)],
    [*range(100, 120)],
    [*SHARED, *range(140, 160)],
]


def free_endpoint() -> str:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        return f"tcp://*:{socket.bind_to_random_port('tcp://*')}"


class Server:
    """A server that publishes, everything that a subscriber got from it, and the cached tokens of its answers."""

    def __init__(self, address: str, publisher: KvEventPublisher, endpoint: str, sent: list[bytes]) -> None:
        self.address, self.publisher, self.sent = address, publisher, sent
        self.endpoint = endpoint.replace("*", "127.0.0.1")
        self.cached: list[int] = []
        self.captured = Captured([], 0, 0, 0)
        self._done = threading.Event()
        self._polls = len(PROMPTS) + 8  # of the subscriber, after all is published
        self._thread = threading.Thread(target=self._listen)

    def _clock(self) -> float:
        self._polls -= self._done.is_set()
        return 0.0 if self._polls > 0 else 100.0

    def _listen(self) -> None:
        self.captured = capture(self.endpoint, 10.0, clock=self._clock)

    def run(self) -> None:
        """Subscribe, send the prompts one after the other, empty the cache, and end the subscription."""
        self._thread.start()
        assert self.publisher._socket.poll(int(1000 * PATIENCE_S))
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            answer = httpx.post(f"{self.address}/v1/completions", json=body, timeout=PATIENCE_S).json()
            self.cached.append((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        httpx.post(f"{self.address}/reset_prefix_cache", timeout=PATIENCE_S)
        assert wait_until(lambda: isinstance(self.batches()[-1].events[-1], AllBlocksCleared))
        self._done.set()
        self._thread.join()

    def batches(self) -> list:
        """What was published."""
        return [decode(payload) for payload in self.sent]


@pytest.fixture(scope="module", name="server")
def server_fixture() -> Iterator[Server]:
    import torch

    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    torch.set_num_threads(1)
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
    model = load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape))

    def scheduler(blocks: int, limits: SchedulerLimits) -> Scheduler:
        return Scheduler(PagedManager(blocks, BLOCK, keep_events=True), limits)

    engine = build_engine(model, scheduler=scheduler)
    manager = engine.scheduler.manager
    endpoint, sent, encode = free_endpoint(), list[bytes](), kv_events.encode

    def kept(batch: EventBatch) -> bytes:
        sent.append(encode(batch))
        return sent[-1]

    publisher = KvEventPublisher(manager, endpoint, topic="kv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "encode", kept)
        with served(engine, kv_events=publisher) as address:
            found = Server(address, publisher, endpoint, sent)
            found.run()
            yield found


def test_the_subscriber_gets_every_message_in_order(server: Server) -> None:
    assert server.captured.first == server.captured.lost == 0
    assert server.captured.batches == server.sent


def test_stored_blocks_have_their_parent_and_tokens(server: Server) -> None:
    stored = [event for batch in server.batches() for event in batch.events if isinstance(event, BlockStored)]
    assert stored[0].parent_block_hash is None
    assert list(stored[0].token_ids) == PROMPTS[0][:24]
    assert stored[1].parent_block_hash == stored[0].block_hashes[1]
    assert list(stored[1].token_ids) == PROMPTS[1][16:32]


def test_hashes_and_groups_are_those_of_vllm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default vLLM publishes 64 bits of a hash, as a number, and the group of layers, which is one here."""
    events = [event for batch in server.batches() for event in batch.events if isinstance(event, BlockStored)]
    assert all(0 <= one < 2**64 for event in events for one in event.block_hashes)
    assert {event.group_idx for event in events} == {0}
    assert memory._published(bytes(range(32))) == int.from_bytes(bytes(range(32)), "big") & (2**64 - 1)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    assert memory._published(b"abc") == b"abc"


def test_an_emptied_cache_is_reported(server: Server) -> None:
    assert isinstance(server.batches()[-1].events[-1], AllBlocksCleared)


def test_the_rebuilt_trace_has_the_same_prefix_hits(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "events.msgpack"
    path.write_bytes(b"".join(server.captured.batches))
    assert hits_of(path) == server.cached == [0, 16, 0, 16]


def hits_of(path: Path) -> list[int]:
    """Hit tokens of the requests that a file of events shows."""
    return hits(read_trace(path, "kv_events"))


def hits(trace: Trace) -> list[int]:
    """Hit tokens of a trace's requests, one after the other over an empty pool."""
    scheduler, hits = Scheduler(PagedManager(1000, BLOCK), SchedulerLimits()), []
    for row in trace.requests:
        identity = KeyIdentity(row.request_id, row.segments)
        scheduler.submit(Request(row.request_id, row.prompt_tokens, 1, identity=identity))
        plan = scheduler.schedule()
        hits.append(plan.hit_tokens)
        scheduler.commit(plan, StepResult())
    return hits


_DECODE = """
import json, sys, msgspec
from vllm.distributed.kv_events import BlockStored, KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
batches = [decoder.decode(bytes.fromhex(line)) for line in sys.stdin]
print(json.dumps([[type(e).__name__, getattr(e, "token_ids", None)] for b in batches for e in b.events]))
"""


def test_vllms_own_classes_read_the_messages(server: Server) -> None:
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    lines = "\n".join(one.hex() for one in server.captured.batches)
    done = subprocess.run(
        [PYTHON or "python", "-c", _DECODE], input=lines, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    events = [event for one in server.captured.batches for event in decode(one).events]
    assert [name for name, _ in found] == [type(event).__name__ for event in events]
    stored = [list(event.token_ids) for event in events if isinstance(event, BlockStored)]
    assert [tokens for name, tokens in found if name == "BlockStored"] == stored


def test_an_address_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UserError, match="--kv-events: 'nowhere' cannot be used"):
        KvEventPublisher(PagedManager(10, 4, keep_events=True), "nowhere")


def test_a_topic_needs_a_publisher(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--kv-events-topic", "kv"]) == 2
    assert "needs --kv-events ENDPOINT" in capsys.readouterr().err
