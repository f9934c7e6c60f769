"""Calls that go wrong as kernels on a GPU may, for the drill of first contact."""

import os
import signal
import time

from gpu_acceptance.contact import Timed


def _hang(device: str) -> float:
    while True:
        time.sleep(1)


def _end(device: str) -> float:
    """As an access outside of all memory ends a process. The rest of its context is lost too."""
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def _refuse(device: str) -> float:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


BROKEN = {
    "decode": lambda device: 0.1,
    "hanging": _hang,
    "ending": _end,
    "refused": _refuse,
    "wrong": lambda device: 2.0,
    "not a number": lambda device: float("nan"),
    "behind them": lambda device: 0.5,
    "risky: hanging": _hang,
    "risky: last": lambda device: 0.2,
}
TIMED = {
    "engine: right": lambda device: Timed(0.1, 250.0, 500_000_000),
    "engine: wrong": lambda device: Timed(2.0, 10.0, 1_000),
    "engine: hanging": _hang,
    "engine: without a device": lambda device: Timed(0.1),
}
WRONG = {"merge": lambda device: 0.1, "decode": lambda device: 3.0, "risky: prefill": lambda device: 0.1}
