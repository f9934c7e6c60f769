"""Drives vLLM's own scheduler and KV cache manager, unmodified, on the CPU. Runs in the interpreter that has vLLM.

It is started as a script, `python vllm_driver.py`, and imports nothing of PageTwin. Standard input and output carry
one JSON object a line. A line with `settings` starts anew with an empty pool, and is answered with vLLM's version and
what it made of its flags and of the model. Where the settings have `layers`, the model has these; `blocks` then names
those of the first group. A line with `submit` names the requests that arrive before the next step, and is answered
with what vLLM decides in that step; the fields are those of `harness.oracle.decisions.Step`. What a step computes is
given: a request's tokens are those that its line names, and it ends after the last one. Where the settings have
`draft_tokens`, a draft model proposes as many for each request, and `accepted` says how many are right in that step.

vLLM loads no model and no kernel here. Three of its methods are wrapped to learn what its output does not say: which
blocks are evicted, and which requests are preempted after the step had given them tokens. A wrapper calls the method
and changes nothing.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
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


_LAYERS = "PageTwinLayers"  # the architecture of a model that is given as a list of layers


def _use_platform() -> None:
    """vLLM's own CPU platform, with attention in blocks of multiples of 16 tokens and async scheduling, as on a GPU.

    Nothing is computed, so no kernel is missed. On a CPU vLLM keeps blocks of windows in multiples of 32 tokens, and
    switches async scheduling off.
    """
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    class GpuBlocks(CPUAttentionBackend):  # type: ignore[misc]  # untyped
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [MultipleOf(16)]

    class AsyncCpu(CpuPlatform):  # type: ignore[misc]
        @classmethod
        def get_attn_backend_cls(cls, *asked: Any, **named: Any) -> str:
            return f"{__name__}.GpuBlocks"

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            asked = vllm_config.scheduler_config.async_scheduling
            super().check_and_update_config(vllm_config)
            vllm_config.scheduler_config.async_scheduling = asked

    globals()["GpuBlocks"] = GpuBlocks
    vllm.platforms._current_platform = AsyncCpu()


def _register_layers() -> None:
    """A model whose config.json lists its layers: vLLM's own attention layers, and states as its recurrent layers are.

    `layers` has for each layer `full`, `window`, `chunk` or `state`, its bytes (of a token, or of the state), and the
    window or the chunk of attention in tokens.
    """
    import torch
    from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    def shape_of(layers: Any) -> tuple[tuple[int, ...], ...]:
        return ((max(size for kind, size, _ in layers if kind == "state") // 4,),)

    class StateLayer(torch.nn.Module, MambaBase):  # type: ignore[misc]
        mamba_type = MambaAttentionBackendEnum.MAMBA1

        def __init__(self, config: Any, name: str, size: int) -> None:
            super().__init__()
            self._size = size
            config.compilation_config.static_forward_context[name] = self

        def get_state_shape(self) -> Any:
            return ((self._size // 4,),)

        def get_state_dtype(self) -> Any:
            return (torch.float32,)

    class LayerList(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            for place, (kind, size, window) in enumerate(vllm_config.model_config.hf_config.layers):
                name = f"layers.{place}"
                if kind == "state":
                    layer: Any = StateLayer(vllm_config, name, size)
                else:
                    heads = size // 8  # K and V of one number each, in float32
                    chunked = kind == "chunk"
                    span = {"attention_chunk_size" if chunked else "per_layer_sliding_window": window}
                    layer = (ChunkedLocalAttention if chunked else Attention)(
                        *(heads, 1, 1.0),
                        num_kv_heads=heads,
                        cache_config=vllm_config.cache_config,
                        prefix=name,
                        **span,
                    )
                self.add_module(str(place), layer)

        def embed_input_ids(self, input_ids: Any) -> Any: ...

        def forward(self, input_ids: Any, positions: Any) -> Any: ...

        def compute_logits(self, hidden_states: Any) -> Any: ...

    class HybridList(LayerList):
        is_hybrid = True

        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> Any:
            return shape_of(vllm_config.model_config.hf_config.layers)

        @classmethod
        def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> Any:
            return (torch.float32,)

        @classmethod
        def get_mamba_state_copy_func(cls) -> Any: ...

    ModelRegistry.register_model(_LAYERS, LayerList)
    ModelRegistry.register_model(f"{_LAYERS}WithStates", HybridList)


def _model(layers: list[Any]) -> dict[str, Any]:
    """The config.json of a model of these layers."""
    states = any(kind == "state" for kind, _, _ in layers)
    heads = max(size for kind, size, _ in layers if kind != "state") // 8
    return _MODEL | {
        "architectures": [_LAYERS + ("WithStates" if states else "")],
        "hidden_size": heads,
        "head_dim": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": len(layers),
        "layers": layers,
        "attention_chunk_size": next((window for kind, _, window in layers if kind == "chunk"), None),
    }


class Watched:
    """A scheduler of vLLM over an empty pool, and what it decides. `hasher` makes block hashes (None: none)."""

    def __init__(self, scheduler: Any, hasher: Any) -> None:
        self._scheduler = scheduler
        self._hasher = hasher
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
        """Add a request to vLLM's queue. Tokens are given as ranges (first, count), or those of the prompt as ids."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        name, (first, count) = str(request["id"]), request["output"]
        self._outputs[name] = first, count
        self._arrived += 1
        ids = request.get("ids")
        if ids is None:
            ids = list(chain.from_iterable(range(at, at + tokens) for at, tokens in request["prompt"]))
        self._scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=ids,
                sampling_params=SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                arrival_time=float(self._arrived),
                cache_salt=request.get("salt") or None,
                priority=request.get("priority", 0),
                block_hasher=self._hasher,
            )
        )

    def _decisions(self, plan: Any, preempted: Collection[str] = ()) -> dict[str, Any]:
        """What a step decides that has just been scheduled; `preempted` before it, too."""
        scheduler = self._scheduler
        self._given.clear()
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
            "preempted": sorted(int(name) for name in {*preempted, *(plan.preempted_req_ids or ())}),
            "blocks": given,
            "evicted": evicted,
            "running": running,
            "waiting": waiting,
            "free": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


def ended(outputs: dict[int, Any]) -> list[int]:
    """The requests that end with the outputs of a step."""
    return [
        int(one.request_id)
        for batch in outputs.values()
        for one in batch.outputs
        if one.finish_reason is not None
    ]


class Driver(Watched):
    """vLLM's scheduler without a model."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        config = _config(settings, folder)
        scheduler, hash_tokens = _new_scheduler(settings, config)
        self.asked = _asked(config, scheduler)
        caching, self._drafts = settings["prefix_caching"], settings.get("draft_tokens", 0)
        self._ahead = settings["async_scheduling"]
        # a step, which of its requests get a token, the drafts that are right in it
        self._under_way: Any = None
        super().__init__(scheduler, get_request_block_hasher(hash_tokens, sha256) if caching else None)

    def step(self, accepted: dict[str, int], idle: bool) -> dict[str, Any]:
        """Schedule a step, and give its result: each request that has computed all of its tokens gets the next one, and
        as many more as draft tokens are `accepted`.

        With async scheduling the result is given once the next step is scheduled, as `EngineCore.step_with_batch_queue`
        does; what is answered ends with it. Before that, where the engine was `idle`, or nothing could be scheduled.
        """
        finished = self._give_result() if idle else []
        plan, preempted = self._scheduler.schedule(), set[str]()
        if self._ahead and not plan.num_scheduled_tokens:
            preempted = plan.preempted_req_ids or set()
            finished += self._give_result()
            self._under_way = plan, {}, {}
            self._give_result()
            plan = self._scheduler.schedule()
        found = self._decisions(plan, preempted)
        requests = self._scheduler.requests
        chooses = {name: not requests[name].is_prefill_chunk for name in plan.num_scheduled_tokens}
        if self._ahead:
            finished += self._give_result()
        self._under_way = plan, chooses, accepted
        if not self._ahead:
            finished += self._give_result()
        for request_id in finished:
            self._ends.pop(str(request_id), None)
        return {**found, "finished": finished}

    def _give_result(self) -> list[int]:
        """Give the result of the step under way, if there is one; returns the requests that end with it."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        if self._under_way is None:
            return []
        (plan, chooses, accepted), self._under_way, scheduler = self._under_way, None, self._scheduler
        names, sampled = list(chooses), []
        for name in names:
            drafts = plan.scheduled_spec_decode_tokens.get(name, ())
            right = min(accepted.get(name, 0), len(drafts)) if drafts and drafts[0] >= 0 else 0
            request = scheduler.requests.get(name)
            first = self._outputs[name][0] + (request.num_output_tokens if request else 0)
            sampled.append([*range(first, first + 1 + right)] if chooses[name] else [])
        outputs = scheduler.update_from_output(
            plan,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        if self._drafts:
            proposed = [[*range(1, 1 + self._drafts)] for _ in names]
            scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))
        return ended(outputs)


def _flags(settings: dict[str, Any], folder: str) -> list[str]:
    """The settings as vLLM's command line has them. What is left out is vLLM's own default for the model."""
    longest = settings["max_model_len"]
    flags = {
        "block_size": settings["block_size"],
        "max_model_len": longest,
        # a step has at most one token for each running request
        "max_num_seqs": min(settings["max_running"], settings["max_batched_tokens"]),
        "max_num_batched_tokens": max(settings["max_batched_tokens"], longest),
        "scheduling_policy": settings["policy"],
        "watermark": settings["watermark"],
        "scheduler_reserve_full_isl": settings["admit_whole_prompt"],
        "enable_prefix_caching": settings["prefix_caching"],
        "async_scheduling": settings["async_scheduling"],
        **settings.get("flags", {}),
    }
    if drafts := settings.get("draft_tokens"):
        flags["speculative_config"] = {
            "method": "draft_model",
            "model": folder,
            "num_speculative_tokens": drafts,
        }
    return words_of(flags)


def words_of(flags: dict[str, Any]) -> list[str]:
    """Arguments of vLLM as words of a command line, by their names with `_`."""
    words = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def resolved_config(words: list[str]) -> Any:
    """vLLM's configuration, made by its own argument parser from the words of a command line."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    return EngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)


def _config(settings: dict[str, Any], folder: str) -> Any:
    """vLLM's configuration of flags and the model's config.json.

    What its checks refuse for a server, but its scheduler takes, is set after them.
    """
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(_model(settings["layers"]) if "layers" in settings else _MODEL, file)
    words = ["--model", folder, "--skip-tokenizer-init", "--dtype", "float32", *_flags(settings, folder)]
    config = resolved_config(words)
    scheduler, budget = config.scheduler_config, settings["max_batched_tokens"]
    scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = budget
    scheduler.enable_chunked_prefill = settings["chunked_prefill"]
    scheduler.long_prefill_token_threshold = settings["long_prefill_tokens"] or 0
    scheduler.long_prefill_token_threshold_adaptive = settings.get("long_prefill_adaptive", False)
    return config


def _kv_cache(config: Any, blocks: int) -> Any:
    """The groups of layers, as vLLM makes them of the model: its layers are built without weights, and asked."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            with tempfile.NamedTemporaryFile(delete=False) as store:
                init_distributed_environment(
                    world_size=1, rank=0, distributed_init_method=f"file://{store.name}", backend="gloo"
                )
            ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            initialize_model(vllm_config=config, model_config=config.model_config)
        current_platform.update_block_size_for_backend(config)
        register_all_kvcache_specs(config)
        specs = get_kv_cache_spec(config)
        layouts = [layout.name for layout in get_supported_kv_cache_layouts([])]
        resolve_kv_cache_layout(config, [layouts], specs.values())
        builder = get_kv_cache_config_builder(config)
        groups = builder.get_kv_cache_groups(config, specs)
        return builder.get_kv_cache_config_from_groups(config, groups, blocks)


def _new_scheduler(settings: dict[str, Any], config: Any) -> tuple[Any, int]:
    """vLLM's scheduler of the class that its configuration names, and the tokens of a block hash."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    config.cache_config.num_gpu_blocks = blocks = settings["pool_blocks"] + 1  # vLLM counts the null block
    kv_cache = _kv_cache(config, blocks)
    block_size, hash_size = resolve_kv_cache_block_sizes(kv_cache, config)
    made = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_size,
        log_stats=False,
    )
    assert made.max_num_scheduled_tokens == settings["max_batched_tokens"]
    assert made.max_num_running_reqs == config.scheduler_config.max_num_seqs
    return made, hash_size


def _asked(config: Any, scheduler: Any) -> dict[str, Any]:
    """What vLLM made of its flags and of the model, for those who compare."""
    cache, groups = config.cache_config, scheduler.kv_cache_config.kv_cache_groups
    return {
        "scheduler": type(scheduler).__name__,
        "retention_interval": cache.prefix_cache_retention_interval,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "match_unit": scheduler.block_size,
        "prefix_match_unit": scheduler.hash_block_size,
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "window": getattr(group.kv_cache_spec, "attention_chunk_size", None)
                or getattr(group.kv_cache_spec, "sliding_window", None),
                "layers": len(group.layer_names),
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "inner_checkpoints": getattr(group.kv_cache_spec, "num_prefill_checkpoint_blocks", 0),
            }
            for group in groups
        ],
    }


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
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    driver: Driver | None = None
    _use_platform()
    _register_layers()

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        nonlocal driver
        import vllm

        if "settings" in asked:
            driver = Driver(asked["settings"], folder)
            return {"vllm": vllm.__version__, **driver.asked}
        assert driver is not None, "settings come first"
        for request in asked["submit"]:
            driver.submit(request)
        return driver.step(asked.get("accepted", {}), asked.get("idle", False))

    with tempfile.TemporaryDirectory() as folder:
        return serve(answer)


if __name__ == "__main__":
    sys.exit(main())
