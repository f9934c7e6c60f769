"""Caches with groups beside vLLM's scheduler with the same groups: recorded, and live where vLLM is installed."""

from collections import Counter

import pytest
from group_oracle import RECORDED, compare, random_case, recording
from oracle_cases import PYTHON
from tiers import tier

from engine.core.memory.group_layout import KVGroup
from engine.core.memory.grouped import GroupedManager
from harness.config.errors import ConfigError
from harness.oracle.check import VllmProcess, vllm_version

SEEDS = range(200, tier(206, 321))


@pytest.mark.parametrize("seed", RECORDED)
def test_every_step_is_as_vllm_decided_it(seed: int) -> None:
    compare(random_case(seed), recording(seed))


def compare_all() -> Counter[str]:
    return sum((compare(random_case(seed), recording(seed)) for seed in RECORDED), Counter[str]())


def test_the_recordings_hit_and_preempt() -> None:
    found = compare_all()
    assert min(found["hit_tokens"], found["preempted"]) > 0


def test_a_block_that_is_released_one_step_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVGroup.skipped
    monkeypatch.setattr(KVGroup, "skipped", lambda group, computed: real(group, max(0, computed - 1)))
    with pytest.raises(AssertionError, match="free"):
        compare_all()


def test_a_hit_that_needs_no_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupedManager, "_last_run", lambda manager, keys, index, tokens, needed: 0)
    with pytest.raises(AssertionError, match=r"admitted|free|rows"):
        compare_all()


def test_random_workloads_are_scheduled_as_by_vllm() -> None:
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    found = Counter[str]()
    with VllmProcess(PYTHON) as vllm:
        for seed in SEEDS:
            case = random_case(seed)
            if case.rows:
                vllm.begin(case.settings)
                found += compare(case, vllm.step)
    assert min(found["hit_tokens"], found["preempted"]) > 0
