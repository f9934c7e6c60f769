"""A point's requests through our scheduler and through vLLM's, step by step, until the first difference."""

import atexit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from engine.core.options import CachePolicy, Decoding, Preemption, Retention
from engine.core.request import Request
from harness.config.schema import AllowedDifference
from harness.oracle.decisions import Cause, Comparison, Difference, Step
from harness.oracle.process import KNOWN, VllmProcess, settings_of, vllm_version
from harness.oracle.watch import NotedLru, TokenRanges, WatchedScheduler
from harness.replay.cost_model import CostModel
from harness.workload.simulate import replay_workload, simulated_executor
from harness.workload.workload import Workload

StepOf = Callable[[Sequence[Any]], Step]
_FIXES = {
    Cause.block_ids: "vLLM gives out freed blocks without a hash in another order, which changes no other decision; "
    "compare with oracle.allow=block_ids",
    Cause.scheduled_victim: "under priority vLLM preempts requests that the step has already given tokens, PageTwin "
    "does not; compare up to there with oracle.allow=scheduled_victim",
}


class OracleError(RuntimeError):
    """The two schedulers decide differently; the message names the step, the request, and both decisions."""


@dataclass
class OracleReport:
    """What was compared: all `steps` of the replay, or those before an allowed difference that ends the comparison.

    `not_compared` is the reason where vLLM's scheduler does not have what the point has.
    """

    version: str
    not_compared: str | None = None
    steps: int = 0
    compared: int = 0
    equal_ids: int = 0
    stopped: str | None = None  # the allowed difference that ended the comparison
    counts: dict[str, int] = field(default_factory=dict)

    def section(self) -> dict[str, Any]:
        """The section of a record."""
        return {"engine": "vllm", **vars(self)}


def _obstacles(workload: Workload) -> Iterator[str]:
    cache, limits, batching = workload.cache, workload.limits, workload.batching
    decodings = [workload.trace_decoding.of(row) for row in workload.trace.requests]
    if workload.pool.policy is not CachePolicy.paged:
        yield f"it has no contiguous cache (cache.policy={workload.pool.policy})"
    if any(one.width > 1 or one.mode is not Decoding.greedy or one.speculation for one in decodings):
        yield "requests have beams, several samples or drafts, which its scheduler does not see as one request"
    if limits.preemption is not Preemption.recompute:
        yield f"it has no swapping (scheduler.preemption={limits.preemption})"
    if limits.static_batch or limits.adaptive_watermark:
        yield "it has neither scheduler.static_batch nor scheduler.adaptive_watermark"
    if cache.deduplicate or cache.retention is not Retention.lru:
        yield "it has neither cache.deduplicate nor cache.retention=none"
    if cache.eviction or batching.order or batching.victim or batching.admission:
        yield "a policy of your own is in use (cache.eviction, scheduler.order, .victim, .admission)"
    if workload.replicas > 1:
        yield "several replicas are simulated (device.data_parallel)"


@lru_cache(maxsize=1)
def _process(python: str | None) -> VllmProcess:
    """A driver for this process's life: vLLM takes half a minute to start."""
    process = VllmProcess(python)
    atexit.register(process.close)
    return process


def compare(
    workload: Workload,
    cost: CostModel,
    beam_churn: float | None,
    python: str | None,
    allowed: AllowedDifference = AllowedDifference.none,
) -> OracleReport:
    """Replay the workload step by step, without fast-forward, and ask vLLM for each step.

    Raises:
        OracleError: a decision differs and `allowed` does not name its cause.
        ConfigError: vLLM could not be driven.
    """
    reason = next(_obstacles(workload), None)
    if reason is not None:
        return OracleReport(vllm_version(python), reason)
    process = _process(python)
    pool, rows = workload.pool, workload.trace.requests
    longest = max((row.prompt_tokens + row.output_tokens for row in rows), default=1)
    version = process.begin(
        settings_of(pool.num_blocks, pool.block_size, pool.prefix_caching, workload.limits, longest)
    )
    checker = Checker(pool.block_size, TokenRanges(rows), process.step, allowed)
    lru = NotedLru()
    scheduler = WatchedScheduler(workload.scheduler(lru), lru, checker.observe)
    requests = workload.requests()
    by_id = {timed.request.request_id: timed.request for timed in requests}
    executor = simulated_executor(workload, cost, by_id, beam_churn, fast_forward=False)
    quiet = replace(workload, kv_events=False, lookups=False, residency=None)
    replay_workload(quiet, requests, executor, scheduler=scheduler)
    return checker.report(version)


class Checker:
    """Gives each step to the other side and compares. `step_of` answers what it decides."""

    def __init__(
        self, block_size: int, ranges: TokenRanges, step_of: StepOf, allowed: AllowedDifference
    ) -> None:
        self._ranges = ranges
        self._step_of = step_of
        self._allowed = allowed
        self._comparison = Comparison(block_size, same_ids=not self._allows(Cause.block_ids))
        self._steps = 0
        self._stopped: str | None = None

    def _allows(self, cause: Cause | None) -> bool:
        return cause is not None and self._allowed in (AllowedDifference.all, cause)

    def observe(self, arrived: Sequence[Request], step: Step) -> None:
        """Our side decided `step`. Raises OracleError if the other side decides otherwise."""
        self._steps += 1
        if self._stopped is not None:
            return
        theirs = self._step_of([self._ranges.wire(request) for request in arrived])
        found = self._comparison.note(step, theirs)
        if found is None:
            return
        if not self._allows(found.cause):
            raise OracleError(_sentence(found))
        self._stopped = found.text("vLLM")

    def report(self, version: str) -> OracleReport:
        """What was compared."""
        done = self._comparison
        return OracleReport(
            version,
            steps=self._steps,
            compared=done.steps,
            equal_ids=done.equal_ids,
            stopped=self._stopped,
            counts=dict(sorted(done.counts.items())),
        )


def _sentence(found: Difference) -> str:
    why = _FIXES.get(found.cause) if found.cause else None
    known = f"; {why}" if why else f" (vLLM {KNOWN} is what PageTwin follows)"
    return f"vLLM decides differently: {found.text('vLLM')}{known}"
