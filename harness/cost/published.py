"""A cost model from published timings of operators: attention, dense layers and links at the shapes of a step.

`PublishedCost` prices a step from endless grids, which are filled from the measured operators of the package
aiconfigurator-core (extra `gpu-tables`).

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

import numpy as np

from harness.config.errors import ConfigError
from harness.config.schema import TableEngine
from harness.console import install_hint
from harness.cost.grid import Grid, octaves, short_as_decodes, some, tabulated, where_any
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import EACH_ROW_READS, RooflineCost
from harness.replay.cost_model import Amount, CostSource, Price
from harness.replay.features import AT


@dataclass(frozen=True)
class StepTables:
    """Seconds of all layers of one device.

    `dense(tokens)`: everything that depends on the tokens of a step alone. `decode_dense(rows)`: the same in a step of
    decode rows alone, which an engine replays from a graph. `sample(rows)`: the output embedding. `decode(rows, slots a
    row)`: attention of decode rows. `prefill(chunks, query tokens a chunk, earlier tokens a chunk)`: attention of
    chunks of prompts.
    """

    dense: Grid
    decode_dense: Grid
    sample: Grid
    decode: Grid
    prefill: Grid


class PublishedCost:
    """The seconds of a step: the device's step overhead, dense layers, sampling, attention, and moved blocks.

    What the features of a step say of its rows is mapped to the tables thus:

    * decode rows read `decode_kv / decode_rows` slots each: the mean stands for rows of unequal length;
    * chunks of prompts have `prefill_tokens / prefill_rows` query tokens each, and as many earlier tokens as give the
      step's number of query-key pairs (`prefill_work`), so that one chunk is priced exactly and unequal chunks by their
      mean length and the sum of their pairs; those of a few queries take no less than decodes that read as many slots:
      the tables scale a whole prompt down to its last tokens, which leaves out the reading of the others;
    * a step that mixes both adds the seconds of both, as kernels run one after the other;
    * copied slots and swapped blocks cost what `moves`, the roofline of the same device, says.

    `moves.device.step_overhead_s` is added to every step. Overheads of layers and rows are not: the tables have them.

    `anchors` multiply the seconds of attention, and of dense layers and sampling. Timings of single operators leave out
    what lies between them: one measured run of the same engine, model and device tells how much (`harness.twin.fit`).
    """

    def __init__(
        self,
        tables: StepTables,
        moves: RooflineCost,
        source: CostSource,
        anchors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.tables = tables
        self._attention, self._dense = anchors
        self.moves = moves
        self.source = source
        self._step_s = moves.device.step_overhead_s

    def price(self, features: Sequence[Amount]) -> Price:
        """Seconds of the step and of its attention."""
        tables, rows, chunks = self.tables, features[AT.decode_rows], features[AT.prefill_rows]
        tokens, sampled = features[AT.tokens], features[AT.sampled_rows]
        decodes = tables.decode.at(rows, features[AT.decode_kv] / some(rows))
        attention = where_any(rows, decodes) + self._prefill(features)
        dense = where_any(chunks, tables.dense.at(tokens), tables.decode_dense.at(tokens))
        dense = dense + where_any(sampled, tables.sample.at(sampled))
        seconds = self._dense * dense + self._attention * attention + self._step_s
        return Price(seconds + self.moves.moving(features), self._attention * attention)

    def _prefill(self, features: Sequence[Amount]) -> Amount:
        chunks, tokens = features[AT.prefill_rows], features[AT.prefill_tokens]
        each = tokens / some(chunks)
        earlier = np.maximum(features[AT.prefill_work] / some(tokens) - (each + 1) / 2, 0.0)
        found = where_any(chunks, self.tables.prefill.at(chunks, each, earlier))
        return short_as_decodes(features, self.tables.decode.at, found, found)


PACKAGE = "aiconfigurator-core"
# The one version whose calls and tables were checked; `pyproject.toml` pins the same.
VERSION = "0.12.0"
# The package's name of each device, by ours.
SYSTEMS: Mapping[str, str] = {
    "a100_80gb": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "l40s": "l40s",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "rtx_pro_6000": "rtx_pro_6000_server",
}
_TYPICAL = {
    "decode of 32 rows with 1,024 slots each": (32, 1024),
    "a chunk of 2,048 prompt tokens": (1, 2048),
}
# What the record says of decode attention; `harness.scoreboard.published_runs.package_errors` measures the errors.
INTERPOLATION = (
    "the package's own interpolation between timed shapes, not the ratio to a form of cost=operators. With every "
    "other timed value of rows or KV left out, so that neighbours lie four-fold apart, it missed these by 4.3 to 6.2 % "
    "in the mean on six GPUs; it returns the shapes that were timed as they are"
)
PerOp = tuple[str, float, float, str]


class Handle(Protocol):
    """The part of the package's `EngineHandle` that is called. Values are (operator, ms, energy, provenance)."""

    def decode_step_per_op(self, gen_tokens: int, isl: int, osl: int) -> list[PerOp]:
        """The operators of one decode step."""

    def run_static_per_op(
        self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str
    ) -> tuple[list[PerOp], list[PerOp]]:
        """The operators of a prefill, and of the decoding after it."""


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
    advice = install_hint("gpu-tables")
    try:
        found = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        reason = f"published needs {PACKAGE} {VERSION}, which is not installed: {advice}"
        raise ConfigError("cost.kind", reason) from error
    if found != VERSION:
        reason = f"published was checked with {PACKAGE} {VERSION} alone, found {found}: {advice}"
        raise ConfigError("cost.kind", reason)


def system_of(device: str) -> str:
    """The package's name of a device.

    Raises:
        ConfigError: the tables have no such device.
    """
    if device not in SYSTEMS:
        allowed = f"allowed: {', '.join(sorted(SYSTEMS))}. Use cost=roofline for other devices"
        raise ConfigError("device.name", f"the tables of cost=published do not know {device}; {allowed}")
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
            "kvcache_quant_mode": setup.kv or (_SIXTEEN if _is_latent(setup) else None),
            "fmha_quant_mode": _SIXTEEN if _prompts_in_sixteen_bits(setup) else None,
        }
        try:
            handle: Handle = EngineHandle.compile(model, system, str(setup.engine), **options)
            _checked(handle.decode_step_per_op(2, 100, 2))
            _checked(_chunks(handle, 1, 128, 0))
        except Exception as error:  # the package raises many types, of which some are private to it
            reason = f"{type(error).__name__}: {str(error).replace(folder, 'model')[:400]}. Use cost=roofline"
            tables = f"published: the tables of {setup.device} with {setup.engine}"
            raise ConfigError("cost.kind", f"{tables} cannot price this model: {reason}") from error
    return handle


def _has_experts(setup: TableSetup) -> bool:
    if setup.shape is not None:
        return setup.shape.experts is not None
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(_facts(setup).get(name) not in (None, 0, 1) for name in names)


_SIXTEEN = "bfloat16"


def _is_latent(setup: TableSetup) -> bool:
    """Whether attention is latent. Engines keep its KV in the model's type; the package takes 8 bits if unasked."""
    return setup.shape is None and "kv_lora_rank" in _facts(setup)


def _prompts_in_sixteen_bits(setup: TableSetup) -> bool:
    """Whether latent attention of prompts has prices in bfloat16 alone: all but vLLM's with KV of 8 bits."""
    return _is_latent(setup) and (setup.engine is not TableEngine.vllm or setup.kv is None)


def _facts(setup: TableSetup) -> dict[str, Any]:
    """The config.json of a checkpoint, with that of its text model."""
    assert setup.checkpoint is not None
    facts: dict[str, Any] = json.loads((Path(setup.checkpoint) / "config.json").read_text(encoding="utf-8"))
    return {**facts, **facts.get("text_config", {})}


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
        what = f"published cannot describe a model with {' and '.join(odd)} to the tables"
        advice = "name a folder with its config.json (model.path), or use cost=roofline"
        raise ConfigError("cost.kind", f"{what}; {advice}")
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
    """The grids of a setup, up to the limits; two places in each octave of a chunk, four of all else.

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
        reason = f"published: the tables lack a shape of this model: {error}"
        raise ConfigError("cost.kind", reason) from error


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
    shares: dict[str, dict[str, float]] = {step: {} for step in steps}
    for step, operators in steps.items():
        total = sum(ms for _, ms, _, _ in operators)
        for _, ms, _, kind in operators:
            if ms:
                shares[step][kind] = round(shares[step].get(kind, 0.0) + ms / total, 4)
    return {
        "what": "measured operators at the shapes of a step, plus the device's step overhead",
        "tables": f"{PACKAGE} {VERSION}",
        "system": system_of(setup.device),
        "engine": str(setup.engine),
        "decode attention": INTERPOLATION,
        **({"attention of prompts": _SIXTEEN} if _prompts_in_sixteen_bits(setup) else {}),
        "not priced": f"block size: the tables have the page size that was timed; {EACH_ROW_READS}",
        "operators": {
            step: {name: kind for name, ms, _, kind in operators if ms} for step, operators in steps.items()
        },
        "share of the seconds": shares,
    }
