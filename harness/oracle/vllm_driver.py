"""Drives vLLM's own scheduler and KV cache manager, unmodified, on the CPU. Runs in the interpreter that has vLLM.

It is started as a script, `python vllm_driver.py`, and imports nothing of PageTwin. Standard input and output carry
one JSON object a line. A line with `settings` starts anew with an empty pool, and is answered with vLLM's version.
Where the settings have `groups`, (window or null, block size) of each, the cache has these groups of layers, and
`blocks` names those of the first. A line with `submit` names the requests that arrive before the next step, and is
answered with what vLLM decides in that step; the fields are those of `harness.oracle.decisions.Step`. What a step
computes is given: a request's tokens are those that its line names, and it ends after the last one.

vLLM loads no model and no kernel here. Three of its methods are wrapped to learn what its output does not say: which
blocks are evicted, and which requests are preempted after the step had given them tokens. A wrapper calls the method
and changes nothing.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import chain
from typing import Any

_MODEL = {  # the smallest model that vLLM's configuration takes; nothing of it is loaded
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32,
    "max_position_embeddings": 1 << 30,
    "torch_dtype": "float32",
}


class Driver:
    """vLLM's scheduler over an empty pool, and what it decides."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        config, scheduler_settings = _configs(settings, folder)
        self._scheduler = _new_scheduler(settings, config, scheduler_settings)
        self._block_size = math.gcd(*(size for _, size in _groups(settings)))
        self._caching = settings["prefix_caching"]
        self._outputs: dict[str, tuple[int, int]] = {}  # first output token, tokens in all
        self._ends: dict[str, int] = {}  # context after the row of the last step, by request
        self._arrived = 0
        self._evicted: list[int] = []
        self._given: set[str] = set()  # requests that the step has given tokens
        self._robbed: list[int] = []  # those of them that it preempts afterwards
        self._listen()

    def _listen(self) -> None:
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        evict, allocate, preempt = (
            pool._maybe_evict_cached_block,
            manager.allocate_slots,
            scheduler._preempt_request,
        )

        def evicts(block: Any) -> bool:
            evicted = bool(evict(block))
            if evicted:
                self._evicted.append(block.block_id)
            return evicted

        def allocates(request: Any, *more: Any, **named: Any) -> Any:
            blocks = allocate(request, *more, **named)
            if blocks is not None:
                self._given.add(request.request_id)
            return blocks

        def preempts(request: Any, *more: Any, **named: Any) -> None:
            if request.request_id in self._given:
                self._robbed.append(int(request.request_id))
            preempt(request, *more, **named)

        pool._maybe_evict_cached_block = evicts
        manager.allocate_slots = allocates
        scheduler._preempt_request = preempts

    def submit(self, request: dict[str, Any]) -> None:
        """Add a request to vLLM's queue. Its tokens are given as ranges (first, count)."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        name, (first, count) = str(request["id"]), request["output"]
        self._outputs[name] = first, count
        self._arrived += 1
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=list(
                    chain.from_iterable(range(at, at + tokens) for at, tokens in request["prompt"])
                ),
                sampling_params=SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                arrival_time=float(self._arrived),
                cache_salt=request.get("salt") or None,
                priority=request.get("priority", 0),
                block_hasher=get_request_block_hasher(self._block_size, sha256) if self._caching else None,
            )
        )

    def step(self) -> dict[str, Any]:
        """Schedule a step, and give its result: each request that has computed all of its tokens gets the next one."""
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self._scheduler
        self._given.clear()
        plan = scheduler.schedule()
        found = self._decisions(plan)
        names = list(plan.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            complete = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._outputs[name][0] + request.num_output_tokens] if complete else [])
        outputs = scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        found["finished"] = [
            int(one.request_id)
            for batch in outputs.values()
            for one in batch.outputs
            if one.finish_reason is not None
        ]
        for request_id in found["finished"]:
            del self._ends[str(request_id)]
        return found

    def _decisions(self, plan: Any) -> dict[str, Any]:
        scheduler = self._scheduler
        fresh = {one.req_id: one.block_ids[0] for one in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        blocks = {
            name: added[0] for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True) if added
        }
        resumed = set(cached.resumed_req_ids)
        rows, admitted, given, ends = [], [], [], dict[str, int]()
        for name, query in plan.num_scheduled_tokens.items():
            context = scheduler.requests[name].num_computed_tokens - query
            enters = name in fresh or name in resumed
            if enters:
                admitted.append([int(name), context])
            if enters or query != 1 or self._ends.get(name) != context:
                rows.append([int(name), context, query])
            ends[name] = context + query
            table = fresh.get(name, blocks.get(name))
            if table:
                given.append([int(name), list(table)])
        preempted = sorted(int(name) for name in plan.preempted_req_ids or ())
        running, waiting = scheduler.get_request_counts()
        paused = [int(one.request_id) for one in scheduler.running if one.request_id not in ends]
        self._ends = ends
        for request_id in paused:
            self._ends[str(request_id)] = scheduler.requests[str(request_id)].num_computed_tokens
        evicted, self._evicted = self._evicted, []
        robbed, self._robbed = self._robbed, []
        return {
            "robbed": robbed,
            "rows": rows,
            "paused": paused,
            "admitted": admitted,
            "preempted": preempted,
            "blocks": given,
            "evicted": evicted,
            "running": running,
            "waiting": waiting,
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


def _configs(settings: dict[str, Any], folder: str) -> tuple[Any, Any]:
    """vLLM's configuration. What its checks refuse for a server, but its scheduler takes, is set after them."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(_MODEL, file)
    budget, longest = settings["max_batched_tokens"], settings["max_model_len"]
    model = ModelConfig(
        model=folder,
        tokenizer=folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=longest,
        seed=0,
    )
    running = min(settings["max_running"], budget)  # a step has at most one token for each running request
    scheduler = SchedulerConfig(
        max_model_len=longest,
        is_encoder_decoder=False,
        max_num_seqs=running,
        max_num_batched_tokens=max(budget, longest),
        policy=settings["policy"],
        watermark=settings["watermark"],
        scheduler_reserve_full_isl=settings["admit_whole_prompt"],
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=settings["block_size"], enable_prefix_caching=settings["prefix_caching"])
    config = VllmConfig(
        model_config=model,
        scheduler_config=scheduler,
        cache_config=cache,
        device_config=DeviceConfig(device="cpu"),
    )
    scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = budget
    scheduler.enable_chunked_prefill = settings["chunked_prefill"]
    scheduler.long_prefill_token_threshold = settings["long_prefill_tokens"] or 0
    scheduler.long_prefill_token_threshold_adaptive = False
    cache.enable_prefix_caching = settings["prefix_caching"]
    cache.block_size = settings["block_size"]
    return config, scheduler


def _new_scheduler(settings: dict[str, Any], config: Any, scheduler: Any) -> Any:
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    register_all_kvcache_specs(config)
    blocks = settings["pool_blocks"] + 1  # vLLM counts the null block
    config.cache_config.num_gpu_blocks = blocks
    groups, sizes = [], [size for _, size in _groups(settings)]
    for place, (window, size) in enumerate(_groups(settings)):
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        windowed = window is not None
        spec = SlidingWindowSpec(**shape, sliding_window=window) if windowed else FullAttentionSpec(**shape)
        groups.append(KVCacheGroupSpec([f"layer{place}"], spec))
    made = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=math.lcm(*sizes),
        hash_block_size=math.gcd(*sizes),
        log_stats=False,
    )
    assert made.max_num_scheduled_tokens == settings["max_batched_tokens"]
    assert made.max_num_running_reqs == scheduler.max_num_seqs
    return made


def _groups(settings: dict[str, Any]) -> list[tuple[int | None, int]]:
    """Window (None: full attention) and block size of each group of layers; without `groups` there is one."""
    return settings.get("groups") or [(None, settings["block_size"])]


def serve(answer: Callable[[dict[str, Any]], Any]) -> int:
    """Answer lines of standard input until it ends. What is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line)), separators=(",", ":")) + "\n")
        answers.flush()
    return 0


def main() -> int:
    """Drive vLLM's scheduler."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    driver: Driver | None = None

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal driver
        import vllm

        if "settings" in asked:
            driver = Driver(asked["settings"], folder)
            return {"vllm": vllm.__version__}
        assert driver is not None, "settings come first"
        for request in asked["submit"]:
            driver.submit(request)
        return driver.step()

    with tempfile.TemporaryDirectory() as folder:
        return serve(answer)


if __name__ == "__main__":
    sys.exit(main())
