"""The work that `bench policy` times: prompts, decode steps, scheduling, beams.

Each class has `fresh`, which prepares a round and is not timed, and `run`, which is timed. The yardstick is a loop of
plain Python, timed in the same process.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.core.calendar import DecodeCalendar
from engine.core.identity import TokenIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.plan import IntArray, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow

YARDSTICK = "yardstick"


BLOCK_SIZE = 16
_VOCABULARY = 32_000
_SPREAD = 16  # prompt lengths, so that as many sequences fill a block in every step


def tokens_of(seed: int, count: int) -> IntArray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, _VOCABULARY, count)


def token_request(number: int, tokens: int) -> Request:
    """A request with an unshared prompt and 8 output tokens."""
    return Request(number, tokens, 8, identity=TokenIdentity(number, tokens_of(number, tokens)))


def prefill(manager: PagedManager, group: Group) -> None:
    """Compute the whole prompt in one step, without a lookup in the prefix cache."""
    hits: list[int] = []
    if not manager.can_admit(group, hits, 0):
        raise RuntimeError(f"{group.request.request_id} does not fit: the benchmark's pool is too small")
    manager.admit(group, hits)
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, group.request.prompt_tokens, True))
    root.computed = group.request.prompt_tokens


class Allocation:
    """Prompts whose blocks were named beforehand; `evicting` pools hold exactly one round."""

    def __init__(self, sequences: int, tokens: int, *, evicting: bool) -> None:
        self.blocks = sequences * (tokens // BLOCK_SIZE)
        self._manager = PagedManager(self.blocks * (1 if evicting else 2), BLOCK_SIZE)
        self._evicting = evicting
        self._sequences, self._tokens = sequences, tokens
        self._round = 0
        for _ in range(1 if evicting else 2):
            self.run(*self.fresh()[0])
        self._clear()

    def _clear(self) -> None:
        if not self._evicting:
            self._manager.reset_prefix_cache()
        self._manager.drain_frees()

    def fresh(self) -> tuple[tuple[list[Group]], dict[str, object]]:
        """Groups with names that no round had before."""
        self._clear()
        groups = []
        for number in range(self._sequences):
            identity = TokenIdentity(number, tokens_of(number, self._tokens), salt=f"round {self._round}")
            group = Group(Request(number, self._tokens, 1, identity=identity))
            group.block_hashes = identity.prompt_hashes(BLOCK_SIZE)
            groups.append(group)
        self._round += 1
        return (groups,), {}

    def run(self, groups: list[Group]) -> None:
        """Allocate the blocks of all groups, then free them."""
        manager = self._manager
        for group in groups:
            prefill(manager, group)
        for group in groups:
            manager.release(group.sequences[0])


class Prompts:
    """Prompts served one after the other; the first half of each is a common system prompt."""

    def __init__(self, count: int, tokens: int, *, evicting: bool) -> None:
        self.count = count
        self._tokens = tokens
        blocks = tokens // BLOCK_SIZE
        self._manager = PagedManager(blocks * (200 if evicting else count + 2), BLOCK_SIZE)
        self._evicting = evicting
        self._shared = tokens_of(0, tokens // 2)
        self._round = 0
        for _ in range(1 + 400 // count if evicting else 1):  # until the pool is full
            self.run(*self.fresh()[0])

    def fresh(self) -> tuple[tuple[list[IntArray]], dict[str, object]]:
        """Prompts whose second halves are new in each round."""
        if not self._evicting:
            self._manager.reset_prefix_cache()
            self._serve(np.concatenate([self._shared, tokens_of(1, self._tokens // 2)]))
        self._manager.drain_frees()
        self._round += 1
        own = [
            tokens_of(self._round * self.count + number, self._tokens // 2) for number in range(self.count)
        ]
        return ([np.concatenate([self._shared, half]) for half in own],), {}

    def fresh_lists(self) -> tuple[tuple[list[list[int]]], dict[str, object]]:
        """The prompts of `fresh` as lists."""
        (prompts,), _ = self.fresh()
        return ([prompt.tolist() for prompt in prompts],), {}

    def run(self, prompts: Sequence[IntArray]) -> None:
        """Serve each prompt, from its tokens to the release of its blocks."""
        for prompt in prompts:
            self._serve(prompt)

    def run_lists(self, prompts: list[list[int]]) -> int:
        """Serve each prompt, from a list of tokens to the release of its blocks; returns the blocks that were hit."""
        return sum(map(self._serve, prompts))

    def _serve(self, prompt: IntArray | list[int]) -> int:
        manager = self._manager
        group = Group(Request(0, self._tokens, 1, identity=TokenIdentity(0, prompt)))
        hits = manager.lookup(group)
        if not manager.can_admit(group, hits, 0):
            raise RuntimeError("a prompt does not fit: the benchmark's pool is too small")
        manager.admit(group, hits)
        root = group.sequences[0]
        manager.extend(ScheduledRow(root, self._tokens - BLOCK_SIZE * len(hits), True))
        root.computed = self._tokens
        manager.release(root)
        return len(hits)


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
        """Compute every prompt, so that all sequences decode."""
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
        """Decode all sequences for `steps` steps."""
        manager, calendar = decoders.manager, decoders.calendar
        hashed, told = self._hashed, list(range(BLOCK_SIZE))
        for _ in range(self.steps):
            for group in calendar.due():
                if not manager.can_append(group):
                    raise RuntimeError("no block is free: the benchmark's pool is too small")
                manager.append(group)
            if hashed:
                for group in calendar.due(1):
                    self._tell(group, told)
            manager.advance(calendar)
            calendar.tick(1)

    def _tell(self, group: Group, tokens: list[int]) -> None:
        identity, root = group.request.identity, group.sequences[0]
        assert isinstance(identity, TokenIdentity)
        known = root.computed + 1 - group.request.prompt_tokens  # outputs, with the one that fills the block
        identity.extend(0, tokens[:known] if known < BLOCK_SIZE else tokens)


class Scheduling:
    """A full batch of decoding requests under the scheduler.

    With `hashed`, outputs are shared: as a block fills, it is cached, and the 16 tokens of a later one are told as a
    list and hashed. Outputs are told ahead so that `fresh` needs no special case.
    """

    def __init__(self, running: int, steps: int, *, rows: bool, hashed: bool = False) -> None:
        self.steps = steps
        self._running, self._rows, self._hashed = running, rows, hashed

    def fresh(self) -> tuple[tuple[Scheduler], dict[str, object]]:
        """Admit every request and compute its prompt."""
        blocks = self._running * (2 + (100 + _SPREAD + self.steps) // BLOCK_SIZE)
        scheduler = Scheduler(PagedManager(blocks, BLOCK_SIZE), SchedulerLimits(8192, self._running))
        for number in range(self._running):
            prompt = 100 + number % _SPREAD
            tokens = tokens_of(number, prompt).tolist()
            identity = TokenIdentity(number, tokens, share_outputs=self._hashed)
            if self._hashed:
                identity.extend(0, list(range(BLOCK_SIZE + -prompt % BLOCK_SIZE)))
            scheduler.submit(Request(number, prompt, self.steps + 64, identity=identity))
        plan = scheduler.schedule()
        while plan.steady < self._running:
            scheduler.commit(plan, StepResult())
            plan = scheduler.schedule()
        scheduler.commit(plan, StepResult())
        return (scheduler,), {}

    def run(self, scheduler: Scheduler) -> int:
        """Schedule and commit `steps` steps; returns the rows that were laid out."""
        result, laid_out, rows = StepResult(), self._rows, 0
        told, filling = list(range(BLOCK_SIZE)), self._filling(scheduler)
        for step in range(self.steps):
            for identity in filling[step % BLOCK_SIZE]:
                identity.extend(0, told)
            plan = scheduler.schedule()
            if laid_out:
                rows += len(list(plan.rows))
            scheduler.commit(plan, result)
        return rows

    def _filling(self, scheduler: Scheduler) -> list[list[TokenIdentity]]:
        """The identities whose next outputs fill a block in step i, by i modulo the block size; none unless hashed."""
        by_step: list[list[TokenIdentity]] = [[] for _ in range(BLOCK_SIZE)]
        for group in scheduler.running if self._hashed else ():
            assert isinstance(group.request.identity, TokenIdentity)
            by_step[-(group.sequences[0].computed + 1) % BLOCK_SIZE].append(group.request.identity)
        return by_step


class BeamChurn:
    """One beam group whose hypotheses get random parents at every step."""

    def __init__(self, width: int, prompt: int, steps: int) -> None:
        self.width, self.steps = width, steps
        self._prompt = prompt
        draw = random.Random(0)
        self._parents = [[draw.randrange(width) for _ in range(width)] for _ in range(steps)]

    def fresh(self) -> tuple[tuple[PagedManager, Group], dict[str, object]]:
        """Compute the prompt and fork it into the beams."""
        blocks = self.width * (2 + (self._prompt + self.steps) // BLOCK_SIZE)
        manager = PagedManager(blocks, BLOCK_SIZE)
        identity = TokenIdentity(0, tokens_of(0, self._prompt))
        group = Group(Request(0, self._prompt, self.steps + 2, self.width, Decoding.beam, identity=identity))
        prefill(manager, group)
        manager.fork(group.sequences[0], group.fork())
        return (manager, group), {}

    def run(self, manager: PagedManager, group: Group) -> None:
        """In every step, extend all beams and re-parent them."""
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
    """Plain Python with a list and a dictionary. No change of our code makes it faster."""

    operations = 200_000

    def run(self) -> int:
        """Run a fixed number of loop turns, each with an append, a dictionary entry and a sum."""
        kept: list[int] = []
        index: dict[int, int] = {}
        total = 0
        for number in range(self.operations):
            kept.append(number)
            index[number & 1023] = number
            total += number
        return total + len(kept) + len(index)
