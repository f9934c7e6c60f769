"""Pools with groups of layers: how large they are, what a record says of them, and what is refused by name."""

import math
from pathlib import Path

import pytest
from tiers import cases

from engine.core.options import GroupPages
from harness.cli.main import main
from harness.config.checks import check_config
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.metrics.log import WASTE_COLUMNS
from harness.point.run import run_point
from harness.workload.deployment import PoolShape, deployment_of
from harness.workload.point import resolve
from harness.workload.simulate import check_compiled


def config(*overrides: str) -> RunConfig:
    words = ("measure=false", "cache.groups=uniform", *overrides)
    return compose_config(axis.settings[0] for axis in parse_overrides(words))


def pool(*overrides: str) -> PoolShape:
    return deployment_of(config(*overrides)).pool


def refusals(*overrides: str) -> list[str]:
    return [str(error) for error in check_config(config(*overrides))]


def test_a_pool_of_groups_has_the_memory_of_the_pool_without() -> None:
    sizes = ("model=gemma2_9b", "cache.pool_tokens=160000", "cache.max_model_len=8192")
    grouped, plain = pool(*sizes), pool(*sizes, "cache.groups=off")
    assert grouped.tokens * grouped.slot_bytes == plain.tokens * plain.kv_bytes_per_token
    assert grouped.num_blocks == 2 * plain.num_blocks  # a page holds 21 of the 42 layers


def test_gpt_oss_has_a_group_of_windows_beside_a_full_one() -> None:
    found = pool("model=gpt_oss_20b", "cache.pool_tokens=160000")
    assert found.groups is not None
    kinds = [(str(group.kind), group.layers, group.window) for group in found.groups.groups]
    assert kinds == [("window", 12, 128), ("full", 12, None)]


def test_without_a_prefix_cache_there_is_no_ratio_of_hits_and_not_one_of_0() -> None:
    words = ("cache.groups=off", "device=h200", "model=llama3_8b", "workload.num_requests=4")
    asked, unasked = (
        run_point(config(*words, f"cache.prefix_caching={on}")).record for on in ("true", "false")
    )
    assert "hit_ratio" in asked.simulated
    assert "hit_ratio" not in unasked.simulated | unasked.analytic


@pytest.mark.nightly
def test_a_run_without_rows_says_where_the_bytes_of_its_pools_went() -> None:
    words = ("model=gpt_oss_20b", "device=h200", "cache.pool_tokens=20000", "workload.num_requests=8")
    kept, summed = (
        run_point(config(*words, f"replay.records={records}")).record.simulated
        for records in ("true", "false")
    )
    shares = {name: kept[name] for name in kept if name.startswith("waste_")}
    assert len(shares) == len(WASTE_COLUMNS)
    assert {name: summed[name] for name in shares} == pytest.approx(shares)


def test_latent_layers_are_one_group() -> None:
    found = pool("model=deepseek_v2_lite", "cache.pool_tokens=160000")
    assert found.groups is not None
    assert [(str(group.kind), group.layer_bytes) for group in found.groups.groups] == [("latent", 576 * 2)]


NEXT = ("model=qwen3_next_80b_a3b", "cost=roofline", "cache.pool_tokens=160000")


def test_blocks_beside_a_state_are_as_long_as_vllm_sets_them_for_qwen3_next() -> None:
    """544 tokens, with 1.49 % of padding: a state of 1,097,728 bytes beside 2,048 bytes a token."""
    found = pool(*NEXT)
    assert found.groups is not None
    assert found.block_size == 544
    states = [group for group in found.groups.groups if str(group.kind) == "state"]
    assert [group.layers for group in states] == [12, 12, 12]
    assert states[0].page_bytes / 12 / 1_097_728 == pytest.approx(1.0149, abs=5e-5)


def test_a_state_may_be_kept_less_often_than_at_each_block() -> None:
    found = pool(*NEXT, "cache.groups=separate", "cache.state_every=256")
    assert found.groups is not None
    assert [group.block_size for group in found.groups.groups] == [256, 16]
    assert found.block_size == 256  # a hit ends where a state was kept


def test_layers_with_a_state_keep_no_tokens() -> None:
    assert pool(*NEXT).kv_bytes_per_token == 12 * 2048


def test_a_model_with_states_is_replayed_and_its_pool_adds_up() -> None:
    found = run_point(
        config(
            *NEXT, "device=h200", "workload.num_requests=6", "cache.max_model_len=8192", "replay.records=true"
        )
    )
    assert found.record.outcome["simulated"]["finished"] == 6
    assert "layers with a state" in found.record.cost["provenance"]["not priced"]
    steps = found.tables["steps"]
    states = sum(steps[name] for name in ("token", "cached", "reserved", "internal", "external", "free"))
    assert set(states.tolist()) == {found.record.pool["tokens"]}


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("cache.groups", ("cache.groups=off",)),
        ("cache.groups", ("cache.policy=contiguous_pow2",)),
        ("model.state_bytes", ("model.state_bytes=0",)),
        ("model.state_layers", ("model.state_layers=48",)),
        ("model.experts", ("measure=true",)),
        ("model.state_layers", ("measure=true", "model.family=llama", "model.experts=0")),
        ("cache.state_every", ("cache.groups=separate", "cache.state_every=100")),
        ("device.tensor_parallel", ("device.tensor_parallel=4",)),
        ("cost.kind", ("cost=published",)),
    ],
)
def test_what_states_do_not_go_with_is_refused_by_its_key(key: str, overrides: tuple[str, ...]) -> None:
    assert any(text.startswith(key) for text in refusals(*NEXT, *overrides))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("oversize", ["error", "drop"])
def test_drafts_beside_states_are_refused_before_a_request_is_read(measured: bool, oversize: str) -> None:
    asked = config(*NEXT, "decoding.draft_tokens=2", f"workload.oversize={oversize}")
    asked.measure = measured
    with pytest.raises(
        ConfigError, match=r"^decoding\.draft_tokens: found 2, .* a state .*; set draft_tokens=0$"
    ):
        deployment_of(asked)


@pytest.mark.parametrize(("measured", "windows"), [(True, 3), (True, 4), (False, 4)])
def test_a_measured_draft_model_needs_a_layer_that_keeps_every_token(measured: bool, windows: int) -> None:
    asked = config(
        "model.layers=4", "model.window=64", f"model.windowed_layers={windows}", "decoding.draft_tokens=2"
    )
    asked.measure = measured
    if measured and windows == 4:
        with pytest.raises(
            ConfigError, match=r"^decoding\.draft_tokens: found 2, but every layer has a window"
        ):
            deployment_of(asked)
    else:
        assert deployment_of(asked).draft is not None


def test_an_interval_that_is_no_multiple_of_the_match_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache\.retention_interval.*100: must be 0 or a multiple of 16"):
        pool("model=gemma3_12b", "cache.pool_tokens=160000", "cache.retention_interval=100")


STATES = ("model.layers=4", "model.state_layers=2", "model.state_bytes=65536")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("cache.groups=off",), "with one group of layers hits end with its blocks, cache.block_size=16"),
        (("model.layers=4", "model.window=64", "model.windowed_layers=2"), "beside aligned states"),
        ((*STATES, "cache.groups=separate"), "in pages of one size"),
        ((*STATES, "cache.states=every_block"), "beside aligned states"),
        ((*STATES, "cache.prefix_match_unit=5"), "must divide the blocks of all groups, of 64 tokens"),
    ],
)
def test_hits_inside_blocks_are_refused_where_vllm_has_none(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"cache.prefix_match_unit: .*{reason}"):
        pool("cache.prefix_match_unit=8", *overrides)


def test_hits_inside_blocks_are_replayed_by_the_core_and_the_record_has_their_unit() -> None:
    unit = (*STATES, "cache.prefix_match_unit=8", "workload.num_requests=8", "decoding.beam_width=1")
    record = run_point(config(*unit)).record
    assert record.pool["groups"]["match_unit"] == record.pool["block_size"] == 8
    assert record.pool["groups"]["layers"][0]["block_size"] == 64
    with pytest.raises(ConfigError, match="layers keep states"):
        check_compiled(resolve(config(*unit, "replay.compiled=always")))


def test_pool_blocks_are_pages() -> None:
    assert pool("model=gemma3_12b", "cache.pool_tokens=null", "cache.pool_blocks=777").page_counts == (777,)


def test_separate_pools_share_the_memory_as_one_longest_sequence_needs_it() -> None:
    sizes = ("cache.pool_tokens=160000", "cache.max_model_len=8192", "scheduler.max_batched_tokens=512")
    found = pool("model=gemma2_9b", "cache.groups=separate", *sizes)
    assert found.groups is not None
    most = [group.most_blocks(8192, 512) for group in found.groups.groups]
    assert most == [(4095 + 512 + 15) // 16 + 1, 512]
    room = [pages // need for pages, need in zip(found.page_counts, most, strict=True)]
    assert room[0] == room[1]


def test_a_model_without_windows_has_as_many_blocks_as_without_groups() -> None:
    sizes = ("model=llama3_8b", "cache.pool_tokens=160000")
    assert pool(*sizes).num_blocks == pool(*sizes, "cache.groups=off").num_blocks


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("engine.cuda_graphs", ("measure=true", "engine.cuda_graphs=true")),
        ("cache.copy_at_fork", ("decoding.beam_width=4", "cache.copy_at_fork=true")),
        ("decoding.sharing", ("decoding.beam_width=4", "decoding.sharing=tail_at_fork")),
        ("scheduler.admission", ("scheduler.admission=a:B",)),
        ("scheduler.async_scheduling", ("scheduler.async_scheduling=true",)),
        ("cache.eviction", ("cache.eviction=a:B",)),
        ("cache.deduplicate", ("cache.deduplicate=true",)),
        ("cache.pool_blocks", ("cache.groups=separate", "cache.pool_blocks=100", "cache.pool_tokens=null")),
        ("replay.kv_events", ("replay.kv_events=true",)),
        ("replay.lookups", ("replay.lookups=true",)),
    ],
)
def test_what_groups_do_not_serve_is_refused_by_its_key(key: str, overrides: tuple[str, ...]) -> None:
    assert any(text.startswith(f"{key}: ") for text in refusals(*overrides))


TIGHT = (
    *(
        "model=gemma3_12b",
        "device=h100",
        "cache.max_model_len=4096",
        "cache.pool_tokens=4000",
        "replay.mode=offline",
    ),
    *("workload.num_requests=12", "workload.length_scale=0.5", "workload.oversize=drop"),
)


SEVERAL = [("decoding=beam", "decoding.beam_width=4"), ("decoding=sample", "decoding.n=4")]
SWAP = ("scheduler.preemption=swap", "cache.host_tokens=4000", "scheduler.admit_whole_prompt=false")


@pytest.mark.nightly
@cases("pages", [GroupPages.uniform, GroupPages.separate, GroupPages.lcm], day=1)
@cases("overrides", SEVERAL, day=SEVERAL[1:])
def test_branches_copy_shared_pages_in_a_prediction(pages: GroupPages, overrides: tuple[str, ...]) -> None:
    found = run_point(config(*TIGHT, *overrides, f"cache.groups={pages}", "replay.records=true"))
    assert found.record.outcome["simulated"]["finished"] == 12
    assert found.tables["steps"]["copies"].sum() > 0


@pytest.mark.nightly
def test_what_is_swapped_out_is_not_computed_again() -> None:
    found = run_point(config(*TIGHT, *SWAP, "replay.records=true"))
    requests = found.tables["requests"]
    assert requests["preemptions"].sum() > 0
    assert requests["recomputed_tokens"].sum() == 0


@pytest.mark.nightly
def test_drafts_save_steps_in_groups() -> None:
    drafts = run_point(
        config(*TIGHT, "decoding.draft_tokens=3", "decoding.acceptance=0.6", "replay.records=true")
    )
    alone = run_point(config(*TIGHT, "replay.records=true"))
    assert len(drafts.tables["steps"]["step"]) < 0.7 * len(alone.tables["steps"]["step"])


def test_a_copied_page_costs_its_own_bytes() -> None:
    """A page of a group has the bytes of its layers in a block, not those of all layers."""
    found = pool(
        "model=gemma2_9b", "cache.pool_tokens=16000", "cache.groups=separate", "cache.max_model_len=8192"
    )
    assert found.groups is not None
    assert found.page_slots is not None
    firsts = [1, 1 + found.page_counts[0]]
    sizes = [group.page_bytes / found.kv_bytes_per_token for group in found.groups.groups]
    assert [found.page_slots([page]) for page in firsts] == sizes
    assert found.page_slots(firsts) == 16


def test_a_pool_too_small_for_a_page_of_each_group_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"holds 0, .* pages of the groups of gemma-3-27b, each needs at least 1"
    ):
        pool("model=gemma3_27b", "cache.groups=separate", "cache.pool_tokens=16")


def test_a_predicted_point_holds_less_where_windows_are_released() -> None:
    sizes = (
        *("model=gemma3_12b", "device=h100", "cache.max_model_len=8192", "cache.pool_tokens=40000"),
        *(
            "workload.num_requests=6",
            "workload.length_scale=3",
            "workload.oversize=drop",
            "replay.mode=offline",
        ),
    )
    uniform = run_point(config(*sizes)).record
    off = run_point(config(*sizes, "cache.groups=off")).record
    assert uniform.pool["groups"]["match_unit"] == 16
    assert uniform.pool["bytes"] == off.pool["bytes"]
    held, whole = uniform.simulated, off.simulated
    assert held["peak_kv"] < whole["peak_kv"]
    assert math.isclose(sum(held[f"waste_{name}"] for name in WASTE_COLUMNS), 1)
    used = held["gauge"] - held["waste_token"]  # what the gauge counts and no next token needs
    wasted = ("behind_window", "duplicate", "reserved", "tail", "padding", "imbalance")
    assert math.isclose(used, sum(held[f"waste_{name}"] for name in wasted), abs_tol=1e-9)
    assert held["finished"] == whole["finished"]


@pytest.mark.nightly
def test_the_report_shows_where_the_bytes_go(tmp_path: Path) -> None:
    words = ["model=gemma2_9b", "device=h100", "cache.groups=uniform", "cache.max_model_len=8192"]
    sizes = ["cache.pool_tokens=20000", "workload.num_requests=4", "report.figures=svg", f"out={tmp_path}"]
    assert main(["run", "measure=false", *words, *sizes]) == 0
    for figure in ("causes", "groups_over_time"):
        assert (tmp_path / "report" / "figures" / f"{figure}.svg").exists()
    assert (
        "Predicted bytes of the pools by what they hold" in (tmp_path / "report" / "index.html").read_text()
    )
    assert list(tmp_path.glob("points/*/waste.parquet"))


@pytest.mark.nightly
def test_the_head_of_the_report_says_that_windows_are_held_without_groups(tmp_path: Path) -> None:
    words = ["model=gemma2_9b", "device=h100", "cache.max_model_len=8192", "cache.pool_tokens=20000"]
    sizes = ["workload.num_requests=2", "report.figures=none", f"out={tmp_path}"]
    assert main(["run", "measure=false", *words, *sizes]) == 0
    page = (tmp_path / "report" / "index.html").read_text()
    assert page.index("Windowed layers keep every block") < page.index('<section id="trust">')
