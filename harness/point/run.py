"""Check a point before anything runs, and run it."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engine.runtime.models.spec import checkpoint_stamp
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, OracleEngine, RunConfig
from harness.console import remark
from harness.environment import code_version, device_identity
from harness.oracle.check import compare as compare_with_vllm
from harness.oracle.process import vllm_version
from harness.point.bounds import bounds_of
from harness.point.cost import check_cost, cost_model
from harness.point.record import files_of, make_record, tables_of
from harness.replay.cost_model import CostModel, PacedCost
from harness.workload.compiled import check_compiled
from harness.workload.devices import (
    check_engine,
    check_memory,
    check_weights,
    clock_of,
    engine_kernels,
    has_yardstick,
)
from harness.workload.drawn import recording_stamp
from harness.workload.shapes import draft_of, draft_shape, model_shape, pool_shape
from harness.workload.simulate import Prediction, prediction_of, simulate, simulate_metrics
from harness.workload.trace import reshaped_trace
from harness.workload.workload import Workload, build_workload

if TYPE_CHECKING:
    from harness.calibrate.pace import Pace
    from harness.measure.yardstick import Reading
    from harness.replay.recorder import MeasuredRun


Progress = Callable[[str, int, int], None]  # stage, requests done, requests in total

# Calibrations that this process has repeated: `cost.recalibrate` asks for one new calibration, not one for each point.
_RECALIBRATED: set[str] = set()

# Without a calibration all points of this process are measured at the pace of its first warm-up.
_FIRST_READING: "dict[str, Reading]" = {}


def point_identity(config: RunConfig) -> dict[str, str]:
    """Everything outside the configuration that the result depends on: digests of trace, code, calibration, kernels,
    checkpoints and recordings, and for a measured point the device.
    """
    from harness.calibrate.store import calibration_fingerprint
    from harness.point.cost import needs_fit, resolve_cost_kind, takes_timed_kernels

    kind = resolve_cost_kind(config)
    identity = {"trace": reshaped_trace(config).digest, "code": code_version(), "cost": str(kind)}
    if needs_fit(config):
        identity["calibration"] = calibration_fingerprint(config)
    if takes_timed_kernels(config):
        from harness.calibrate.kernel_table import kernels_digest

        identity["kernels"] = kernels_digest(config)
    if kind is CostKind.operators:
        from harness.cost.operator_table import operators_digest

        identity["operators"] = operators_digest(str(config.cost.operators))
    if config.model.path:
        identity["checkpoint"] = checkpoint_stamp(config.model.path)
    if config.decoding.draft_path:
        identity["draft"] = checkpoint_stamp(config.decoding.draft_path)
    if config.decoding.beam_parents:
        identity["beam_parents"] = recording_stamp(config.decoding.beam_parents)
    if config.measure:
        identity |= {"device": device_identity(config.engine.device), "clock": str(clock_of(config))}
        identity["engine"] = " ".join(engine_kernels(config.engine))
    return identity


@dataclass(frozen=True)
class PointResult:
    """A finished point: its record, its tables (`steps`, `requests`) as columns by name, and files by name."""

    record: dict[str, Any]
    tables: dict[str, dict[str, np.ndarray[Any, np.dtype[Any]]]]
    files: dict[str, bytes] = field(default_factory=dict)


def check_point(config: RunConfig) -> None:
    """Raise ConfigError if a point cannot run: trace, sizes, model or cost model. Imports no torch."""
    if config.measure:
        _check_records(config)
        check_engine(config.engine)
        check_model(config)
        pool = pool_shape(config)
        draft = draft_shape(config)
        token_bytes = pool.slot_bytes + (draft.kv_bytes_per_token if draft else 0)
        check_memory(pool.tokens * token_bytes, config.engine)
    workload = build_workload(config)
    check_compiled(workload)
    if config.oracle.engine is OracleEngine.vllm:
        vllm_version(config.oracle.python)
    if config.measure:
        _check_widths(config, workload)
    check_cost(config)


def _check_records(config: RunConfig) -> None:
    if not config.replay.records:
        raise ConfigError(
            "replay.records",
            "false keeps no rows, but a measured point is compared by its rows; use measure=false or records=true",
        )


def check_model(config: RunConfig) -> None:
    """Raise ConfigError if the engine cannot run the model, or the model does not fit the memory."""
    from engine.runtime.errors import ModelError
    from engine.runtime.models.spec import check_model as check_spec
    from harness.workload.shapes import model_spec

    try:
        check_spec(model_spec(config.model))
    except ModelError as error:
        raise ConfigError("model.path" if config.model.path else "model.family", str(error)) from error
    check_weights(model_shape(config.model).weight_bytes, config.engine)
    _check_draft(config)


def _check_widths(config: RunConfig, workload: Workload) -> None:
    """Raise ConfigError for requests with more sequences than tokens: each sequence needs its own first token."""
    vocab = model_shape(config.model).vocab
    for row in workload.trace.requests:
        width = workload.trace_decoding.of(row).width
        if width > vocab:
            raise ConfigError(
                "workload.widths",
                f"request {row.request_id} has {width} sequences, more than {config.model.name} has tokens "
                f"({vocab:,}); set workload.widths=configured",
            )


def _check_draft(config: RunConfig) -> None:
    """Raise ConfigError if the draft model cannot run, or has another vocabulary than the model."""
    from engine.runtime.errors import ModelError
    from engine.runtime.models.spec import check_model as check_spec
    from harness.workload.shapes import model_spec

    path = config.decoding.draft_path
    if path is None:
        return
    draft = draft_of(config.model, path)
    try:
        check_spec(model_spec(draft))
    except ModelError as error:
        raise ConfigError("decoding.draft_path", str(error)) from error
    vocab, wanted = model_shape(draft).vocab, model_shape(config.model).vocab
    if vocab != wanted:
        raise ConfigError(
            "decoding.draft_path",
            f"{path} has {vocab:,} tokens in its vocabulary, {config.model.name} {wanted:,}: it cannot propose to it",
        )


Stages = Generator[None, None, PointResult]


def run_point(config: RunConfig, *, progress: Progress | None = None) -> PointResult:
    """Predict the point and, unless `measure` is off, measure it `replay.repeats` times.

    `progress(stage, done, total)` is called with the stage and the requests finished in it.
    """
    stages = point_stages(config, progress=progress)
    while True:
        try:
            next(stages)
        except StopIteration as ended:
            return cast(PointResult, ended.value)


def point_stages(config: RunConfig, *, progress: Progress | None = None) -> Stages:
    """The same in stages: pauses before the first measured run and between runs, where other points may run.

    A simulation-only point does not pause.
    """
    workload = build_workload(config)
    cost = calibrated_cost(config, progress)
    measured = (yield from _measure(config, workload, cost, progress)) if config.measure else _NOT_MEASURED
    runs, pace = measured.runs, measured.pace
    paced = PacedCost(cost, pace.ratio) if pace and not has_yardstick(config) else cost
    predicted_from = time.perf_counter()
    simulated = _predicted(config, workload, paced)
    seconds = {"simulate": time.perf_counter() - predicted_from}
    if runs:
        seconds["measured_over"] = measured.over_s
    record = make_record(config, workload, paced, simulated, runs, seconds)
    record["bounds"] = bounds_of(config, workload, paced)
    record["oracle"] = _oracle(config, workload, paced)
    if runs:
        record["pace"] = _pace_section(pace, runs, cost)
    return PointResult(record, tables_of(simulated.log, runs), files_of(simulated.log, runs))


def _oracle(config: RunConfig, workload: Workload, cost: CostModel) -> dict[str, Any] | None:
    """What was compared with another system's scheduler. Raises OracleError at the first difference."""
    oracle = config.oracle
    if oracle.engine is OracleEngine.none:
        return None
    found = compare_with_vllm(workload, cost, config.decoding.beam_churn, oracle.python, oracle.allow)
    return found.section()


def _predicted(config: RunConfig, workload: Workload, cost: CostModel) -> Prediction:
    """The simulation: with rows for each request and step, or, without `replay.records`, in constant memory."""
    if not config.replay.records:
        return simulate_metrics(workload, cost, config.decoding.beam_churn)
    return prediction_of(simulate(workload, cost, config.decoding.beam_churn), cost.source)


def _pace_section(pace: "Pace | None", runs: "list[MeasuredRun]", cost: CostModel) -> dict[str, Any] | None:
    """The record's section on the pace of the device, with the teacher-forced error if it had not been followed."""
    from harness.point.error_levels import teacher_forced

    return {**pace.section(), "unscaled": teacher_forced(runs, cost, clocked=True)} if pace else None


def calibrated_cost(config: RunConfig, progress: Progress | None) -> CostModel:
    """The point's cost model. A measured point first calibrates its device, once."""
    from harness.calibrate.store import is_calibrated, set_aside_damaged
    from harness.point.cost import needs_fit

    damaged = set_aside_damaged(config) if config.measure and needs_fit(config) else None
    if damaged:
        remark(damaged)
    if config.measure and needs_fit(config) and _must_calibrate(config, is_calibrated(config)):
        from harness.calibrate.run import calibrate

        def stage(case: str, done: int, total: int) -> None:
            if progress:
                progress(f"calibrating: {case}", done, total)

        _RECALIBRATED.add(_calibration_key(config))
        calibrate(config, stage)
    return cost_model(config)


def _calibration_key(config: RunConfig) -> str:
    from harness.calibrate.store import calibration_fingerprint

    return calibration_fingerprint(config)


def _must_calibrate(config: RunConfig, calibrated: bool) -> bool:
    return not calibrated or (config.cost.recalibrate and _calibration_key(config) not in _RECALIBRATED)


@dataclass(frozen=True)
class _Measured:
    """The measured runs, the pace of the device during them, and the wall seconds from first to last."""

    runs: "list[MeasuredRun]"
    pace: "Pace | None"
    over_s: float


_NOT_MEASURED = _Measured([], None, 0.0)


def _measure(
    config: RunConfig, workload: Workload, cost: CostModel, progress: Progress | None
) -> Generator[None, None, _Measured]:
    """The measured runs, and the pace of the device: from the yardstick, or from probes beside the runs.

    Without a calibration there is no pace to compare with; then a CPU's times are those at the pace of this
    process's first warm-up.
    """
    from harness.calibrate.pace import pace_of, pace_of_runs, probe_s, reference_of
    from harness.measure.engine import measure, warm_up

    provenance = cost.source.provenance
    calibrated_s = provenance.get("probe_s") if config.cost.follow_pace else None
    warm = warm_up(config, workload)
    reference = reference_of(provenance) or (_FIRST_READING.setdefault("reading", warm) if warm else None)
    runs, probes = [], []
    yield
    begun = time.perf_counter()
    for number in range(config.replay.repeats):

        def stage(done: int, total: int, run: int = number) -> None:
            if progress:
                progress(f"measuring, run {run + 1} of {config.replay.repeats}", done, total)

        if number:
            yield
        if calibrated_s:
            probes.append(probe_s(config))
        runs.append(measure(config, workload, seed=config.workload.seed, progress=stage, reference=reference))
    over_s = time.perf_counter() - begun
    if has_yardstick(config):
        pace = pace_of_runs(runs)
        since = pace.since if reference_of(provenance) else "first warm-up of the process"
        return _Measured(runs, replace(pace, since=since), over_s)
    if not calibrated_s:
        return _Measured(runs, None, over_s)
    return _Measured(runs, pace_of([*probes, probe_s(config)], calibrated_s), over_s)
