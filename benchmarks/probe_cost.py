"""CPU-seconds of the probe beside those of vLLM's schedule() and update_from_output(), with 256 requests running.

Run in the Python that has vLLM: `VLLM_PYTHON benchmarks/probe_cost.py [REQUESTS]`. No model runs. Two schedulers, one
of them probed, get the same requests; each step of one follows on that of the other, so that both see the same machine.
"""

import json
import os
import sys
import tempfile
import threading
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

_ROOT = Path(__file__).parents[1]
_RUNNING, _PROMPT, _OUTPUT = 256, 64, 192
_SETTINGS = {
    "pool_blocks": 8192,
    "block_size": 16,
    "prefix_caching": True,
    "max_batched_tokens": 8192,
    "max_running": _RUNNING,
    "chunked_prefill": True,
    "watermark": 0.0,
    "policy": "fcfs",
    "long_prefill_tokens": None,
    "admit_whole_prompt": True,
    "async_scheduling": False,
    "max_model_len": 1024,
}


class Side:
    """A scheduler with its requests, and the CPU seconds of its calls."""

    def __init__(self, driver: Any, flags: dict[str, str], requests: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            driver.Driver._listen = lambda _: None  # only vLLM's own work counts
            self._driver = driver.Driver({**_SETTINGS, "flags": flags}, folder)
        self.scheduler = self._driver._scheduler
        self.seconds: list[float] = []
        for number in range(requests):
            first = number * 1000
            output = (first + 500, _OUTPUT // 2 + number % _OUTPUT)  # ends are spread over all steps
            self._driver.submit({"id": number, "prompt": [(first, _PROMPT)], "output": output})

    def step(self) -> None:
        """Schedule, and give each request that has computed all of its tokens the next one."""
        from vllm.v1.outputs import ModelRunnerOutput

        began = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        names = list(plan.num_scheduled_tokens)
        known = self.scheduler.requests
        whole = [known[name].num_computed_tokens >= known[name].num_tokens for name in names]
        places = {name: index for index, name in enumerate(names)}
        output = ModelRunnerOutput(names, places, [[7] if one else [] for one in whole])
        again = time.thread_time()
        self.scheduler.update_from_output(plan, output)
        if len(names) == _RUNNING:
            self.seconds.append(planned - began + time.thread_time() - again)


def main() -> int:
    """Print the cost of a step without the probe, and the shares of the probe and of its writing thread."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_TARGET_DEVICE="cpu", HF_HUB_OFFLINE="1")
    sys.path += [str(_ROOT / "harness" / "oracle"), str(_ROOT / "harness" / "twin")]
    driver: Any = import_module("vllm_driver")
    driver._use_platform()
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PAGETWIN_PROBE"] = folder
        plain = Side(driver, {}, requests)
        probed = Side(driver, {"scheduler_cls": "pagetwin_probe.Scheduler"}, requests)
        while probed.scheduler.has_unfinished_requests():
            plain.step()
            probed.step()
        thread = next(one for one in threading.enumerate() if one.name == "pagetwin-probe")
        writing = time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
        probed.scheduler.shutdown()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    steps = len(plain.seconds)
    found = {
        "steps": steps,
        "plain_us": 1e6 * median(plain.seconds),
        "probe_share": median(b / a - 1 for a, b in zip(plain.seconds, probed.seconds, strict=True)),
        "probe_share_of_sums": sum(probed.seconds) / sum(plain.seconds) - 1,
        "writing_share": writing / sum(plain.seconds),
        "log_bytes_a_step": size / max(1, steps),
    }
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
