"""Measured samples and beams under each way of sharing: counts, and tokens and parents of beams sent as requests."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from point_cases import mooncake_file, small_config, with_trace
from tiers import cases, tier

from engine.core.options import GroupPages, Preemption, Retention, Scheduling, Sharing
from harness.config.checks import check_settings
from harness.config.schema import CostKind, DecodingMode, Oversize, ReplayMode, RunConfig, TraceFormat
from harness.measure.beam_search import TokenBeams
from harness.measure.engine import loaded_models, measure
from harness.point import check_point, run_point
from harness.replay.beams import RecordedGenealogy
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve
from traces.trace import Segment

WIDTH = 3


@pytest.fixture(name="config")
def config_fixture(tmp_path: Path) -> RunConfig:
    config = small_config(tmp_path)
    config.cost.kind = CostKind.roofline
    config.workload.num_requests = 6
    config.decoding.beam_width, config.decoding.sharing = WIDTH, Sharing.prefix_cache
    return config


def crowded(config: RunConfig) -> RunConfig:
    config.cache.pool_tokens, config.cache.max_model_len, config.workload.request_rate = 240, 224, 5000.0
    config.scheduler.admit_whole_prompt, config.scheduler.max_batched_tokens = False, 32
    return config


def counts(config: RunConfig) -> dict:
    assert check_settings(config) == []
    check_point(config)
    record = run_point(config).record
    assert record.audit["checks"] == record.levels["counts"]["steps"]
    return dict(record.levels["counts"])


@cases("block_size", [1, 8, 16], day=(8,))
def test_both_sides_decide_alike_for_beams_sent_as_requests(config: RunConfig, block_size: int) -> None:
    config.cache.block_size = block_size
    assert counts(config)["identical"]


@pytest.mark.nightly
def test_both_sides_decide_alike_in_a_small_pool(config: RunConfig) -> None:
    assert counts(crowded(config))["identical"]


def test_both_sides_decide_alike_where_prompts_share_text(config: RunConfig, tmp_path: Path) -> None:
    config.workload.length_scale, config.cache.block_size = 0.02, 4
    assert counts(with_trace(config, TraceFormat.mooncake, mooncake_file(tmp_path)))["identical"]


@pytest.mark.nightly
def test_both_sides_decide_alike_with_groups_of_layers(config: RunConfig) -> None:
    config.model.family, config.model.layers = "gemma2", 4
    config.model.window, config.model.windowed_layers = 24, 2
    config.cache.groups, config.cache.block_size = GroupPages.uniform, 8
    assert counts(config)["identical"]


@cases("sharing", Sharing, day=1)
def test_both_sides_decide_alike_for_rollouts_however_they_share(config: RunConfig, sharing: Sharing) -> None:
    config.decoding.beam_width, config.decoding.sharing = 1, sharing
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 8
    assert counts(config)["identical"]


SEEDS = range(tier(2, 60))


def drawn(config: RunConfig, folder: Path, seed: int) -> RunConfig:
    """A workload and every choice that the requests of beams meet, drawn from `seed`."""
    draw = random.Random(seed)
    if draw.random() < 0.5:
        config = with_trace(config, TraceFormat.mooncake, mooncake_file(folder, rows=8))
        config.workload.length_scale = 0.02
    config.workload.num_requests, config.workload.seed = draw.randint(3, 6), seed
    config.workload.request_rate = draw.choice([50.0, 5000.0])
    config.workload.oversize = Oversize.drop
    config.replay.mode = draw.choice(
        [ReplayMode.trace, ReplayMode.closed, ReplayMode.offline, ReplayMode.sessions]
    )
    config.replay.users = draw.randint(1, 3)
    config.decoding.beam_width = draw.randint(2, 6)
    config.cache.block_size = draw.choice([1, 4, 8, 16])
    config.cache.pool_tokens, config.cache.max_model_len = draw.choice([208, 240, 800]), 200
    config.cache.deduplicate = draw.random() < 0.3
    config.cache.retention = draw.choice([Retention.lru, Retention.none])
    config.scheduler.policy = draw.choice(list(Scheduling))
    config.scheduler.max_running = draw.choice([1, 3, 64])
    config.scheduler.max_batched_tokens = draw.choice([32, 256])
    config.scheduler.admit_whole_prompt = draw.random() < 0.5
    config.scheduler.preemption = draw.choice(list(Preemption))
    config.cache.host_tokens = 400 if config.scheduler.preemption is not Preemption.recompute else 0
    return config


@pytest.mark.nightly
@cases("seed", SEEDS, day=1)
def test_random_beams_sent_as_requests_are_decided_alike(
    config: RunConfig, tmp_path: Path, seed: int
) -> None:
    assert counts(drawn(config, tmp_path, seed))["identical"]


def searched(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Point, TokenBeams]:
    """The workload, and the client after a measured run."""
    clients: list[TokenBeams] = []
    begin = TokenBeams.__init__

    def noted(self: TokenBeams, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        clients.append(self)

    monkeypatch.setattr(TokenBeams, "__init__", noted)
    workload = resolve(config)
    measure(workload, seed=0)
    return workload, clients[-1]


@pytest.mark.nightly
def test_the_beams_are_those_of_transformers(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from engine.runtime.models.load import original_model

    workload, client = searched(config, monkeypatch)
    with original_model(loaded_models(deployment_of(config), drafts=False)[0]) as model:
        for row in workload.trace.requests:
            prompt = client._prompts[row.request_id]
            found = model.generate(
                torch.tensor(prompt)[None],
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=row.output_tokens,
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                do_sample=False,
                eos_token_id=None,
            )
            assert client.outputs[row.request_id] == found[:, len(prompt) :].tolist()


@pytest.mark.nightly
def test_the_beams_are_those_that_the_engine_itself_chooses(config: RunConfig) -> None:
    runs = {}
    for sharing in (Sharing.prefix_cache, Sharing.copy_on_write):
        config.decoding.sharing = sharing
        runs[sharing] = measure(resolve(config), seed=0)
    parents = [RecordedGenealogy(run.recording.parents).chosen for run in runs.values()]
    as_lists = [{rid: [list(step) for step in steps] for rid, steps in found.items()} for found in parents]
    assert as_lists[0] == as_lists[1]


@pytest.mark.nightly
def test_recorded_parents_give_the_measured_run_back(config: RunConfig, tmp_path: Path) -> None:
    from harness.store.commit import parquet_bytes

    result = run_point(config)
    (tmp_path / "parents.parquet").write_bytes(parquet_bytes(result.tables["parents"]))
    config.decoding.beam_parents, config.measure = str(tmp_path), False
    again = run_point(config).record
    for name in ("finished", "computed_tokens"):
        assert again.simulated[name] == result.record.measured["median"][name]


def test_tenants_do_not_find_each_others_beams(config: RunConfig) -> None:
    workload = resolve(config)
    rows = workload.trace.requests
    twins = tuple(
        replace(rows[0], request_id=number, arrival_us=number * 10**7, salt=salt)
        for number, salt in enumerate(("one", "one", "two"))
    )
    keyed = tuple(replace(row, segments=(Segment(7, row.prompt_tokens),)) for row in twins)
    run = measure(workload.of_trace(workload.trace.changed(keyed, "twins")), seed=0)
    hits = {
        rid: int(hit)
        for rid, hit in zip(run.log.requests["request_id"], run.log.requests["hit_tokens"], strict=True)
    }
    assert hits[1] > 0
    assert hits[0] == hits[2] == 0
