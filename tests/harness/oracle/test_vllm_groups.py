"""Caches with groups beside vLLM's scheduler of the same layers: recorded, and live where vLLM is installed.

The nightly run draws its workloads by the date.
"""

from collections import Counter
from typing import Any

import pytest
from group_oracle import FAMILIES, RECORDED, begin, compare, random_case, recorded_case, recording
from oracle_cases import FIRST_SEED, PYTHON
from tiers import tier

from engine.core.memory.block_tables import BlockTables
from engine.core.memory.eviction import CheckpointRule
from engine.core.memory.group_layout import KVGroup
from engine.core.memory.layer_groups import LayerGroups
from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import GroupHits, PrefixCache
from engine.core.options import GroupKind
from harness.config.errors import ConfigError
from harness.oracle.check import OracleError, VllmProcess, vllm_version

CASES = tier(3, 60)


@pytest.mark.parametrize("family", RECORDED)
def test_every_step_is_as_vllm_decided_it(family: str) -> None:
    compare(recorded_case(family), recording(family))


def compare_all() -> Counter[str]:
    return sum((compare(recorded_case(family), recording(family)) for family in RECORDED), Counter[str]())


def test_the_recordings_hit_and_preempt() -> None:
    found = compare_all()
    assert min(found["hit_tokens"], found["preempted"]) > 0


def test_a_block_that_is_released_one_step_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVGroup.skipped
    monkeypatch.setattr(KVGroup, "skipped", lambda group, computed: real(group, max(0, computed - 1)))
    with pytest.raises(OracleError, match="free"):
        compare_all()


def test_a_chunk_of_attention_that_slides_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVGroup.unseen

    def slides(group: KVGroup, computed: int) -> int:
        return (
            max(0, computed - (group.window or 0)) if group.kind is GroupKind.chunk else real(group, computed)
        )

    monkeypatch.setattr(KVGroup, "unseen", slides)
    with pytest.raises(OracleError, match="free"):
        compare_all()


def test_a_hit_that_needs_no_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupHits, "_last_run", lambda hits, group, index, tokens, needed: 0)
    with pytest.raises(OracleError, match=r"admitted|free|rows"):
        compare_all()


def test_a_cache_that_keeps_every_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CheckpointRule, "kept", lambda rule, group, needed, first, end, checkpoints: range(first, end)
    )
    with pytest.raises(OracleError, match=r"admitted|free|rows"):
        compare_all()


def test_chunks_that_end_anywhere_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedManager, "chunk_end", lambda manager, group, start, end, most, hits=None: end)
    with pytest.raises(OracleError, match="rows"):
        compare_all()


def test_a_unit_that_is_named_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PrefixCache._inner_hash
    monkeypatch.setattr(
        PrefixCache,
        "_inner_hash",
        lambda cache, group, tokens, base: real(cache, group, tokens - cache._unit, base),
    )
    with pytest.raises(OracleError, match=r"admitted|free|rows"):
        compare(recorded_case("inside"), recording("inside"))


def test_a_copy_for_which_no_page_is_taken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTables, "is_cached_state", lambda tables, block: False)
    with pytest.raises(OracleError, match=r"admitted|free"):
        compare(recorded_case("inside"), recording("inside"))


def ends_with_blocks(asked: dict[str, Any]) -> bool:
    """Whether every hit ends with a block: vLLM 0.33 looks inside one only where states have longer blocks than hashes
    (`partial_hash_hits_enabled`), and by default both are as long as the blocks of attention.
    """
    states = (one["block_size"] for one in asked["groups"] if one["kind"] == "MambaSpec")
    return all(size <= asked["prefix_match_unit"] for size in states)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_random_workloads_are_scheduled_as_by_vllm(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the listed difference: vLLM 0.33 copies a block that the same step writes, ours waits for the next step
    monkeypatch.setattr(LayerGroups, "_writes_source_of", lambda groups, hit, tokens: False)
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    found = Counter[str]()
    with VllmProcess(PYTHON) as vllm:
        for seed in range(FIRST_SEED, FIRST_SEED + CASES):
            case = random_case(seed, family)
            if case.rows:
                asked = begin(case, vllm)
                assert asked["retention_interval"] == 0  # its default, which is not handed over
                assert asked["prefix_match_unit"] == case.unit or not case.unit
                assert case.unit or case.caching <= ends_with_blocks(asked)
                found += compare(case, vllm.step)
    assert found["steps"] > 0
