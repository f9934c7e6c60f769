"""Lesson pages as single HTML files: style, text, logic and data inline, nothing from elsewhere."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from engine.core.memory.block_pool import BlockPool
from engine.core.memory.paged import PagedManager
from engine.core.options import CachePolicy, GroupPages
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.config.errors import ConfigError, UserError
from harness.config.groups import groups
from harness.metrics.log import RunLog
from harness.papers.sizes import shape_of
from harness.point import PointSession
from harness.point.cost import cost_model
from harness.point.run import Progress, calibrated_cost
from harness.replay.cost_model import CostModel
from harness.replay.loop import Observer
from harness.sweep.plan import plan_sweep, run_request
from harness.workload.point import Point, resolve
from harness.workload.simulate import Observe, new_log, replay_point, simulated_executor
from traces.synth.generator import generate_trace

FREE, CACHED, FIRST = 0, 1, 2
"""Codes of a block: free without a hash, free in the prefix cache; from FIRST on FIRST + 2 x request, + 1 if shared."""

MOST_EVENTS = 400_000
"""More changes than this make a page too large to open with ease."""

DEFAULT = (
    *("measure=false", "cost=roofline", "device=h100", "model=llama3_8b", "trace=sosp23_sharegpt"),
    *("workload=as_recorded", "workload.num_requests=60"),
    *("workload.prefix_share=0.3", "workload.request_rate=20"),
    *("replay=poisson", "cache.pool_tokens=6400", "cache.max_model_len=2048"),
)
"""What is replayed where nothing is asked for: small, but with queueing, sharing and preemptions."""

MEASURED = (
    *("measure=true", "workload.num_requests=40", "workload.prefix_share=0.3", "workload.request_rate=30"),
    *("cache.pool_tokens=1536", "cache.max_model_len=512"),
)
"""The same with `measure=true`: what a small model does on this machine, in a pool that is short."""

_REQUEST = ("request_id", "arrival_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Recording:
    """A run. In step i, blocks `blocks[offsets[i]:offsets[i + 1]]` change to `codes[...]`; times are in seconds."""

    label: str
    num_blocks: int
    block_size: int
    times: Sequence[float]
    offsets: Sequence[int]
    blocks: Sequence[int]
    codes: Sequence[int]
    running: Sequence[int]
    waiting: Sequence[int]
    requests: Mapping[int, tuple[float, int, int]]  # arrival, prompt and output tokens
    side: str = "predicted"
    beside: "Recording | None" = None  # the other side of the same requests

    def data(self) -> dict[str, object]:
        """For the page, as JSON."""
        return {
            **vars(self),
            "beside": self.beside.data() if self.beside else None,
            "times": [round(time, 5) for time in self.times],
            "requests": {str(rid): list(values) for rid, values in self.requests.items()},
        }


class _Watching(Observer):
    """Notes what each block holds in every step."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._now: dict[int, int] = {}  # blocks in use -> code
        self.offsets, self.blocks, self.codes = [0], list[int](), list[int]()
        self.running, self.waiting = list[int](), list[int]()

    def planned(self, now_ns: int, plan: StepPlan) -> None:
        """Note the tables."""
        held: dict[int, int] = {}
        for row in plan.rows:
            own = FIRST + 2 * row.request_id
            for block in row.table:  # samples and beams of one request share its blocks with nobody else
                known = held.get(block, own)
                held[block] = known | (known | 1 != own | 1)
        changes = {block: code for block, code in held.items() if self._now.get(block) != code}
        for block in self._now.keys() - held.keys():
            if not self._pool.references(block):  # a request that waits for its turn keeps its blocks
                changes[block] = FREE if self._pool.hash_of(block) is None else CACHED
            else:
                held[block] = self._now[block]
        self._now = held
        self.blocks += changes
        self.codes += changes.values()
        self.offsets.append(len(self.blocks))
        self.running.append(plan.running)
        self.waiting.append(plan.waiting)
        if len(self.blocks) > MOST_EVENTS:
            raise UserError(
                f"more than {MOST_EVENTS:,} changes of blocks: take fewer requests (workload.num_requests)"
            )


def record(overrides: Sequence[str], progress: Progress | None = None) -> Recording:
    """Simulate the point of these overrides on top of `DEFAULT`, step by step; with `measure=true` also run it.

    The run that ends later comes first and has the other one in `beside`. Raises UserError.
    """
    deployed = run_request(overrides).deployed
    given = {word.split("=", 1)[0] for word in overrides} | deployed
    given |= {key.partition(".")[0] for key in deployed}
    default = MEASURED if "measure=true" in overrides else DEFAULT
    request = run_request([*(word for word in default if word.split("=", 1)[0] not in given), *overrides])
    if request.varying:
        raise UserError(f"a replay shows one run; give one value for {', '.join(request.varying)}")

    config = plan_sweep(request, PointSession()).points[0].config
    if config.cache.policy is not CachePolicy.paged:
        raise ConfigError(
            "cache.policy", f"a replay shows blocks, and {config.cache.policy.value} has none; use paged"
        )
    if config.cache.groups is not GroupPages.off:
        reason = f"a replay shows the blocks of one table, and {config.cache.groups} has several; use off"
        raise ConfigError("cache.groups", reason)
    resolved = resolve(config)
    if resolved.replicas > 1:
        raise ConfigError("device.data_parallel", "a replay shows one pool; replicas have one each")
    label = shlex.join(overrides)
    if not config.measure:
        return _recorded(resolved, cost_model(resolved.deployment), label)
    # a device is calibrated before it is measured
    cost = calibrated_cost(resolved.deployment, progress, set())
    measured = _measured(resolved, cost, label, progress)
    predicted = _recorded(resolved, cost, label)
    first, second = sorted((measured, predicted), key=lambda one: one.times[-1], reverse=True)
    return replace(first, beside=second)


def _measured(point: Point, cost: CostModel, label: str, progress: Progress | None) -> Recording:
    """One run on the engine. It is warm before, as in a sweep; times are those at the pace of the calibration."""
    from harness.measure.engine import measure, warm_up
    from harness.measure.pace import reference_of

    made, observe = _watching()
    warm = warm_up(point)
    reference = reference_of(cost.source.provenance) or warm
    told = (lambda done, total: progress("measuring", done, total)) if progress else None
    run = measure(point, seed=point.workload.seed, progress=told, observe=observe, reference=reference)
    return replace(_recording(point, made[-1], run.log, label), side="measured")


def _recorded(point: Point, cost: CostModel, label: str) -> Recording:
    (made, observe), live, log = _watching(), dict[int, Request](), new_log(point)
    executor = simulated_executor(point, cost, live, fast_forward=False)
    client = point.beam_client(point.workload.genealogy(cost.source))
    replay_point(point, log, point.requests(), executor, observe=observe, live=live, client=client)
    return _recording(point, made[-1], log.log(), label)


def _watching() -> tuple[list[_Watching], Observe]:
    """Makes the observer of a run, and keeps it in the list."""
    made: list[_Watching] = []

    def observe(scheduler: Scheduler) -> Observer:
        made.append(_Watching(cast(PagedManager, scheduler.manager).pool))
        return made[-1]

    return made, observe


def _recording(point: Point, watching: _Watching, log: RunLog, label: str) -> Recording:
    rows = zip(*(log.requests[name].tolist() for name in _REQUEST), strict=True)
    return Recording(
        label,
        point.pool.num_blocks,
        point.pool.block_size,
        log.steps["start_s"].tolist(),
        watching.offsets,
        watching.blocks,
        watching.codes,
        watching.running,
        watching.waiting,
        {rid: (round(arrival, 5), prompt, output) for rid, arrival, prompt, output in rows},
    )


_MODELS = (
    "opt_13b", "llama2_7b", "llama3_8b", "llama3_70b", "mistral_7b", "qwen3_8b", "qwen3_32b", "opt_66b",
    "opt_175b",
)  # fmt: skip
_WORKLOADS = ("sosp23_sharegpt", "sosp23_alpaca", "sosp23_chatbot", "azure_conv")
_SAMPLED = 200


@dataclass(frozen=True)
class Lesson:
    """A page: its title, the line above it, its scripts in order, and what makes its data."""

    title: str
    about: str
    scripts: tuple[str, ...]
    data: Callable[[], Mapping[str, object]] | None = None


def _accountant_data() -> Mapping[str, object]:
    """KV bytes of a token by model, and lengths drawn from the shipped calibrations."""
    known = groups()["model"]
    lengths = {}
    for name in _WORKLOADS:
        trace = generate_trace(name, num_requests=_SAMPLED, seed=0)
        lengths[name] = [(one.prompt_tokens, one.output_tokens) for one in trace.requests]
    return {
        "models": {name: shape_of(name).kv_bytes_per_token for name in _MODELS if name in known},
        "workloads": lengths,
    }


LESSONS: Mapping[str, Lesson] = {
    "pool": Lesson("A pool of blocks", "lesson: touch a block pool", ("pool.js", "pool_page.js")),
    "accountant": Lesson(
        "What do these lengths take?",
        "lesson: blocks, waste, tables and bytes",
        ("accountant.js", "accountant_page.js"),
        _accountant_data,
    ),
    "replay": Lesson("The pool of a run", "lesson: a run, block by block", ("replay.js", "replay_page.js")),
}
"""The lessons by name."""


def text_of(name: str) -> str:
    """A file of this package."""
    return files("harness.lessons").joinpath(name).read_text(encoding="utf-8")


def page(
    name: str,
    recording: Recording | None = None,
    lengths: tuple[str, Sequence[tuple[int, int]]] | None = None,
) -> str:
    """The page of a lesson; that of `replay` shows the recording, that of `accountant` the lengths of a trace."""
    from markupsafe import Markup

    from harness.report.style import filled, page_css

    lesson = LESSONS[name]
    folder = Path(__file__).parent
    known: Mapping[str, Any] = recording.data() if recording else lesson.data() if lesson.data else {}
    if lengths is not None:
        known = {**known, "workloads": {lengths[0]: lengths[1], **known["workloads"]}, "chosen": lengths[0]}
    data = json.dumps(known, separators=(",", ":")).replace("<", "\\u003c")
    body = filled(folder / f"{name}.html.j2", data=Markup(data), label=recording.label if recording else "")
    return filled(
        folder / "lesson.html.j2",
        lesson=lesson,
        style=Markup(page_css() + text_of("lesson.css")),
        body=Markup(body),
        script=Markup("\n".join(text_of(script) for script in lesson.scripts)),
    )
