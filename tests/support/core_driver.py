"""Every operation of the policy core in random order, over the brute-force slot model, for any set of policies."""

import random
from dataclasses import dataclass

import numpy as np
from slot_model import SlotModel

from engine.core.errors import CoreError, NeverFitsError
from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager, layer_groups
from engine.core.options import (
    Decoding,
    Placement,
    Preemption,
    Reservation,
    Retention,
    SchedulerLimits,
    Scheduling,
    SpeculationMode,
)
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Setup:
    """One choice of every policy."""

    paged: bool = True
    size: int = 4
    blocks: int = 26
    host_blocks: int = 12
    caching: bool = True
    retention: Retention = Retention.lru
    deduplicate: bool = False
    copy_at_fork: bool = False
    reservation: Reservation = Reservation.max
    placement: Placement = Placement.first_fit
    budget: int = 24
    running: int = 8
    chunked: bool = True
    watermark: float = 0.0
    adaptive: bool = False
    scheduling: Scheduling = Scheduling.fcfs
    preemption: Preemption = Preemption.recompute
    cap: int | None = None
    whole: bool = True
    static: bool = False
    mixed: bool = True

    def manager(self) -> KVCacheManager:
        if not self.paged:
            return ContiguousManager(self.blocks * self.size, 64, self.reservation, self.placement)
        return PagedManager(
            self.blocks,
            self.size,
            prefix_caching=self.caching,
            retention=self.retention,
            deduplicate=self.deduplicate,
            copy_at_fork=self.copy_at_fork,
            host_blocks=self.host_blocks,
            keep_events=True,
            keep_lookups=True,
        )

    def model(self, seed: int) -> SlotModel:
        return SlotModel(Scheduler(self.manager(), self.limits()), seed)

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            self.budget,
            self.running,
            max_model_len=64,
            chunked_prefill=self.chunked,
            watermark=self.watermark,
            adaptive_watermark=self.adaptive,
            policy=self.scheduling,
            preemption=self.preemption,
            long_prefill_tokens=self.cap if self.chunked else None,
            admit_whole_prompt=self.whole,
            static_batch=self.static,
            mixed_steps=self.mixed,
        )


@dataclass(frozen=True)
class Arrival:
    """A request to make: `shared` leading tokens of one of a few common prefixes, then `unique` ones."""

    prefix: int = 0
    shared: int = 10
    unique: int = 3
    output: int = 18
    width: int = 3
    mode: Decoding = Decoding.greedy
    drafts: int = 0
    place: SpeculationMode = SpeculationMode.lookahead
    priority: int = 0
    share_outputs: bool = False
    adapter: str | None = None
    named: bool = True


class CoreDriver:
    """Operations with their checks; the slot model and `check()` look at the state after every step."""

    def __init__(self, setup: Setup, seed: int = 0) -> None:
        self.model = setup.model(seed)
        self.scheduler = self.model.scheduler
        self.manager = self.scheduler.manager
        self.submitted = 0
        self.aborted: set[int] = set()
        self.refused = 0

    def submit(self, arrival: Arrival) -> None:
        rid = self.submitted
        if not arrival.shared + arrival.unique:
            return
        own = 1000 * (rid + 1)
        prompt = [
            *range(100 * arrival.prefix, 100 * arrival.prefix + arrival.shared),
            *range(own, own + arrival.unique),
        ]
        width = 1 if arrival.mode is Decoding.greedy else arrival.width
        identity = TokenIdentity(
            rid, np.array(prompt), adapter=arrival.adapter, share_outputs=arrival.share_outputs
        )
        request = Request(
            rid,
            len(prompt),
            arrival.output,
            width,
            arrival.mode,
            identity if arrival.named else None,
            priority=arrival.priority,
            speculation=Speculation(arrival.drafts, arrival.place) if arrival.drafts and width == 1 else None,
        )
        self.submitted += 1
        try:
            self.model.submit(request, prompt, arrival.adapter)
        except NeverFitsError:
            self.refused += 1
            self.aborted.add(rid)

    def step(self, accept: float = 0.5, finish: float = 0.0, end: float = 0.0, max_steps: int = 1) -> None:
        if self.scheduler.has_work:
            self.model.step(accept=accept, finish=finish, end=end, max_steps=max_steps)

    def abort(self, index: int) -> None:
        """Abort one of the requests that are under way; one that has ended is refused."""
        if not self.submitted:
            return
        rid = index % self.submitted
        try:
            self.scheduler.abort(rid)
        except CoreError:
            return
        self.aborted.add(rid)
        self.manager.check()

    def truncate(self, index: int, share: float) -> None:
        """Cut a prompt that is under way: what is lost will be computed again."""
        prompts = [g for g in self.scheduler.running if not g.generated and not g.forked]
        if not prompts:
            return
        (root,) = prompts[index % len(prompts)].sequences
        wanted = int(share * root.computed)
        try:
            assert self.manager.truncate(root, wanted) == root.computed <= wanted
        except CoreError:
            assert layer_groups(self.manager)  # what a window or a state has left cannot come back
        self.manager.check()

    def reset_cache(self) -> None:
        """Succeeds exactly when nothing is in use."""
        if not isinstance(self.manager, PagedManager):
            return
        groups = layer_groups(self.manager)
        in_use = groups.pages.live_pages if groups else self.manager.pool.live_blocks
        try:
            self.manager.reset_prefix_cache()
        except CoreError:
            assert in_use
        else:
            assert not in_use
            assert not (groups.pages.slots()[1] if groups else self.manager.pool.cached_blocks)
        self.manager.check()

    def drain(self) -> None:
        """Run to the end: everything that was accepted ends once, and nothing is left behind."""
        self.model.run()
        assert sorted(self.model.finished) == [r for r in range(self.submitted) if r not in self.aborted]
        usage = self.manager.usage(None)
        assert (usage.token, usage.reserved, usage.internal, usage.external) == (0, 0, 0, 0)
        if isinstance(self.manager, PagedManager):
            host = self.manager.swapper.host
            assert host.free_blocks == host.num_blocks
            self.reset_cache()


_PLACES = (SpeculationMode.fork, SpeculationMode.fork, SpeculationMode.lookahead, SpeculationMode.whole)


def random_arrival(rng: random.Random) -> Arrival:
    return Arrival(
        prefix=rng.randrange(3),
        shared=rng.randrange(25),
        unique=rng.randrange(17),
        output=rng.randint(1, 22),
        width=rng.randint(2, 4),
        mode=rng.choice(list(Decoding)),
        drafts=rng.choice([0, 0, 1, 3, 5]),
        place=_PLACES[int(4 * rng.random())],
        priority=rng.randrange(3),
        share_outputs=rng.random() < 0.3,
        adapter=rng.choice([None, None, "a"]),
        named=rng.random() < 0.9,
    )


def random_walk(setup: Setup, seed: int, rules: int, arrivals: float = 0.2) -> CoreDriver:
    """`rules` operations in random order, a share of `arrivals` being requests, then to the end."""
    rng, driver = random.Random(seed), CoreDriver(setup, seed)
    for _ in range(rules):
        dice = rng.random()
        if dice < arrivals:
            driver.submit(random_arrival(rng))
        elif dice < 0.9:
            driver.step(rng.random(), rng.choice([0, 0.05]), rng.choice([0, 0.1]), rng.choice([1, 1, 30]))
        elif dice < 0.95:
            driver.abort(rng.randrange(1000))
        elif dice < 0.98:
            driver.truncate(rng.randrange(1000), rng.random())
        else:
            driver.reset_cache()
    driver.drain()
    return driver
