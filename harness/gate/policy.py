"""The policy layer: CPU time of block manager and scheduler, as ratios to a loop of the same rounds.

Never change `reference_loop`: every baseline is a multiple of its time. The loop does the same kinds of work as the
policy, a fixed number of times: attribute and method calls, lists, dictionaries, integers, small arrays. A faster or a
busier machine changes both in the same way. The loads are small replays through the public interface of the scheduler.
"""

import gc
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from engine.core.identity import KeyIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from harness.gate.findings import Baseline, Finding, LayerResult, Measured, coverage
from harness.gate.settings import GateSettings, Margins, compared, default_settings, effect

LOOP_TURNS = 800
LOAD_BLOCK_SIZE = 16
ROUNDS, MOST_ROUNDS = 20, 80
SETTLED = 1 / 6  # no more rounds are needed once the bounds of a ratio are closer than this

Work = Callable[[], object]


class _Item:
    __slots__ = ("count", "name", "table")

    def __init__(self, name: int) -> None:
        self.name = name
        self.count = 0
        self.table: list[int] = []

    def grow(self, value: int) -> int:
        self.count += 1
        self.table.append(value)
        return self.count % 16


def reference_loop() -> int:
    """The yardstick of the loads. Returns a checksum, so that no part of it can be optimised away."""
    items = [_Item(name) for name in range(64)]
    index: dict[int, _Item] = {}
    free = list(range(4096))
    total = 0
    for step in range(LOOP_TURNS):
        for item in items:
            if item.grow(step) == 0:
                index[free.pop()] = item
        lengths = np.fromiter((item.count for item in items), dtype=np.int64, count=len(items))
        total += int((lengths // 16).sum()) + len(index)
        if step % 16 == 15:
            free.extend(sorted(index, key=lambda block: index[block].name))
            index.clear()
    return total


@dataclass(frozen=True)
class Load:
    """Requests and the size of their pool in blocks. `parents(width, step)` gives the parents of a request's beams."""

    requests: tuple[Request, ...]
    blocks: int
    limits: SchedulerLimits
    parents: Callable[[int, int], list[int]] | None = None

    def run(self) -> int:
        """Serve all requests; returns the number of steps."""
        scheduler = Scheduler(PagedManager(self.blocks, LOAD_BLOCK_SIZE), self.limits)
        for request in self.requests:
            scheduler.submit(request)
        steps = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.commit(plan, StepResult(parents=dict(self._parents(plan, steps))))
            steps += 1
        return steps

    def _parents(self, plan: StepPlan, step: int) -> Iterator[tuple[int, list[int]]]:
        if self.parents is None:
            return
        for request in self.requests:
            yield request.request_id, self.parents(request.width, step)


def loads() -> dict[str, Load]:
    """The loads by name. A changed load is a new case and needs a new name."""
    prompts = _plain(200, 700, 4)
    beams = tuple(Request(rid, 40, 48, 8, Decoding.beam) for rid in range(6))
    return {
        "scheduler: decode, 64 sequences": Load(_plain(64, 16, 96), 2000, SchedulerLimits(2048, 64)),
        "scheduler: chunked prefill, 200 prompts of 700": Load(prompts, 4000, SchedulerLimits(512, 64)),
        "block manager: shared prefixes": Load(_sharing(120), 3000, SchedulerLimits(4096, 64)),
        "block manager: pool too small, preemption": Load(_plain(48, 64, 96), 200, SchedulerLimits(2048, 48)),
        "block manager: beams, copy on write": Load(beams, 3000, SchedulerLimits(2048, 64), _half),
    }


def _plain(count: int, prompt: int, output: int) -> tuple[Request, ...]:
    return tuple(Request(rid, prompt, output) for rid in range(count))


def _sharing(count: int) -> tuple[Request, ...]:
    """Requests with one of three shared prefixes of 1,024 tokens in turn, and 40 tokens of their own."""
    keys = ([(rid % 3, 1024), (None, 40)] for rid in range(count))
    return tuple(Request(rid, 1064, 8, identity=KeyIdentity(rid, key)) for rid, key in enumerate(keys))


def _half(width: int, step: int) -> list[int]:
    """Parents that continue every second beam, each twice. Even and odd steps continue the other half."""
    return [2 * (place // 2) + step % 2 for place in range(width)]


def case_names() -> list[str]:
    """The names of the loads."""
    return [*loads()]


def measure() -> Measured:
    """Time every load."""
    cases = {name: {"ratios": rounds(load.run, reference_loop)} for name, load in loads().items()}
    python = ".".join(platform.python_version_tuple()[:2])
    return Measured("policy", f"policy-python-{python}", {"python": python}, None, cases)


def margins(settings: GateSettings | None = None) -> Margins:
    """The margins of the layer."""
    return (settings or default_settings()).policy


def rounds(work: Work, yardstick: Work) -> list[float]:
    """Ratios of CPU time, work to yardstick, one for each round. The spread of the rounds decides their number.

    Each round runs both twice, in the order A B B A, and takes the faster run of each, because the influence of other
    processes on the caches only ever costs time. CPU time is used, so that waiting does not count.
    """
    work(), yardstick()
    found: list[float] = []
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist already
    gc.disable()  # otherwise one side would pay for a collection that the other side caused
    try:
        while len(found) < MOST_ROUNDS:
            if len(found) >= ROUNDS and len(found) % 10 == 0 and effect(found, found).width < SETTLED:
                break
            first, second, third, fourth = (_seconds(it) for it in (work, yardstick, yardstick, work))
            found.append(round(min(first, fourth) / min(second, third), 5))
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def judge(now: Measured, baseline: Baseline, settings: GateSettings | None = None) -> LayerResult:
    """Compare with a baseline of the same Python version. Other versions change loops and calls differently."""
    made_on = f"Python {now.made_on['python']}, {len(now.cases)} ratios"
    if baseline.made_on != now.made_on:
        reason = f"the baseline is of Python {baseline.made_on.get('python')}"
        return LayerResult.undecided("policy", reason, made_on)
    effects, allowed = compared(now, baseline), margins(settings)
    judged = [Finding(case, found.verdict(allowed), str(found)) for case, found in effects.items()]
    return LayerResult("policy", (*coverage(now, baseline), *judged), made_on)


def unfit(now: Measured, settings: GateSettings | None = None) -> Iterator[str]:
    """The reasons why these figures cannot become a baseline: a spread so wide that no later run could pass."""
    for case, values in now.cases.items():
        found = effect(values["ratios"], values["ratios"])
        if found.width > margins(settings).widest:
            yield f"{case}: too much noise ({found}); try again on a quieter machine"


def _seconds(work: Work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
