"""Random workloads on caches with groups, beside vLLM with the same layers, and recordings of its decisions.

`python tests/support/group_oracle.py PYTHON` makes the recordings in tests/data/oracle again, with the vLLM of the
interpreter PYTHON. vLLM is told the layers of a model and makes the groups, and all that follows from them, itself.
Compared are the counts that a step decides, hits included; page numbers are free.
"""

import gzip
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from oracle_cases import run_watched

from engine.core import Request, Scheduler, SchedulerLimits
from engine.core.memory.group_layout import LayerSet, uniform_layout
from engine.core.memory.group_pages import PoolPages
from engine.core.memory.paged import PagedManager
from engine.core.options import GroupKind, StateMode
from harness.config.schema import AllowedDifference
from harness.oracle.check import (
    Checker,
    Question,
    StepOf,
    TokenRanges,
    VllmProcess,
    check_groups,
    layers_of,
    settings_of,
)
from harness.oracle.decisions import Step
from traces.trace import Segment, TraceRequest

RECORDINGS = Path(__file__).parents[1] / "data" / "oracle"
RECORDED = {
    "window": 30,
    "windows": 137,
    "no_full": 167,
    "states": 26,
    "states_and_windows": 52,
    "chunked": 1034,
    "inside": 106,
}
"""The seed of the recorded workload of each family."""


@dataclass(frozen=True)
class GroupCase:
    """Layers, pages, limits, and the requests that are submitted before each step."""

    sets: tuple[LayerSet, ...]
    block_size: int
    pages: int
    caching: bool
    limits: SchedulerLimits
    rows: Sequence[TraceRequest]
    before: Sequence[int]
    drafts: int = 0
    unit: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        longest = max(row.prompt_tokens + row.output_tokens for row in self.rows)
        settings = settings_of(self.pages, self.block_size, self.caching, self.limits, longest)
        flags = {"flags": {"prefix_match_unit": self.unit}} if self.unit else {}
        return {**settings, **flags, "layers": layers_of(self.manager().groups.layout)}

    def manager(self) -> PagedManager:
        states = StateMode.align if self.caching else StateMode.none
        layout = replace(uniform_layout(self.sets, self.block_size, states), unit=self.unit)
        return PagedManager.of(
            PoolPages(layout, (self.pages,)),
            most_chunk=self.limits.max_batched_tokens,
            prefix_caching=self.caching,
        )


FAMILIES = ("window", "windows", "no_full", "states", "states_and_windows", "chunked", "inside")


def _sets(draw: random.Random, family: str) -> list[LayerSet]:
    """Kinds of layers in the order of their first layers, which is that of the groups."""
    narrow = draw.choice([1, 1, 2])  # tokens of windowed layers may be half as large: blocks of twice as many
    spans = draw.sample([2, 5, 16, 33, 64, 100], 3)
    if family == "window":
        full, windowed = draw.choice([(1, 1), (2, 4), (3, 5), (4, 5)])
        sets = [
            LayerSet(GroupKind.window, windowed, 16 // narrow, spans[0]),
            LayerSet(GroupKind.full, full, 16),
        ]
    elif family == "windows":
        sets = [
            LayerSet(GroupKind.window, draw.choice([2, 4]), 16, span) for span in spans[: draw.choice([2, 3])]
        ]
        sets.append(LayerSet(GroupKind.full, 2, 16))
    elif family == "no_full":
        sets = [LayerSet(GroupKind.window, 2, 16, span) for span in spans[: draw.choice([1, 2, 3])]]
    elif family == "chunked":  # attention in chunks, as of Llama 4: one layer in four keeps every token
        chunks, layers = draw.sample([32, 64, 96, 160], 2), draw.choice([(1, 1), (3, 1), (6, 2), (4, 3)])
        sets = [LayerSet(GroupKind.chunk, layers[0], 16, chunks[0])]
        sets += [LayerSet(GroupKind.full, layers[1], 16)] if draw.random() < 0.8 else []
        sets += [LayerSet(GroupKind.chunk, 2, 16, chunks[1])] if draw.random() < 0.2 else []
    else:
        state = LayerSet(GroupKind.state, draw.choice([1, 3, 6]), draw.choice([64, 256, 1000, 2000]))
        sets = [state, LayerSet(GroupKind.full, draw.choice([1, 2]), 16)]
        if family == "states_and_windows":
            sets.insert(draw.choice([0, 1, 2]), LayerSet(GroupKind.window, draw.choice([1, 2]), 16, spans[0]))
        if family == "inside" and draw.random() < 0.3:  # blocks of two lengths
            sets.append(LayerSet(GroupKind.full, draw.choice([1, 2]), 8))
    return draw.sample(sets, len(sets))


def random_case(seed: int, family: str | None = None) -> GroupCase:
    """Layers of one or more kinds, shared prefixes, chunks, pressure and preemptions."""
    draw = random.Random(seed)
    size = draw.choice([16, 16, 32])
    sets = _sets(draw, draw.choice(FAMILIES) if family is None else family)
    limits = SchedulerLimits(
        max_batched_tokens=draw.choice([16, 64, 256]),
        max_running=draw.choice([2, 4, 16]),
        watermark=draw.choice([0, 0, 0.05]),
        admit_whole_prompt=True,
    )
    pages, longest = draw.choice([40, 80, 160, 400]), min(16 * size, 300)
    texts = [Segment(key, draw.randint(1, longest)) for key in range(1, 5)]
    case = GroupCase(tuple(sets), size, pages, draw.random() < 0.85, limits, (), ())
    if family == "inside":
        case = replace(case, caching=True, unit=draw.choice([4, 8, 16 if size == 32 else 8]))
    scheduler, rows, before, step = Scheduler(case.manager(), limits), [], [], 0
    for number in range(draw.choice([30, 60])):
        row = _row(draw, number, texts, longest)
        if case.unit:
            row = replace(row, segments=[Segment(s.key or 100 + number, s.tokens) for s in row.segments])
        if case.unit and rows and draw.random() < 0.6:
            row = _after(draw, number, draw.choice(rows), longest)
        if scheduler.never_fits(Request(number, row.prompt_tokens, row.output_tokens)) is None:
            rows.append(row)
            before.append(step)
        step += draw.choice([0, 0, 1, 3, 10])
    return replace(case, rows=rows, before=before)


def _row(draw: random.Random, number: int, texts: Sequence[Segment], longest: int) -> TraceRequest:
    segments = [draw.choice(texts)] if draw.random() < 0.75 else []
    segments.append(Segment(None, draw.randint(1, max(1, longest // 3))))
    total = sum(segment.tokens for segment in segments)
    return TraceRequest(number, number, total, draw.randint(1, 40), segments)


def _after(draw: random.Random, number: int, row: TraceRequest, longest: int) -> TraceRequest:
    """A request that begins as an earlier one, as the next turn of a chat does, or is sent again."""
    segments = list(row.segments)
    if draw.random() < 0.7:
        segments.append(Segment(draw.choice([None, 100 + number]), draw.randint(1, max(1, longest // 4))))
    total = sum(segment.tokens for segment in segments)
    return TraceRequest(number, number, total, draw.randint(1, 40), segments)


def compare(case: GroupCase, step_of: StepOf) -> Counter[str]:
    """Run a case beside another side; OracleError at the first difference. Returns what was compared."""
    checker = Checker(None, TokenRanges(case.rows), step_of, AllowedDifference.none)
    run_watched(case, Scheduler(case.manager(), case.limits), checker.observe)
    report = checker.report("")
    return Counter(report.counts, steps=report.steps)


def _path(family: str) -> Path:
    return RECORDINGS / f"vllm-0.33.0-{family}-seed{RECORDED[family]}.jsonl.gz"


def recorded_case(family: str) -> GroupCase:
    """The workload that was recorded."""
    return random_case(RECORDED[family], family)


def recording(family: str) -> StepOf:
    """What vLLM decided on a case, step by step; raises ValueError if it was made of another case."""
    head, *steps = (json.loads(line) for line in gzip.decompress(_path(family).read_bytes()).splitlines())
    if head["settings"] != json.loads(json.dumps(recorded_case(family).settings)):
        raise ValueError(f"the recording of {family} is one of another workload: make it again")
    left = iter(steps)
    return lambda question: Step.of(next(left))


def begin(case: GroupCase, vllm: VllmProcess) -> Any:
    """Start vLLM with a case's model; OracleError where it makes other groups of its layers. Returns its answer."""
    asked = vllm.ask({"settings": case.settings})
    layout = case.manager().groups.layout
    check_groups(layout, asked, caching=case.caching)
    return asked


def record(family: str, vllm: VllmProcess) -> Counter[str]:
    """Write the recording of a case, after it was compared."""
    case, steps = recorded_case(family), list[Step]()
    version = begin(case, vllm)["vllm"]

    def noted(question: Question) -> Step:
        steps.append(vllm.step(question))
        return steps[-1]

    counts = compare(case, noted)
    lines = chain([{"vllm": version, "settings": case.settings}], map(asdict, steps))
    text = "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
    _path(family).write_bytes(gzip.compress(text.encode(), mtime=0))
    return counts


if __name__ == "__main__":
    with VllmProcess(sys.argv[1]) as process:
        for number in RECORDED:
            sys.stdout.write(f"{number} {dict(record(number, process))}\n")
