"""Choose the cost model of a point, check that it is available, and load it."""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.runtime.options import Dtype, KVDtype
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, EngineDevice, WeightDtype
from harness.cost import published, roofline
from harness.cost.seen import NEW, NOT_KEPT, seen_of
from harness.cost.timings import NATIVE
from harness.environment import engine_kernels
from harness.replay.cost_model import CostModel, CostSource
from harness.workload.deployment import Deployment, draft_of, model_shape, unmodelled
from harness.workload.point import Point
from harness.workload.simulate import predict

if TYPE_CHECKING:
    from harness.cost.kernel_table import TimedAttention

_WEIGHTS = {
    WeightDtype.model: None,
    WeightDtype.fp8: "fp8",
    WeightDtype.int8: "int8_wo",
    WeightDtype.int4: "int4_wo",
    WeightDtype.mxfp4: "w4a16_mxfp4",  # of experts alone: dense layers have no such kernel
}
_DTYPES = {Dtype.float32: "fp32", Dtype.bfloat16: "bf16", Dtype.float16: "fp16"}


def table_setup(deployment: Deployment) -> published.TableSetup:
    """The tables' view of the point's model, devices and engine.

    Raises:
        ConfigError: the package is missing or of another version, the tables do not know the device, the device has
            other rates than its preset, the point decodes with drafts, or the dense layers would have weights in a
            form that no table has.
    """
    for name in ("bandwidth_gbs", "tflops"):
        if (origin := roofline.origin_of(deployment.device, name)).startswith("as the user set it"):
            reason = f"{origin}, but published takes its seconds from timings of the device itself"
            raise ConfigError(f"device.{name}", f"{reason}; leave it out, or use cost=roofline")
    if deployment.model.dtype is Dtype.float32:
        reason = "float32, but published has timings of 16 bits and fewer; use bfloat16, or cost=roofline"
        raise ConfigError("model.dtype", reason)
    published.check_package()
    published.system_of(deployment.device.name)
    if deployment.decoding.draft_tokens:
        raise ConfigError("decoding.draft_tokens", "published does not price draft passes; use cost=roofline")
    model = deployment.model
    weights = _WEIGHTS[model.weight_dtype]
    if model.weight_dtype is WeightDtype.mxfp4 and not model.experts_only:
        reason = "mxfp4, but the tables have it for experts alone; set model.experts_only=true, or use cost=roofline"
        raise ConfigError("model.weight_dtype", reason)
    return published.TableSetup(
        device=deployment.device.name,
        engine=deployment.cost.engine,
        parallel=deployment.device.tensor_parallel,
        expert_parallel=deployment.device.expert_parallel,
        checkpoint=model.path,
        shape=None if model.path else deployment.shape,
        weights=None if model.experts_only else weights,
        expert_weights=weights,
        kv="fp8" if model.kv_dtype is KVDtype.fp8_e4m3 else None,
    )


def published_cost(
    deployment: Deployment, setup: published.TableSetup | None = None
) -> published.PublishedCost:
    """The cost model. The tables of a setup are made once in a process, up to the next powers of two of its limits.

    `setup` names a quantisation that no key of the configuration has; None: the configuration's.
    """
    if setup is None:
        setup = table_setup(deployment)
        published.compiled(setup)
    scheduler = deployment.scheduler
    limits = published.Limits(
        rows=_power_of_two(scheduler.max_running),
        tokens=_power_of_two(max(scheduler.max_batched_tokens, scheduler.max_running)),
        sequence=_power_of_two(deployment.longest),
    )
    device, asked = deployment.hardware, deployment.device
    anchors = asked.tables_attention, asked.tables_dense
    fitted = f"fitted to {asked.fitted_from}" if asked.fitted_from else None
    provenance = {
        **published.described(setup),
        "model": deployment.model.name,
        # constants that are no operator's: the host's time of a step, and the links of moved blocks
        "step_overhead_us": asked.step_overhead_us,
        "tensor_parallel": asked.tensor_parallel,
        **{name: getattr(asked, name) for name in ANCHORS},
        "from": {
            "operators": "published timings",
            **dict.fromkeys(("step_overhead_us", *ANCHORS), fitted or "assumed"),
            **{
                name: roofline.origin_of(asked, name)
                for name in roofline.DATASHEET
                if name.startswith("host")
            },
        },
    }
    identity = f"published:{setup}:{asked.step_overhead_us}:{anchors}:{device}"
    source = CostSource("published", asked.name, identity, provenance)
    moves = roofline.RooflineCost(deployment.shape, device)
    return published.PublishedCost(published.step_tables(setup, limits), moves, source, anchors)


ANCHORS = ("tables_attention", "tables_dense")


def _power_of_two(number: int) -> int:
    """The next power of two: points of about the same limits share their tables."""
    return 1 << (number - 1).bit_length()


MOST_REQUESTS = 2_000
METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50", "output_throughput")


def bounds_of(point: Point, cost: CostModel) -> dict[str, Any] | None:
    """Metrics of the same workload at the datasheet's bound, and at both ends of the ranges of what is assumed.

    None where `cost` is no roofline of a GPU's datasheet, or `cost.bounds` is off. Without a word it is off for more
    than `MOST_REQUESTS` requests, because it takes three more simulations. The ends are left out where the
    assumed constants were fitted to a log. A value of the configuration that lies outside its range widens the range.
    """
    deployment = point.deployment
    wanted = deployment.cost.bounds
    if wanted is None:
        wanted = len(point.trace.requests) <= MOST_REQUESTS
    if not wanted or not isinstance(cost, roofline.RooflineCost):
        return None
    if deployment.device.name == EngineDevice.cpu.value:
        return None
    bound = deployment.hardware.bound
    devices = {"datasheet": replace(bound, flops=bound.flops * deployment.shape.most_flops)}
    if deployment.device.fitted_from is None:
        devices |= {"fast_end": _at_end(deployment, True), "slow_end": _at_end(deployment, False)}
    ends = {name: roofline.RooflineCost(cost.model, device, cost.draft) for name, device in devices.items()}
    found = {name: predict(point, end, rows=False).metrics for name, end in ends.items()}
    return {end: {name: found[end][name] for name in METRICS if name in found[end]} for end in found}


def at_end(deployment: Deployment, cost: CostModel, fastest: bool) -> CostModel | None:
    """The cost model with all that it assumes at the end where steps are shortest, or longest.

    None where nothing is known of its error: it is no roofline of a GPU's datasheet, or was fitted to a log.
    """
    device, on_cpu = deployment.device, deployment.device.name == EngineDevice.cpu.value
    if not isinstance(cost, roofline.RooflineCost) or on_cpu or device.fitted_from is not None:
        return None
    return roofline.RooflineCost(cost.model, _at_end(deployment, fastest), cost.draft)


def _at_end(deployment: Deployment, fastest: bool) -> roofline.DeviceShape:
    """The device with every assumed constant at the end of its range where steps are shortest, or longest."""
    device = deployment.device
    ends: dict[str, Any] = {}
    for name, (low, high) in roofline.ASSUMED.items():
        value = getattr(device, name)
        larger_is_faster = name.endswith("efficiency")
        ends[name] = max(high, value) if larger_is_faster == fastest else min(low, value)
    return replace(deployment, device=replace(device, **ends)).hardware


_PREDICTED = (CostKind.roofline, CostKind.operators, CostKind.published)
"""The kinds that need no calibration of this machine."""


def resolve_cost_kind(deployment: Deployment) -> CostKind:
    """The cost model's kind. `auto` is table with timed kernels, fitted if measured or calibrated, else roofline.

    Layers with a state are priced by the roofline alone. A calibration of this machine prices no other device: for
    another `device`, `auto` is the roofline.
    """
    from harness.calibrate.store import is_calibrated

    if deployment.cost.kind is not CostKind.auto:
        return deployment.cost.kind
    if deployment.model.state_layers:
        return CostKind.roofline
    if deployment.cost.kernels is not None:
        return CostKind.table
    if deployment.cost.operators is not None:
        return CostKind.operators
    fitted = deployment.is_at_hand and (deployment.measured or is_calibrated(deployment))
    return CostKind.fitted if fitted else CostKind.roofline


def takes_timed_kernels(deployment: Deployment) -> bool:
    """Whether the price of attention comes from a run of `bench kernels`."""
    return resolve_cost_kind(deployment) is CostKind.table and deployment.cost.kernels is not None


def timed_attention(deployment: Deployment) -> "TimedAttention":
    """The attention whose timings `cost.kernels` must have: that of the model on the engine's device.

    Raises:
        KernelTableError: `bench kernels` does not time the model's cache with its queries.
    """
    from harness.cost.kernel_table import KEY, Geometry, KernelTableError, TimedAttention

    model, shape, engine = deployment.model, deployment.shape, deployment.engine
    same = model.kv_dtype is KVDtype.model
    if not same and model.dtype is not Dtype.bfloat16:
        found = f"model.kv_dtype={model.kv_dtype} beside model.dtype={model.dtype}"
        rule = "bench kernels times 8-bit caches with bfloat16 queries; use cost=fitted"
        raise KernelTableError(KEY, f"{found}: {rule}")
    dtype = _DTYPES[model.dtype] if same else str(model.kv_dtype)
    threads = engine.threads if deployment.runs_on == "cpu" else 0
    heads = shape.heads, shape.kv_heads, shape.head_dim
    return TimedAttention(
        kernels=str(deployment.cost.kernels),
        geometry=Geometry(*heads, dtype, deployment.device_at_hand, threads),
        block_size=deployment.pool.block_size,
        layers=shape.layers,
        native=engine_kernels(engine)[0] == NATIVE,
    )


def needs_fit(deployment: Deployment) -> bool:
    """Whether the point needs fitted coefficients. A measured point calibrates its device where they are missing."""
    kind = resolve_cost_kind(deployment)
    return kind is CostKind.fitted or (kind is CostKind.table and deployment.cost.kernels is not None)


def check_cost(deployment: Deployment) -> None:
    """Raise ConfigError if the point needs a calibration that does not exist, or that could not be written."""
    from harness.calibrate.store import calibration_path, has_grid, is_calibrated

    kind = resolve_cost_kind(deployment)
    _check_device(deployment, kind)
    _check_modelled(deployment, kind)
    _check_seen(deployment)
    if deployment.device.data_parallel > 1 and deployment.shape.experts and kind is not CostKind.roofline:
        reason = f"{kind}, but replicas of a mixture of experts run in lockstep, which the roofline alone"
        raise ConfigError("cost.kind", f"{reason} prices; use cost=roofline, or device.data_parallel=1")
    for name in ANCHORS:
        if getattr(deployment.device, name) != 1.0 and kind is not CostKind.published:
            reason = f"a factor on cost=published, and this point has {kind}; leave it out"
            raise ConfigError(f"device.{name}", reason)
    decoding = deployment.decoding
    if decoding.draft_tokens and decoding.acceptance is None and kind in _PREDICTED:
        raise ConfigError(
            "decoding.acceptance",
            "missing: decoding.draft_tokens proposes tokens, and a roofline does not know the share of accepted ones; "
            "set it (1 where the model drafts for itself), or use cost=fitted on a device that is calibrated",
        )
    if deployment.cost.block_sizes:
        why = "rows of one token, and drafts make rows of several" if decoding.draft_tokens else ""
        why = why if kind is CostKind.roofline else f"cost=roofline and this point has {kind}"
        if why:
            raise ConfigError("cost.block_sizes", f"true, but it is a factor on {why}; leave it out")
        # raises where the static model of our kernels lacks device, shape or block size
        _ = deployment.hardware
    if kind is CostKind.operators:
        if deployment.cost.operators is None:
            reason = "missing: cost=operators reads a table; add cost.operators=FILE.csv"
            raise ConfigError("cost.operators", reason)
        cost_model(deployment)
    elif kind is CostKind.published:
        published.compiled(table_setup(deployment))
    elif takes_timed_kernels(deployment):
        from harness.cost.kernel_table import kernel_shapes

        kernel_shapes(timed_attention(deployment)).decode_grid()
    elif kind is CostKind.table and not has_grid(deployment):
        raise ConfigError(
            "cost.kind",
            "table, but attention has not been measured on a grid for this model and engine on this device. Run "
            "'python -m harness calibrate' with the same settings first, or use cost=fitted or cost=roofline",
        )
    if not needs_fit(deployment) or is_calibrated(deployment):
        return
    if not deployment.measured:
        raise ConfigError(
            "cost.kind",
            f"{kind}, but this model and engine have not been calibrated on this device. Run 'python -m harness "
            "calibrate' with the same settings first, or the same with measure=true, or use cost=roofline",
        )
    folder = calibration_path(deployment).parent  # checked early, because calibrating takes long
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = f"the calibration cannot be kept in {folder}: {there} is no writable folder; choose another"
        raise ConfigError("cost.cache_dir", reason)


def _check_seen(deployment: Deployment) -> None:
    """Raise ConfigError if the constants are of a fit to a model with other kinds of layers.

    Those are other terms of a price, of whose error the log of the fit tells nothing.
    """
    device = deployment.device
    kinds = [] if device.seen is None else seen_of(device.seen).new_kinds(deployment.shape)
    if kinds:
        both = f"{deployment.model.name} and the model that {device.name} was fitted to differ in {', '.join(kinds)}"
        more = "fit a log of this model, or take the preset of the device"
        raise ConfigError("device.seen", f"{both}, and the fit tells nothing of such layers; {more}")


def _check_device(deployment: Deployment, kind: CostKind) -> None:
    """Raise ConfigError if seconds of this machine would be given out as those of another device."""
    if kind not in _PREDICTED and deployment.device.tensor_parallel > 1:
        many = deployment.device.tensor_parallel
        reason = f"found {many}, but {kind} takes its seconds from one device; use cost=roofline"
        raise ConfigError("device.tensor_parallel", reason)
    if deployment.is_at_hand:
        return
    here, name = deployment.device_at_hand, deployment.device.name
    if deployment.measured:
        raise ConfigError(
            "device.name",
            f"{name} would be predicted, but the engine measures on {here}; use measure=false to predict {name}, "
            "or device=cpu, which stands for the machine at hand",
        )
    if kind not in _PREDICTED:
        raise ConfigError(
            "cost.kind",
            f"{kind} takes its seconds from {here} and cannot price device {name}; use cost=roofline, or "
            "device=cpu, which stands for the machine at hand",
        )


def _check_modelled(deployment: Deployment, kind: CostKind) -> None:
    """Raise ConfigError if the roofline, or timed attention, would price the model as something that it is not."""
    shape = deployment.shape
    windows = shape.window is not None and shape.window < deployment.longest
    if (shape.latent or windows) and (kind is CostKind.operators or takes_timed_kernels(deployment)):
        has = "latent vectors" if shape.latent else f"layers that see {shape.window:,} tokens"
        reason = (
            f"{kind}, but {deployment.model.name} has {has}, and its timings are of K and V of every token"
        )
        raise ConfigError("cost.kind", f"{reason}; use cost=roofline, or cost=fitted on its device")
    if kind not in _PREDICTED or kind is CostKind.published:
        return
    models = [(deployment.model, "model.path")]
    if deployment.decoding.draft_tokens and deployment.decoding.draft_path:
        models.append((draft_of(deployment.model, deployment.decoding.draft_path), "decoding.draft_path"))
    for model, key in models:
        shape = model_shape(model, key)
        unknown = unmodelled(model, key)
        if unknown:
            raise ConfigError(
                "cost.kind",
                f"roofline, but {model.path or model.name} has {unknown}, which the roofline does not price. Use "
                "cost=fitted on the device that runs it",
            )
        proposes = deployment.decoding.draft_tokens and (len(models) == 1 or key == "decoding.draft_path")
        if proposes and (shape.experts or shape.window):
            raise ConfigError(
                key,
                f"{model.path or model.name} proposes tokens and has {'experts' if shape.experts else 'windows'}, "
                "which the roofline does not price in a draft pass; name a dense model (decoding.draft_path)",
            )
    if deployment.device.expert_parallel and not deployment.shape.experts:
        reason = f"true, but {deployment.model.name} has no experts; set it to false"
        raise ConfigError("device.expert_parallel", reason)


def cost_model(deployment: Deployment) -> CostModel:
    """The point's cost model. A fitted one must have been calibrated before.

    One of constants that were fitted to a log has the range of that log's steps, and says what is new to it.
    """
    cost, device = _cost_model(deployment), deployment.device
    if device.fitted_from is None or not isinstance(cost, roofline.RooflineCost | published.PublishedCost):
        return cost
    new, hull = NOT_KEPT, cost.source.hull
    if device.seen is not None:
        known = seen_of(device.seen)
        new, hull = known.new_model(deployment.shape, device.tensor_parallel), dict(known.hull)
    provenance = {**cost.source.provenance, **({NEW: new} if new else {})}
    cost.source = replace(cost.source, provenance=provenance, hull=hull)
    return cost


def _cost_model(deployment: Deployment) -> CostModel:
    kind = resolve_cost_kind(deployment)
    timed = timed_attention(deployment) if takes_timed_kernels(deployment) else None
    if kind is CostKind.published:
        return published_cost(deployment)
    if kind in _PREDICTED:
        cost = roofline.RooflineCost(deployment.shape, deployment.hardware, deployment.draft)
        provenance = {
            **cost.source.provenance,
            "model": deployment.model.name,
            "from": roofline.origins(deployment.device),
        }
        if (factor := cost.device.block_size_factor) is not None:
            provenance["block size"] = {
                "what": "static model of our Triton decode kernel, not measured",
                "factor": factor,
                "block_size": deployment.cache.block_size,
                "of": f"seconds of decode attention at block size {roofline.REFERENCE}",
                "uncertainty": roofline.UNCERTAINTY,
            }
        cost.source = replace(cost.source, provenance=provenance)
        if kind is CostKind.roofline:
            return cost
        from harness.cost.operators import OperatorCost, read_operators

        return OperatorCost(cost, read_operators(str(deployment.cost.operators), cost.device))
    from harness.calibrate.store import load_calibration, load_table

    if timed is not None:
        from harness.cost.kernel_table import kernel_table

        return kernel_table(timed, load_calibration(deployment))
    return load_table(deployment) if kind is CostKind.table else load_calibration(deployment)
