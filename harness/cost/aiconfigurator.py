"""Tables for `PublishedCost` from the measured operators of the package aiconfigurator-core (`pagetwin[gpu-tables]`).

The package (Apache-2.0, https://github.com/ai-dynamo/aiconfigurator) has timings of attention, GEMM, experts and
collectives on real GPUs. It is imported when it is used; nothing of it is copied. Its calls are mapped so:

* `decode_step_per_op(rows, isl=slots - 1, osl=2)` is a step of `rows` decode rows that read `slots` KV slots each;
* `run_static_per_op(mode="static_ctx", batch_size=chunks, isl=earlier + tokens, prefix=earlier)` is a step of `chunks`
  chunks of prompts, of `tokens` query tokens each after `earlier` ones.

Operators whose time changes with the KV are attention, those named "logits" are the sampling, all others are dense.
Milliseconds become seconds. The tables know no block size: a page has the size that was timed.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from harness.config.errors import ConfigError
from harness.config.schema import TableEngine
from harness.cost.lattice import octaves, tabulated
from harness.cost.model_shape import ModelShape
from harness.cost.published import StepTables

PACKAGE = "aiconfigurator-core"
VERSION = "0.12.0"
"""The one version whose calls and tables were checked; `pyproject.toml` pins the same."""
SYSTEMS: Mapping[str, str] = {
    "a100_80gb": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "rtx_pro_6000": "rtx_pro_6000_server",
}
"""The package's name of each device, by ours."""
_TYPICAL = {
    "decode of 32 rows with 1,024 slots each": (32, 1024),
    "a chunk of 2,048 prompt tokens": (1, 2048),
}
INTERPOLATION = (
    "the package's own interpolation between timed shapes, not the ratio to a form of cost=operators. With every "
    "other timed value of rows or KV left out, so that neighbours lie four-fold apart, it missed these by 4.3 to 6.2 % "
    "in the mean on six GPUs; it returns the shapes that were timed as they are"
)
"""What the record says of decode attention; `harness.scoreboard.attention.package_errors` measures the errors."""
PerOp = tuple[str, float, float, str]


class Handle(Protocol):
    """The part of the package's `EngineHandle` that is called. Values are (operator, ms, energy, provenance)."""

    def decode_step_per_op(self, gen_tokens: int, isl: int, osl: int) -> list[PerOp]:
        """The operators of one decode step."""
        ...

    def run_static_per_op(
        self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str
    ) -> tuple[list[PerOp], list[PerOp]]:
        """The operators of a prefill, and of the decoding after it."""
        ...


@dataclass(frozen=True)
class TableSetup:
    """What the tables are asked for: a model on devices, under an engine. `checkpoint` is a folder with a config.json.

    Without a checkpoint `shape` describes the model. Quantisation is named as in the package; None: the checkpoint's.
    """

    device: str
    engine: TableEngine
    parallel: int
    expert_parallel: bool
    checkpoint: str | None
    shape: ModelShape | None
    weights: str | None = None
    expert_weights: str | None = None
    kv: str | None = None


@dataclass(frozen=True)
class Limits:
    """The largest step that is to be priced: running sequences, tokens of a step, tokens of a sequence."""

    rows: int
    tokens: int
    sequence: int


def check_package() -> None:
    """Raise ConfigError unless the pinned version of the package is installed."""
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "cost.kind",
            f"published needs {PACKAGE} {VERSION}, which is not installed; pip install 'pagetwin[gpu-tables]'",
        ) from error
    if found != VERSION:
        raise ConfigError(
            "cost.kind",
            f"published was checked with {PACKAGE} {VERSION} alone, found {found}; "
            "pip install 'pagetwin[gpu-tables]'",
        )


def system_of(device: str) -> str:
    """The package's name of a device.

    Raises:
        ConfigError: the tables have no such device.
    """
    if device not in SYSTEMS:
        raise ConfigError(
            "device.name",
            f"the tables of cost=published do not know {device}; allowed: {', '.join(sorted(SYSTEMS))}. "
            "Use cost=roofline for other devices",
        )
    return SYSTEMS[device]


@lru_cache(maxsize=16)
def compiled(setup: TableSetup) -> Handle:
    """The package's engine for a setup. The first takes seconds, because its tables are loaded.

    Raises:
        ConfigError: the package is missing or of another version, or the tables do not know the device, the model, the
            engine or the quantisation.
    """
    check_package()
    system = system_of(setup.device)
    from aiconfigurator_core.sdk.engine import EngineHandle

    # It warns of every table that it replaces by another; `described` gives the provenance of each operator instead.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        model = setup.checkpoint
        if model is None:
            assert setup.shape is not None
            (Path(folder) / "config.json").write_text(json.dumps(checkpoint_config(setup.shape)))
            model = folder
        experts = _has_experts(setup)
        options: dict[str, Any] = {
            "tp_size": setup.parallel,
            "moe_tp_size": setup.parallel if experts and not setup.expert_parallel else 1,
            "moe_ep_size": setup.parallel if experts and setup.expert_parallel else 1,
            "gemm_quant_mode": setup.weights,
            "moe_quant_mode": setup.expert_weights if experts else None,
            "kvcache_quant_mode": setup.kv,
        }
        try:
            handle: Handle = EngineHandle.compile(model, system, str(setup.engine), **options)
            _one_step(handle)
        except Exception as error:  # the package raises many types, of which some are private to it
            raise ConfigError(
                "cost.kind",
                f"published: the tables of {setup.device} with {setup.engine} cannot price this model: "
                f"{type(error).__name__}: {str(error).replace(folder, 'model')[:400]}. Use cost=roofline",
            ) from error
    return handle


def _one_step(handle: Handle) -> None:
    _checked(handle.decode_step_per_op(2, 100, 2))
    _checked(_chunks(handle, 1, 128, 0))


def _has_experts(setup: TableSetup) -> bool:
    if setup.shape is not None:
        return setup.shape.experts is not None
    assert setup.checkpoint is not None
    facts = json.loads((Path(setup.checkpoint) / "config.json").read_text(encoding="utf-8"))
    facts = {**facts, **facts.get("text_config", {})}
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(facts.get(name) not in (None, 0, 1) for name in names)


def checkpoint_config(shape: ModelShape) -> dict[str, Any]:
    """A config.json for a shape: Llama's architecture, or Qwen3-MoE's where every layer has experts and none is shared.

    Raises:
        ConfigError: the shape is neither; a checkpoint's own config.json may be.
    """
    experts = shape.experts
    odd = [
        name
        for name, found in (
            ("sliding windows", shape.window),
            ("latent KV", shape.latent),
            ("an MLP of two matrices", shape.mlp_matrices != 3),
            ("shared experts", experts and experts.shared),
            ("dense layers before its experts", experts and experts.dense_layers),
        )
        if found
    ]
    if odd:
        raise ConfigError(
            "cost.kind",
            f"published cannot describe a model with {' and '.join(odd)} to the tables; name a folder with its "
            "config.json (model.path), or use cost=roofline",
        )
    facts: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 1 << 20,
        "torch_dtype": "bfloat16",
    }
    if experts:
        facts |= {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.active,
            "moe_intermediate_size": experts.intermediate,
        }
    return facts


@lru_cache(maxsize=16)
def step_tables(setup: TableSetup, limits: Limits) -> StepTables:
    """The lattices of a setup, up to the limits; two places in each octave of a chunk, four of all else.

    Raises:
        ConfigError: as `compiled`, or a shape has no price.
    """
    return tables_of(compiled(setup), limits)


def tables_of(handle: Handle, limits: Limits) -> StepTables:
    """The same from a handle."""
    attention = _attention_names(handle)
    rows = octaves(1, limits.rows, 4, dense_to=8)
    tokens = octaves(1, max(limits.tokens, limits.rows), 8, dense_to=16)

    def of_context(total: float) -> Mapping[str, float]:
        return _kinds(_chunks(handle, 1, int(total), 0), attention)

    def of_decode(count: float, slots: float) -> Mapping[str, float]:
        return _kinds(handle.decode_step_per_op(int(count), max(int(slots) - 1, 1), 2), attention)

    def prefill(count: float, each: float, earlier: float) -> float:
        return _kinds(_chunks(handle, int(count), int(each), int(earlier)), attention)["attention"]

    chunks = tuple(sorted({1.0, 2.0, 4.0, *octaves(1, min(limits.rows, 64), 1)}))
    earlier = (0.0, *octaves(64, limits.sequence, 2))
    try:
        return StepTables(
            dense=tabulated((tokens,), lambda total: of_context(total)["dense"]),
            decode_dense=tabulated((rows,), lambda count: of_decode(count, 1024)["dense"]),
            sample=tabulated((rows,), lambda count: of_decode(count, 1024)["sample"]),
            decode=tabulated(
                (rows, octaves(16, limits.sequence, 4)), lambda count, kv: of_decode(count, kv)["attention"]
            ),
            prefill=tabulated((chunks, octaves(1, limits.tokens, 2), earlier), prefill),
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            "cost.kind", f"published: the tables lack a shape of this model: {error}"
        ) from error


def _chunks(handle: Handle, count: int, each: int, earlier: int) -> list[PerOp]:
    found, _ = handle.run_static_per_op(
        batch_size=count, isl=earlier + each, osl=1, prefix=earlier, mode="static_ctx"
    )
    return found


def _attention_names(handle: Handle) -> frozenset[str]:
    """Operators whose time changes where the KV alone does, and those that are called attention."""
    pairs = (
        (handle.decode_step_per_op(8, 64, 2), handle.decode_step_per_op(8, 16_384, 2)),
        (_chunks(handle, 1, 1024, 0), _chunks(handle, 1, 1024, 15_360)),
    )
    found = set()
    for short, long in pairs:
        before = {name: ms for name, ms, _, _ in short}
        found |= {name for name, ms, _, _ in long if ms != before.get(name) or "attention" in name}
    return frozenset(found)


def _kinds(operators: Sequence[PerOp], attention: frozenset[str]) -> dict[str, float]:
    """Seconds of the operators by kind: attention, sample, dense."""
    found = {"attention": 0.0, "sample": 0.0, "dense": 0.0}
    for name, ms, _, _ in _checked(operators):
        kind = "attention" if name in attention else "sample" if "logits" in name else "dense"
        found[kind] += ms * 1e-3
    return found


def _checked(operators: Sequence[PerOp]) -> Sequence[PerOp]:
    for name, ms, _, _ in operators:
        if not isfinite(ms) or ms < 0:
            raise ValueError(f"operator {name} takes {ms} ms")
    return operators


def described(setup: TableSetup) -> dict[str, Any]:
    """What the record says of the tables: package, system, engine, and the provenance of each operator.

    `silicon` was measured, `empirical` is the package's own formula, `mixed` has both. Operators of no time (links of a
    single device) are left out.
    """
    handle = compiled(setup)
    rows, slots = _TYPICAL["decode of 32 rows with 1,024 slots each"]
    steps = dict(
        zip(_TYPICAL, (handle.decode_step_per_op(rows, slots, 2), _chunks(handle, 1, 2048, 0)), strict=True)
    )
    shares: dict[str, dict[str, float]] = {}
    for step, operators in steps.items():
        total = sum(ms for _, ms, _, _ in operators)
        shares[step] = {}
        for _, ms, _, kind in operators:
            if ms:
                shares[step][kind] = round(shares[step].get(kind, 0.0) + ms / total, 4)
    return {
        "what": "measured operators at the shapes of a step, plus the device's step overhead",
        "tables": f"{PACKAGE} {VERSION}",
        "system": system_of(setup.device),
        "engine": str(setup.engine),
        "decode attention": INTERPOLATION,
        "not priced": "block size: the tables have the page size that was timed, at any block size",
        "operators": {
            step: {name: kind for name, ms, _, kind in operators if ms} for step, operators in steps.items()
        },
        "share of the seconds": shares,
    }
