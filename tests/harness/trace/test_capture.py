"""`trace capture` against a publisher that sends as vLLM's does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.errors import UserError
from harness.trace import capture as actions
from harness.trace.capture import Captured, capture
from traces.formats.kv_events import BlockStored, EventBatch, encode
from traces.reading import read_trace

zmq = pytest.importorskip("zmq", reason="capturing events needs pagetwin[events]")
pytest.importorskip("msgpack", reason="KV events need pagetwin[events]")


def batch(number: int) -> bytes:
    tokens = list(range(4 * number, 4 * number + 4))
    return encode(EventBatch(100.0 + number, [BlockStored([number + 1], None, tokens, 4)]))


def message(number: int) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), batch(number)]


@contextmanager
def publisher(*messages: list[bytes]) -> Iterator[tuple[str, threading.Event]]:
    """Publishes the messages once somebody has subscribed; gives the endpoint, and an event for when all are sent."""
    context, sent = zmq.Context(), threading.Event()
    socket = context.socket(zmq.XPUB)  # unlike PUB, it sees subscriptions
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        if socket.poll(60_000):
            socket.recv()
            for one in messages:
                socket.send_multipart(one)
        sent.set()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}", sent
    finally:
        thread.join()
        socket.close(0)
        context.term()


class Clock:
    """Stands still until all messages are sent, and for some polls more."""

    def __init__(self, sent: threading.Event, more: int) -> None:
        self._sent = sent
        self._left = more

    def __call__(self) -> float:
        self._left -= self._sent.is_set()
        return 0.0 if self._left > 0 else 100.0


def captured(*messages: list[bytes]) -> Captured:
    with publisher(*messages) as (endpoint, sent):
        return capture(endpoint, 10.0, clock=Clock(sent, len(messages) + 10))


def test_messages_are_kept_as_they_were_sent() -> None:
    assert captured(message(0), message(1)) == Captured([batch(0), batch(1)], 2, 0, 0)


def test_lost_messages_and_those_before_are_counted() -> None:
    assert captured(message(5), message(6), message(9))[1:] == (3, 5, 2)


def test_a_message_that_is_no_batch_is_named() -> None:
    with pytest.raises(UserError, match=r"message 0 of tcp://.*time and events expected"):
        captured([b"", bytes(8), b"\x01"])


def test_a_publisher_of_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="has 1 parts"):
        captured([b"hello"])


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="cannot connect to 'localhost'"):
        capture("localhost", 0.1)


def test_the_file_is_a_trace_of_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.msgpack"
    monkeypatch.setattr(actions, "capture", lambda *_: Captured([batch(0), batch(1)], 2, 0, 0))
    assert main(["trace", "capture", "tcp://127.0.0.1:5557", "--out", str(path)]) == 0
    assert sum(row.prompt_tokens for row in read_trace(path, "kv_events").requests) >= 8


def test_silence_is_an_error_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.msgpack"
    with publisher() as (endpoint, _):
        assert main(["trace", "capture", endpoint, "--out", str(path), "--seconds", "0.3"]) == 2
    assert "no message came" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize("out", ["", "nowhere/events.msgpack"])
def test_a_file_that_cannot_be_written_is_named_before_anything_is_captured(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "capture", "tcp://127.0.0.1:5557", "--out", str(tmp_path / out)]) == 2
    assert "must be a file in a folder that exists" in capsys.readouterr().err
