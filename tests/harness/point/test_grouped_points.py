"""Measured points whose layers are in groups: both sides decide alike, step by step, down to the bytes by cause."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from families import build
from point_cases import mooncake_file, small_config, with_trace
from tiers import cases, tier

from engine.core.options import (
    CachePolicy,
    GroupPages,
    Preemption,
    Retention,
    Scheduling,
    Sharing,
    SpeculationMode,
    StateMode,
    WindowHits,
)
from engine.runtime.options import KVDtype
from harness.config.checks import check_settings
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, DecodingMode, Oversize, RunConfig, TraceFormat
from harness.measure.engine import measure
from harness.metrics.log import WASTE_COLUMNS
from harness.point import check_point, run_point
from harness.replay.features import AT
from harness.replay.recorder import waste_differs
from harness.workload.point import resolve
from harness.workload.simulate import replay_recording

Made = Callable[[Path, GroupPages], RunConfig]
SEEDS = tier((13, 14, 18, 19), tuple(range(60)))  # by day: hits, preemptions and releases of both kinds


def windowed(cache_dir: Path, pages: GroupPages = GroupPages.uniform) -> RunConfig:
    """A random Gemma 2 of four layers, two of which see 24 tokens."""
    config = small_config(cache_dir)
    config.model.family, config.model.layers = "gemma2", 4
    config.model.window, config.model.windowed_layers = 24, 2
    config.cache.groups, config.cache.block_size = pages, 8
    config.cost.kind = CostKind.roofline
    return config


def stateful(cache_dir: Path, pages: GroupPages = GroupPages.uniform) -> RunConfig:
    """A random Qwen3-Next of four layers, two of which keep a state."""
    config = small_config(cache_dir)
    config.model.family, config.model.layers = "qwen3_next", 4
    config.model.state_layers, config.model.state_bytes = 2, (128 * 4 + 4 * 16 * 16) * 4
    config.cache.groups, config.cache.block_size = pages, 8
    return config


def crowded(config: RunConfig) -> RunConfig:
    """A pool that forces preemption and eviction."""
    config.cache.pool_tokens = 480 if config.model.state_layers else 200
    config.cache.max_model_len, config.workload.request_rate = 224, 5000.0
    config.scheduler.admit_whole_prompt, config.scheduler.max_batched_tokens = False, 32
    return config


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


PAGES = [pages for pages in GroupPages if pages is not GroupPages.off]


@cases("made", [stateful, windowed], day=1)
@cases("pages", PAGES, day=(GroupPages.uniform,))
def test_a_measured_point_has_the_counts_of_its_prediction(
    pages: GroupPages, made: Made, cache_dir: Path
) -> None:
    config = crowded(made(cache_dir, pages))
    config.cache.states = StateMode.every_block  # so many pages that requests are preempted
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"] == {
        "identical": True,
        "steps": record.levels["counts"]["steps"],
        "first_difference": None,
    }
    assert record.audit["checks"] == record.levels["counts"]["steps"]
    assert record.outcome["measured"] == record.outcome["simulated"]
    assert record.measured["median"]["preemptions"] > 0
    assert record.measured["median"]["waste_cached"] > 0


def test_a_measured_point_whose_hits_end_inside_blocks_has_the_counts_of_its_prediction(
    cache_dir: Path, tmp_path: Path
) -> None:
    config = with_trace(stateful(cache_dir), TraceFormat.mooncake, mooncake_file(tmp_path, rows=10))
    config.workload.length_scale, config.cache.prefix_match_unit = 0.02, 4
    config.cache.pool_tokens, config.cache.max_model_len = 1536, 200
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.audit["checks"] == record.levels["counts"]["steps"]
    assert record.measured["median"]["copies_per_token"] > 0
    assert record.measured["median"]["hit_tokens"] > 0


@cases(
    ("made", "mode", "preemption"),
    [
        (made, mode, memory)
        for made in (windowed, stateful)
        for mode in ("sample", "beam")
        for memory in Preemption
    ],
    day=((windowed, "beam", Preemption.swap),),
)
def test_a_measured_point_of_several_sequences_has_the_counts_of_its_prediction(
    made: Made, mode: str, preemption: Preemption, cache_dir: Path
) -> None:
    config = crowded(made(cache_dir, GroupPages.uniform))
    config.cache.pool_tokens = 800 if config.model.state_layers else 320
    config.decoding.mode = DecodingMode.sample
    config.decoding.n, config.decoding.beam_width = (3, 1) if mode == "sample" else (1, 3)
    config.scheduler.preemption = preemption
    config.cache.host_tokens = 0 if preemption is Preemption.recompute else 4000
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.audit["checks"] == record.levels["counts"]["steps"]
    assert config.model.state_layers or record.measured["median"]["preemptions"] > 0


@pytest.mark.nightly
def test_copied_pages_have_their_bytes_in_what_a_measured_step_is_priced_by(cache_dir: Path) -> None:
    """A page of one of two groups has half the bytes of a block of all layers; as such a block it cost twice."""
    config = windowed(cache_dir)
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3
    point = resolve(config)
    run = measure(point, seed=1)
    _, again = replay_recording(point, run.recording)
    assert point.pool.page_slots is not None
    copies, slots = run.log.steps["copies"], point.pool.page_slots([0])
    assert (slots, copies.sum() > 0) == (4, True)
    for recording in (run.recording, again):
        assert recording.features[:, AT.copied_slots].tolist() == (slots * copies).tolist()


@pytest.mark.nightly
@cases(
    ("made", "pages", "kv_dtype", "place"),
    [
        *((windowed, pages, KVDtype.model, place) for pages in PAGES for place in SpeculationMode),
        *((made, pages, KVDtype.fp8_e4m3, None) for made in (windowed, stateful) for pages in PAGES),
        (windowed, GroupPages.uniform, KVDtype.fp8_e4m3, SpeculationMode.fork),
    ],
    day=((windowed, GroupPages.uniform, KVDtype.fp8_e4m3, SpeculationMode.fork),),
)
def test_a_measured_point_with_drafts_or_8_bits_has_the_counts_of_its_prediction(
    made: Made,
    pages: GroupPages,
    kv_dtype: KVDtype,
    place: SpeculationMode | None,
    cache_dir: Path,
    tmp_path: Path,
) -> None:
    config = crowded(made(cache_dir, pages))
    config.model.kv_dtype = kv_dtype
    if place is not None:
        config.decoding.draft_tokens, config.decoding.draft_place = 3, place
        config.decoding.draft_path, config.decoding.acceptance = str(tmp_path), 0.5
        config.model.vocab = 256
        build("llama").save_pretrained(tmp_path)
    if kv_dtype is KVDtype.fp8_e4m3 and config.model.state_layers:
        config.cache.pool_tokens *= 4  # a state keeps its bytes
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.audit["checks"] == record.levels["counts"]["steps"]
    assert config.model.state_layers or record.measured["median"]["preemptions"] > 0


def drawn(cache_dir: Path, folder: Path, seed: int) -> RunConfig:
    """A workload and every choice that groups have, drawn from `seed`; every other model has states."""
    draw = random.Random(seed)
    config = (stateful if seed % 2 else windowed)(cache_dir, PAGES[seed % len(PAGES)])
    if draw.random() < 0.5:
        config = with_trace(config, TraceFormat.mooncake, mooncake_file(folder, rows=10))
        config.workload.length_scale = 0.02
    config.workload.num_requests, config.workload.seed = draw.randint(6, 12), seed
    config.workload.request_rate = draw.choice([50.0, 5000.0])
    config.cache.block_size = draw.choice([1, 4, 8, 16])
    config.cache.pool_tokens, config.cache.max_model_len = draw.choice([200, 240, 400]), 200
    config.workload.oversize = Oversize.drop
    config.cache.prefix_caching = draw.random() < 0.8
    config.cache.window_hits = draw.choice(list(WindowHits))
    config.cache.retention_interval = draw.choice([0, 0, None])
    config.cache.behind_first = draw.random() < 0.5
    config.cache.retention = draw.choice(list(Retention))
    config.scheduler.policy = draw.choice(list(Scheduling))
    config.scheduler.max_batched_tokens = draw.choice([16, 64, 512])
    config.scheduler.admit_whole_prompt = draw.random() < 0.5
    if config.model.state_layers:  # pages of a state are large, and a chunk has one for each block
        config.cache.block_size = draw.choice([4, 8, 16])
        config.cache.pool_tokens = draw.choice([768, 1536])
        config.scheduler.max_batched_tokens = draw.choice([16, 32, 64])
        config.cache.states = draw.choice([StateMode.align, StateMode.align, StateMode.every_block])
        if config.cache.groups is not GroupPages.uniform:
            config.cache.state_every = draw.choice([None, 16, 48])
        elif config.cache.states is StateMode.align:
            config.cache.prefix_match_unit = draw.choice([None, 2, 4])
    return crowded(config) if draw.random() < 0.5 else config


@pytest.mark.nightly
def test_the_random_workloads_hit_preempt_and_release(cache_dir: Path, tmp_path: Path) -> None:
    """Else they would show nothing."""
    found = {"hit_tokens": 0.0, "preemptions": 0.0, "waste_behind_window": 0.0}
    for seed in range(max(20, len(SEEDS))):  # simulated alone
        config = drawn(cache_dir, tmp_path, seed)
        config.measure = False
        simulated = run_point(config).record.simulated
        found = {name: total + simulated.get(name, 0.0) for name, total in found.items()}
    assert min(found.values()) > 0


@cases("seed", SEEDS, day=1)
def test_random_workloads_have_the_same_plans_and_bytes_on_both_sides(
    seed: int, cache_dir: Path, tmp_path: Path
) -> None:
    config = drawn(cache_dir, tmp_path, seed)
    assert check_settings(config) == []
    workload = resolve(config)
    run = measure(workload, seed=0)
    log, recorder = replay_recording(workload, run.recording)
    assert recorder.digests == run.recording.digests
    assert waste_differs(log, run.log) is None
    for name in WASTE_COLUMNS:
        assert np.array_equal(log.waste[name], run.log.waste[name])
    for name, column in log.steps.items():
        if np.issubdtype(column.dtype, np.integer):  # all but times and what follows from them
            assert np.array_equal(column, run.log.steps[name]), name
    assert run.audits == len(recorder.digests)


def test_another_byte_in_one_step_is_a_difference(cache_dir: Path) -> None:
    config = windowed(cache_dir)
    workload = resolve(config)
    run = measure(workload, seed=0)
    log, _ = replay_recording(workload, run.recording)
    log.waste["token"][5] += 1
    assert waste_differs(log, run.log) == 5


def test_windows_that_the_model_does_not_have_are_refused(cache_dir: Path) -> None:
    config = windowed(cache_dir)
    config.model.windowed_layers = 1
    with pytest.raises(ConfigError, match=r"cache\.groups: group 0 has 1 window layers .* the model has 2"):
        measure(resolve(config), seed=0)


def test_a_state_of_another_size_than_the_model_keeps_is_refused(cache_dir: Path) -> None:
    config = stateful(cache_dir)
    config.model.state_bytes = 4096
    with pytest.raises(ConfigError, match=r"cache\.groups: .* 2 with a state of 6144 bytes"):
        measure(resolve(config), seed=0)


@pytest.mark.nightly
def test_the_record_says_that_states_have_no_price(cache_dir: Path) -> None:
    config = stateful(cache_dir)
    check_point(config)
    record = run_point(config).record
    assert record.cost["kind"] == "roofline"
    assert "layers with a state" in record.cost["provenance"]["not priced"]


def stateful_checkpoint(cache_dir: Path, folder: Path) -> RunConfig:
    """A random Qwen3-Next as a checkpoint."""
    build("qwen3_next").save_pretrained(folder)
    config = stateful(cache_dir, GroupPages.separate)
    config.model.path, config.model.state_layers, config.model.state_bytes = str(folder), 0, 0
    return config


@pytest.mark.nightly
def test_a_checkpoint_with_states_is_measured_with_their_bytes(cache_dir: Path, tmp_path: Path) -> None:
    config = stateful_checkpoint(cache_dir, tmp_path)
    config.model.state_layers, config.model.state_bytes = 2, 2048
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.audit["checks"] == record.levels["counts"]["steps"]


def test_the_bytes_of_a_checkpoints_states_are_told_where_they_are_missing(
    cache_dir: Path, tmp_path: Path
) -> None:
    config = stateful_checkpoint(cache_dir, tmp_path)
    with pytest.raises(ConfigError, match=r"cache\.groups: .* 2 with a state of 2048 bytes"):
        measure(resolve(config), seed=0)


def test_more_layers_with_a_state_than_a_checkpoint_has_are_refused(cache_dir: Path, tmp_path: Path) -> None:
    config = stateful_checkpoint(cache_dir, tmp_path)
    config.model.state_layers, config.model.state_bytes = 4, 2048
    with pytest.raises(ConfigError, match=r"model\.state_layers: found 4, but the checkpoint has 4 layers"):
        resolve(config)


def test_what_states_need_is_asked_of_a_checkpoint_too(cache_dir: Path, tmp_path: Path) -> None:
    config = stateful_checkpoint(cache_dir, tmp_path)
    config.model.state_layers, config.model.state_bytes = 2, 2048
    config.cache.groups = GroupPages.off
    assert [error.key for error in check_settings(config)] == ["cache.groups"]
    config.cache.groups, config.cache.policy = GroupPages.uniform, CachePolicy.contiguous_max
    assert [error.key for error in check_settings(config)] == ["cache.groups"]


@pytest.mark.nightly
def test_samples_are_requests_that_find_the_prompt_in_the_prefix_cache(cache_dir: Path) -> None:
    config = windowed(cache_dir)
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3
    config.decoding.sharing, config.workload.num_requests = Sharing.prefix_cache, 5
    assert check_settings(config) == []
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.outcome["measured"]["finished"] == 15
    assert record.measured["median"]["hit_tokens"] > 0


def latent(cache_dir: Path, folder: Path, pages: GroupPages) -> RunConfig:
    """A random DeepSeek V2 as a checkpoint."""
    build("deepseek_v2").save_pretrained(folder)
    config = crowded(windowed(cache_dir, pages))
    config.model.path, config.model.window, config.model.windowed_layers = str(folder), None, 0
    return config


@pytest.mark.nightly
def test_latent_layers_in_groups_keep_as_many_bytes_as_the_pool_counts(
    cache_dir: Path, tmp_path: Path
) -> None:
    config = latent(cache_dir, tmp_path, GroupPages.uniform)
    check_point(config)
    record = run_point(config).record
    assert record.levels["counts"]["identical"]
    assert record.pool["kv_bytes_per_token"] == 2 * (16 + 8) * 4
    assert record.pool["note"] == ""


@pytest.mark.nightly
def test_without_groups_the_record_says_that_latent_vectors_are_expanded(
    cache_dir: Path, tmp_path: Path
) -> None:
    record = run_point(latent(cache_dir, tmp_path, GroupPages.off)).record
    assert record.pool["note"].startswith(
        "expanded: the engine keeps K and V of 896 bytes a token, where the pool counts latent vectors of 192"
    )
