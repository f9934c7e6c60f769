"""Random workloads for the comparison with vLLM's scheduler, and recordings of what vLLM decided on some of them.

`python tests/support/oracle_cases.py PYTHON` makes the recordings in tests/data/oracle again, with the vLLM of the
interpreter PYTHON.
"""

import gzip
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from tiers import NIGHT_SEED, tier

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.options import Scheduling
from engine.core.request import Speculation
from harness.config.schema import AllowedDifference
from harness.oracle.check import (
    Checker,
    DecisionsObserver,
    NotedLru,
    Observe,
    OracleReport,
    Question,
    StepOf,
    TokenRanges,
    VllmProcess,
    settings_of,
)
from harness.oracle.decisions import Step
from harness.replay.branches import DraftAcceptance
from harness.replay.executors import StepTiming
from harness.replay.features import FEATURES, StepFeatures
from harness.replay.loop import StepRecord
from traces.reshape import one_request_per_sample
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

RECORDINGS = Path(__file__).parents[1] / "data" / "oracle"
NO_FEATURES = StepFeatures(*[0] * len(FEATURES))
RECORDED = (0, 4, 7, 10, 13, 28, 33, 39)
"""Seeds of the recorded workloads."""

FAMILIES = ("plain", "drafts", "samples", "ahead")
FIRST_SEED = tier(1000, 1000 * NIGHT_SEED)
"""Of the workloads that are compared live: by night the date's."""

PYTHON = os.environ.get("PAGETWIN_VLLM")
"""The interpreter that has vLLM; None asks our own."""


@dataclass(frozen=True)
class Case:
    """A pool, limits, and the requests that are submitted before each step."""

    num_blocks: int
    block_size: int
    caching: bool
    limits: SchedulerLimits
    rows: Sequence[TraceRequest]
    before: Sequence[int]  # the step before which each request is submitted, at the earliest
    drafts: int = 0

    def scheduler(self, lru: NotedLru) -> Scheduler:
        manager = PagedManager(self.num_blocks, self.block_size, prefix_caching=self.caching, eviction=lru)
        return Scheduler(manager, self.limits)

    @property
    def settings(self) -> dict[str, Any]:
        longest = max(row.prompt_tokens + row.output_tokens for row in self.rows)
        return settings_of(self.num_blocks, self.block_size, self.caching, self.limits, longest, self.drafts)


def random_case(seed: int, policy: Scheduling | None = None, family: str = "plain") -> Case:
    """A workload with shared prefixes, chunks, pressure and preemptions; requests that never fit are left out."""
    draw = random.Random(seed)
    size, blocks = draw.choice([1, 4, 16, 16, 32]), draw.choice([12, 19, 39, 100, 300])
    caching = draw.random() < 0.8
    limits = SchedulerLimits(
        max_batched_tokens=draw.choice([16, 64, 256, 1024]),
        max_running=draw.choice([2, 4, 16, 64]),
        chunked_prefill=draw.random() < 0.85,
        watermark=draw.choice([0, 0, 0, 0.01, 0.05, 0.1, 0.25]),
        policy=policy or draw.choice([Scheduling.fcfs, Scheduling.fcfs, Scheduling.priority]),
        admit_whole_prompt=draw.random() < 0.8,
    )
    if limits.chunked_prefill and draw.random() < 0.4:
        limits.long_prefill_tokens = draw.choice([8, 32, 100])
        limits.long_prefill_adaptive = seed not in RECORDED and seed % 2 == 0
    longest = min(size * blocks, 400)
    texts = [Segment(key, draw.randint(1, longest)) for key in range(1, 7)]
    limits.ahead = family == "ahead"
    drafts = draw.choice([1, 2, 4, 7]) if family == "drafts" else 0
    speculation = Speculation(drafts) if drafts else None
    if drafts and draw.random() < 0.3:
        limits.max_model_len = draw.choice([longest // 2, longest])
    scheduler = Scheduler(PagedManager(blocks, size), limits)
    rows, before, step = [], [], 0
    for number in range(draw.choice([30, 80, 150])):
        row = _row(draw, number, texts, longest)
        asked = Request(number, row.prompt_tokens, row.output_tokens, speculation=speculation)
        if scheduler.never_fits(asked) is None:
            rows.append(row)
            before.append(step)
        step += draw.choice([0, 0, 1, 3, 20])
    if family == "samples":
        rows, before = _samples(draw, rows, before)
    return Case(blocks, size, caching, limits, rows, before, drafts)


def tight_case(seed: int) -> Case:
    """A few prompts in small chunks, scheduled ahead in a pool that all but a few of them fill: they come and go."""
    draw, step = random.Random(seed), 0
    limits = SchedulerLimits(draw.randint(8, 20), draw.randint(2, 7), ahead=True)
    limits.long_prefill_tokens, limits.long_prefill_adaptive = draw.randint(1, 3), draw.random() < 0.5
    limits.admit_whole_prompt = draw.random() < 0.5
    rows, before = list[TraceRequest](), list[int]()
    for number in range(draw.randint(4, 9)):
        prompt = draw.randint(1, 8)
        rows.append(TraceRequest(number, number, prompt, draw.randint(1, 8), [Segment(None, prompt)]))
        before.append(step)
        step += draw.randint(0, 2)
    return Case(draw.randint(16, 25), 1, True, limits, rows, before)


def _samples(
    draw: random.Random, rows: Sequence[TraceRequest], before: Sequence[int]
) -> tuple[list[TraceRequest], list[int]]:
    """Each request as requests for its samples, as points make them (vLLM: `ParentRequest.get_child_info`)."""
    asked = [replace(row, n=draw.choice([1, 2, 4])) for row in rows[: len(rows) // 2]]
    header = TraceHeader(*("samples", "simple", "random", "content"), None, 1, "", len(asked), len(asked))
    trace = Trace(header, tuple(asked))
    samples = one_request_per_sample(trace, {row.request_id: row.n or 1 for row in asked}).requests
    arrivals = [at for row, at in zip(asked, before, strict=False) for _ in range(row.n or 1)]
    return list(samples), arrivals


def _row(draw: random.Random, number: int, texts: Sequence[Segment], longest: int) -> TraceRequest:
    left, segments = draw.randint(1, max(1, int(longest * draw.choice([0.2, 0.5, 0.8])))), []
    total = left
    while left:
        text = draw.choice(texts) if draw.random() < 0.6 else Segment(None, draw.randint(1, 60))
        whole = draw.random() < 0.5
        tokens = min(left, text.tokens if whole else draw.randint(1, text.tokens))
        segments.append(Segment(text.key, tokens))
        left -= tokens
    output = max(1, min(draw.randint(1, draw.choice([4, 40, 120])), longest - total))
    salt, priority = draw.choice(["", "", "a"]), draw.randint(0, 2)
    return TraceRequest(number, number, total, output, segments, salt=salt, priority=priority)


def checked(
    case: Case, step_of: StepOf, allowed: AllowedDifference = AllowedDifference.none, version: str = "0.33.0"
) -> OracleReport:
    """Run a case through the policy core beside another side; raises OracleError at the first difference."""
    ranges = TokenRanges(case.rows)
    checker = Checker(case.block_size, ranges, step_of, allowed, ahead=case.limits.ahead)
    lru = NotedLru()
    run_watched(case, case.scheduler(lru), checker.observe, lru)
    return checker.report(version)


class Watchable(Protocol):
    """Requests, the steps before which they are submitted at the earliest, and the draft tokens of each."""

    rows: Sequence[TraceRequest]
    before: Sequence[int]
    drafts: int


def run_watched(case: Watchable, scheduler: Scheduler, observe: Observe, lru: NotedLru | None = None) -> None:
    """Run a case through the policy core; `observe` gets what arrived before each step, and what was decided in it."""
    acceptance = DraftAcceptance(0.6)
    observer = DecisionsObserver(scheduler, NotedLru() if lru is None else lru, observe)
    left, step = list(zip(case.rows, case.before, strict=True)), 0
    while left or scheduler.has_work:
        if not scheduler.has_work:
            scheduler.rest()
        while left and (left[0][1] <= step or not scheduler.has_work):
            row, _ = left.pop(0)
            identity = KeyIdentity(row.request_id, row.segments, row.salt)
            request = Request(
                row.request_id,
                row.prompt_tokens,
                row.output_tokens,
                identity=identity,
                priority=row.priority,
                speculation=Speculation(case.drafts) if case.drafts else None,
            )
            observer.arrived(request, step)
            scheduler.submit(request)
        plan = scheduler.schedule()
        result = StepResult(accepted=acceptance.of(plan))
        observer.planned(step, plan)
        report = scheduler.commit(plan, result)
        observer.committed(StepRecord(step, 1, plan, result, report, StepTiming([1], [0.0], NO_FEATURES)))
        step += 1


# -- recordings --------------------------------------------------------------------------------------------


class RecordedVllm:
    """What vLLM decided in the steps of a recording, one after the other."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        self._steps = iter(steps)

    def step(self, question: Question) -> Step:
        """The next recorded step. A side that takes more steps than vLLM took gets an empty one."""
        recorded = next(self._steps, None)
        return Step() if recorded is None else Step.of(recorded)


def recording(seed: int) -> RecordedVllm:
    """The recording of a random case; raises ValueError if it was made of another case."""
    head, *steps = (json.loads(line) for line in gzip.decompress(_path(seed).read_bytes()).splitlines())
    if head["settings"] != json.loads(json.dumps(random_case(seed).settings)):
        raise ValueError(f"the recording of seed {seed} is one of another workload: make it again")
    return RecordedVllm(steps)


def _path(seed: int) -> Path:
    return RECORDINGS / f"vllm-0.33.0-seed{seed}.jsonl.gz"


def record(seed: int, vllm: VllmProcess) -> Counter[str]:
    """Write the recording of a case, after it was compared; returns the counts of what was compared."""
    case, steps = random_case(seed), list[Step]()
    version = vllm.begin(case.settings)

    def noted(question: Question) -> Step:
        steps.append(vllm.step(question))
        return steps[-1]

    report = checked(case, noted, version=version)
    lines = chain([{"vllm": version, "seed": seed, "settings": case.settings}], map(asdict, steps))
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    _path(seed).write_bytes(gzip.compress(text.encode(), mtime=0))
    return Counter(report.counts)


if __name__ == "__main__":
    with VllmProcess(sys.argv[1]) as process:
        for number in RECORDED:
            sys.stdout.write(f"{number} {dict(record(number, process))}\n")
