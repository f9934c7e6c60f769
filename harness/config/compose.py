"""Composition: Hydra combines `conf/` and the overrides into a validated `RunConfig`.

`normalise` sets each setting that does not apply to one fixed value, so that equal experiments have equal
configurations.
"""

import copy
import os
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import is_dataclass, replace
from functools import cache, lru_cache, reduce
from os.path import expanduser
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.core.options import CachePolicy, Eviction, GroupPages, Preemption
from engine.runtime.options import Dtype
from harness.config.errors import ConfigError
from harness.config.execution import applicable
from harness.config.groups import conf_dir
from harness.config.option_files import apply_option_file
from harness.config.overrides import Setting, refuse_resolver
from harness.config.paths import read_checkpoint
from harness.config.schema import (
    CostKind,
    DecodingMode,
    EngineDevice,
    OracleEngine,
    ReplayMode,
    RunConfig,
    SharingModel,
    TraceArrivals,
    TraceFormat,
    WeightDtype,
    Widths,
    config_keys,
)
from harness.config.values import UnusualError, converted, replaced, with_values

# formats whose rows may name their width
_WIDE = (TraceFormat.auto, TraceFormat.simple, TraceFormat.pagetwin)


CPU = "cpu"
# Models of `conf/model/` with random weights, made for the CPU.
TOY_MODELS = (
    *("tiny-llama", "small-llama", "tiny-gpt2", "tiny-opt", "tiny-qwen3"),
    *("tiny-gemma2", "tiny-qwen3-next"),
)

# key: (values that the files of conf/ hold for a toy model on the CPU, value for a real deployment). A server takes
# whole requests, fills the device's memory with KV, and has 8,192 tokens a step, as vLLM's `serve` on an
# H100, and 256 sequences, as there on smaller GPUs.
_REAL_DEFAULTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "workload.length_scale": ((0.1,), 1.0),
    "cache.pool_tokens": ((8192,), None),
    "cache.max_model_len": ((1024,), None),
    "scheduler.max_batched_tokens": ((512, 2048), 8192),
    "scheduler.max_running": ((64,), 256),
}


_NEUTRAL = RunConfig()  # the values of settings that do not apply


def normalise(config: RunConfig) -> RunConfig:
    """The same run with settings that do not apply set to their neutral value.

    A contiguous cache has single slots, and neither shares nor swaps. Without a prefix cache blocks are not hashed.
    Beam search ignores `mode`, `n` and `temperature`; greedy decoding ignores `temperature`. Settings of beams, sampled
    branches and drafts apply only where there are any; rows of some trace formats can have their own width. Users and
    pauses apply only to the replay modes that have them. `~` in a path becomes the home folder.
    """
    values: dict[str, dict[str, Any]] = {}
    for section, applies, names in _applies(config):
        if not applies:
            values.setdefault(section, {}).update(_neutral(section, names))
    if config.cache.policy is not CachePolicy.paged:
        values["cache"] |= {"block_size": 1, "prefix_caching": False}
    for section, name in _PATHS:
        inner = values.setdefault(section, {})
        path = inner.get(name, getattr(getattr(config, section), name))
        inner[name] = None if path is None else expanduser(path)
    changes: dict[str, Any] = {
        section: with_values(getattr(config, section), **inner) for section, inner in values.items()
    }
    changes |= {"out": expanduser(config.out), "execute": applicable(config.execute)}
    alike = all(getattr(config, name) is value for name, value in changes.items())
    return config if alike else replace(config, **changes)


_PATHS = tuple(
    (section, name)
    for section, names in (
        ("trace", ("path",)),
        ("model", ("path",)),
        ("cost", ("kernels", "operators", "cache_dir")),
        ("decoding", ("beam_parents", "draft_path")),
        ("oracle", ("python",)),
    )
    for name in names
)


@cache
def _neutral(section: str, names: str) -> dict[str, Any]:
    """The defaults of the settings `names` of a section."""
    return {name: getattr(getattr(_NEUTRAL, section), name) for name in names.split()}


def _applies(config: RunConfig) -> Iterable[tuple[str, bool, str]]:
    """A section, whether some of its settings apply, and their names."""
    decoding, replay, kind, oracle = config.decoding, config.replay.mode, config.cost.kind, config.oracle
    paged = config.cache.policy is CachePolicy.paged
    grouped, hashed = config.cache.groups is not GroupPages.off, paged and config.cache.prefix_caching
    tiered = hashed and config.cache.tier_tokens > 0
    rules = hashed and config.cache.eviction, tiered and config.cache.tier_eviction
    wide = config.trace.format in _WIDE
    of_rows = wide and config.workload.widths is Widths.recorded  # rows may have beams or samples
    beams, sampled = decoding.beam_width > 1, decoding.mode is DecodingMode.sample
    compared = oracle.engine is not OracleEngine.none  # with vLLM as a third side
    return (
        ("cache", paged, "copy_at_fork host_tokens groups"),
        ("cache", not paged, "placement"),
        ("cache", paged and grouped, "window_hits retention_interval behind_first states state_every"),
        ("cache", hashed, "tier_tokens eviction answers retention hash deduplicate prefix_match_unit"),
        ("cache", tiered, "disk_tokens tier_store tier_chunk tier_eviction tier_load tier_overlap"),
        ("cache", Eviction.ttl in rules, "ttl_s"),
        ("cache", Eviction.pinned in rules, "pinned_tokens"),
        ("workload", wide, "widths"),
        ("decoding", not beams, "mode n"),
        ("decoding", beams or of_rows, "beam_churn beam_parents"),
        ("decoding", of_rows or (sampled and not beams), "temperature branch_hazard"),
        ("decoding", of_rows or beams or decoding.n != 1, "sharing"),
        ("decoding", bool(decoding.draft_tokens), "draft_place draft_path acceptance"),
        ("replay", replay is ReplayMode.closed, "users"),
        ("replay", replay is not ReplayMode.closed, "max_in_flight"),
        ("replay", replay in (ReplayMode.closed, ReplayMode.sessions), "think_s"),
        ("replay", replay is ReplayMode.gamma, "burstiness"),
        ("cost", kind in (CostKind.auto, CostKind.table), "kernels"),
        ("cost", kind in (CostKind.auto, CostKind.operators), "operators"),
        ("cost", kind is CostKind.published, "engine"),
        ("cost", paged, "block_sizes"),
        ("scheduler", config.scheduler.async_scheduling, "async_frees_at_once"),
        ("oracle", compared or (config.measure and config.engine.on_vllm), "python"),
        ("oracle", compared, "allow"),
    )


OF_MEMORY = "memory_gb memory_utilization activation_gb other_memory_gb graph_memory_gb"
"""Keys of `device` that size a pool which is not given."""


def _parts(config: RunConfig) -> Iterable[tuple[object, str, str]]:
    """Whether a part of a point is there and read, and the section and the names of the keys that describe it."""
    device, model, cost, trace = config.device, config.model, config.cost, config.trace
    kind, share = cost.kind, config.workload.prefix_share
    built = not model.path  # a checkpoint has its own shape
    experts = model.path or model.experts
    priced = kind is not CostKind.published  # which has timings in the place of rates
    measured = config.measure and not cost.operators and not model.state_layers  # so `auto` is fitted
    fitted = kind in (CostKind.fitted, CostKind.table) or (kind is CostKind.auto and measured)
    linked = device.tensor_parallel > 1 or (experts and device.data_parallel > 1)
    read, mode = trace.format is not TraceFormat.generated, config.replay.mode
    return (
        (priced and linked, "device", "link_gbs link_efficiency link_round_us"),
        (not (config.cache.pool_tokens or config.cache.pool_blocks), "device", OF_MEMORY),
        (config.cache.disk_tokens, "device", "disk_read_gbs disk_write_gbs disk_latency_us"),
        (kind in (CostKind.auto, CostKind.operators), "device", "multiprocessors l2_mib clock_ghz"),
        (priced, "device", "compute_efficiency attention_efficiency"),
        (priced and not fitted, "device", "bandwidth_efficiency kv_efficiency layer_overhead_us"),
        (priced and not fitted, "device", "attention_overhead_us row_overhead_us"),
        (not fitted, "device", "bandwidth_gbs step_overhead_us"),
        (built, "model", "family layers hidden heads kv_heads head_dim intermediate vocab tied_embeddings"),
        (built, "model", "window windowed_layers chunked_windows experts latent_rank"),
        (built and model.latent_rank, "model", "rope_dim value_dim query_rank"),
        (built and experts, "model", "experts_per_token dense_layers"),
        (built and experts, "model", "expert_intermediate shared_intermediate"),
        (experts, "model", "experts_only"),
        (experts and priced, "model", "expert_skew"),
        (model.weight_dtype is WeightDtype.int4, "model", "weight_group"),
        (experts, "device", "expert_parallel"),
        (not priced, "device", "tables_attention tables_dense"),
        (config.measure, "decoding", "temperature"),
        (config.measure, "replay", "repeats"),
        (model.path or model.state_layers, "cache", "states state_every"),
        (config.scheduler.preemption is not Preemption.recompute, "cache", "host_tokens"),
        (config.cache.policy is CachePolicy.paged, "scheduler", "preemption"),
        (mode not in (ReplayMode.closed, ReplayMode.offline), "workload", "request_rate"),
        (share is not None or trace.sharing is not SharingModel.none, "workload", "num_prefixes prefix_zipf"),
        (share is None, "trace", "sharing"),
        (share is None and trace.sharing is not SharingModel.none, "trace", "share"),
        (trace.arrivals is TraceArrivals.gamma, "trace", "arrival_shape"),
        (read, "trace", "ticks on_error sort tokenizer"),
    )


def unread_keys(config: RunConfig) -> set[str]:
    """Keys of parts that a point lacks. Their values stay: a changed setting may bring the part."""
    lacking = (row for row in _parts(config) if not row[0])
    return {f"{section}.{name}" for _, section, names in lacking for name in names.split()}


ConfigStore.instance().store(name="schema", node=RunConfig)


def compose_config(settings: Iterable[Setting], *, shared: bool = False) -> RunConfig:
    """Compose a run from group options and values. Types are checked here, ranges in `harness.config.checks`.

    With `shared` the sections are also those of other configurations, and must never be changed.

    Raises:
        ConfigError: a value has the wrong type, or an interpolation cannot be resolved; names the key, and the line
            where it stands in a file of the user's.
    """
    chosen = list(settings)
    for item in chosen:
        refuse_resolver(item.key, item.value)
    try:
        config = _composed_by_values(chosen)
    except UnusualError:
        return compose_as_tree(chosen)
    if shared:
        return config
    own = {
        name: replace(value)
        for name, value in vars(config).items()
        if is_dataclass(value) and not isinstance(value, type)
    }
    return replace(config, **cast(dict[str, Any], own))


def compose_as_tree(chosen: Sequence[Setting]) -> RunConfig:
    """The same through OmegaConf's trees, which take any value and name each fault; 20 ms a configuration."""
    tree = _tree(tuple(item for item in chosen if item.is_group))
    for item in chosen:
        if not item.is_group:
            _apply(tree, item)
    typed = _typed(tree)  # names the key of a reference that leads nowhere
    changes = _consequences(typed, {item.key for item in chosen})
    for key, value in changes.items():
        OmegaConf.update(tree, key, value, merge=False)
    return _typed(tree) if changes else typed


def _composed_by_values(chosen: Sequence[Setting]) -> RunConfig:
    """Raises UnusualError where a value, or a file of the user's, needs OmegaConf's tree."""
    values = {item.key: converted(item.key, item.value) for item in chosen if not item.is_group}
    first = tuple(item for item in chosen if item.is_group or item.key in _NAMES)
    config = _base(first, tuple(_stamp(item.value) for item in first if item.is_file))
    config = replaced(config, {key: value for key, value in values.items() if key not in _NAMES})
    asked = {item.key for item in chosen}
    more = {key: converted(key, value) for key, value in _consequences(config, asked).items()}
    return replaced(config, more) if more else config


_NAMES = ("name", "out")  # the file of the defaults derives the one from the other
_REFERENCE = re.compile(r"\$\{([^}]*)\}")


@lru_cache(maxsize=256)
def _base(first: tuple[Setting, ...], stamps: tuple[tuple[int, int], ...]) -> RunConfig:
    """The configuration of group options and names alone; `stamps` are those of the files that it is read from."""
    tree = _tree(tuple(item for item in first if item.is_group))
    for item in first:
        if not item.is_group:
            _apply(tree, item)
    plain = cast(dict[str, Any], OmegaConf.to_container(tree))
    if not {*_REFERENCE.findall(str(plain))} <= {*_NAMES}:
        raise UnusualError  # a reference to a key that a point may set
    return _typed(tree)


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(expanduser(file))
    except OSError:
        raise UnusualError from None  # reading it says why
    return found.st_mtime_ns, found.st_size


def _tree(groups: tuple[Setting, ...]) -> DictConfig:
    """A tree of its own with these options of groups, those from files included."""
    tree = copy.deepcopy(_composed(tuple(item.text for item in groups if not item.is_file)))
    for item in groups:
        if item.is_file:
            apply_option_file(tree, item.key, item.value)
    return tree


def _typed(tree: DictConfig) -> RunConfig:
    try:
        return cast(RunConfig, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "", str(error.msg or error).splitlines()[0]) from None


def _consequences(config: "RunConfig | DictConfig", asked: Container[str]) -> dict[str, Any]:
    """The settings that follow from the others, by key; `asked` are those of the user."""
    found: dict[str, Any] = {}
    if config.cache.pool_blocks is not None and "cache.pool_tokens" not in asked:
        found["cache.pool_tokens"] = None  # that of the group's file; a pool that the user names counts
    if "model.dtype" not in asked and (dtype := _dtype_of_checkpoint(config)) is not None:
        found["model.dtype"] = dtype
    return found | real_defaults(config, asked)


def real_defaults(config: "RunConfig | DictConfig", named: Container[str]) -> dict[str, Any]:
    """The settings that a point takes because it predicts a real deployment, by key; `named` are those of the user.

    The files of `conf/` hold small values, so that a toy model answers in a second on the CPU. They make no sense for a
    prediction (`measure=false`) of a GPU or of a real model, nor for a real model that is measured on CUDA. A value
    that the user names stays, and so does `workload=small` where it is named.
    """
    model = bool(config.model.path) or config.model.name not in TOY_MODELS
    on_cuda = config.engine.device == EngineDevice.cuda
    if not (model and on_cuda if config.measure else model or config.device.name != CPU):
        return {}
    return {
        key: value
        for key, (toy, value) in _REAL_DEFAULTS.items()
        if key not in named
        and reduce(getattr, key.split("."), config) in toy
        and not (key.startswith("workload.") and "workload" in named)
    }


def _dtype_of_checkpoint(config: "RunConfig | DictConfig") -> str | None:
    """What the checkpoint at `model.path` says of its element type; None without a word or a path.

    Raises:
        ConfigError: the checkpoint says none of our types; or float32 or nothing, and a GPU is predicted. Our engine
            loads such weights as float32, which would silently double the bytes of what vLLM loads in 16 bits.
    """
    if not config.model.path:
        return None
    try:
        found = read_checkpoint(config.model.path)
    except ConfigError:
        return None  # the check of the model says what is wrong with the file
    wide = found.dtype == Dtype.float32 or (found.dtype is None and config.model.dtype == Dtype.float32)
    if wide and not config.measure and config.device.name != CPU:
        said = (
            "says float32"
            if found.dtype
            else "does not say the element type of the weights (dtype, torch_dtype)"
        )
        reason = f"{found.file} {said}, and vLLM loads such weights in 16 bits; for the prediction of a GPU"
        raise ConfigError("model.dtype", f"{reason} add model.dtype=bfloat16 (or float16, float32)")
    if found.dtype is None:
        return None
    if not isinstance(found.dtype, str) or found.dtype not in Dtype.__members__:
        allowed = ", ".join(Dtype.__members__)
        reason = f"found {found.dtype!r} in {found.file}; allowed: {allowed}. Name one of them to convert the weights"
        raise ConfigError("model.dtype", reason)
    return found.dtype


def compose_with_hydra(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own composition of override strings, without the cache; slow, tests compare `compose_config` with it."""
    with initialize_config_dir(str(conf_dir()), job_name="pagetwin", version_base="1.3"):
        return cast(DictConfig, compose("config", overrides=list(overrides)))


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    if len(choices) > 1:  # an option sets its own section alone, so that each is composed once
        tree = copy.deepcopy(_composed(choices[:1]))
        for choice in choices[1:]:
            group = choice.partition("=")[0]
            tree[group] = _composed((choice,))[group]
        return tree
    try:
        return compose_with_hydra(choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("conf", f"cannot compose {' '.join(choices) or 'config.yaml'}: {error}") from None


def _apply(tree: DictConfig, item: Setting) -> None:
    try:
        OmegaConf.update(tree, item.key, item.value, merge=False)
    except OmegaConfBaseException:
        found = "null" if item.value is None else f"'{item.value}'"
        raise ConfigError(item.key, f"found {found}, must be {_expected(item)}") from None


def _expected(item: Setting) -> str:
    words = config_keys()[item.key].expected
    several = isinstance(item.value, list)
    return words + " (to sweep, write the values without brackets: a,b,c)" if several else words
