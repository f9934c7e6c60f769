"""Points of every replay mode: both sides decide alike, and points without rows are reported all the same."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from point_cases import small_config, with_trace
from tiers import cases

from harness.cli.main import main
from harness.config.compose import normalise
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, Oversize, ReplayMode, RunConfig, TraceFormat
from harness.point import check_point, run_point
from harness.report import verdict_lines
from harness.store.commit import commit_point

CACHE = {"cache": {"policy": "paged", "block_size": 8}}  # what a report needs of a record's configuration


def closed(config: RunConfig) -> RunConfig:
    config.replay.users, config.replay.think_s = 3, 0.01
    return config


def poisson(config: RunConfig) -> RunConfig:
    return config


MODES = {
    ReplayMode.poisson: poisson,
    ReplayMode.gamma: poisson,
    ReplayMode.closed: closed,
    ReplayMode.offline: poisson,
}


@cases("mode", MODES, day=1)
def test_measured_durations_give_identical_plans_in_every_replay_mode(
    mode: ReplayMode, tmp_path: Path
) -> None:
    change: Callable[[RunConfig], RunConfig] = MODES[mode]
    config = change(small_config(tmp_path))
    config.replay.mode, config.cost.kind = mode, CostKind.roofline
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.outcome["measured"]["finished"] == 16
    assert sum(record.levels["attribution"]["e2e_mean"]["share"].values()) == pytest.approx(1)


def test_conversations_are_measured_turn_after_turn(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.trace.format, config.trace.name = TraceFormat.generated, "chat"
    config.workload.length_scale, config.workload.num_requests = 0.02, 12
    config.replay.mode, config.cost.kind = ReplayMode.sessions, CostKind.roofline
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.outcome["measured"]["finished"] == 12


@pytest.mark.nightly
def test_answers_are_found_by_later_turns_on_both_sides(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.trace.format, config.trace.name = TraceFormat.generated, "chat"
    config.workload.length_scale, config.workload.num_requests = 0.1, 16
    config.cache.max_model_len, config.cache.pool_tokens, config.workload.oversize = 1024, 3000, Oversize.drop
    config.replay.mode, config.cost.kind = ReplayMode.sessions, CostKind.roofline
    without = run_point(replace(config, measure=False)).record
    config.cache.answers = True
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert (
        record.simulated["hit_tokens"]
        == record.measured["median"]["hit_tokens"]
        > without.simulated["hit_tokens"]
    )


def test_a_deadline_leaves_unfinished_requests_in_the_outcome(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure, config.replay.duration_s = False, 0.05
    outcome = run_point(config).record.outcome["simulated"]
    assert outcome["unfinished"] > 0
    assert sum(outcome.values()) == 16


ZERO = "arrival_s,prompt_tokens,output_tokens\n0,20,5\n0.1,30,0\n0.2,10,4\n"


def test_requests_without_output_are_dropped_and_lead_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "zero.csv"
    path.write_text(ZERO)
    config = with_trace(small_config(tmp_path), TraceFormat.simple, path)
    config.measure, config.workload.request_rate, config.workload.length_scale = False, None, 1.0
    result = run_point(config)
    assert result.record.outcome["dropped"] == 1
    commit_point(tmp_path / "store", "a" * 32, replace(result.record, config=CACHE), result.tables)
    assert "1 dropped before the replay" in verdict_lines(tmp_path / "store")[0]


def test_unfinished_requests_lead_the_verdict(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure, config.replay.duration_s = False, 0.05
    result = run_point(config)
    commit_point(tmp_path / "store", "a" * 32, replace(result.record, config=CACHE), result.tables)
    assert verdict_lines(tmp_path / "store")[0].startswith("NOT all requests finished at 1 point")


def test_metrics_alone_equal_those_of_the_rows(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure = False
    kept = run_point(config)
    config.replay.records = False
    alone = run_point(config)
    assert alone.record.simulated["span"] == kept.record.simulated["span"]
    assert alone.record.outcome == kept.record.outcome
    assert len(kept.tables["steps"]["step"]) > 0
    assert len(alone.tables["steps"]["step"]) == 0


def test_a_measured_point_needs_its_rows(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.replay.records = False
    with pytest.raises(ConfigError, match=r"replay.records: false keeps no rows"):
        check_point(config)


def test_a_table_that_was_not_measured_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.cost.kind = CostKind.table
    with pytest.raises(ConfigError, match="python -m harness calibrate"):
        check_point(config)


def test_heads_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure, config.device.tensor_parallel = False, 3
    with pytest.raises(ConfigError, match=r"device.tensor_parallel: found 3, must divide the 4 heads"):
        run_point(config)


def test_kv_heads_that_can_be_neither_split_nor_repeated_are_refused_as_by_vllm(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.heads, config.model.kv_heads = 12, 6
    config.measure, config.device.tensor_parallel = False, 4
    with pytest.raises(ConfigError, match=r"found 4, must divide the 12 heads .* and its 6 KV heads"):
        run_point(config)


def test_settings_of_other_modes_make_no_other_point() -> None:
    one, other = RunConfig(), RunConfig()
    other.replay.users, other.replay.think_s, other.replay.burstiness = 99, 5.0, 3.0
    assert normalise(one) == normalise(other)
    one.replay.mode = other.replay.mode = ReplayMode.closed
    assert normalise(one) != normalise(other)


@pytest.mark.nightly
def test_a_sweep_without_rows_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep", "measure=false", "cost=roofline", "replay=streamed", "cache.block_size=8,16"]
    assert main([*words, "report.figures=svg", "workload.num_requests=20", "workers=1", "out=store"]) == 0
    assert "Everything finished" in capsys.readouterr().out or (tmp_path / "store" / "report").exists()
