"""Every policy of the core can be asked for by override, in the simulator and on the engine, with equal plans."""

from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from point_cases import azure_file, small_config, with_trace
from tiers import cases

from engine.core.memory.eviction import LruQueue, Released
from engine.core.options import (
    CachePolicy,
    Eviction,
    HashAlgorithm,
    Placement,
    Preemption,
    Retention,
    SchedulerOptions,
    Scheduling,
)
from engine.core.request import Request
from engine.core.sequence import Group
from harness.config.checks import check_config
from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind, DecodingMode, RunConfig, SchedulerConfig, TraceFormat
from harness.point import run_point
from harness.workload.deployment import limits_of
from harness.workload.point import resolve
from harness.workload.scheduler import eviction_policy, new_scheduler


@pytest.fixture(name="config")
def config_fixture(tmp_path: Path) -> RunConfig:
    """A pool that forces preemption, priced without calibration."""
    config = with_trace(small_config(tmp_path), TraceFormat.azure, azure_file(tmp_path))
    config.workload.length_scale, config.workload.request_rate = 1.0, 5000.0
    config.cache.pool_tokens, config.cache.max_model_len = 320, 256
    config.cost.kind = CostKind.roofline
    return config


def pow2(config: RunConfig) -> None:
    config.cache.policy, config.cache.block_size = CachePolicy.contiguous_pow2, 1


def oracle_first_fit(config: RunConfig) -> None:
    config.cache.policy, config.cache.block_size = CachePolicy.contiguous_oracle, 1
    config.cache.placement = Placement.first_fit


def swap(config: RunConfig) -> None:
    config.cache.host_tokens = 2000
    config.scheduler.preemption = Preemption.swap


def copies(config: RunConfig) -> None:
    config.cache.copy_at_fork, config.cache.pool_tokens = True, 640
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3


def frugal(config: RunConfig) -> None:
    config.cache.deduplicate, config.cache.hash = True, HashAlgorithm.xxh3_128
    config.cache.retention = Retention.none
    config.scheduler.policy, config.scheduler.long_prefill_tokens = Scheduling.priority, 16
    config.scheduler.admit_whole_prompt = False


def static(config: RunConfig) -> None:
    config.scheduler.static_batch = True


def own(config: RunConfig) -> None:
    config.scheduler.victim = "own_policies:LongestFirst"
    config.scheduler.order = "own_policies:ShortPromptsFirst"
    config.cache.eviction = "own_policies:MostRecentFirst"


Change = Callable[[RunConfig], None]
POLICIES = [pow2, oracle_first_fit, swap, copies, frugal, static, own]


@cases("policy", POLICIES, day=(frugal,))
def test_measured_durations_give_identical_plans(policy: Change, config: RunConfig) -> None:
    policy(config)
    assert not check_config(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]


@cases("rule", list(Eviction), day=(Eviction.gdsf,))
def test_both_sides_evict_alike(rule: Eviction, config: RunConfig, tmp_path: Path) -> None:
    """Turns of three conversations that begin with one text, in a pool that holds few of them."""
    rows = [
        f"{turn / 100},{80 + 16 * (turn % 5)},4,p{turn % 3},{32 + 16 * (turn % 3)},t,{turn % 3},s{turn % 3}"
        for turn in range(30)
    ]
    path = tmp_path / "turns.csv"
    head = "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens,salt,priority,session"
    path.write_text("\n".join([head, *rows]) + "\n")
    with_trace(config, TraceFormat.simple, path)
    config.workload.request_rate, config.workload.num_requests, config.cache.pool_tokens = None, 30, 480
    config.cache.eviction, config.cache.ttl_s, config.cache.pinned_tokens = str(rule), 0.05, 32
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.simulated["hit_tokens"] > 0


def test_a_rule_is_told_how_many_tokens_a_block_has(config: RunConfig) -> None:
    """Else attention, which grows with the square of a prompt, would weigh too little in what is lost."""
    deployment = resolve(config).deployment
    assert eviction_policy(deployment).facts.block_size == deployment.pool.block_size == 16


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.to_be:Found", "ModuleNotFoundError"),
        ("collections:deque", "lacks choose"),
        ("collections:NoSuchClass", "AttributeError"),
    ],
)
def test_a_policy_that_cannot_be_had_is_refused_by_key(name: str, message: str, config: RunConfig) -> None:
    config.scheduler.victim = name
    with pytest.raises(ConfigError, match=f"scheduler.victim.*{message}"):
        resolve(config).scheduler()


def test_a_name_without_a_class_is_refused_before_anything_runs(config: RunConfig) -> None:
    config.scheduler.order = "just_a_module"
    assert [error.key for error in check_config(config)] == ["scheduler.order"]


def test_swapping_without_host_memory_is_refused(config: RunConfig) -> None:
    config.scheduler.preemption = Preemption.swap
    (error,) = check_config(config)
    assert "cache.host_tokens is 0" in str(error)


def test_tenants_and_priorities_of_a_trace_reach_the_scheduler(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(
        "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens,salt,priority\n"
        "0,40,2,p,32,a,2\n1,40,2,p,32,b,1\n2,40,2,p,32,a,0\n"
    )
    with_trace(config, TraceFormat.simple, path)
    config.workload.request_rate = None
    requests = [timed.request for timed in resolve(config).requests()]
    names = [request.identity.prompt_hashes(16) for request in requests if request.identity]
    assert [request.priority for request in requests] == [2, 1, 0]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("option", fields(SchedulerOptions), ids=lambda option: option.name)
def test_every_scheduler_option_of_the_configuration_reaches_the_scheduler(option: Field[Any]) -> None:
    config = SchedulerConfig()
    default = getattr(config, option.name)
    assert getattr(limits_of(config, 100), option.name) == default
    if isinstance(default, Enum):
        other: object = [*type(default)][-1]
    elif isinstance(default, bool):
        other = not default
    else:
        other = 0.5 if isinstance(default, float) else 8
    assert other != default
    setattr(config, option.name, other)
    assert getattr(limits_of(config, 100), option.name) == other


class Raising(LruQueue):
    """Fails in the method that `at` names, or spoils what it is given."""

    at = ""

    def push(self, blocks: list[int], table: Released) -> None:
        super().push(blocks, table)
        if self.at == "spoils":
            blocks.clear()
        if self.at == "push":
            raise KeyError("lost")

    def pop(self, count: int) -> list[int]:
        found = super().pop(count)
        return {"pop": None, "words": [str(each) for each in found]}.get(self.at, found)


class OfNumpy:
    """A queue order, a choice of the victim, and an admission rule, whose results are numbers of NumPy."""

    def key(self, request: Request, rank: int) -> Any:
        return np.int64(-rank)

    def choose(self, candidates: Sequence[Group]) -> Any:
        return np.argmin([group.tokens for group in candidates])

    def allows(self, request: Request, free_blocks: int, running: int) -> Any:
        return np.bool_(running < 4)


class TooFar:
    """Chooses whom there is not."""

    def choose(self, candidates: Sequence[Group]) -> int:
        return len(candidates)


class NoFacts(LruQueue):
    def __init__(self) -> None:
        """Forgets that of its base."""


@pytest.mark.parametrize(
    ("at", "said"),
    [
        ("push", "has failed in push: KeyError: 'lost'"),
        ("pop", "has failed in pop: TypeError: 'NoneType' object is not iterable"),
        ("words", "has failed in pop: TypeError: 'str' object cannot be interpreted as an integer"),
    ],
)
def test_an_error_in_a_rule_of_ones_own_is_told_by_its_name(
    at: str, said: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raising, "at", at)
    config.cache.eviction = f"{__name__}:Raising"
    with pytest.raises(UserError, match=f"cache.eviction: '{__name__}:Raising' {said}") as caught:
        run_point(config)
    causes = [error := caught.value]
    while error.__cause__ is not None:
        causes.append(error := error.__cause__)
    assert type(causes[-1]) is (KeyError if at == "push" else TypeError)


def test_the_core_gets_results_of_numpy_as_those_of_python(config: RunConfig) -> None:
    """It takes no others where it is compiled."""
    name = f"{__name__}:OfNumpy"
    config.scheduler.order = config.scheduler.victim = config.scheduler.admission = name
    policies = new_scheduler(resolve(config).deployment).policies
    request = Request(0, 8, 1)
    assert policies.order.key(request, 2) == (-2,)
    assert type(policies.victim.choose([Group(request), Group(Request(1, 4, 1))])) is int
    assert policies.admission.allows(request, 9, 3) is True


def test_a_choice_of_nobody_is_told_by_the_name_of_its_rule(config: RunConfig) -> None:
    config.scheduler.victim = f"{__name__}:TooFar"
    with pytest.raises(
        UserError, match=f"scheduler.victim: '{__name__}:TooFar' has failed in choose: IndexError"
    ):
        run_point(config)


@pytest.mark.nightly
def test_a_rule_of_ones_own_can_spoil_its_copy_alone(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.cache.eviction = f"{__name__}:Raising"
    plain = run_point(config).record.simulated
    monkeypatch.setattr(Raising, "at", "spoils")
    assert run_point(config).record.simulated == plain


def test_a_rule_of_ones_own_without_facts_is_refused(config: RunConfig) -> None:
    config.cache.eviction = f"{__name__}:NoFacts"
    with pytest.raises(ConfigError, match="lacks facts"):
        eviction_policy(resolve(config).deployment)
