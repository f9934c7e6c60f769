"""SIGTERM and SIGHUP stop a sweep as Ctrl-C does: what is done is kept, and the user is told how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STOPPING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn the signals into KeyboardInterrupt inside the block; one that is ignored (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread alone
        return
    before = {name: signal.getsignal(name) for name in _STOPPING}
    caught = [name for name, handler in before.items() if handler is not signal.SIG_IGN]
    try:
        for name in caught:
            signal.signal(name, _stop)
        yield
    finally:
        for name in caught:
            signal.signal(name, before[name] or signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
