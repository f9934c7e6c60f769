"""Composition: Hydra combines `conf/` and the overrides into a validated `RunConfig`.

`normalise` sets each setting that does not apply to one fixed value, so that equal experiments have equal
configurations.
"""

import copy
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from os.path import expanduser
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.core.options import CachePolicy
from engine.runtime.options import Dtype
from harness.config.checkpoint import CheckpointFacts
from harness.config.errors import ConfigError
from harness.config.groups import conf_dir
from harness.config.option_files import apply_option_file
from harness.config.overrides import Setting, config_keys
from harness.config.schema import (
    CacheConfig,
    CostConfig,
    CostKind,
    DecodingConfig,
    DecodingMode,
    EngineDevice,
    ReplayConfig,
    ReplayMode,
    RunConfig,
    TraceFormat,
    Widths,
    WorkloadConfig,
)

_WIDE = (
    TraceFormat.auto,
    TraceFormat.simple,
    TraceFormat.pagetwin,
)  # formats whose rows may name their width


CPU = "cpu"
TOY_MODELS = ("tiny-llama", "small-llama", "tiny-gpt2", "tiny-opt", "tiny-qwen3")
"""Models of `conf/model/` with random weights, made for the CPU."""

# key: (values that the files of conf/ hold for a toy model on the CPU, value for a real deployment). A server takes
# whole requests, fills the device's memory with KV, and has the limits that vLLM's `serve` has on a large GPU.
_REAL_DEFAULTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "workload.length_scale": ((0.1,), 1.0),
    "cache.pool_tokens": ((8192,), None),
    "cache.max_model_len": ((1024,), None),
    "scheduler.max_batched_tokens": ((512, 2048), 8192),
    "scheduler.max_running": ((64,), 256),
}


def normalise(config: RunConfig) -> RunConfig:
    """The same run with settings that do not apply set to their neutral value.

    A contiguous cache has single slots, and neither shares nor swaps. Without a prefix cache blocks are not hashed.
    Beam search ignores `mode`, `n` and `temperature`; greedy decoding ignores `temperature`. Settings of beams, sampled
    branches and drafts apply only where there are any; rows of some trace formats can have their own width. Users and
    pauses apply only to the replay modes that have them. `~` in a path becomes the home folder.
    """
    cache = config.cache
    plain = CacheConfig()
    if cache.policy is not CachePolicy.paged:
        cache = replace(
            cache,
            block_size=1,
            prefix_caching=False,
            deduplicate=False,
            copy_at_fork=False,
            host_tokens=0,
            eviction=None,
        )
    else:
        cache = replace(cache, placement=plain.placement)
    if not cache.prefix_caching:
        cache = replace(cache, retention=plain.retention, hash=plain.hash, deduplicate=False)
    wide = config.trace.format in _WIDE
    return replace(
        config,
        out=expanduser(config.out),
        trace=replace(config.trace, path=_home(config.trace.path)),
        model=replace(config.model, path=_home(config.model.path)),
        cost=_cost(config.cost),
        cache=cache,
        workload=config.workload if wide else replace(config.workload, widths=WorkloadConfig().widths),
        decoding=_decoding(config.decoding, wide and config.workload.widths is Widths.recorded),
        replay=_replay(config.replay),
    )


def _decoding(decoding: DecodingConfig, wide: bool) -> DecodingConfig:
    """`wide`: rows of the trace may have beams or samples where the configuration has none."""
    neutral = DecodingConfig()
    unused: dict[str, Any] = {}
    beams, sampled = decoding.beam_width > 1, decoding.mode is DecodingMode.sample
    if beams:
        unused |= {"mode": neutral.mode, "n": neutral.n}
    elif not wide:
        unused |= {"beam_churn": None, "beam_parents": None}
    if not wide and (beams or not sampled):
        unused |= {"temperature": neutral.temperature, "branch_hazard": neutral.branch_hazard}
    if not decoding.draft_tokens:
        unused |= {"draft_place": neutral.draft_place, "draft_path": None, "acceptance": None}
    kept = replace(decoding, **unused)
    return replace(kept, beam_parents=_home(kept.beam_parents), draft_path=_home(kept.draft_path))


def _replay(replay: ReplayConfig) -> ReplayConfig:
    neutral = ReplayConfig()
    unused: dict[str, Any] = {}
    if replay.mode is not ReplayMode.closed:
        unused["users"] = neutral.users
    if replay.mode not in (ReplayMode.closed, ReplayMode.sessions):
        unused["think_s"] = neutral.think_s
    if replay.mode is not ReplayMode.gamma:
        unused["burstiness"] = neutral.burstiness
    return replace(replay, **unused)


def _cost(cost: CostConfig) -> CostConfig:
    """Timed kernels apply to the table model alone, which `auto` chooses where they are named."""
    kernels = _home(cost.kernels) if cost.kind in (CostKind.auto, CostKind.table) else None
    operators = _home(cost.operators) if cost.kind in (CostKind.auto, CostKind.operators) else None
    engine = cost.engine if cost.kind is CostKind.published else CostConfig().engine
    return replace(cost, kernels=kernels, operators=operators, engine=engine, cache_dir=_home(cost.cache_dir))


def _home(path: str | None) -> str | None:
    return None if path is None else expanduser(path)


ConfigStore.instance().store(name="schema", node=RunConfig)


def compose_config(settings: Iterable[Setting]) -> RunConfig:
    """Compose a run from group options and values. Types are checked here, ranges in `harness.config.checks`.

    Raises:
        ConfigError: a value has the wrong type, or an interpolation cannot be resolved; names the key, and the line
            where it stands in a file of the user's.
    """
    chosen = list(settings)
    named = tuple(item.text for item in chosen if item.is_group and not item.is_file)
    tree = copy.deepcopy(_composed(named))
    for item in chosen:
        if item.is_file:
            apply_option_file(tree, item.key, item.value)
    for item in chosen:
        if not item.is_group:
            _apply(tree, item)
    asked = {item.key for item in chosen}
    if tree.cache.pool_blocks is not None and "cache.pool_tokens" not in asked:
        tree.cache.pool_tokens = None  # that of the group's file; a pool that the user names counts
    if "model.dtype" not in asked:
        _take_dtype_of_checkpoint(tree)
    for key, value in real_defaults(tree, asked).items():
        OmegaConf.update(tree, key, value, merge=False)
    try:
        return cast(RunConfig, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        raise ConfigError(error.full_key or "", str(error.msg or error).splitlines()[0]) from None


def real_defaults(tree: DictConfig, named: Container[str]) -> dict[str, Any]:
    """The settings that a point takes because it predicts a real deployment, by key; `named` are those of the user.

    The files of `conf/` hold small values, so that a toy model answers in a second on the CPU. They make no sense for a
    prediction (`measure=false`) of a GPU or of a real model, nor for a real model that is measured on CUDA. A value
    that the user names stays, and so does `workload=small` where it is named.
    """
    model = bool(tree.model.path) or tree.model.name not in TOY_MODELS
    on_cuda = tree.engine.device == EngineDevice.cuda
    if not (model and on_cuda if tree.measure else model or tree.device.name != CPU):
        return {}
    return {
        key: value
        for key, (toy, value) in _REAL_DEFAULTS.items()
        if key not in named
        and OmegaConf.select(tree, key) in toy
        and not (key.startswith("workload.") and "workload" in named)
    }


def _take_dtype_of_checkpoint(tree: DictConfig) -> None:
    """Set `model.dtype` to what the checkpoint at `model.path` says of itself; without a word it stays as it is.

    Raises:
        ConfigError: the checkpoint says none of our types; or it says nothing, and a GPU is predicted. Our engine loads
            such weights as float32, which would silently double the bytes of what other engines load in 16 bits.
    """
    if not tree.model.path:
        return
    try:
        facts = CheckpointFacts(tree.model.path)
    except ConfigError:
        return  # the check of the model says what is wrong with the file
    if facts.dtype is None:
        if not tree.measure and tree.device.name != CPU and tree.model.dtype == Dtype.float32:
            raise ConfigError(
                "model.dtype",
                f"{facts.file} does not say the element type of the weights (dtype or torch_dtype), and a prediction "
                "for a GPU needs it; add model.dtype=bfloat16 (or float16, float32)",
            )
        return
    if not isinstance(facts.dtype, str) or facts.dtype not in Dtype.__members__:
        allowed = ", ".join(Dtype.__members__)
        raise ConfigError(
            "model.dtype",
            f"found {facts.dtype!r} in {facts.file}; allowed: {allowed}. Name one of them to convert the weights",
        )
    tree.model.dtype = facts.dtype


def compose_with_hydra(overrides: Sequence[str]) -> DictConfig:
    """Hydra's own composition of override strings, without the cache; slow, tests compare `compose_config` with it."""
    with initialize_config_dir(str(conf_dir()), job_name="pagetwin", version_base="1.3"):
        return cast(DictConfig, compose("config", overrides=list(overrides)))


@lru_cache(maxsize=256)
def _composed(choices: tuple[str, ...]) -> DictConfig:
    try:
        return compose_with_hydra(choices)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("conf", f"cannot compose {' '.join(choices) or 'config.yaml'}: {error}") from None


def _apply(tree: DictConfig, item: Setting) -> None:
    try:
        OmegaConf.update(tree, item.key, item.value, merge=False)
    except OmegaConfBaseException:
        raise ConfigError(item.key, f"found {_found(item.value)}, must be {_expected(item)}") from None


def _expected(item: Setting) -> str:
    words = config_keys()[item.key].expected
    several = isinstance(item.value, list)
    return words + " (to sweep, write the values without brackets: a,b,c)" if several else words


def _found(value: Any) -> str:
    return "null" if value is None else f"'{value}'"
