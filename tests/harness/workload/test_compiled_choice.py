"""When a point is replayed compiled, and what is said where it cannot be."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from tiers import NIGHT, cases

from harness.cli.main import main
from harness.compiled import numba_edge as compiling
from harness.config.compose import compose_config
from harness.config.errors import ConfigError
from harness.config.schema import Compiled
from harness.point.cost import cost_model
from harness.replay.cost_model import CostModel
from harness.sweep.plan import run_request
from harness.workload import simulate as compiled
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict

PLAIN = (
    *("measure=false", "cost=roofline", "model=llama3_8b", "device=a100_80gb", "trace=azure_conv"),
    *("workload.num_requests=60", "workload.prefix_share=null", "workload.length_scale=1"),
    *("workload.oversize=drop", "cache.pool_tokens=null", "cache.max_model_len=null"),
)
FRONT_END = ("device.frontend_request_us=90000", "device.frontend_token_us=40")
CAPPED = ("workload.request_rate=40", "replay.max_in_flight=12", *FRONT_END, "device.frontend_turn_us=9000")
TIERS = (
    *("workload.prefix_share=0.5", "cache.pool_tokens=9000", "cache.max_model_len=8192"),
    "cache.tier_tokens=60000",
)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By day Python runs the loop: to compile it takes longer than all tests here, and `test_compiled.py` does."""
    monkeypatch.setattr(compiled, "is_cached", lambda: True)
    if not NIGHT:
        monkeypatch.setattr("harness.compiled.replay.MachineCode", lambda function: function)


def point(*settings: str) -> tuple[Point, CostModel]:
    config = compose_config(axis.settings[0] for axis in run_request((*PLAIN, *settings)).axes)
    return resolve(config), cost_model(deployment_of(config))


@pytest.mark.parametrize("kept", [True, False])
def test_what_compiles_for_minutes_says_so(
    kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "is_cached", lambda: kept)
    compiled.simulate(*point("replay.compiled=always"))
    assert ("compiling the replay, once" in capsys.readouterr().err) is not kept


@cases(
    "settings",
    [
        (),
        ("cache.prefix_caching=false",),
        ("cache.retention=none", "cache.block_size=1"),
        ("scheduler=whole_prompt",),
        ("replay.mode=offline", "cache.pool_tokens=20000", "cache.max_model_len=8192"),
        ("replay.mode=gamma", "workload.request_rate=40", "scheduler.watermark=0.1"),
        ("workload.prefix_share=0.5", "cache.pool_tokens=20000", "cache.max_model_len=8192"),
        ("workload.prefix_share=0.5", "cache.retention=none"),
        ("trace=prefix_tree", "cache.block_size=8"),
        ("decoding=sample", "decoding.n=3", "workload.prefix_share=0.5"),
        ("decoding=beam", "workload.prefix_share=0.5"),
        ("decoding=beam", "decoding.beam_churn=0.6", "cache.block_size=8"),
        ("decoding.beam_width=4", "cache.pool_tokens=9000", "cache.max_model_len=8192"),
        ("decoding=sample", "decoding.n=4", "cache.pool_tokens=9000", "cache.max_model_len=8192"),
        ("scheduler.async_scheduling=true", "workload.request_rate=40", "workload.prefix_share=0.5"),
        ("replay.mode=closed", "replay.users=8", "replay.think_s=0.5"),
        ("trace=chat", "replay.mode=sessions"),
        CAPPED,
        ("replay.mode=closed", "replay.users=8", *FRONT_END),
        ("trace=chat", "replay.mode=sessions", *CAPPED),
        ("workload.request_rate=40", *FRONT_END, "scheduler.async_scheduling=true"),
        ("scheduler=swap", "cache.host_tokens=3000", "cache.pool_tokens=9000", "cache.max_model_len=8192"),
        (
            "cache.eviction=pinned",
            "cache.pool_tokens=20000",
            "cache.max_model_len=8192",
            "workload.prefix_share=0.5",
        ),
        (
            "cache.eviction=ttl",
            "cache.ttl_s=3",
            "trace=chat",
            "cache.pool_tokens=9000",
            "cache.max_model_len=8192",
        ),
        ("scheduler.policy=priority", "cache.pool_tokens=20000", "cache.max_model_len=8192"),
        ("model=gemma3_12b", "cache.groups=uniform", "device=h100", "workload.prefix_share=0.5"),
        ("model=gpt_oss_20b", "device=h100", "workload.prefix_share=0.5"),
        (
            "model=gpt_oss_20b",
            "cache.groups=uniform",
            "device=h100",
            "workload.prefix_share=0.5",
            "cache.pool_tokens=12000",
            "cache.max_model_len=8192",
        ),
        (
            *("model=llama4_scout", "model.window=256", "cache.groups=uniform", "device=h200"),
            *("workload.prefix_share=0.5", "cache.pool_tokens=12000", "cache.max_model_len=8192"),
        ),
        ("decoding=speculative", "decoding.acceptance=0.7", "workload.prefix_share=0.5"),
        ("device.data_parallel=4", "workload.request_rate=80", "workload.prefix_share=0.5"),
        ("device.data_parallel=2", "workload.request_rate=1", "scheduler.async_scheduling=true"),
        (*TIERS, "cache.tier_store=evicted", "cache.tier_tokens=2000", "cache.disk_tokens=4000"),
        (*TIERS, "cache.tier_chunk=64", "cache.tier_load=cheaper", "device.host_link_gbs=2"),
        (*TIERS, "device.data_parallel=2", "cache.tier_overlap=true", "decoding=speculative"),
    ],
    day=[
        (*TIERS, "cache.tier_store=evicted", "cache.tier_tokens=2000", "cache.disk_tokens=4000"),
        ("decoding=speculative", "decoding.acceptance=0.7", "workload.prefix_share=0.5"),
        ("replay.mode=gamma", "workload.request_rate=40", "scheduler.watermark=0.1"),
        ("replay.mode=closed", "replay.users=8", *FRONT_END),
    ],
)
def test_records_are_those_of_the_core(settings: tuple[str, ...]) -> None:
    workload, cost = point(*settings)
    kept, streamed = [], []
    for mode in (Compiled.never, Compiled.always):
        told = replace(workload, replay=replace(workload.replay, compiled=mode))
        kept.append(predict(told, cost, rows=True))
        streamed.append(predict(told, cost, rows=False))
    for one, other in (kept, streamed):
        assert repr(one.metrics) == repr(other.metrics)  # nan too
        assert (one.outcome, one.totals) == (other.outcome, other.totals)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        (
            ("workload.prefix_share=0.5", "cache.deduplicate=true"),
            "prompts may share prefixes, and equal blocks",
        ),
        (
            ("decoding=speculative", "decoding.acceptance=0.5", "decoding.draft_place=lookahead"),
            "drafts are cut at the end",
        ),
        (("decoding.beam_width=2", "cache.copy_at_fork=true"), "branches copy their blocks"),
        (("cache=contiguous_max",), "it is not paged"),
        (("model=gemma3_12b", "cache.groups=lcm", "device=h100"), "groups have pages of their own"),
        (
            ("model=gemma3_12b", "cache.groups=uniform", "device=h100", "decoding=sample"),
            "layers in groups have",
        ),
        (("scheduler=static",), "batching is not continuous"),
        (("cache.tier_tokens=9000", "cache.eviction=pinned"), "a rule of eviction other than lru"),
        (("cache.tier_tokens=9000", "device=cpu", "model=tiny_llama"), "the engine copies what its tier has"),
        (("replay.duration_s=5",), "stops early"),
        ((*FRONT_END, "device.data_parallel=2"), "delays requests before they go to replicas"),
        (("scheduler=swap", "cache.host_tokens=100000", "decoding.beam_width=2"), "may be swapped out"),
        (("scheduler.adaptive_watermark=true",), "the watermark is adaptive"),
        (("replay.lookups=true", "replay.records=true"), "lookups of the prefix cache are kept"),
        (("replay.residency=0.1", "replay.records=true"), "the residency of blocks is sampled"),
        (("scheduler.victim=own_policies:LongestFirst",), "a policy of your own"),
    ],
)
def test_always_refuses_a_point_that_needs_the_core(setting: tuple[str, ...], reason: str) -> None:
    workload, cost = point(*setting, "replay.compiled=always")
    with pytest.raises(ConfigError, match=reason) as refusal:
        predict(workload, cost, rows=False)
    assert refusal.value.key == "replay.compiled"


def test_shared_prefixes_do_not_matter_where_nothing_is_cached() -> None:
    workload, cost = point("workload.prefix_share=0.5", "cache.prefix_caching=false")
    assert compiled.obstacle(workload, cost) is None


def test_auto_compiles_only_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LOADING_S", 0.005)
    monkeypatch.setattr(compiled, "is_cached", lambda: False)
    monkeypatch.setattr(compiled, "COMPILING_S", 0.18)
    of_seventy_ms = point()
    assert [bool(compiled.compiled_replays(*of_seventy_ms)) for _ in range(3)] == [False, False, True]


def test_auto_loads_the_compiled_code_when_small_points_add_up() -> None:
    small = point()
    chosen = [bool(compiled.compiled_replays(*small)) for _ in range(30)]
    assert not any(chosen[:5])
    assert chosen[-1]
    assert sorted(chosen) == chosen  # once it is loaded, all are compiled


def test_points_that_only_the_core_can_replay_do_not_count() -> None:
    small, beams = point(), point("decoding.beam_width=2", "cache.copy_at_fork=true")
    assert not any(compiled.compiled_replays(*beams) for _ in range(30))
    assert not compiled.compiled_replays(*small)


SLOW = (
    "decoding=sample decoding.n=16",
    "decoding=speculative replay.mode=closed replay.users=1",
    "decoding=beam",
)


@pytest.mark.parametrize(
    "slow", [*SLOW, "model=gpt_oss_20b cache.groups=uniform", "scheduler.max_batched_tokens=128"]
)
def test_auto_replays_fewer_requests_compiled_where_the_core_takes_longer(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LOADING_S", 0.15)
    assert not compiled.compiled_replays(*point())
    assert compiled.compiled_replays(*point(*slow.split()))


@pytest.mark.parametrize("slow", ["decoding=speculative", "decoding=beam"])
def test_tokens_cost_the_core_where_each_step_is_a_plan(slow: str) -> None:
    short, long = ("trace=azure_code", slow), (slow,)  # 30 and 208 tokens in the mean
    taken = [compiled._seconds_in_core(point(*each)[0]) for each in ((), short, long)]
    assert taken[0] < taken[1] < taken[2] / 2


def test_auto_leaves_to_the_core_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LOADING_S", 0.0)
    workload, cost = point("decoding.beam_width=2", "cache.copy_at_fork=true")
    assert not compiled.compiled_replays(workload, cost)


@pytest.mark.parametrize("asked", ["never", "always"])
def test_what_is_asked_for_is_kept_where_a_point_is_replayed_often(asked: str) -> None:
    workload, cost = point(f"replay.compiled={asked}")
    assert compiled.often_replayed(workload, cost, 10**6).replay.compiled == asked
    workload, cost = point()
    assert compiled.often_replayed(workload, cost, 10**6).replay.compiled is Compiled.always


def test_without_numba_the_core_replays_and_always_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "is_available", lambda: False)
    workload, cost = point("replay.compiled=always")
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        compiled.compiled_replays(workload, cost)
    told = replace(workload, replay=replace(workload.replay, compiled=Compiled.auto))
    assert not compiled.compiled_replays(told, cost)


def test_a_numba_that_cannot_be_imported_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "numba", None
    )  # import raises ImportError, as beside a numpy that is too new
    workload, cost = point("replay.compiled=always")
    with pytest.raises(ConfigError, match=r"pip install '\.\[fast\]'"):
        compiled.compiled_replays(workload, cost)


def test_where_the_cache_cannot_be_written_no_code_is_kept_beside_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(import_module("numba").config, "CACHE_DIR", "")
    function = compiling.dispatcher.__wrapped__(lambda run: run)
    assert type(function._cache).__name__ == "NullCache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "folder"))
    assert (tmp_path / "folder") in Path(compiling.dispatcher.__wrapped__(only)._cache.cache_path).parents


def only(run: int) -> int:
    return run


def test_arrivals_beyond_the_clock_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"arrives after .* years") as refusal:
        point("workload.request_rate=1e-6", "workload.num_requests=10000")
    assert refusal.value.key == "workload.request_rate"


def test_always_is_refused_before_any_point_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure=false", "cost=roofline", "workload.num_requests=5", f"out={tmp_path}"]
    assert main(["sweep", *words, "cache.policy=paged,contiguous_max", "replay.compiled=always"]) == 2
    assert (
        "replay.compiled: always, but it is not paged (cache.policy=contiguous_max)"
        in capsys.readouterr().err
    )
