"""Points with tiers below the pool: what they gain and cost, whichever way they are replayed, and what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
from tiers import cases

from harness.config.checks import check_config
from harness.config.compose import compose_config, normalise
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.metrics.compute import compute_metrics
from harness.metrics.log import RunLog
from harness.point.cost import cost_model
from harness.replay.replicas import merged
from harness.workload import simulate as simulate_module
from harness.workload.point import resolve
from harness.workload.simulate import predict, simulate

BASE = (
    *(
        "measure=false",
        "model=llama3_8b",
        "device=h100",
        "cost.kind=roofline",
        "trace=chat",
        "workload=as_recorded",
    ),
    *(
        "workload.num_requests=60",
        "workload.prefix_share=0.6",
        "cache.max_model_len=8192",
        "cache.pool_tokens=9000",
    ),
)


def config(*overrides: str) -> RunConfig:
    return compose_config(axis.settings[0] for axis in parse_overrides((*BASE, *overrides)))


def metrics(*overrides: str) -> dict[str, float]:
    point = resolve(config(*overrides))
    return compute_metrics(simulate(point, cost_model(point.deployment)))


def test_a_tier_finds_what_the_pool_has_lost_and_its_seconds_are_counted() -> None:
    without, host = metrics(), metrics("cache.tier_tokens=200000")
    assert host["hit_tokens"] >= without["hit_tokens"] + host["host_hit_tokens"] / 2 > without["hit_tokens"]
    assert host["ttft_p99"] <= without["ttft_p99"]
    shape = resolve(config()).pool.kv_bytes_per_token
    assert host["host_read_bytes"] == host["host_hit_tokens"] * shape
    assert host["tier_saved_s"] > host["tier_load_s"] > 0


@pytest.mark.nightly
def test_a_slow_link_makes_loading_worse_than_computing_unless_it_is_asked() -> None:
    slow = ("cache.tier_tokens=200000", "device.host_link_gbs=0.2")
    without, always, cheaper = metrics(), metrics(*slow), metrics(*slow, "cache.tier_load=cheaper")
    assert always["ttft_p50"] > without["ttft_p50"]
    assert always["tier_load_s"] > always["tier_saved_s"]
    assert (cheaper["host_hit_tokens"], cheaper["ttft_p50"]) == (0, without["ttft_p50"])


def test_reading_beside_a_step_delays_it_less_than_reading_before_it() -> None:
    slow = ("cache.tier_tokens=200000", "device.host_link_gbs=2")
    before, beside = metrics(*slow), metrics(*slow, "cache.tier_overlap=true")
    assert beside["ttft_mean"] < before["ttft_mean"]


_AT_HAND = (
    "device=cpu",
    "model=tiny_llama",
    "workload.length_scale=0.1",
    "cache.max_model_len=1024",
    "cache.pool_tokens=1024",
    "cache.tier_tokens=1024",
    "device.host_link_gbs=0.1",
    "workload.request_rate=50",
)


@pytest.mark.nightly
@cases("store", ["written", "evicted"], day=1)
@cases(
    "device",
    [(), _AT_HAND],
    day=1,
    ids=["h100", "at_hand"],
)
def test_no_fast_forward_and_no_rows_change_a_figure(store: str, device: tuple[str, ...]) -> None:
    words = ("cache.tier_tokens=20000", "cache.disk_tokens=90000", f"cache.tier_store={store}", *device)
    point = resolve(config(*words))
    cost = cost_model(point.deployment)
    found = compute_metrics(simulate(point, cost))
    assert found["disk_hit_tokens"] > 0
    assert compute_metrics(simulate(point, cost, fast_forward=False)) == pytest.approx(found)
    counts = predict(point, cost, rows=False).metrics
    assert {
        name: counts[name] for name in found if "host_" in name or "disk_" in name or "tier_" in name
    } == {name: found[name] for name in found if "host_" in name or "disk_" in name or "tier_" in name}


@pytest.mark.nightly
def test_each_replica_has_a_tier_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they do what each does alone, with the requests that it was given."""
    words = ("cache.tier_tokens=60000", "workload.num_requests=120", "workload.request_rate=40")
    point, lanes = resolve(config(*words, "device.data_parallel=2")), list[RunLog]()
    monkeypatch.setattr(simulate_module, "merged", lambda logs: lanes.extend(logs) or merged(logs))
    cost = cost_model(point.deployment)
    together, alone = compute_metrics(simulate(point, cost)), Counter[str]()
    for lane in lanes:
        ids = set(lane.requests["request_id"].tolist())
        rows = tuple(row for row in point.trace.requests if row.request_id in ids)
        one = resolve(config(*words)).of_trace(replace(point.trace, requests=rows))
        alone.update(compute_metrics(simulate(one, cost_model(one.deployment))))
    assert len(lanes) == 2
    for name in ("host_hit_tokens", "host_read_bytes", "host_written_bytes", "tier_load_s", "tier_saved_s"):
        assert together[name] == pytest.approx(alone[name]), name
        assert together[name] > 0


@pytest.mark.parametrize("rule", ["ttl", "pinned"])
def test_a_rule_of_the_tiers_has_its_settings(rule: str) -> None:
    """Also where the pool has another rule."""
    words = (
        "cache.tier_tokens=8000",
        f"cache.tier_eviction={rule}",
        "cache.ttl_s=5",
        "cache.pinned_tokens=64",
    )
    cache = normalise(config(*words)).cache
    assert {"ttl": cache.ttl_s, "pinned": cache.pinned_tokens}[rule] == {"ttl": 5, "pinned": 64}[rule]
    assert normalise(config(*words[1:])).cache.ttl_s == RunConfig().cache.ttl_s


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("cache.tier_overlap", ("cache.tier_tokens=8000", "measure=true", "cache.tier_overlap=true")),
        ("cache.tier_overlap", ("cache.tier_tokens=8000", "device=cpu", "cache.tier_overlap=true")),
        ("cache.disk_tokens", ("cache.tier_tokens=8000", "measure=true", "cache.disk_tokens=8000")),
        ("cache.tier_tokens", ("cache.tier_tokens=8000", "cache.groups=uniform")),
        ("cache.tier_tokens", ("cache.tier_tokens=8",)),
        ("cache.tier_chunk", ("cache.tier_tokens=8000", "cache.tier_chunk=40")),
        ("cache.tier_chunk", ("cache.tier_tokens=8000", "cache.tier_chunk=64", "cache.tier_store=evicted")),
        ("replay.optimum", ("cache.tier_tokens=8000", "replay.optimum=true")),
    ],
)
def test_what_a_tier_does_not_go_with_is_refused_by_its_key(key: str, overrides: tuple[str, ...]) -> None:
    assert any(str(error).startswith(f"{key}: ") for error in check_config(config(*overrides)))
