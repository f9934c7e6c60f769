"""What each step of an engine held and how long it took, from the log of `pagetwin_probe`, and a fit to that.

A log of requests shows steps through sums over many of them, so a fit to it runs the simulator. Here each step is a row
of a regression: its features (`harness.replay.features`) give its price, its line in the log its seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.core.plan import Row, StepPlan
from harness.metrics.log import FloatArray
from harness.replay.features import AT, FeatureMeter

MOST = 20_000
"""Steps that are read: the first ones, of which thousands are enough for a fit."""
_NS = 1e-9


@dataclass(frozen=True)
class LoggedSteps:
    """Steps of an engine; every column has one entry for each, `features` one column for each feature.

    `seconds` count from the end of the step before, or from the step's begin where there was nothing to do between.
    `host_s` of them are those in which vLLM does not wait for its model: schedule(), update_from_output() and what lies
    between two steps. Steps whose rows the log does not tell are left out, `unknown` is their number.
    """

    done_s: FloatArray
    seconds: FloatArray
    host_s: FloatArray
    features: FloatArray
    unknown: int = 0

    def __len__(self) -> int:
        return len(self.seconds)

    def until(self, at_s: float) -> "LoggedSteps":
        """The steps that are done by then."""
        seen = self.done_s <= at_s
        features = self.features[seen]
        return LoggedSteps(self.done_s[seen], self.seconds[seen], self.host_s[seen], features, self.unknown)

    @property
    def rows(self) -> FloatArray:
        """Sequences of each step."""
        found: FloatArray = self.features[:, AT.rows]
        return found


@dataclass(frozen=True)
class StepLine:
    """What the line of a step tells of its rows, by the numbers of requests."""

    entering: Sequence[Sequence[int]]  # number, cached tokens, tokens of the step
    several: Sequence[Sequence[int]]  # of other than one token: number, tokens before, tokens of the step
    absent: Sequence[int]  # run without a row
    preempted: Sequence[int]


@dataclass
class _Running:
    """A request in the batch: tokens whose K and V are in the pool, and those that are known."""

    held: int
    known: int


@dataclass
class StepReader:
    """Follows the batch through the steps of a log. Times are ns."""

    block_size: int
    unknown: int = 0
    _batch: dict[int, _Running] = field(default_factory=dict)
    _known: dict[int, int] = field(default_factory=dict)  # tokens of requests that are not in the batch
    _ended: list[int] = field(default_factory=list)
    _done: int | None = None  # when the step before was, if there was more to do then
    _found: list[tuple[int, int, int]] = field(default_factory=list)
    _features: list[Sequence[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Features of a step follow from its rows and those before."""
        self._meter = FeatureMeter({}, self.block_size)

    def queued(self, number: int, prompt_tokens: int) -> None:
        """A request is queued."""
        self._known[number] = prompt_tokens

    def ended(self, number: int) -> None:
        """A request ends with the step whose line comes next, or before it."""
        self._ended.append(number)

    def step(self, times: Sequence[int], rows: int, waiting: int, told: StepLine) -> None:
        """A step: when it began, and how long it planned, waited for its model, and noted; its rows."""
        began, policy, model, commit = times
        done = began + policy + model + commit
        queries = self._rows(told)
        if self._done is not None and rows:
            began = min(began, self._done)
        if len(queries) == rows and rows and len(self._found) < MOST:
            plan = StepPlan(0, queries)
            self._features.append([float(value) for value in self._meter.single(plan, {})])
            self._found.append((done, done - began, done - began - model))
        elif rows:
            self.unknown += len(queries) != rows
        for number in self._ended:
            self._batch.pop(number, None)
            self._known.pop(number, None)
        self._ended.clear()
        self._done = done if self._batch or waiting else None

    def _rows(self, told: StepLine) -> list[Row]:
        """The rows of the step, which are taken: those that enter, those of several tokens, and all others of one."""
        batch = self._batch
        for number in told.preempted:
            if number in batch:
                self._known[number] = batch.pop(number).known
        several = {number: query for number, _, query in told.several}
        several |= {number: query for number, _, query in told.entering}
        for number, held, _ in told.entering:
            batch[number] = _Running(held, self._known.pop(number, 0))
        for number, held, _ in told.several:
            if number in batch:
                batch[number].held = held
        absent = set(told.absent)
        found = []
        for number, one in batch.items():
            if number in absent:
                continue
            query = several.get(number, 1)
            samples = one.held + query >= one.known
            found.append(Row(number, 0, one.held, query, samples, ()))
            one.held += query
            one.known += samples
        return found

    def steps(self) -> LoggedSteps | None:
        """The steps; None where the log has none."""
        if not self._found:
            return None
        times = np.array(self._found, dtype=np.float64) * _NS
        return LoggedSteps(times[:, 0], times[:, 1], times[:, 2], np.array(self._features), self.unknown)
