"""`trace capture`: subscribe to a live server's KV cache events, and keep them as a file that `trace=kv_events` reads.

vLLM publishes one ZeroMQ message for each step that changed its prefix cache: topic, number of the message (8 bytes,
the largest first), and the batch in msgpack (`vllm/distributed/kv_events.py`, `ZmqEventPublisher`).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.config.errors import UserError
from harness.console import install_hint, remark, say
from harness.trace.flags import describe

if TYPE_CHECKING:
    from harness.trace.flags import Actions

_POLL_MS = 100
_NEEDED = f"capture: needs pyzmq, which is not installed: {install_hint('events')}"


def add_capture(actions: "Actions") -> None:
    """Describe `capture`."""
    more = (
        'vLLM publishes with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq"}\', on\n'
        "tcp://*:5557 where it is not told otherwise. Ctrl-C ends early and keeps what has come. Then:\n"
        "  python -m harness sweep trace=kv_events trace.path=FILE ..."
    )
    usage = "capture ENDPOINT --out FILE [--seconds S]"
    parser = describe(actions, run_capture, "keep the KV cache events of a live server", usage, more)
    parser.add_argument("endpoint", metavar="ENDPOINT", help="of the publisher, like tcp://127.0.0.1:5557")
    parser.add_argument("--out", metavar="FILE", required=True, help="events as msgpack, one after the other")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long; default: 60")
    parser.add_argument("--topic", default="", help="of the messages; default: all")


def run_capture(flags: argparse.Namespace) -> int:
    """Subscribe, and write what came; nothing is written if nothing came."""
    from harness.store.atomic import write_files

    if not 0 < flags.seconds < 1e6:
        raise UserError(f"--seconds is {flags.seconds:g}, must be above 0 and below 1,000,000")
    path = Path(flags.out).expanduser()
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out: '{flags.out}' must be a file in a folder that exists")
    if path.exists() and not flags.overwrite:
        raise UserError(f"--out: '{flags.out}' exists; add --overwrite to replace it")
    remark(f"listening to {flags.endpoint} for {flags.seconds:g} s")
    found = capture(flags.endpoint, flags.seconds, flags.topic)
    if not found.batches:
        raise UserError(
            f"capture: no message came from {flags.endpoint} in {flags.seconds:g} s; is the server publishing events, "
            "is the address right, and did any request run?"
        )
    write_files(path.parent, {path.name: b"".join(found.batches)})
    say(f"{path}: {len(found.batches):,} messages with {found.events:,} events")
    if found.lost:
        say(f"{found.lost:,} messages were lost on the way, so blocks are missing from the trace")
    if found.first:
        say(f"{found.first:,} messages were published before; blocks that they stored have no parent here")
    return 0


class Captured(NamedTuple):
    """What a subscription got: batches as they were sent, their events, and how many messages it missed."""

    batches: list[bytes]
    events: int
    first: int  # number of the first message that came: how many were published before
    lost: int  # gaps in the numbers after it


def capture(
    endpoint: str, seconds: float, topic: str = "", clock: Callable[[], float] = time.monotonic
) -> Captured:
    """Subscribe to `endpoint` for `seconds`, or until Ctrl-C.

    Raises:
        UserError: pyzmq is missing, the endpoint is none, or a message is no batch of events; says which.
    """
    from traces.errors import RowError
    from traces.formats.kv_events import decode

    batches: list[bytes] = []
    events = first = lost = 0
    expected: int | None = None
    try:
        for frames in _messages(endpoint, topic, seconds, clock):
            if len(frames) != 3 or len(frames[1]) != 8:
                raise UserError(
                    f"capture: message {len(batches) + 1} has {len(frames)} parts; topic, number (8 bytes) and batch "
                    f"expected: {endpoint} is no publisher of vLLM's KV cache events"
                )
            number = int.from_bytes(frames[1], "big")
            try:
                events += len(decode(frames[2]).events)
            except RowError as error:
                raise UserError(f"capture: message {number} of {endpoint}: {error}") from error
            if expected is None:
                first = number
            else:
                lost += max(0, number - expected)
            expected = number + 1
            batches.append(frames[2])
    except KeyboardInterrupt:
        remark("interrupted; what has come is kept")
    return Captured(batches, events, first, lost)


def _messages(endpoint: str, topic: str, seconds: float, clock: Callable[[], float]) -> Iterator[list[bytes]]:
    zmq = _zmq()
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)  # a burst must not be dropped here
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            reason = f"capture: cannot connect to '{endpoint}': {error}; an address like tcp://127.0.0.1:5557 expected"
            raise UserError(reason) from error
        end = clock() + seconds
        while clock() < end:
            if socket.poll(_POLL_MS):
                yield socket.recv_multipart()


def _zmq() -> Any:
    try:
        return import_module("zmq")
    except ImportError as error:
        raise UserError(_NEEDED) from error
