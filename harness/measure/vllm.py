"""vLLM as the measured engine: its own scheduler and model, beside the policy core that is fed its durations.

Our scheduler and vLLM get the same requests before the same steps. Each step runs on vLLM; its decisions must be those
of our plan, and its seconds are those of the step. So the log of the run is ours, and every count in it was compared.
vLLM runs in a process of its own, in the interpreter that has it (`vllm_engine.py`).
"""

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from engine.core.options import HashAlgorithm
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.commit import RequestStats
from engine.runtime.models.spec import config_values
from engine.runtime.options import Audit
from harness.config.errors import ConfigError
from harness.measure.executor import FixedDurations, Reading, Yardstick, middle
from harness.metrics.log import Outcome
from harness.oracle.check import KEY, DecisionsObserver, NotedLru, OracleError, OracleReport, vllm_version
from harness.oracle.decisions import Comparison, Step
from harness.replay.arrivals import to_ns
from harness.replay.executors import Executor, StepTiming
from harness.replay.features import FeatureMeter
from harness.replay.loop import Observer, Progress
from harness.replay.recorder import MeasuredRun, PlanRecording
from harness.workers import Peer, PeerError
from harness.workload.deployment import Deployment
from harness.workload.point import Point
from harness.workload.simulate import new_log, replay_point
from traces.tokens import token_ids

_PROGRAM = Path(__file__).with_name("vllm_engine.py")
_HASH = {HashAlgorithm.sha256: "sha256", HashAlgorithm.xxh3_128: "xxhash"}


class VllmEngine(Peer):
    """A running vLLM. `begin` starts a run with an empty pool."""

    def __init__(self, python: str | None, threads: int) -> None:
        self._python = python
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        super().__init__(python or sys.executable, _PROGRAM, environment=environment)

    @cached_property
    def version(self) -> str:
        """That of vLLM, as its interpreter says it."""
        return vllm_version(self._python)

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The answer. Raises ConfigError if vLLM stopped."""
        try:
            return super().ask(question)
        except PeerError as error:
            _engine.cache_clear()
            raise ConfigError(KEY, f"vLLM {self.version} stopped: {error}") from error


@lru_cache(maxsize=1)
def _engine(python: str | None, threads: int) -> VllmEngine:
    """The engine of this process's life: vLLM takes half a minute to start."""
    process = VllmEngine(python, threads)
    atexit.register(process.close)
    return process


def measure_on_vllm(
    point: Point, *, progress: Progress | None, step_ns: Sequence[int] | None, reference: Reading | None
) -> MeasuredRun:
    """Run the point on vLLM; the arguments are those of `harness.measure.engine.measure`.

    Raises:
        OracleError: vLLM decides a step differently; the message names the first difference.
        ConfigError: vLLM cannot be started or does not take the settings.
    """
    deployment, pool = point.deployment, point.pool
    engine = _engine(deployment.vllm_python, deployment.engine.threads)
    engine.ask({"begin": engine_settings(deployment)})
    live, kept, recording, lru = dict[int, Request](), new_log(point), PlanRecording(), NotedLru()
    meter = FeatureMeter(live, pool.block_size, pool.window)
    executor = VllmExecutor(point, engine, meter, reference)
    same = FixedDurations(executor, step_ns) if step_ns else None
    beside = replay_point(
        *(point, kept, point.requests(), same or executor, recording, executor),
        observe=lambda scheduler: DecisionsObserver(scheduler, lru, executor.compare),
        eviction=lru,
        progress=progress,
        live=live,
    )
    log = kept.log(**beside)
    readings = middle(executor.yardstick.readings) if executor.yardstick else None
    compared = OracleReport(
        f"{engine.version} (measured)",
        steps=executor.compared.steps,
        compared=executor.compared.steps,
        equal_ids=executor.compared.equal_ids,
        counts=dict(sorted(executor.compared.counts.items())),
    )
    log = same.as_measured(log) if same else log
    return MeasuredRun(log, recording, executor.audits, readings, compared.section())


def engine_settings(deployment: Deployment) -> dict[str, Any]:
    """What vLLM is asked for: its own arguments, and the values of the model's config.json or its folder."""
    pool, limits, cache = deployment.pool, deployment.limits, deployment.cache
    flags: dict[str, Any] = {
        "dtype": str(deployment.model.dtype),
        "block_size": pool.block_size,
        "num_gpu_blocks_override": pool.num_blocks + 1,  # vLLM counts the null block
        "max_model_len": limits.max_model_len or pool.max_model_len,
        # a step has at most one token for each running request
        "max_num_seqs": min(limits.max_running, limits.max_batched_tokens),
        "max_num_batched_tokens": limits.max_batched_tokens,
        "enable_chunked_prefill": limits.chunked_prefill,
        "long_prefill_token_threshold": limits.long_prefill_tokens or 0,
        **({"long_prefill_token_threshold_adaptive": True} if limits.long_prefill_adaptive else {}),
        "scheduling_policy": str(limits.policy),
        "watermark": limits.watermark,
        "scheduler_reserve_full_isl": limits.admit_whole_prompt,
        "enable_prefix_caching": pool.prefix_caching,
        "prefix_caching_hash_algo": _HASH[cache.hash],
        "async_scheduling": False,
    }
    return {"model": _model(deployment), "flags": flags, "clock": str(deployment.clock_used)}


def _model(deployment: Deployment) -> str | dict[str, Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

    spec = deployment.model_spec
    if spec.path is not None:
        return spec.path
    named = {"model_type": spec.family, "architectures": [ARCHITECTURES[spec.family]]}
    return {**named, "torch_dtype": spec.dtype, **config_values(spec)}


class VllmExecutor(Executor, Observer):
    """Runs each step on vLLM; its seconds are those of vLLM's step, without audits and what is asked beside.

    It listens to the replay for the requests that arrive. `compare` has to be told what our side decided.
    """

    max_steps = 1

    def __init__(
        self, point: Point, engine: VllmEngine, meter: FeatureMeter, reference: Reading | None
    ) -> None:
        paced = point.deployment.has_yardstick
        self.yardstick = Yardstick(lambda: self._answer["reading"], reference) if paced else None
        self.compared = Comparison(point.pool.block_size, same_ids=False)
        self.audits = 0
        self._point = point
        self._rows = {row.request_id: row for row in point.trace.requests}
        self._engine = engine
        self._meter = meter
        self._arrived: list[Request] = []
        audit = point.deployment.engine
        self._audit_every = {Audit.off: 0, Audit.full: 1}.get(audit.audit, audit.audit_every)
        self._plan: StepPlan
        self._answer: Mapping[str, Any]

    def arrived(self, request: Request, at_ns: int) -> None:
        """A request that vLLM gets before its next step."""
        self._arrived.append(request)

    def ended(self, request: Request, outcome: Outcome, at_ns: int, stats: RequestStats) -> None:
        """A request that was rejected is not sent."""
        if outcome is Outcome.REJECTED:
            self._arrived.remove(request)

    def begin(self) -> None:
        """Does nothing: vLLM has the clock."""

    def execute(self, plan: StepPlan, horizon_ns: int | None) -> StepResult:
        """Run vLLM's next step."""
        sent, self._arrived = [self._sent(request) for request in self._arrived], []
        audit = bool(self._audit_every) and self.compared.steps % self._audit_every == 0
        self._plan, self._answer = (
            plan,
            self._engine.ask({"submit": sent, "audit": audit, "paced": self.yardstick is not None}),
        )
        return StepResult()

    def _sent(self, request: Request) -> dict[str, Any]:
        row = self._rows[request.request_id]
        ids = token_ids(
            row, seed=self._point.workload.seed, vocab_size=self._point.deployment.shape.vocab, first_id=0
        )
        return {
            "id": request.request_id,
            "ids": ids.tolist(),
            "output": (0, request.output_tokens),
            "salt": row.salt,
            "priority": request.priority,
        }

    def end(self) -> StepTiming:
        """vLLM's time, divided by the pace of the core where a yardstick tells it."""
        answer = self._answer
        seconds, policy_s, attention_s = (answer[name] for name in ("seconds", "policy_s", "attention_s"))
        phases = {"policy_s": policy_s, "forward_s": seconds - policy_s}
        if self.yardstick is not None:
            pace = self.yardstick.pace_after(seconds)
            seconds, attention_s = seconds / pace, attention_s / pace
            phases = {name: value / pace for name, value in phases.items()} | {"pace": pace}
        return StepTiming([max(1, to_ns(seconds))], [attention_s], self._meter.single(self._plan, {}), phases)

    def compare(self, arrived: Sequence[Request], ours: Step, told: Mapping[str, Any]) -> None:
        """Our side decided `ours` in the step that vLLM has run. Raises OracleError where vLLM decided otherwise."""
        found = self.compared.note(ours, Step.of(self._answer["step"]))
        if found is not None:
            raise OracleError(f"vLLM decides differently: {found.text('vLLM')}")
        if self._answer["slots"]:
            self._check_slots(self._answer["slots"])

    def _check_slots(self, theirs: Sequence[int]) -> None:
        """Compare the slots of vLLM's block tables with the usage that the plan states."""
        usage, size = self._plan.usage, self._point.pool.block_size
        ours = [usage.token, usage.physical_blocks, usage.cached // size]
        if ours != list(theirs):
            raise OracleError(
                f"step {self.compared.steps - 1}: written slots, blocks in tables and cached blocks are {ours} here, "
                f"{list(theirs)} in vLLM"
            )
        self.audits += 1
