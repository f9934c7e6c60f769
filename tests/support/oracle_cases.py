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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from engine.core import KeyIdentity, PagedManager, Request, Scheduler, SchedulerLimits, StepResult
from engine.core.options import Scheduling
from harness.config.schema import AllowedDifference
from harness.oracle.check import (
    Checker,
    DecisionsObserver,
    NotedLru,
    OracleReport,
    StepOf,
    TokenRanges,
    VllmProcess,
    settings_of,
)
from harness.oracle.decisions import Step
from harness.replay.executors import StepTiming
from harness.replay.features import FEATURES, StepFeatures
from harness.replay.loop import StepRecord
from traces.trace import Segment, TraceRequest

RECORDINGS = Path(__file__).parents[1] / "data" / "oracle"
NO_FEATURES = StepFeatures(*[0] * len(FEATURES))
RECORDED = (0, 4, 7, 10, 13, 28, 33, 39)
"""Seeds of the recorded workloads."""

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

    @property
    def settings(self) -> dict[str, Any]:
        longest = max(row.prompt_tokens + row.output_tokens for row in self.rows)
        return settings_of(self.num_blocks, self.block_size, self.caching, self.limits, longest)


def random_case(seed: int, policy: Scheduling | None = None) -> Case:
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
    longest = min(size * blocks, 400)
    texts = [Segment(key, draw.randint(1, longest)) for key in range(1, 7)]
    scheduler = Scheduler(PagedManager(blocks, size), limits)
    rows, before, step = [], [], 0
    for number in range(draw.choice([30, 80, 150])):
        row = _row(draw, number, texts, longest)
        if scheduler.never_fits(Request(number, row.prompt_tokens, row.output_tokens)) is None:
            rows.append(row)
            before.append(step)
        step += draw.choice([0, 0, 1, 3, 20])
    return Case(blocks, size, caching, limits, rows, before)


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
    checker = Checker(case.block_size, ranges, step_of, allowed)
    run_watched(case, checker.observe)
    return checker.report(version)


def run_watched(case: Case, observe: Callable[[Sequence[Request], Step], None]) -> None:
    """Run a case through the policy core; `observe` gets what arrived before each step, and what was decided in it."""
    lru = NotedLru()
    manager = PagedManager(case.num_blocks, case.block_size, prefix_caching=case.caching, eviction=lru)
    scheduler = Scheduler(manager, case.limits)
    observer = DecisionsObserver(scheduler, lru, observe)
    left, step = list(zip(case.rows, case.before, strict=True)), 0
    while left or scheduler.has_work:
        while left and (left[0][1] <= step or not scheduler.has_work):
            row, _ = left.pop(0)
            identity = KeyIdentity(row.request_id, row.segments, row.salt)
            request = Request(
                row.request_id,
                row.prompt_tokens,
                row.output_tokens,
                identity=identity,
                priority=row.priority,
            )
            observer.arrived(request, step)
            scheduler.submit(request)
        plan, result = scheduler.schedule(), StepResult()
        observer.planned(step, plan)
        report = scheduler.commit(plan, result)
        observer.committed(StepRecord(step, 1, plan, result, report, StepTiming([1], [0.0], NO_FEATURES)))
        step += 1


# -- recordings --------------------------------------------------------------------------------------------


class RecordedVllm:
    """What vLLM decided in the steps of a recording, one after the other."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        self._steps = iter(steps)

    def step(self, arrived: Sequence[Any]) -> Step:
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

    def noted(arrived: Sequence[Any]) -> Step:
        steps.append(vllm.step(arrived))
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
