"""Check a point before anything runs, and run it."""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engine.runtime.models.spec import checkpoint_stamp
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, EngineConfig, ModelConfig, OracleEngine, RunConfig
from harness.console import remark
from harness.environment import check_engine, check_memory, check_weights, code_version, engine_code
from harness.metrics.record import PointRecord
from harness.oracle.check import VLLM_CPU, vllm_version
from harness.oracle.check import compare as compare_with_vllm
from harness.point.cost import (
    bounds_of,
    check_cost,
    cost_model,
    needs_fit,
    resolve_cost_kind,
    takes_timed_kernels,
)
from harness.point.record import files_of, make_record, priced, tables_of, teacher_forced
from harness.replay.cost_model import CostModel, PacedCost
from harness.workload.decoding import recording_stamp
from harness.workload.deployment import Deployment, deployment_of, draft_of, model_shape, model_spec
from harness.workload.point import Point, resolve
from harness.workload.scheduler import own_code
from harness.workload.simulate import check_compiled, predict
from harness.workload.trace import reshaped_trace

if TYPE_CHECKING:
    from harness.measure.executor import Reading
    from harness.measure.pace import Pace
    from harness.replay.recorder import MeasuredRun


Progress = Callable[[str, int, int], None]  # stage, requests done, requests in total


def point_identity(config: RunConfig) -> dict[str, str]:
    """Everything outside the configuration that the result depends on: digests of trace, code, calibration, kernels,
    checkpoints, recordings and own policies, and for a measured point the device.
    """
    from harness.calibrate.store import calibration_fingerprint

    deployment = deployment_of(config)
    kind = resolve_cost_kind(deployment)
    identity = {"trace": reshaped_trace(config).digest, "code": code_version(), "cost": str(kind)}
    if needs_fit(deployment):
        identity["calibration"] = calibration_fingerprint(deployment)
    if takes_timed_kernels(deployment):
        from harness.cost.kernel_table import read_kernels

        identity["kernels"] = read_kernels(str(config.cost.kernels)).digest
    if kind is CostKind.operators:
        from harness.cost.operators import operators_digest

        identity["operators"] = operators_digest(str(config.cost.operators))
    if config.model.path:
        identity["checkpoint"] = checkpoint_stamp(config.model.path)
    if config.decoding.draft_path:
        identity["draft"] = checkpoint_stamp(config.decoding.draft_path)
    if config.decoding.beam_parents:
        identity["beam_parents"] = recording_stamp(config.decoding.beam_parents)
    if own := own_code(deployment):
        identity["own policies"] = own
    if config.measure:
        identity |= {"device": deployment.device_at_hand, "clock": str(deployment.clock_used)}
        identity["engine"] = " ".join(engine_code(config.engine, deployment.vllm_python))
    return identity


@dataclass(frozen=True)
class PointResult:
    """A finished point: its record, its tables (`steps`, `requests`) as columns by name, and files by name."""

    record: PointRecord
    tables: dict[str, dict[str, np.ndarray[Any, np.dtype[Any]]]]
    files: dict[str, bytes] = field(default_factory=dict)


def check_point(config: RunConfig) -> None:
    """Raise ConfigError if a point cannot run: trace, sizes, model or cost model. Imports no torch.

    Raises UserError where the engine, which a measured point needs, is not installed.
    """
    if config.measure:
        if not config.replay.records:
            reason = "false keeps no rows, by which a measured point is compared; use measure=false or records=true"
            raise ConfigError("replay.records", reason)
        check_engine(config.engine)
        if config.engine.on_vllm:
            vllm_version(config.oracle.python, VLLM_CPU)
        check_model(config.model, config.engine, config.decoding.draft_path)
        deployment = deployment_of(config)
        token_bytes = deployment.pool.slot_bytes
        token_bytes += deployment.draft.kv_bytes_per_token if deployment.draft else 0
        check_memory(deployment.pool.tokens * token_bytes, config.engine)
    point = resolve(config)
    check_compiled(point)
    if config.oracle.engine is OracleEngine.vllm:
        vllm_version(config.oracle.python)
    vocab = point.deployment.shape.vocab
    for row in point.trace.requests if config.measure else ():
        width = point.workload.trace_decoding.of(row).width
        if width > vocab:  # each sequence needs its own first token
            raise ConfigError(
                "workload.widths",
                f"request {row.request_id} has {width} sequences, more than {point.deployment.model.name} has tokens "
                f"({vocab:,}); set workload.widths=configured",
            )
    check_cost(point.deployment)


def check_model(model: ModelConfig, engine: EngineConfig, draft_path: str | None = None) -> None:
    """Raise ConfigError if the engine cannot run the model or its draft, or the model does not fit the memory."""
    from engine.runtime.errors import ModelError
    from engine.runtime.models.spec import check_model as check_spec

    def check(each: ModelConfig, key: str) -> None:
        try:
            check_spec(model_spec(each))
        except ModelError as error:
            raise ConfigError(key, str(error)) from error

    check(model, "model.path" if model.path else "model.family")
    check_weights(model_shape(model).weight_bytes, engine)
    if draft_path is None:
        return
    draft = draft_of(model, draft_path)
    check(draft, "decoding.draft_path")
    vocab, wanted = model_shape(draft).vocab, model_shape(model).vocab
    if vocab != wanted:
        raise ConfigError(
            "decoding.draft_path",
            f"{draft_path} has {vocab:,} tokens in its vocabulary, {model.name} {wanted:,}: it cannot propose to it",
        )


Stages = Generator[None, None, PointResult]


@dataclass
class PointSession:
    """Runs points in one process; has the functions that a sweep calls, and what its points share.

    `cost.recalibrate` asks for one new calibration and not for one at each point: `repeated` are those that were made.
    Without a calibration a CPU measures all points at the pace of the first warm-up, `reference`. A copy that arrives
    in another process is the session of that process.
    """

    repeated: set[str] = field(default_factory=set)
    reference: "Reading | None" = None
    check_point = staticmethod(check_point)
    point_identity = staticmethod(point_identity)

    def __reduce__(self) -> tuple[Callable[[], "PointSession"], tuple[()]]:
        return _session_of_process, ()

    def run_point(self, config: RunConfig, *, progress: Progress | None = None) -> PointResult:
        """`run_point` with what this object keeps."""
        return run_point(config, progress=progress, session=self)

    def point_stages(
        self, config: RunConfig, *, progress: Progress | None = None, kept: Path | None = None
    ) -> Stages:
        """`point_stages` with what this object keeps."""
        return point_stages(config, progress=progress, session=self, kept=kept)


@cache
def _session_of_process() -> PointSession:
    return PointSession()


def run_point(
    config: RunConfig, *, progress: Progress | None = None, session: PointSession | None = None
) -> PointResult:
    """Predict the point and, unless `measure` is off, measure it `replay.repeats` times.

    `progress(stage, done, total)` is called with the stage and the requests finished in it. Without a session the
    point shares nothing with others.
    """
    stages = point_stages(config, progress=progress, session=session)
    while True:
        try:
            next(stages)
        except StopIteration as ended:
            return cast(PointResult, ended.value)


def point_stages(
    config: RunConfig,
    *,
    progress: Progress | None = None,
    session: PointSession | None = None,
    kept: Path | None = None,
) -> Stages:
    """The same in stages: pauses before the first measured run and between runs, where other points may run.

    A simulation-only point does not pause. Each measured run is written to the folder `kept` as it ends; those that an
    earlier start left there are taken over.
    """
    session = session or PointSession()
    point = resolve(config)
    deployment = point.deployment
    cost = calibrated_cost(deployment, progress, session.repeated)
    runs, pace, seconds, earlier = list["MeasuredRun"](), None, dict[str, float](), 0
    if deployment.measured:
        measured = yield from _measure(point, cost, progress, session, kept)
        runs, pace, seconds["measured_over"], earlier = measured
    paced = PacedCost(cost, pace.ratio) if pace and not deployment.has_yardstick else cost
    predicted_from = time.perf_counter()
    simulated = predict(point, paced, rows=point.replay.records)
    seconds = {"simulate": time.perf_counter() - predicted_from, **seconds}
    compared = compare_with_vllm(point, paced) if point.oracle.engine is OracleEngine.vllm else None
    bounds = bounds_of(point, paced)
    tables, files = tables_of(simulated.log, runs), files_of(simulated.log, runs)
    # the teacher-forced error is that of prices that had not followed the pace
    unscaled = teacher_forced(priced(runs, cost), clocked=True) if pace else None
    record = make_record(
        *(point, paced, simulated, priced(runs, paced) if runs else []),
        bounds=bounds,
        oracle=compared.section() if compared else runs[0].compared if runs else None,
        pace={**pace.section(), "unscaled": unscaled} if pace else None,
        seconds=seconds,
    )
    if earlier:
        record = replace(record, environment={**record.environment, "runs_of_earlier_starts": earlier})
    return PointResult(record, tables, files)


def _measure(
    point: Point, cost: CostModel, progress: Progress | None, session: PointSession, folder: Path | None
) -> "Generator[None, None, _Measured]":
    """The measured runs, and the pace of the device: from the yardstick, or from probes beside the runs.

    Without a calibration there is no pace to compare with; then a CPU's times are those at the pace of the first
    warm-up, of the start that took the first run.
    """
    from harness.measure.engine import measure, warm_up
    from harness.measure.executor import Reading
    from harness.measure.pace import pace_of, pace_of_runs, probe_s, reference_of
    from harness.point.kept_runs import KeptRun, keep_run, read_runs

    deployment, provenance, repeats = point.deployment, cost.source.provenance, point.replay.repeats
    calibrated_s = provenance.get("probe_s") if deployment.cost.follow_pace else None
    calibrated = reference_of(provenance)
    kept = read_runs(folder)[:repeats] if folder else []
    if kept and calibrated not in (None, kept[0].reference):
        kept = []  # they were taken before another calibration
    earlier, known = len(kept), Reading(*kept[0].reference) if kept and kept[0].reference else None
    warm = warm_up(point) if earlier < repeats else None
    if warm and not calibrated:
        session.reference = session.reference or known or warm
    reference = calibrated or known or (warm and session.reference)
    yield
    for number in range(earlier, repeats):

        def stage(done: int, total: int, run: int = number) -> None:
            if progress:
                progress(f"measuring, run {run + 1} of {repeats}", done, total)

        if number > earlier:
            yield
        begun = time.time()
        probe = probe_s(deployment) if calibrated_s else None
        run = measure(point, seed=point.workload.seed, progress=stage, reference=reference)
        kept.append(KeptRun(run, begun, time.time(), reference, probe))
        if folder and repeats > 1:
            keep_run(folder, number, kept[-1])
    runs, pace = [one.run for one in kept], None
    if deployment.has_yardstick:
        pace = pace_of_runs(runs)
        pace = pace if calibrated else replace(pace, since="first warm-up of the process")
    elif calibrated_s:
        probes = [one.probe_s for one in kept if one.probe_s is not None]
        pace = pace_of([*probes, probe_s(deployment)], calibrated_s)
    return runs, pace, kept[-1].ended_s - kept[0].begun_s, earlier


_Measured = tuple["list[MeasuredRun]", "Pace | None", float, int]
"""The measured runs, the pace of the device during them, the wall seconds from first to last, and how many of them an
earlier start took."""


def calibrated_cost(deployment: Deployment, progress: Progress | None, repeated: set[str]) -> CostModel:
    """The deployment's cost model. A measured one is first calibrated, once.

    `cost.recalibrate` repeats a calibration that is not among `repeated`, and adds it.
    """
    if deployment.measured and needs_fit(deployment):
        from harness.calibrate.store import calibration_fingerprint, is_calibrated, set_aside_damaged

        if damaged := set_aside_damaged(deployment):
            remark(damaged)
        key = calibration_fingerprint(deployment)
        if not is_calibrated(deployment) or (deployment.cost.recalibrate and key not in repeated):
            from harness.calibrate.run import calibrate

            def stage(case: str, done: int, total: int) -> None:
                if progress:
                    progress(f"calibrating: {case}", done, total)

            repeated.add(key)
            calibrate(deployment, stage)
    return cost_model(deployment)
