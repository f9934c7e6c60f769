"""The work of `test_policy_core.py` by vLLM's own classes. Runs in the interpreter that has vLLM.

It imports nothing of PageTwin but the oracle's driver, which needs no package of ours. A line of its input prepares
a round, runs it (the answer is what was done), or asks for the CPU-seconds of this process.
"""

import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
_SPREAD = 16
_VOCABULARY = 32_000
_tokens = random.Random(0)


def _random(count: int) -> list[int]:
    return _tokens.choices(range(_VOCABULARY), k=count)


class Core:
    """vLLM's scheduler over `blocks` blocks, with its KV cache manager."""

    def __init__(self, blocks: int, running: int, longest: int, algorithm: str = "sha256") -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm_driver import _config, _new_scheduler  # type: ignore[import-not-found]

        settings = {
            "pool_blocks": blocks,
            "block_size": BLOCK_SIZE,
            "prefix_caching": True,
            "max_batched_tokens": 8192,
            "max_running": running,
            "chunked_prefill": True,
            "watermark": 0.0,
            "policy": "fcfs",
            "long_prefill_tokens": None,
            "admit_whole_prompt": True,
            "async_scheduling": False,
            "max_model_len": longest + 1,
        }
        with tempfile.TemporaryDirectory() as folder:
            self.scheduler, _ = _new_scheduler(settings, _config(settings, folder))
        self.manager = self.scheduler.kv_cache_manager
        self.blocks = blocks
        self._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name(algorithm))

    def request(self, number: int, tokens: list[int], most: int) -> Any:
        """A request; its full blocks are hashed here."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=str(number),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0),
            pooling_params=None,
            arrival_time=0.0,
            block_hasher=self._hasher,
        )

    def held(self) -> int:
        """Blocks in use."""
        return int(self.blocks - self.manager.block_pool.get_num_free_blocks())


Work = Callable[[], Any]  # what is timed; its value is what was done


def allocate(sizes: dict[str, int]) -> Callable[[], Work]:
    """`Allocation`: prompts whose blocks were hashed beforehand."""
    count, tokens = sizes["sequences"], sizes["tokens"]
    core = Core(2 * count * (tokens // BLOCK_SIZE), count, tokens)

    def fresh() -> Work:
        core.manager.reset_prefix_cache()
        requests = [core.request(number, _random(tokens), 1) for number in range(count)]

        def run() -> int:
            for request in requests:
                if core.manager.allocate_slots(request, tokens) is None:
                    raise RuntimeError("the pool is too small")
            held = core.held()
            for request in requests:
                core.manager.free(request)
            return held

        return run

    return fresh


def prompts(sizes: dict[str, int], algorithm: str = "sha256") -> Callable[[], Work]:
    """`Prompts`: lists of tokens, one after the other; the first half is a common system prompt."""
    count, tokens = sizes["prompts"], sizes["tokens"]
    core = Core((tokens // BLOCK_SIZE) * (count + 2), count, tokens, algorithm)
    shared = _random(tokens // 2)

    def serve(prompt: list[int]) -> int:
        manager, request = core.manager, core.request(0, prompt, 1)
        found = manager.get_computed_blocks(request)
        blocks, hits = found[0], int(found[1])
        if manager.allocate_slots(request, tokens - hits, hits, blocks) is None:
            raise RuntimeError("the pool is too small")
        manager.free(request)
        return hits // BLOCK_SIZE

    def fresh() -> Work:
        core.manager.reset_prefix_cache()
        serve([*shared, *_random(tokens // 2)])
        asked = [[*shared, *_random(tokens // 2)] for _ in range(count)]
        return lambda: sum(map(serve, asked))

    return fresh


def decode(sizes: dict[str, int]) -> Callable[[], Work]:
    """`Decoders`: sequences that decode on the KV cache manager; outputs are told and hashed."""
    running, steps = sizes["running"], sizes["steps"]

    def fresh() -> Work:
        core = Core(running * (2 + (100 + _SPREAD + steps) // BLOCK_SIZE), running, 200 + steps)
        requests = [core.request(n, _random(100 + n % _SPREAD), steps + 2) for n in range(running)]
        for request in requests:
            core.manager.allocate_slots(request, request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)

        def run() -> int:
            allocate_slots = core.manager.allocate_slots
            for _ in range(steps):
                for request in requests:
                    if allocate_slots(request, 1) is None:
                        raise RuntimeError("the pool is too small")
                    request.num_computed_tokens += 1
                    request.append_output_token_ids(7)
            return core.held()

        return run

    return fresh


def schedule(sizes: dict[str, int]) -> Callable[[], Work]:
    """`Scheduling`: a full batch of decoding requests under the scheduler."""
    from vllm.v1.outputs import ModelRunnerOutput

    running, steps = sizes["running"], sizes["steps"]

    def step(scheduler: Any) -> int:
        plan = scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        requests = [scheduler.requests[name] for name in names]
        sampled = [[7] if one.num_computed_tokens >= one.num_tokens else [] for one in requests]
        places = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(
            plan, ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=sampled)
        )
        return int(plan.total_num_scheduled_tokens)

    def fresh() -> Work:
        core = Core(running * (2 + (100 + _SPREAD + steps) // BLOCK_SIZE), running, 300 + steps)
        for number in range(running):
            core.scheduler.add_request(core.request(number, _random(100 + number % _SPREAD), steps + 64))
        while step(core.scheduler) != running:
            pass
        return lambda: sum(step(core.scheduler) for _ in range(steps))

    return fresh


_WORK = {
    "allocate": allocate,
    "prompt_list": prompts,
    "prompt_list_cbor": lambda sizes: prompts(sizes, "sha256_cbor"),
    "decode_hashed": decode,
    "schedule_hashed": schedule,
}


def main() -> int:
    """Answer lines of standard input until it ends."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.path.insert(0, str(Path(__file__).parents[1] / "harness" / "oracle"))
    from vllm_driver import _use_platform, serve

    _use_platform()

    known: dict[str, Callable[[], Work]] = {}
    ready: Work = int

    def answer(asked: dict[str, Any]) -> Any:
        nonlocal ready
        if asked["do"] == "fresh":
            name = asked["line"]
            known[name] = known.get(name) or _WORK[name](asked["sizes"])
            ready = known[name]()
            gc.collect()
            gc.disable()
            return None
        if asked["do"] == "run":
            done = ready()
            gc.enable()
            return done
        return time.process_time()

    return int(serve(answer))


if __name__ == "__main__":
    sys.exit(main())
