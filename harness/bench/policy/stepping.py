"""The work of the lines on decoding, apart from its timing: `fresh` prepares a round, which is not timed, `run` is."""

import random
from dataclasses import dataclass

from engine.core.calendar import DecodeCalendar
from engine.core.identity import TokenIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow
from harness.bench.policy.work import BLOCK_SIZE, prefill, tokens_of

_SPREAD = 16  # prompt lengths, so that as many sequences fill a block in every step


@dataclass
class _Decoders:
    manager: PagedManager
    calendar: DecodeCalendar


class Decoding256:
    """Steady decoders on the calendar over the block manager."""

    def __init__(self, running: int, steps: int, *, hashed: bool) -> None:
        self.steps = steps
        self._running, self._hashed = running, hashed

    def fresh(self) -> tuple[tuple[_Decoders], dict[str, object]]:
        """Every prompt computed, every sequence steady."""
        blocks = self._running * (2 + (100 + _SPREAD + self.steps) // BLOCK_SIZE)
        decoders = _Decoders(PagedManager(blocks, BLOCK_SIZE), DecodeCalendar(BLOCK_SIZE))
        for number in range(self._running):
            prompt = 100 + number % _SPREAD
            identity = TokenIdentity(number, tokens_of(number, prompt), share_outputs=self._hashed)
            group = Group(Request(number, prompt, self.steps + 2, identity=identity))
            prefill(decoders.manager, group)
            group.generated = 1
            decoders.calendar.join(group)
        return (decoders,), {}

    def run(self, decoders: _Decoders) -> None:
        """Decode."""
        manager, calendar = decoders.manager, decoders.calendar
        hashed, told = self._hashed, list(range(BLOCK_SIZE))
        for _ in range(self.steps):
            for group in calendar.due():
                if hashed:
                    self._tell(group, told)
                if not manager.can_append(group):
                    raise RuntimeError("no block is free: the benchmark's pool is too small")
                manager.append(group)
            manager.advance(calendar.rows)
            calendar.tick(1)

    def _tell(self, group: Group, tokens: list[int]) -> None:
        identity, root = group.request.identity, group.sequences[0]
        assert isinstance(identity, TokenIdentity)
        first = root.computed <= group.request.prompt_tokens + BLOCK_SIZE
        identity.extend(0, tokens[: root.computed - group.request.prompt_tokens] if first else tokens)


class Scheduling:
    """A full batch of decoding requests under the scheduler."""

    def __init__(self, running: int, steps: int, *, rows: bool) -> None:
        self.steps = steps
        self._running, self._rows = running, rows

    def fresh(self) -> tuple[tuple[Scheduler], dict[str, object]]:
        """Every request admitted and past its prompt."""
        blocks = self._running * (2 + (100 + _SPREAD + self.steps) // BLOCK_SIZE)
        scheduler = Scheduler(PagedManager(blocks, BLOCK_SIZE), SchedulerLimits(8192, self._running))
        for number in range(self._running):
            prompt = 100 + number % _SPREAD
            identity = TokenIdentity(number, tokens_of(number, prompt))
            scheduler.submit(Request(number, prompt, self.steps + 64, identity=identity))
        plan = scheduler.schedule()
        while plan.steady < self._running:
            scheduler.commit(plan, StepResult())
            plan = scheduler.schedule()
        scheduler.commit(plan, StepResult())
        return (scheduler,), {}

    def run(self, scheduler: Scheduler) -> None:
        """Schedule and commit."""
        result, laid_out = StepResult(), self._rows
        for _ in range(self.steps):
            plan = scheduler.schedule()
            if laid_out:
                list(plan.rows)
            scheduler.commit(plan, result)


class BeamChurn:
    """One beam group whose hypotheses get random parents at every step."""

    def __init__(self, width: int, prompt: int, steps: int) -> None:
        self.width, self.steps = width, steps
        self._prompt = prompt
        draw = random.Random(0)
        self._parents = [[draw.randrange(width) for _ in range(width)] for _ in range(steps)]

    def fresh(self) -> tuple[tuple[PagedManager, Group], dict[str, object]]:
        """The prompt computed and forked."""
        blocks = self.width * (2 + (self._prompt + self.steps) // BLOCK_SIZE)
        manager = PagedManager(blocks, BLOCK_SIZE)
        identity = TokenIdentity(0, tokens_of(0, self._prompt))
        group = Group(Request(0, self._prompt, self.steps + 2, self.width, Decoding.BEAM, identity=identity))
        prefill(manager, group)
        manager.fork(group.sequences[0], group.fork())
        return (manager, group), {}

    def run(self, manager: PagedManager, group: Group) -> None:
        """Extend every beam, then re-parent all."""
        for parents in self._parents:
            rows = [ScheduledRow(beam, 1, True) for beam in group.sequences]
            if not manager.can_extend(rows):
                raise RuntimeError("beams do not fit: the benchmark's pool is too small")
            for row in rows:
                manager.extend(row)
            for beam in group.sequences:
                beam.computed += 1
            manager.drain_copies()
            manager.drain_frees()
            manager.reparent(group.sequences, parents)


class Yardstick:
    """Plain Python that no change of ours makes faster: what this machine does with a list and a dictionary."""

    operations = 200_000

    def run(self) -> int:
        """A fixed number of loop turns, each with an append, a dictionary entry and a sum."""
        kept: list[int] = []
        index: dict[int, int] = {}
        total = 0
        for number in range(self.operations):
            kept.append(number)
            index[number & 1023] = number
            total += number
        return total + len(kept) + len(index)
