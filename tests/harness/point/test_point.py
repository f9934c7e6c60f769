"""Points on the real engine: the two sides decide alike, the audit holds, the record says what happened."""

import json
import pickle
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from point_cases import azure_file, mooncake_file, small_config, tick, with_trace
from tiers import cases

from engine.core.options import CachePolicy
from engine.runtime.options import Backend
from harness.calibrate.run import calibrate
from harness.config.errors import ConfigError
from harness.config.schema import (
    CostKind,
    DecodingMode,
    EngineDevice,
    Oversize,
    ReplayMode,
    RunConfig,
    TraceFormat,
)
from harness.measure.engine import graphs_of
from harness.metrics.record import PointRecord
from harness.point import PointSession, check_point, point_identity, point_stages, run_point
from harness.point.run import calibrated_cost
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the calibration of the small model, as much of it as a budget of ticks allows."""
    folder = tmp_path_factory.mktemp("calibration")
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        calibrate(deployment_of(small_config(folder)), budget_s=6)
    return folder


@pytest.fixture(scope="module")
def record(cache_dir: Path) -> PointRecord:
    return run_point(small_config(cache_dir)).record


def greedy(config: RunConfig) -> RunConfig:
    return config


def beams(config: RunConfig) -> RunConfig:
    config.decoding.beam_width = 3
    return config


def samples(config: RunConfig) -> RunConfig:
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3
    return config


def contiguous_beams(config: RunConfig) -> RunConfig:
    config.cache.policy = CachePolicy.contiguous_max
    return beams(config)


def crowded(config: RunConfig) -> RunConfig:
    """A pool that forces preemption and eviction."""
    config.cache.pool_tokens, config.cache.max_model_len, config.workload.request_rate = 320, 256, 5000.0
    return config


MODES = [greedy, beams, samples, contiguous_beams, crowded]


def test_a_step_in_which_all_that_runs_is_preempted_computes_nothing(cache_dir: Path, tmp_path: Path) -> None:
    """What has ended holds its memory until its batch ends; the last one that runs finds no block then."""
    config = with_trace(small_config(cache_dir), TraceFormat.mooncake, mooncake_file(tmp_path))
    config.workload.length_scale, config.workload.seed, config.workload.oversize = 0.01, 1, Oversize.drop
    config.replay.mode, config.scheduler.static_batch, config.scheduler.max_running = (
        ReplayMode.offline,
        True,
        4,
    )
    config.cache.pool_tokens, config.cache.block_size, config.cache.prefix_caching = 300, 32, False
    config.decoding.draft_tokens, config.decoding.acceptance = 1, 0.6
    config.cost.kind = CostKind.roofline
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.measured["median"]["preemptions"] > 0
    assert record.levels["kernel"]["max"] < float("inf")


def test_prompts_that_begin_alike_by_chance_are_named_where_counts_differ(cache_dir: Path) -> None:
    config = small_config(cache_dir)
    config.cost.kind = CostKind.roofline
    config.cache.block_size, config.model.vocab = 1, 40
    counts = run_point(config).record.levels["counts"]
    assert not counts["identical"]
    assert re.search(
        r"step \d+: [1-9]\d* of the prompts begin by chance with ids", counts["first_difference"]
    )


@cases("mode", MODES, day=(beams,))
@cases("format_", [TraceFormat.azure, TraceFormat.mooncake], day=1)
def test_measured_durations_give_identical_plans(
    format_: TraceFormat, mode: Callable[[RunConfig], RunConfig], cache_dir: Path, tmp_path: Path
) -> None:
    path = azure_file(tmp_path) if format_ is TraceFormat.azure else mooncake_file(tmp_path)
    config = with_trace(small_config(cache_dir), format_, path)
    if format_ is TraceFormat.azure:
        config.workload.length_scale = 1.0
    else:
        config.workload.length_scale = 0.02
        config.cache.block_size = 4
    result = run_point(mode(config)).record
    assert result.levels["counts"]["identical"], result.levels["counts"]
    assert result.levels["counts"]["steps"] > 10
    assert result.audit["checks"] == result.levels["counts"]["steps"]
    if mode is crowded:
        assert result.measured["median"]["preemptions"] > 0


@pytest.mark.nightly
def test_points_that_are_open_together_do_not_touch_each_other(cache_dir: Path) -> None:
    configs = [beams(small_config(cache_dir)), crowded(small_config(cache_dir))]
    waiting = [point_stages(replace(config, replay=replace(config.replay, repeats=2))) for config in configs]
    records = []
    while waiting:
        stages = waiting.pop(0)
        try:
            next(stages)
            waiting.append(stages)
        except StopIteration as ended:
            records.append(ended.value.record)
    assert [record.levels["counts"]["identical"] for record in records] == [True, True]
    assert [len(record.measured["runs"]) for record in records] == [2, 2]


def test_a_session_repeats_a_calibration_once(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(cache_dir)
    config.cost.recalibrate = True
    made: list[object] = []
    monkeypatch.setattr("harness.calibrate.run.calibrate", lambda deployment, stage: made.append(deployment))
    for session in (PointSession(), PointSession()):
        for _ in range(2):
            calibrated_cost(deployment_of(config), None, session.repeated)
    assert len(made) == 2


def test_what_runs_points_in_another_process_shares_its_session() -> None:
    sent = pickle.dumps(PointSession(repeated={"here"}).run_point)
    assert pickle.loads(sent).__self__ is pickle.loads(sent).__self__
    assert pickle.loads(sent).__self__.repeated == set()


def test_the_record_says_over_which_time_the_runs_lie(cache_dir: Path) -> None:
    stages = point_stages(small_config(cache_dir))
    next(stages)
    begun = time.perf_counter()
    with pytest.raises(StopIteration) as ended:
        next(stages)
    assert 0 < ended.value.value.record.seconds["measured_over"] <= time.perf_counter() - begun


def test_sharing_found_by_tokens_is_what_the_trace_says(cache_dir: Path) -> None:
    config = small_config(cache_dir)
    config.workload.prefix_share = 0.4
    result = run_point(config).record
    assert result.measured["median"]["hit_tokens"] == result.simulated["hit_tokens"] > 0


def test_the_record_names_every_change_to_the_trace(record: PointRecord) -> None:
    changes = " | ".join(record.trace["changes"])
    assert "lengths multiplied by 0.05" in changes
    assert "100" in changes


def test_all_requests_finish_on_both_sides(record: PointRecord) -> None:
    assert record.outcome["simulated"] == {"finished": 16, "rejected": 0, "unfinished": 0}
    assert record.outcome["measured"] == {"finished": 16, "rejected": 0, "unfinished": 0}


def test_the_held_out_error_of_the_cost_model_is_in_the_record(record: PointRecord) -> None:
    assert record.cost["kind"] == "fitted"
    assert record.cost["heldout"]["step"]["n"] > 50


def test_the_pace_of_the_device_is_in_the_record_with_the_error_it_hides(record: PointRecord) -> None:
    pace = record.pace
    assert pace["low"] <= pace["ratio"] <= pace["high"]
    assert pace["by"] == "yardstick"
    unscaled, scaled = pace["unscaled"]["total_error"], record.levels["teacher_forced"]["total_error"]
    assert (1 + scaled) / (1 + unscaled) == pytest.approx(pace["ratio"])


@pytest.mark.nightly
def test_the_pace_is_not_followed_where_the_user_says_so(cache_dir: Path) -> None:
    config = small_config(cache_dir)
    config.cost.follow_pace = False
    assert run_point(config).record.to_json()["pace"] is None


def test_both_sides_did_the_same_work(record: PointRecord) -> None:
    rows = {row["metric"]: row for row in record.comparison}
    assert rows["computed_tokens"]["error"] == 0
    assert rows["computed_tokens"]["analytic"] == rows["computed_tokens"]["measured"]


def test_step_tables_hold_both_sides(cache_dir: Path) -> None:
    tables = run_point(small_config(cache_dir)).tables
    assert set(np.unique(tables["steps"]["side"])) == {"simulated", "measured"}
    assert len(tables["requests"]["request_id"]) == 32


def test_a_simulation_needs_no_engine_and_no_calibration(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure = False
    result = run_point(config).record
    assert result.cost["kind"] == "roofline"
    assert result.to_json()["measured"] is result.to_json()["levels"] is None


def test_a_request_that_can_never_fit_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.cache.pool_tokens = 64
    with pytest.raises(
        ConfigError, match=r"workload.oversize: \d+ of 16 requests can never fit; the first is request"
    ):
        check_point(config)


def test_dropping_what_never_fits_is_counted(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure, config.cache.pool_tokens, config.workload.oversize = False, 64, Oversize.drop
    result = run_point(config).record
    assert result.outcome["dropped"] > 0
    assert result.trace["requests"] + result.outcome["dropped"] == 16


def test_dropping_everything_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.cache.pool_tokens, config.cache.block_size, config.workload.oversize = 1, 1, Oversize.drop
    with pytest.raises(ConfigError, match="no request fits"):
        check_point(config)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: .*config.json"):
        check_point(config)


def test_a_model_whose_attention_cannot_be_replaced_is_refused_by_name(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "n_embd": 64, "n_head": 4, "n_layer": 2}')
    config.model.path = str(tmp_path)
    config_text = (tmp_path / "config.json").read_text()
    checkpoint(tmp_path)  # whole weights; then the configuration of another type
    (tmp_path / "config.json").write_text(config_text)
    with pytest.raises(ConfigError, match="bloom"):
        check_point(config)


def checkpoint(folder: Path, layers: int = 1, **config: object) -> Path:
    """A config.json, and weights that are whole as far as their header says."""
    facts = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps({**facts, **config}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return folder


def test_truncated_weights_are_refused_before_anything_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(checkpoint(tmp_path))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"model.path: .*model.safetensors: incomplete"):
        check_point(config)


def test_a_checkpoint_without_a_language_model_head_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(checkpoint(tmp_path, architectures=["LlamaForSequenceClassification"]))
    with pytest.raises(ConfigError, match="not a causal language model"):
        check_point(config)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"model.path: .*config.json"):
        check_point(config)


def test_other_weights_at_the_same_path_are_another_point(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.path = str(checkpoint(tmp_path, intermediate_size=128, vocab_size=512))
    before = point_identity(config)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    assert point_identity(config) != before


@pytest.mark.parametrize(
    "key", ["scheduler.order", "scheduler.victim", "scheduler.admission", "cache.eviction"]
)
def test_an_edited_class_of_the_users_is_another_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A policy is changed and run again under its name: the store must not give the figures of the one before."""
    monkeypatch.syspath_prepend(tmp_path)
    file, config = tmp_path / f"edited_{key.replace('.', '_')}.py", small_config(tmp_path)
    plain = point_identity(config)
    section, name = key.split(".")
    setattr(getattr(config, section), name, f"{file.stem}:Rule")
    file.write_text("class Rule:\n    first = True\n")
    before = point_identity(config)
    assert point_identity(config) == before
    file.write_text("class Rule:\n    first = False\n")
    after = point_identity(config)
    assert {each for each in after if after[each] != before[each]} == {"own policies"}
    assert plain.keys() == after.keys() - {"own policies"}


def test_a_pool_beyond_the_machine_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.cache.pool_tokens = 10**11
    with pytest.raises(ConfigError, match=r"cache.pool_tokens: the pool takes .* GB"):
        check_point(config)


def test_a_cache_folder_that_cannot_be_made_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = small_config(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match=r"cost.cache_dir: the calibration cannot be kept"):
        check_point(config)


def test_a_hidden_size_that_the_heads_do_not_divide_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.model.hidden = 66
    with pytest.raises(ConfigError, match="hidden 66 is not a multiple of 4 heads"):
        check_point(config)


def test_a_device_that_is_not_here_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.environment.gpu_names", lambda: ())
    config = small_config(tmp_path)
    config.engine.device = EngineDevice.cuda
    with pytest.raises(ConfigError, match=r"engine.device: cuda, but .* no device"):
        check_point(config)


def test_triton_kernels_are_refused_on_the_cpu_before_anything_runs(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.engine.device, config.engine.backend = EngineDevice.cpu, Backend.triton
    with pytest.raises(ConfigError, match=r"engine.backend: triton kernels need a CUDA device"):
        check_point(config)


def test_graphs_are_refused_where_nothing_can_be_recorded(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.engine.device, config.engine.cuda_graphs = EngineDevice.cpu, True
    with pytest.raises(
        ConfigError, match=r"engine.cuda_graphs: true, but only triton kernels on a CUDA device"
    ):
        check_point(config)


def test_graphs_that_are_asked_for_serve_the_scheduler_s_batches_and_the_longest_sequence(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    workload = resolve(config)
    assert graphs_of(deployment_of(config)) is None
    config.engine.cuda_graphs = True
    graphs = graphs_of(deployment_of(config))
    assert graphs is not None
    assert (graphs.most, graphs.longest) == (workload.limits.max_running, workload.pool.max_model_len)


def test_a_malformed_trace_is_refused_with_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,x\n")
    config = with_trace(small_config(tmp_path), TraceFormat.azure, path)
    with pytest.raises(ConfigError, match=r"trace.path: .*broken.csv:2: GeneratedTokens"):
        check_point(config)


def test_a_fitted_model_without_calibration_is_refused_for_a_simulation(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.measure, config.cost.kind = False, CostKind.fitted
    with pytest.raises(ConfigError, match=r"cost.kind: fitted, but .* not been calibrated"):
        check_point(config)


def test_the_identity_of_a_point_follows_its_trace(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    other = replace(config, workload=replace(config.workload, seed=1))
    assert point_identity(config) != point_identity(other)
    assert point_identity(config) == point_identity(small_config(tmp_path))


def test_a_measured_record_names_the_kernels_that_ran(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config.engine.device, config.engine.backend = EngineDevice.cpu, Backend.torch
    config.cost.kind, config.workload.num_requests, config.replay.repeats = CostKind.roofline, 3, 1
    record = run_point(config).record
    assert record.environment["engine_kernels"][0] == "torch"
    config.measure = False
    assert "engine_kernels" not in run_point(config).record.environment
