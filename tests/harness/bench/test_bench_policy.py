"""`bench policy`: it runs, the table carries what it should, and the curve notices an operation that grows."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
from oracle_cases import PYTHON

from engine.core.plan import StepResult
from harness.bench.policy import curve, work
from harness.bench.policy import runner as running
from harness.bench.policy import work as stepping
from harness.bench.policy.against import paired
from harness.bench.policy.curve import (
    CONTROL,
    Cost,
    Footprint,
    Stopwatch,
    block_costs,
    curve_lines,
    exponents,
    footprint,
    growing_operations,
    queue_costs,
)
from harness.bench.policy.runner import LINES
from harness.cli.main import main
from harness.config.errors import ConfigError, UserError
from harness.oracle.process import vllm_version

TINY = {"sequences": 2, "tokens": 256, "prompts": 3, "running": 20, "steps": 20, "beam_steps": 8}
PUBLISHED = {
    "allocate": 0.72e6,
    "prompt_list": 2.0e3,
    "decode_hashed": 587,
    "schedule_hashed": 272,
    "beams": 12.7e3,
}
LEAST = {"allocate": 3.5e6, "prompt_list": 1e4, "decode_hashed": 8e3, "schedule_hashed": 4e3, "beams": 1e5}


def test_the_command_prints_every_line_and_writes_its_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "SIZES", TINY)
    assert main(["bench", "policy", "--rounds", "2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(line.work in printed for line in LINES)
    found = {one["line"]: one for one in json.loads((tmp_path / "policy.json").read_text())}
    assert {key: one["vllm"] for key, one in found.items() if one["vllm"]} == PUBLISHED
    assert {key: one["least"] for key, one in found.items() if one["least"]} == LEAST
    assert all(one["rate"] > 0 and one["per_yardstick"] > 0 and one["definition"] for one in found.values())


def test_no_round_of_the_allocation_hits_and_none_evicts_unless_it_should() -> None:
    for evicting in (False, True):
        allocation = work.Allocation(2, 256, evicting=evicting)
        (groups,), _ = allocation.fresh()
        assert allocation._manager.pool.find(groups[0].block_hashes or ()) == []
        allocation.run(groups)
        evicted = [block for block in allocation._manager.drain_frees() if block]
        assert len(evicted) == (allocation.blocks if evicting else 0)


def test_half_of_every_prompt_hits_and_only_the_full_pool_evicts() -> None:
    for evicting in (False, True):
        prompts = work.Prompts(4, 256, evicting=evicting)
        (fresh,), _ = prompts.fresh()
        assert [prompts._serve(prompt) for prompt in fresh] == [8] * 4
        assert bool(prompts._manager.drain_frees()) is evicting


def test_every_decoding_sequence_fills_its_blocks_and_hashed_ones_are_found_again() -> None:
    decoding = stepping.Decoding256(20, 40, hashed=True)
    (decoders,), _ = decoding.fresh()
    groups = list(decoders.calendar.groups)
    decoding.run(decoders)
    full = 139 // 16
    for group in groups[:1]:
        assert group.sequences[0].computed == 140
        names = group.request.identity.generated_hashes(0, 16)
        assert decoders.manager.pool.find(names) == group.sequences[0].table[:full]


def test_the_scheduler_is_timed_with_every_request_decoding() -> None:
    (scheduler,), _ = stepping.Scheduling(20, 10, rows=False).fresh()
    plan = scheduler.schedule()
    assert (plan.steady, len(plan.rows), plan.running, plan.waiting) == (20, 20, 20, 0)
    scheduler.commit(plan, StepResult())


def test_hashed_scheduling_caches_every_block_that_fills() -> None:
    scheduling = stepping.Scheduling(20, 40, rows=True, hashed=True)
    (scheduler,), _ = scheduling.fresh()
    groups = scheduler.running
    before = [group.sequences[0].computed for group in groups]
    scheduling.run(scheduler)
    for group, computed in zip(groups, before, strict=True):
        root = group.sequences[0]
        assert root.computed == computed + 40
        assert root.cached_blocks == root.computed // 16
        assert scheduler.manager.pool.find(root.block_hashes) == root.table[: root.computed // 16]


def test_lines_that_do_the_same_work_come_first_and_others_have_no_ratio() -> None:
    lines = [*running.table_lines({line.key: 1e3 for line in LINES} | {work.YARDSTICK: 1e6})]
    ratios = [bool(line.split()) and "x  " in line for line in lines]
    assert ratios == [
        False,
        *[True] * len(running.LIKE_FOR_LIKE),
        False,
        *[False] * len(running.LESS_WORK),
        False,
        False,
    ]


def test_a_cost_that_grows_with_the_size_is_noticed() -> None:
    costs = list[Cost]()
    for size in (100, 100_000):
        watch, table = Stopwatch(), list(range(size))
        for _ in range(5):
            watch.time("search a list", 1, partial(table.index, size - 1))
        costs += watch.costs("blocks", size)
    assert growing_operations(costs) == ["search a list"]


def test_what_size_does_to_a_bare_dictionary_is_no_growth_of_ours() -> None:
    def costs(name: str, exponent: float) -> list[Cost]:
        return [Cost(name, "blocks", size, 100 * size**exponent) for size in (10**3, 10**6)]

    grown = [*costs("find", 0.4), *costs("evict", 1.0), *costs(CONTROL, 0.3)]
    assert growing_operations(grown) == ["evict"]
    assert math.isclose(exponents(grown)["find"], 0.4)
    assert "find" in growing_operations(costs("find", 0.4))


def test_every_operation_of_pool_and_queue_is_on_the_curve() -> None:
    costs = [*block_costs(512), *queue_costs(256)]
    wanted = {"take", "release", "name", "find", "share", "evict", "append", "submit", "abort", "serve"}
    assert wanted <= {cost.operation for cost in costs}
    assert all(cost.ns > 0 for cost in costs)
    assert any(line.startswith("evict") for line in curve_lines(costs))


def test_a_curve_that_grows_fails_the_command_and_names_the_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curve, "block_costs", lambda size: [Cost("evict", "blocks", size, float(size))])
    monkeypatch.setattr(curve, "queue_costs", lambda size: [Cost("submit", "requests", size, 100.0)])
    monkeypatch.setattr(
        curve, "footprint", lambda blocks, queued: Footprint(blocks, queued, 40, 640, 260, 900)
    )
    assert curve.bench_curve([1_000, 10_000], [1_000, 10_000], tmp_path) == 1
    said = capsys.readouterr()
    assert "'evict' grows" in said.err
    assert "submit" not in said.err
    assert "640 MB" in said.out
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    monkeypatch.setattr(curve, "block_costs", lambda size: [Cost("evict", "blocks", size, 100.0)])
    assert curve.bench_curve([1_000, 10_000], [1_000, 10_000], tmp_path) == 0
    monkeypatch.setattr(curve, "footprint", lambda blocks, queued: Footprint(blocks, queued, 40, 1_640, 9, 9))
    assert curve.bench_curve([1_000, 10_000], [1_000, 10_000], tmp_path) == 1


def test_the_footprint_counts_blocks_in_use_and_requests_that_wait() -> None:
    found = footprint(2_048, 500)
    assert (found.blocks, found.queued) == (2_048, 500)
    assert found.imports_mb < found.peak_mb


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--curve", "--blocks", "10"]])
def test_wrong_sizes_are_refused_before_anything_is_timed(tmp_path: Path, words: list[str]) -> None:
    assert main(["bench", "policy", "--out", str(tmp_path / "out"), *words]) == 2
    assert not (tmp_path / "out").exists()


@pytest.fixture
def python() -> str:
    """An interpreter that has vLLM."""
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    return PYTHON or sys.executable


@pytest.mark.slow
def test_both_sides_do_the_same_work_in_turns(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SIZES", TINY)
    main(["bench", "policy", "--against", python, "--rounds", "2", "--out", str(tmp_path)])
    found = {one["line"]: one for one in json.loads((tmp_path / "against.json").read_text())}
    assert found.keys() == LEAST.keys() - {"beams"}
    assert found["allocate"]["done"] == 2 * 256 // 16
    assert found["prompt_list"]["done"] == 3 * 128 // 16
    assert found["schedule_hashed"]["done"] == 20 * 20
    assert all(len(one["vllm_s"]) == len(one["ours_s"]) == 2 for one in found.values())
    assert capsys.readouterr().out.count("rounds") == len(found)


@pytest.mark.slow
def test_a_side_that_did_other_work_is_refused(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work.Prompts, "run_lists", lambda self, prompts: 1)
    with pytest.raises(UserError, match="in 'prompt_list' ours did 1 units and vLLM's 24"):
        list(paired(python, TINY, 1))


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "policy", "--against", str(tmp_path / "python"), "--out", str(tmp_path)]
    assert main(words) == 2
    assert "cannot be started" in capsys.readouterr().err
