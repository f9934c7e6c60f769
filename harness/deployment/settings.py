"""The options of a serving engine, under our keys.

What an engine calls `max_num_seqs` is `scheduler.max_running` here, and so on; `overrides` gives the settings as
`key=value`. `origin` says for each setting where it comes from: a file, or a default of a version of the engine. What
has no key of ours stands in `unmapped`; what changes the engine's schedule in a way that is not simulated stands in
`unmodelled`. Nothing is left out.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    """The settings of a deployment that decide what its scheduler and its KV pool do.

    None means: neither a file nor a known default says. `pool_blocks` and `pool_tokens` are those of one replica.
    `dtype` and `kv_dtype` are our names (`bfloat16`; `fp8_e4m3`, or `model` for that of the weights).
    """

    engine: str = "unknown"  # vllm, sglang
    version: str | None = None
    model: str | None = None  # as the engine was told: a name on the hub or a folder
    device: str | None = None  # as the log names it
    max_running: int | None = None
    max_batched_tokens: int | None = None
    chunked_prefill: bool | None = None
    async_scheduling: bool | None = None
    policy: str | None = None
    long_prefill_tokens: int | None = None
    block_size: int | None = None
    prefix_caching: bool | None = None
    pool_blocks: int | None = None
    pool_tokens: int | None = None
    memory_utilization: float | None = None
    host_memory_gb: float | None = None  # 10^9 bytes for blocks that are swapped or offloaded to the host
    max_model_len: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    expert_parallel: bool | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    unmapped: Mapping[str, str] = field(default_factory=dict)
    unmodelled: Mapping[str, str] = field(default_factory=dict)

    def overrides(self) -> tuple[str, ...]:
        """The settings of scheduler, cache and precision as overrides `key=value` of our configuration.

        Model, device and the number of devices are not among them: a preset or the user says what they are.
        """
        values: dict[str, object] = {
            "scheduler.max_running": self.max_running,
            "scheduler.max_batched_tokens": self.max_batched_tokens,
            "scheduler.chunked_prefill": self.chunked_prefill,
            "scheduler.async_scheduling": self.async_scheduling,
            "scheduler.policy": self.policy,
            "scheduler.long_prefill_tokens": self.long_prefill_tokens,
            "cache.block_size": self.block_size,
            "cache.prefix_caching": self.prefix_caching,
            "cache.pool_tokens": self.tokens_of_pool,
            "cache.pool_blocks": self.pool_blocks if self.tokens_of_pool is None else None,
            "cache.max_model_len": self.max_model_len,
            "model.dtype": self.dtype,
            "model.kv_dtype": None if self.kv_dtype == "model" else self.kv_dtype,
            "device.memory_utilization": self.memory_utilization,
        }
        return tuple(f"{key}={_written(value)}" for key, value in values.items() if value is not None)

    @property
    def tokens_of_pool(self) -> int | None:
        """KV slots of one replica, from its blocks or as logged; None: not known."""
        if self.pool_blocks is not None and self.block_size is not None:
            return self.pool_blocks * self.block_size
        return self.pool_tokens

    def given(self) -> dict[str, Any]:
        """The settings that are known, by field."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _BOOKS}
        return {name: value for name, value in values.items() if value not in (None, "unknown")}

    def changed(self, origin: str, **values: Any) -> "EngineSettings":
        """These settings with other values, which come from `origin`."""
        return replace(self, **values, origin={**self.origin, **dict.fromkeys(values, origin)})

    def filled(self, other: "EngineSettings") -> "EngineSettings":
        """These settings, with what is not known here taken from `other`."""
        known = self.given()
        more = {name: value for name, value in other.given().items() if name not in known}
        origin = {name: where for name, where in other.origin.items() if name in more}
        return replace(
            self,
            **more,
            origin={**origin, **self.origin},
            unmapped={**other.unmapped, **self.unmapped},
            unmodelled={**other.unmodelled, **self.unmodelled},
        )


Read = Callable[[Any, str], Any]
"""Reads the value of an option, which it names in errors; None says nothing. Raises RowError."""

_SECRET = re.compile(r"key|token$|password|secret|header", re.IGNORECASE)


@dataclass(frozen=True)
class EngineOptions:
    """What the options of an engine mean, by their names with `_`.

    `mapped` gives our field, and how its value is read. `unmodelled` options change the schedule or the memory in a way
    that is not simulated, unless they have one of the values given here. `silent` ones say nothing of time or memory.
    """

    engine: str
    mapped: Mapping[str, tuple[str, Read]]
    unmodelled: Mapping[str, tuple[object, ...]]
    silent: Collection[str]

    def read(self, args: Mapping[str, Any], where: str, version: str | None) -> EngineSettings:
        """The settings that `args` gives, by name with `_` or `-`; `where` is the file they stand in.

        The value of an option that looks like a secret is kept nowhere.

        Raises:
            RowError: a value has the wrong type, or names something that we do not know.
        """
        values: dict[str, Any] = {"engine": self.engine}
        if version is not None:
            values["version"] = version
        unmapped: dict[str, str] = {}
        unmodelled: dict[str, str] = {}
        for raw, value in args.items():
            name = raw.replace("-", "_")
            if value is None:
                continue
            if name in self.mapped:
                key, read = self.mapped[name]
                found = read(value, raw)
                if found is not None:
                    values[key] = found
            elif name in self.unmodelled:
                if str(value) not in map(str, self.unmodelled[name]):
                    unmodelled[name] = str(value)
            elif name not in self.silent:
                unmapped[name] = "given" if _SECRET.search(name) else str(value)
        return EngineSettings(
            **values, origin=dict.fromkeys(values, where), unmapped=unmapped, unmodelled=unmodelled
        )


_BOOKS = ("origin", "unmapped", "unmodelled")


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
