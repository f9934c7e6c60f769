"""The options of a serving engine, under our keys.

What an engine calls `max_num_seqs` is `scheduler.max_running` here, and so on; `overrides` gives the settings as
`key=value`. `origin` says for each setting where it comes from: a file, or a default of a version of the engine. What
has no key of ours stands in `unmapped`, never nowhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, read_document
from traces.formats.parsing import read_object


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a deployment that decide what its scheduler and its KV pool do.

    None means: neither the file nor a known default says. `pool_blocks` is of one replica. `dtype` and `kv_dtype` are
    our names (`bfloat16`; `fp8_e4m3`, or `model` for that of the weights).
    """

    engine: str = "unknown"  # vllm, sglang
    version: str | None = None
    model: str | None = None  # as the engine was told: a name on the hub or a folder
    device: str | None = None  # as the log names it
    max_running: int | None = None
    max_batched_tokens: int | None = None
    chunked_prefill: bool = True
    async_scheduling: bool | None = None
    policy: str = "fcfs"
    block_size: int | None = None
    prefix_caching: bool = True
    pool_blocks: int | None = None
    pool_tokens: int | None = None
    memory_utilization: float | None = None
    host_memory_gb: float = 0.0  # 10^9 bytes for swapped or offloaded blocks
    max_model_len: int | None = None
    dtype: str | None = None
    kv_dtype: str = "model"
    quantization: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    long_prefill_tokens: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    unmapped: Mapping[str, str] = field(default_factory=dict)

    def overrides(self) -> tuple[str, ...]:
        """The settings of scheduler, cache and parallelism as overrides `key=value` of our configuration.

        Model and device have no override here, since only the user or a preset can say what they are.
        """
        values: dict[str, object] = {
            "scheduler.max_running": self.max_running,
            "scheduler.max_batched_tokens": self.max_batched_tokens,
            "scheduler.chunked_prefill": self.chunked_prefill,
            "scheduler.policy": self.policy,
            "scheduler.long_prefill_tokens": self.long_prefill_tokens,
            "cache.block_size": self.block_size,
            "cache.prefix_caching": self.prefix_caching,
            "cache.pool_tokens": self._tokens_of_pool(),
            "cache.max_model_len": self.max_model_len,
            "model.dtype": self.dtype,
            "model.kv_dtype": None if self.kv_dtype == "model" else self.kv_dtype,
            "device.memory_utilization": self.memory_utilization,
            "device.tensor_parallel": self.tensor_parallel,
        }
        return tuple(f"{key}={_written(value)}" for key, value in values.items() if value is not None)

    def _tokens_of_pool(self) -> int | None:
        if self.pool_blocks is not None and self.block_size is not None:
            return self.pool_blocks * self.block_size
        return self.pool_tokens


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_of(file: SourceFile) -> EngineSettings:
    """The settings in a JSON document: engine.json or meta.json of LLMServingSim's recorder. Raises TraceError."""
    try:
        record: dict[str, Any] = read_object(read_document(file))
    except RowError as error:
        raise TraceError(file.path, error.text_line, error.field, error.reason) from error
    given = record.get("engine_kwargs")
    if not isinstance(given, dict):
        raise TraceError(file.path, 1, "engine_kwargs", "missing, or no object of the engine's arguments")
    return EngineSettings(
        engine="vllm",
        version=record.get("vllm_version"),
        model=given.get("model"),
        max_running=given.get("max_num_seqs"),
        max_batched_tokens=given.get("max_num_batched_tokens"),
        block_size=given.get("block_size", 16),
        prefix_caching=given.get("enable_prefix_caching", True),
        max_model_len=given.get("max_model_len"),
        dtype=given.get("dtype"),
        memory_utilization=given.get("gpu_memory_utilization", 0.9),
        tensor_parallel=given.get("tensor_parallel_size", 1),
        data_parallel=given.get("data_parallel_size", 1),
        expert_parallel=given.get("enable_expert_parallel", False),
    )
