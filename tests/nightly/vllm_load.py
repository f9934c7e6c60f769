"""Requests to a whole vLLM at their own times, under the probe. Runs in the interpreter that has vLLM.

It is started by `vllm_what_ifs.py`. Each line of its input is one load: `model` and `flags` as `harness.measure.vllm`
gives them, the `clock` (cpu or wall), the `folder` of the probe's log, and `requests` with `at` (seconds), `ids`,
`output` and `priority`. It is answered when all requests have ended. The engine is kept where only the requests differ;
its scheduler is new.
"""

import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any

_HARNESS = Path(__file__).parents[2] / "harness"
sys.path += [str(_HARNESS / "oracle"), str(_HARNESS / "measure"), str(_HARNESS / "twin")]
_driver: Any = import_module("vllm_driver")
_engine: Any = import_module("vllm_engine")
_probe: Any = import_module("pagetwin_probe")
_work: Any = import_module("yardstick")
_WINDOW = 8  # readings of which the pace is a median
_WARM_UP = [{"at": 0.0, "ids": [7] * 100, "output": 20, "priority": 0}] * 12


class Clock:
    """The time of a run: of the wall, or CPU-seconds of this thread at the pace of the first run, without waiting.

    The pace is that of fixed work between the steps (`harness/measure/yardstick.py`), over its last readings. The probe
    takes its time from here, in the place of the module `time`.
    """

    reference: list[float] | None = None  # seconds of the parts of the work in the first run

    def __init__(self, name: str) -> None:
        self.wall = name == "wall"
        self._count = time.monotonic_ns if self.wall else time.thread_time_ns
        self._now, self._since, self._pace = 0.0, self._count(), 1.0
        self._unix_ns = time.time_ns()
        self._work = _work.FixedWork(time.thread_time)
        self._readings: list[tuple[float, ...]] = []

    def monotonic_ns(self) -> int:
        return round(self._now + (self._count() - self._since) / self._pace)

    def time_ns(self) -> int:
        return self._unix_ns + self.monotonic_ns()

    def wait(self, seconds: float) -> None:
        """Let so many seconds pass."""
        if self.wall:
            time.sleep(max(0.0, seconds))
        else:
            self._now += max(0.0, 1e9 * seconds)

    def follow(self) -> None:
        """Read the pace beside a step, which takes none of the time."""
        if self.wall:
            return
        self._now = float(self.monotonic_ns())
        self._readings.append(self._work.seconds())
        middle = [median(part) for part in zip(*self._readings[-_WINDOW:], strict=True)]
        if Clock.reference is not None:
            self._pace = fmean(now / then for now, then in zip(middle, Clock.reference, strict=True))
        self._since = self._count()

    def keep(self) -> None:
        """The readings of this run are the reference of all that follow, unless there is one."""
        Clock.reference = Clock.reference or [median(part) for part in zip(*self._readings, strict=True)]


def run(core: Any, requests: list[dict[str, Any]], folder: str, clock: Clock) -> None:
    """Send the requests at their times, and step until all have ended. The probe's log lies in `folder`."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    os.environ["PAGETWIN_PROBE"] = folder
    core.scheduler = _engine.fresh(core.scheduler, core)
    left, began = sorted(requests, key=lambda one: one["at"], reverse=True), clock.monotonic_ns()
    while left or core.scheduler.has_requests():
        while left and left[-1]["at"] <= 1e-9 * (clock.monotonic_ns() - began):
            one = left.pop()
            params = SamplingParams(max_tokens=one["output"], ignore_eos=True, temperature=0.0)
            request = Request(
                request_id=str(len(left)),
                prompt_token_ids=one["ids"],
                sampling_params=params,
                pooling_params=None,
                arrival_time=1e-9 * clock.time_ns(),
                priority=one["priority"],
                block_hasher=core.request_block_hasher,
            )
            core.scheduler.add_request(request)
        if core.scheduler.has_requests():
            core.step()
            clock.follow()
        else:
            clock.wait(left[-1]["at"] - 1e-9 * (clock.monotonic_ns() - began))
    core.scheduler.shutdown()
    if not clock.wall:
        clock.keep()


def main() -> int:
    """Serve the lines of standard input."""
    os.environ.update(_engine.ENVIRONMENT, PAGETWIN_PROBE_HASHES="1")
    known: list[Any] = [None, None]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        settings, clock = {name: asked[name] for name in ("model", "flags")}, Clock(asked["clock"])
        _probe.time = clock
        if known[0] != settings:
            if known[1] is not None:
                known[1].shutdown()
            known[:], os.environ["PAGETWIN_PROBE"] = [None, None], folder
            known[:] = settings, _engine.new_core(settings, folder)
            run(known[1], _WARM_UP, folder, clock)
        run(known[1], asked["requests"], asked["folder"], clock)
        return {}

    with tempfile.TemporaryDirectory() as folder:
        return int(_driver.serve(answer))


if __name__ == "__main__":
    sys.exit(main())
