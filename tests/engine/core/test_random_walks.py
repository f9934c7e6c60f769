"""Every operation of the policy core in random order, under every policy, against the brute-force slot model.

By day they are a few thousand operations, by night more than 200,000.
"""

import random

from core_driver import Arrival, CoreDriver, Setup, random_walk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tiers import cases, tier

from engine.core.options import (
    Decoding,
    Placement,
    Preemption,
    Reservation,
    Retention,
    Scheduling,
    SpeculationMode,
)

RULES = 120  # a walk
SEEDS_A_TEST = tier(2, 50)
SETUPS = {
    "paged": st.sampled_from([True, True, True, False]),
    "size": st.sampled_from([1, 4, 8]),
    "blocks": st.sampled_from([10, 18, 26, 60]),
    "host_blocks": st.sampled_from([0, 6, 30]),
    "caching": st.sampled_from([True, True, True, False]),
    "retention": st.sampled_from(Retention),
    "deduplicate": st.booleans(),
    "copy_at_fork": st.booleans(),
    "reservation": st.sampled_from(Reservation),
    "placement": st.sampled_from(Placement),
    "budget": st.sampled_from([5, 12, 24, 200]),
    "running": st.sampled_from([4, 8, 16]),
    "chunked": st.sampled_from([True, True, True, False]),
    "watermark": st.sampled_from([0.0, 0.0, 0.1]),
    "adaptive": st.booleans(),
    "scheduling": st.sampled_from(Scheduling),
    "preemption": st.sampled_from(Preemption),
    "cap": st.sampled_from([None, None, 3, 8]),
    "whole": st.booleans(),
    "static": st.sampled_from([False, False, False, True]),
    "mixed": st.booleans(),
}
ARRIVALS = st.builds(
    Arrival,
    prefix=st.integers(0, 2),
    shared=st.integers(0, 24),
    unique=st.integers(0, 16),
    output=st.integers(1, 22),
    width=st.integers(2, 4),
    mode=st.sampled_from(Decoding),
    drafts=st.sampled_from([0, 0, 1, 3, 5]),
    place=st.sampled_from(SpeculationMode),
    priority=st.integers(0, 2),
    share_outputs=st.booleans(),
    adapter=st.sampled_from([None, "a"]),
    named=st.sampled_from([True, True, True, False]),
)


def random_setup(seed: int) -> Setup:
    """A choice of every policy, pressed for memory as often as not."""
    rng = random.Random(seed)
    return Setup(
        paged=rng.random() < 0.8,
        size=rng.choice([1, 4, 8]),
        blocks=rng.choice([10, 18, 26, 60]),
        host_blocks=rng.choice([0, 6, 30]),
        caching=rng.random() < 0.8,
        retention=rng.choice(list(Retention)),
        deduplicate=rng.random() < 0.3,
        copy_at_fork=rng.random() < 0.3,
        reservation=rng.choice(list(Reservation)),
        placement=rng.choice(list(Placement)),
        budget=rng.choice([5, 12, 24, 200]),
        running=rng.choice([4, 8, 16]),
        chunked=rng.random() < 0.8,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        adaptive=rng.random() < 0.3,
        scheduling=rng.choice(list(Scheduling)),
        preemption=rng.choice(list(Preemption)),
        cap=rng.choice([None, None, 3, 8]),
        whole=rng.random() < 0.7,
        static=rng.random() < 0.15,
        mixed=rng.random() < 0.7,
    )


@cases("test", range(35), day=3)
def test_a_random_walk_reads_what_it_wrote_and_leaves_nothing(test: int) -> None:
    for seed in range(test * SEEDS_A_TEST, (test + 1) * SEEDS_A_TEST):
        random_walk(random_setup(seed), seed, RULES)


class CoreMachine(RuleBasedStateMachine):
    """The same operations, in an order that hypothesis makes up and can shrink."""

    driver: CoreDriver

    @initialize(setup=st.builds(Setup, **SETUPS))
    def start(self, setup: Setup) -> None:
        self.driver = CoreDriver(setup)

    @rule(arrival=ARRIVALS)
    def submit(self, arrival: Arrival) -> None:
        self.driver.submit(arrival)

    @rule(
        accept=st.sampled_from([0.0, 0.5, 1.0]),
        end=st.sampled_from([0.0, 0.2]),
        max_steps=st.sampled_from([1, 30]),
    )
    def step(self, accept: float, end: float, max_steps: int) -> None:
        self.driver.step(accept, end / 4, end, max_steps)

    @rule(steps=st.integers(2, 8))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule(index=st.integers(0, 50))
    def abort(self, index: int) -> None:
        self.driver.abort(index)

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    def truncate(self, index: int, share: float) -> None:
        self.driver.truncate(index, share)

    @rule()
    def reset_cache(self) -> None:
        self.driver.reset_cache()

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "driver"):
            self.driver.manager.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()


def test_any_order_of_operations_keeps_every_invariant() -> None:
    profile = settings(
        max_examples=tier(25, 600),
        stateful_step_count=tier(30, 60),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(CoreMachine, settings=profile)
