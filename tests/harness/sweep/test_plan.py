"""Plans: every point once, every bad one named, nothing run."""

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import fake_point
import pytest
from tiers import cases, tier

from harness.config.checks import value_of
from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import EXPERIMENTS, options
from harness.config.schema import CostKind, RunConfig
from harness.point import PointSession
from harness.store.commit import SCHEMA
from harness.sweep import plan as module
from harness.sweep.plan import (
    SweepPlan,
    SweepPlanError,
    experiment_overrides,
    fingerprint,
    idle_keys,
    plan_sweep,
    run_request,
    sweep_request,
)
from harness.workers import in_workers

ROOT = Path(__file__).resolve().parents[3]
PATHS = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}


class Anything:
    """Every point can run; its identity is what the test says."""

    def __init__(self, **identity: str) -> None:
        self.identity = identity

    def check_point(self, config: RunConfig) -> None:
        if config.decoding.beam_width == 3:
            raise ConfigError("cache.pool_tokens", "request 7 needs more than the pool has")

    def point_identity(self, config: RunConfig) -> dict[str, Any]:
        return self.identity


def planned(*overrides: str) -> SweepPlan:
    return plan_sweep(sweep_request(overrides), Anything())


def names(*overrides: str, identity: str = "") -> list[str]:
    plan = plan_sweep(
        sweep_request(["workload.seed=1", *overrides, "experiment=default"]), Anything(i=identity)
    )
    return [point.fingerprint for point in plan.points]


def test_points_are_the_product_of_the_axes() -> None:
    plan = planned("cache.block_size=8,16", "decoding.beam_width=range(1,3)")
    assert [point.varying for point in plan.points] == [
        ("cache.block_size=8", "decoding.beam_width=1"),
        ("cache.block_size=8", "decoding.beam_width=2"),
        ("cache.block_size=16", "decoding.beam_width=1"),
        ("cache.block_size=16", "decoding.beam_width=2"),
    ]


def test_without_an_axis_the_default_sweep_is_planned() -> None:
    plan = planned()
    assert plan.experiment == "default"
    assert len(plan.points) == 16
    policies = [point.config.cache.policy for point in plan.points]
    assert policies.count("paged") == 12


def test_a_setting_narrows_the_default_sweep() -> None:
    assert {point.config.cache.block_size for point in planned("cache.block_size=8").points} == {8, 1}


def test_the_default_sweep_has_a_closed_loop_of_users() -> None:
    modes = {(point.config.replay.mode, point.config.replay.users) for point in planned().points}
    assert modes == {("closed", 16)}


def test_a_rate_of_ones_own_replaces_the_closed_loop_which_has_none() -> None:
    modes = {point.config.replay.mode for point in planned("workload.request_rate=20").points}
    assert modes == {"trace"}


def test_an_axis_of_ones_own_replaces_the_default_sweep() -> None:
    plan = planned("workload.seed=1,2")
    assert plan.experiment is None
    assert len(plan.points) == 2


def test_the_users_words_replace_those_of_the_experiment() -> None:
    plan = planned("experiment=default", "decoding.beam_width=1", "cache=paged", "workload.prefix_share=0")
    assert [point.varying for point in plan.points] == [(f"cache.block_size={size}",) for size in (8, 16, 32)]


def test_all_rules_of_eviction_are_planned_beside_the_bound_that_none_exceeds() -> None:
    asked = ("cache.eviction=all", "measure=false", "trace=chat", "decoding.beam_width=1")
    assert {point.config.replay.optimum for point in planned(*asked).points} == {True}
    assert {point.config.replay.optimum for point in planned(*asked, "replay.optimum=false").points} == {
        False
    }


def test_all_rules_are_planned_without_a_bound_where_there_is_none() -> None:
    plan = planned("cache.eviction=all", "measure=false", "trace=chat", "cache.tier_tokens=4096")
    assert {point.config.replay.optimum for point in plan.points} == {False}


def test_an_unknown_experiment_lists_the_experiments() -> None:
    with pytest.raises(
        UnknownKeyError, match=r"no experiment 'defualt'; choose one of\n(.|\n)*default +The main job"
    ):
        sweep_request(["experiment=defualt"])


@cases("name", options(EXPERIMENTS), day=2)
def test_every_experiment_plans(name: str, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.touch()
    extra = [f"trace.path='{file}'"] if any("trace=" in text for text in experiment_overrides(name)) else []
    assert planned(f"experiment={name}", *extra).experiment == name


def test_contiguous_points_that_differ_in_block_size_alone_are_one_point() -> None:
    plan = planned("cache=contiguous_max", "cache.block_size=8,16,32")
    assert len(plan.points) == 1
    assert plan.same == (
        ("cache.block_size=16", "the default point"),
        ("cache.block_size=32", "the default point"),
    )


def test_a_label_leaves_out_what_does_not_apply() -> None:
    labels = [point.label for point in planned("cache=paged,contiguous_max", "cache.block_size=8").points]
    assert "cache=contiguous_max" in " ".join(labels)
    assert [label for label in labels if "contiguous" in label and "block_size" in label] == []


def test_every_bad_point_is_listed_under_its_reason() -> None:
    with pytest.raises(SweepPlanError) as caught:
        planned("decoding.beam_width=1,2,3,65", "workload.seed=1,2", "cache.block_size=8,x")
    message = str(caught.value)
    assert message.startswith("nothing was run: 12 of 16 points cannot run\n")
    assert "cache.pool_tokens: request 7 needs more than the pool has\n  at decoding.beam_width=3" in message
    assert "decoding.beam_width: found 65, more than scheduler.max_running=64" in message
    assert "cache.block_size: found 'x', must be a whole number" in message
    assert len(re.findall(r"  at .*beam_width=65", message)) == 4


def test_a_value_that_many_points_have_is_named_once_with_their_number_and_an_example() -> None:
    with pytest.raises(SweepPlanError) as caught:
        planned("workload.prefix_share=2,0.5", "workload.seed=range(100)")
    assert str(caught.value).splitlines() == [
        "nothing was run: 100 of 200 points cannot run",
        "workload.prefix_share: found 2.0, must be 0 or greater and at most 1",
        "  at 100 points, for example workload.prefix_share=2 workload.seed=0",
    ]


def test_many_different_reasons_stay_within_thirty_lines() -> None:
    with pytest.raises(SweepPlanError) as caught:
        planned("workload.seed=range(-300,5)")
    lines = str(caught.value).splitlines()
    assert len(lines) == 30
    assert lines[-1] == "... and 572 more lines like these"


def test_a_reason_that_holds_everywhere_is_given_once() -> None:
    with pytest.raises(SweepPlanError, match=r"trace.path: missing.*\n  \(every point\)$"):
        planned("trace=azure", "workload.seed=1,2")


@pytest.mark.parametrize("text", ["out=a,b", "name=a,b", "workers=1,2"])
def test_where_a_sweep_is_written_cannot_be_swept(text: str) -> None:
    with pytest.raises(ConfigError, match="one value for the whole sweep"):
        sweep_request([text])


def test_one_results_folder_for_all_points() -> None:
    with pytest.raises(ConfigError, match="out: differs between the points"):
        planned("out=results/${workload.seed}", "workload.seed=1,2")


def test_run_takes_what_is_written_and_nothing_more() -> None:
    assert run_request(["workload.seed=1"]).varying == ()


def test_an_experiment_must_be_a_list_of_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.yaml").write_text("a: 1")
    monkeypatch.setattr("harness.sweep.plan.option_file", lambda group, name: tmp_path / f"{name}.yaml")
    with pytest.raises(UserError, match="must be a list of overrides"):
        experiment_overrides("odd")


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    assert fingerprint(RunConfig(), {"trace": "x"}) == fingerprint(RunConfig(), {"trace": "x"})
    assert re.fullmatch("[0-9a-f]{32}", fingerprint(RunConfig(), {}))


@pytest.mark.parametrize(
    "text", ["cache.block_size=4", "measure=false", "workload.num_requests=3", "engine.threads=2"]
)
def test_what_changes_the_result_changes_the_fingerprint(text: str) -> None:
    assert set(names()).isdisjoint(set(names(text)) - set(names()))
    assert names(text) != names()


@pytest.mark.parametrize("text", ["out=/data/other", "name=other", "workers=3", "cost.cache_dir=/data/c"])
def test_where_it_is_written_does_not(text: str) -> None:
    assert names(text) == names()


def test_another_trace_or_device_makes_another_point() -> None:
    assert set(names(identity="a")).isdisjoint(names(identity="b"))


def test_the_trace_counts_by_its_content_and_not_by_its_place() -> None:
    config = RunConfig()
    moved = replace(config, trace=replace(config.trace, path="elsewhere.csv"))
    assert fingerprint(config, {"trace": "digest"}) == fingerprint(moved, {"trace": "digest"})


def test_planning_tells_its_progress() -> None:
    told: list[tuple[int, int]] = []
    plan_sweep(
        sweep_request(["workload.seed=1,2"]),
        Anything(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]


def test_values_arrive_in_the_configuration() -> None:
    (point,) = planned(
        "cache.block_size=range(4,5)",
        "experiment=default",
        "cache=paged",
        "workload.prefix_share=0",
        "decoding.beam_width=2",
    ).points
    assert value_of(point.config, "cache.block_size") == 4


def test_the_folders_of_a_sweep_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(config: RunConfig) -> list[ConfigError]:
        looked.append(config.out)
        return []

    monkeypatch.setattr("harness.sweep.plan.check_paths", look)
    planned("cache.block_size=8,16,32", "decoding.beam_width=1,2")
    assert looked == ["results/default"]


def test_points_of_a_sweep_share_equal_sections() -> None:
    points = planned("cache.block_size=8,16", "workload.seed=1,2").points
    assert points[0].config.cache is points[1].config.cache
    assert points[0].config.model is points[3].config.model


def test_a_fingerprint_is_that_of_the_whole_configuration_as_sorted_json() -> None:
    config = planned("cache.block_size=8", "workload.request_rate=2.5", "device.name=ä").points[0].config
    content = asdict(config)
    for key in ("name", "out", "workers", "report", "execute"):
        del content[key]
    for section, key in (
        *(("trace", "path"), ("cost", "cache_dir"), ("cost", "kernels"), ("cost", "operators")),
        *(("replay", "compiled"), ("oracle", "python")),
    ):
        del content[section][key]
    text = json.dumps([SCHEMA, content, {"trace": "abc"}], sort_keys=True, default=str)
    expected = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert fingerprint(config, {"trace": "abc"}) == expected


@pytest.mark.nightly
def test_a_hundred_thousand_points_are_planned_in_1_gb() -> None:
    """It takes about 60 CPU-seconds; a limit on them would fail on a busy machine."""
    script = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from harness.cli.sweep import new_session\n"
        "from harness.sweep.plan import plan_sweep, sweep_request\n"
        "plan = plan_sweep(sweep_request(sys.argv[1:]), new_session())\n"
        # ru_maxrss would be that of the process that started this one, where it is larger
        "most = re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())\n"
        "print(len(plan.points), int(most[1]) / 1e6)\n"
    )
    axes = ["cache.pool_tokens=range(8192,40192,64)", "cache.block_size=8,16"]
    axes += ["workload.request_rate=range(1,26)", "scheduler.max_running=8,16,32,64"]
    words = [sys.executable, "-c", script, "measure=false", "cost=roofline", *axes]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | PATHS, capture_output=True, text=True, check=True)
    points, gigabytes = map(float, done.stdout.split())
    assert points == 100_000
    assert gigabytes < 1


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five points are so many that two processes plan them."""
    monkeypatch.setattr(module, "_WORTH_WORKERS", 5)
    monkeypatch.setattr(module, "_PART", 2)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)


def test_points_that_are_planned_in_several_processes_are_the_same(
    monkeypatch: pytest.MonkeyPatch, in_processes: None
) -> None:
    """By day the parts are planned in this process: it shows that they are cut rightly."""
    parts: list[int] = []

    def counted(function: Any, tasks: Any, workers: int) -> Any:
        parts.append(len(tasks))
        return in_workers(function, tasks, tier(1, workers))

    monkeypatch.setattr(module, "in_workers", counted)
    request = sweep_request(["cache.block_size=8,16,8", "workload.seed=1,2", "measure=false"])
    together = plan_sweep(request, PointSession())
    monkeypatch.setattr(module, "_WORTH_WORKERS", 7)
    assert together == plan_sweep(request, PointSession())
    assert parts == [3]
    assert len(together.same) == 2


@pytest.mark.nightly
def test_bad_points_that_several_processes_find_are_listed_as_one(in_processes: None) -> None:
    with pytest.raises(SweepPlanError) as error:
        plan_sweep(
            sweep_request(["trace.name=any,never-fits", "workload.seed=range(3)"]), fake_point.Session()
        )
    assert len(error.value.bad) == 3
    assert str(error.value).count("request 3 needs 99 blocks") == 1


def test_published_timings_stand_in_the_place_of_shares_links_and_times() -> None:
    words = ("device.kv_efficiency=0.5", "device.link_gbs=9", "device.tensor_parallel=2")
    settings = [axis.settings[0] for axis in run_request((*words, "device.step_overhead_us=9")).axes]
    config = compose_config(settings)
    config.cost.kind = CostKind.published
    assert idle_keys(settings, config, config) == {"device.kv_efficiency", "device.link_gbs"}
    config.cost.kind = CostKind.roofline
    assert idle_keys(settings, config, config) == frozenset()


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        ("model.path=/no/such/checkpoint model.layers=2 model.expert_skew=1", {"model.layers"}),
        ("replay.mode=closed workload.request_rate=9 replay.users=2", {"workload.request_rate"}),
        ("workload.prefix_share=0.5 trace.sharing=tree trace.share=0.3", {"trace.sharing", "trace.share"}),
        ("trace.sharing=tree trace.share=0.3 workload.prefix_zipf=2", set()),
        ("workload.num_prefixes=4 trace.ticks=even", {"workload.num_prefixes", "trace.ticks"}),
        ("cache.host_tokens=999", {"cache.host_tokens"}),
        ("cache.host_tokens=999 scheduler.preemption=swap", set()),
        ("measure=true device.kv_efficiency=0.5", {"device.kv_efficiency"}),
        ("measure=true cost.kind=roofline device.kv_efficiency=0.5", set()),
        ("cache.pool_tokens=4096 device.memory_utilization=0.5", {"device.memory_utilization"}),
        ("cache.pool_tokens=null device=h100 device.memory_utilization=0.5", set()),
        ("model=qwen3_30b_a3b cost=published model.expert_skew=1", {"model.expert_skew"}),
        ("model=qwen3_30b_a3b cost=roofline model.expert_skew=1", set()),
    ],
)
def test_a_setting_that_nothing_reads_is_named_for_one_run(words: str, idle: set[str]) -> None:
    settings = [axis.settings[0] for axis in run_request(("measure=false", *words.split())).axes]
    asked = compose_config({one.key: one for one in settings}.values())
    assert idle_keys(settings, asked, normalise(asked)) == idle


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (("device.link_gbs=9", "device.link_round_us=90"), True),
        (("device.link_gbs=9", "device.link_round_us=90", "device.tensor_parallel=4"), False),
        (("device.l2_mib=100", "device.clock_ghz=9"), True),
        (("device.disk_read_gbs=9",), True),
        (("model.query_rank=64",), True),
        (("model.expert_skew=1",), True),
        (("model=mixtral_8x7b", "model.expert_skew=1"), False),
        (("device.frontend_turn_us=900",), False),
    ],
)
def test_what_nothing_reads_at_any_point_is_said_and_keeps_its_value(
    words: tuple[str, ...], idle: bool
) -> None:
    server = ("measure=false", "cost=roofline", "device=h100", "model=llama31_8b")
    asked = {word.partition("=")[0]: word for word in (*server, *words)}
    plan = plan_sweep(sweep_request(tuple(asked.values())), Anything())
    named = [word for word in words if word.partition("=")[0] not in ("model", "device.tensor_parallel")]
    assert list(plan.idle) == (named if idle else [])
    assert [value_of(plan.points[0].config, word.partition("=")[0]) for word in named] == [
        pytest.approx(float(word.partition("=")[2])) for word in named
    ]
