"""Points with drafts, branches that end, widths of the trace's own and recorded beams: both sides decide alike."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from point_cases import azure_file, mooncake_file, small_config, with_trace
from tiers import cases

from engine.core.options import CachePolicy, Decoding, Preemption, SpeculationMode
from harness.config.checks import check_config
from harness.config.compose import normalise
from harness.config.errors import ConfigError
from harness.config.schema import (
    CostKind,
    DecodingMode,
    Figures,
    ReportConfig,
    RunConfig,
    TraceFormat,
    Widths,
)
from harness.point import check_point, point_identity, run_point
from harness.report import write_report
from harness.store.commit import Layout, commit_point, parquet_bytes
from harness.workload.point import resolve


@pytest.fixture(name="config")
def config_fixture(tmp_path: Path) -> RunConfig:
    config = small_config(tmp_path)
    config.cost.kind = CostKind.roofline
    return config


def drafting(config: RunConfig, place: SpeculationMode = SpeculationMode.lookahead) -> RunConfig:
    config.decoding.draft_tokens, config.decoding.draft_place, config.decoding.acceptance = 3, place, 1.0
    return config


def sampling(config: RunConfig, n: int = 3) -> RunConfig:
    config.decoding.mode, config.decoding.n = DecodingMode.sample, n
    return config


def crowded(config: RunConfig) -> RunConfig:
    config.cache.pool_tokens, config.cache.max_model_len, config.workload.request_rate = 320, 256, 5000.0
    return config


def counts(config: RunConfig) -> dict:
    assert not check_config(config)
    return dict(run_point(normalise(config)).record.levels["counts"])


def in_format(config: RunConfig, format_: TraceFormat, folder: Path) -> RunConfig:
    if format_ is TraceFormat.azure:
        config.workload.length_scale = 1.0
        return with_trace(config, format_, azure_file(folder))
    config.workload.length_scale, config.cache.block_size = 0.02, 4
    return with_trace(config, format_, mooncake_file(folder))


@cases("format_", [TraceFormat.azure, TraceFormat.mooncake], day=1)
@cases("place", SpeculationMode, day=2)
def test_drafts_give_identical_plans_on_both_sides(
    place: SpeculationMode, format_: TraceFormat, config: RunConfig, tmp_path: Path
) -> None:
    found = counts(in_format(drafting(config, place), format_, tmp_path))
    assert found["identical"], found


@cases("place", SpeculationMode, day=(SpeculationMode.fork,))
def test_drafts_under_preemption_give_identical_plans(
    place: SpeculationMode, config: RunConfig, tmp_path: Path
) -> None:
    config = in_format(crowded(drafting(config, place)), TraceFormat.azure, tmp_path)
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.measured["median"]["preemptions"] > 0


@pytest.mark.nightly
def test_a_model_that_drafts_for_itself_is_right_and_takes_fewer_steps(config: RunConfig) -> None:
    plain = run_point(config).record
    drafted = run_point(drafting(config)).record
    assert drafted.measured["median"]["steps"] < plain.measured["median"]["steps"]
    assert drafted.simulated["computed_tokens"] == drafted.measured["median"]["computed_tokens"]


@pytest.mark.nightly
@cases("format_", [TraceFormat.azure, TraceFormat.mooncake], day=1)
def test_branches_end_alike_on_both_sides(format_: TraceFormat, config: RunConfig, tmp_path: Path) -> None:
    config = in_format(sampling(config), format_, tmp_path)
    config.decoding.branch_hazard = 0.1
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.simulated["computed_tokens"] == record.measured["median"]["computed_tokens"]
    assert record.outcome["measured"]["finished"] == 16


@pytest.mark.nightly
def test_branches_that_end_under_preemption_give_identical_plans(config: RunConfig, tmp_path: Path) -> None:
    config = in_format(sampling(crowded(config)), TraceFormat.azure, tmp_path)
    config.decoding.branch_hazard = 0.05
    config.cache.pool_tokens, config.cache.host_tokens = 640, 640
    config.scheduler.preemption = Preemption.swap
    record = run_point(config).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.measured["median"]["preemptions"] > 0


def test_tokens_of_ended_branches_are_not_counted_as_generated(config: RunConfig) -> None:
    whole = run_point(replace(sampling(config), measure=False))
    config.decoding.branch_hazard = 0.2
    result = run_point(replace(config, measure=False))
    table = result.tables["requests"]
    assert table["generated"].sum() < (table["output_tokens"] * table["width"]).sum()
    assert (table["generated"] >= table["output_tokens"]).all()  # the longest branch sets a request's length
    sampled = result.tables["steps"]["sampled_rows"].sum()
    assert table["generated"].sum() == sampled + 2 * 16  # the prompt's last row gives three first tokens
    assert table["generated"].sum() < whole.tables["requests"]["generated"].sum()


WIDE = (
    "arrival_s,prompt_tokens,output_tokens,n,best_of,beam_width\n"
    "0,30,12,,,\n0.01,40,9,2,3,\n0.02,35,11,,,4\n0.03,20,8,1,,1\n0.04,50,10,,,2\n0.05,33,7,3,,\n"
)


@pytest.fixture(name="wide")
def wide_fixture(config: RunConfig, tmp_path: Path) -> RunConfig:
    path = tmp_path / "wide.csv"
    path.write_text(WIDE)
    config.workload.length_scale, config.workload.request_rate = 1.0, None
    return with_trace(config, TraceFormat.simple, path)


def forms(config: RunConfig) -> list[tuple[int, Decoding]]:
    requests = [timed.request for timed in resolve(config).requests()]
    return [(request.width, request.decoding) for request in requests]


def test_widths_of_the_trace_reach_the_requests(wide: RunConfig) -> None:
    assert forms(wide) == [
        (1, Decoding.greedy),
        (3, Decoding.sample),
        (4, Decoding.beam),
        (1, Decoding.greedy),
        (2, Decoding.beam),
        (3, Decoding.sample),
    ]
    said = resolve(wide).trace.header.changes[-1]
    assert "widths as recorded" in said
    assert "of which 1 return n of best_of samples: all count as output tokens" in said


def test_widths_of_the_trace_can_be_replaced(wide: RunConfig) -> None:
    wide.workload.widths, wide.decoding.beam_width = Widths.configured, 2
    assert set(forms(wide)) == {(2, Decoding.beam)}
    assert "widths of 5 requests replaced" in resolve(wide).trace.header.changes[-1]


def test_widths_of_the_trace_are_decided_alike_on_both_sides(wide: RunConfig) -> None:
    record = run_point(wide).record
    assert record.levels["counts"]["identical"], record.levels["counts"]
    assert record.outcome["measured"]["finished"] == 6
    assert "computed_tokens" not in record.analytic


@pytest.mark.parametrize("copies", [False, True])
def test_the_closed_form_of_copies_on_write_is_none_of_copies_at_a_fork(
    config: RunConfig, copies: bool
) -> None:
    config.measure, config.cache.pool_tokens, config.workload.request_rate = False, 100_000, 0.01
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3
    config.cost.kind, config.cache.copy_at_fork = CostKind.roofline, copies
    record = run_point(config).record
    names = [name for name in ("copies_per_token", "blocks_allocated") if name in record.analytic]
    assert names == ([] if copies else ["copies_per_token", "blocks_allocated"])
    assert {name: record.analytic[name] for name in names} == pytest.approx(
        {name: record.simulated[name] for name in names}
    )
    assert "hit_tokens" in record.analytic


def test_drafts_go_beside_requests_of_several_sequences(wide: RunConfig) -> None:
    record = run_point(drafting(wide)).record
    assert record.levels["counts"]["identical"], record.levels["counts"]


def test_a_width_that_no_step_takes_is_refused_by_request(wide: RunConfig) -> None:
    wide.scheduler.max_running = 3
    with pytest.raises(ConfigError, match=r"request 2 .*has 4 sequences, a step takes 3.*widths=configured"):
        resolve(wide)


def test_a_width_beyond_the_vocabulary_is_refused_before_anything_runs(wide: RunConfig) -> None:
    wide.model.vocab = 3
    with pytest.raises(ConfigError, match=r"workload.widths: request 2 has 4 sequences, more than .* \(3\)"):
        check_point(wide)


def test_an_absurd_width_is_refused_without_drawing_its_branches(wide: RunConfig) -> None:
    path = Path(str(wide.trace.path))
    path.write_text(WIDE.replace(",2,3,", ",,1000000000,"))
    wide.decoding.branch_hazard = 0.1
    with pytest.raises(ConfigError, match=r"request 1 .*has 1000000000 sequences"):
        resolve(wide)


def test_metrics_without_rows_count_the_tokens_of_ended_branches_alike(config: RunConfig) -> None:
    sampling(config).measure, config.decoding.branch_hazard = False, 0.1
    kept = run_point(config).record.simulated
    config.replay.records = False
    alone = run_point(config).record.simulated
    assert alone["output_throughput"] == pytest.approx(kept["output_throughput"], rel=1e-12)


def test_widths_mean_nothing_to_a_format_that_has_none() -> None:
    one, other = RunConfig(), RunConfig()
    other.workload.widths = Widths.configured
    assert normalise(one) == normalise(other)


@pytest.fixture(scope="module", name="with_beams")
def with_beams_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a measured point with beams."""
    folder = tmp_path_factory.mktemp("recorded")
    config = small_config(folder)
    config.cost.kind, config.decoding.beam_width = CostKind.roofline, 3
    result = run_point(config)
    commit_point(folder / "store", "a" * 32, result.record, result.tables)
    return folder / "store"


@pytest.fixture(name="recorded")
def recorded_fixture(config: RunConfig, with_beams: Path, tmp_path: Path) -> tuple[RunConfig, Path]:
    """The point of `with_beams`, and a copy of its store."""
    config.decoding.beam_width = 3
    shutil.copytree(with_beams, tmp_path / "store")
    return config, tmp_path / "store"


def test_a_prediction_replays_the_beams_that_a_measured_point_recorded(
    recorded: tuple[RunConfig, Path],
) -> None:
    config, store = recorded
    measured = run_point(config).record.measured["median"]
    config.measure = False
    for place in (store, Layout(store).point("a" * 32), Layout(store).table("a" * 32, "parents")):
        config.decoding.beam_parents = str(place)
        predicted = run_point(config).record.simulated
        assert predicted["copies_per_token"] == measured["copies_per_token"] > 0
        assert predicted["blocks_allocated"] == measured["blocks_allocated"]
    config.decoding.beam_parents, config.decoding.beam_churn = None, 0.0
    assert run_point(config).record.simulated["copies_per_token"] < measured["copies_per_token"]


def test_recorded_beams_of_other_widths_are_refused(recorded: tuple[RunConfig, Path]) -> None:
    config, store = recorded
    config.measure, config.decoding.beam_parents, config.decoding.beam_width = False, str(store), 2
    with pytest.raises(ConfigError, match=r"decoding.beam_parents: .* has 2 beams, it recorded parents"):
        check_point(config)


def test_recorded_beams_of_another_trace_are_refused(recorded: tuple[RunConfig, Path]) -> None:
    config, store = recorded
    config.measure, config.decoding.beam_parents, config.workload.num_requests = False, str(store), 20
    with pytest.raises(ConfigError, match=r"decoding.beam_parents: .* no beams of request 16"):
        check_point(config)


def test_a_store_without_beams_is_refused(config: RunConfig, tmp_path: Path) -> None:
    config.measure, config.decoding.beam_width, config.decoding.beam_parents = False, 2, str(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no parents.parquet: only measured points with beams"):
        check_point(config)


@pytest.mark.nightly
def test_recorded_beams_that_differ_are_not_chosen_among(recorded: tuple[RunConfig, Path]) -> None:
    config, store = recorded
    other = run_point(replace(config, model=replace(config.model, seed=3)))
    commit_point(store, "b" * 32, other.record, other.tables)
    config.measure, config.decoding.beam_parents = False, str(store)
    with pytest.raises(ConfigError, match=r"hold different beams; name one of the two"):
        check_point(config)


@pytest.mark.parametrize("content", [b"", b"PAR1 cut", None])
def test_a_recording_that_cannot_be_read_is_refused(
    content: bytes | None, config: RunConfig, tmp_path: Path
) -> None:
    path = tmp_path / "parents.parquet"
    columns = {name: [0.5] for name in ("run", "request_id", "selection", "hypothesis", "parent")}
    path.write_bytes(parquet_bytes(columns) if content is None else content)
    config.measure, config.decoding.beam_width, config.decoding.beam_parents = False, 2, str(path)
    with pytest.raises(
        ConfigError, match=r"decoding.beam_parents: .*(cannot be read|lacks whole numbers in run)"
    ):
        check_point(config)


def test_another_recording_is_another_point(recorded: tuple[RunConfig, Path]) -> None:
    config, store = recorded
    config.measure, config.decoding.beam_parents = False, str(store)
    before = point_identity(config)
    table = Layout(store).table("a" * 32, "parents")
    table.write_bytes(table.read_bytes() + b" ")
    assert point_identity(config) != before


def test_a_roofline_refuses_drafts_whose_acceptance_nobody_knows(config: RunConfig) -> None:
    config.measure, config.decoding.draft_tokens = False, 2
    with pytest.raises(ConfigError, match=r"decoding.acceptance: missing"):
        check_point(config)


def test_a_draft_model_that_is_no_checkpoint_is_refused(config: RunConfig, tmp_path: Path) -> None:
    drafting(config).decoding.draft_path = str(tmp_path)
    with pytest.raises(ConfigError, match=r"decoding.draft_path: .*config.json"):
        check_point(config)


@pytest.mark.nightly
def test_a_contiguous_cache_takes_drafts(config: RunConfig) -> None:
    config.cache.policy = CachePolicy.contiguous_max
    assert counts(drafting(config))["identical"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"draft_tokens": 2, "beam_width": 3},
            "decoding.draft_tokens: found 2, but a request has 3 sequences",
        ),
        ({"draft_tokens": 512}, "decoding.draft_tokens: found 512, must be less than"),
        ({"branch_hazard": 1.0}, "decoding.branch_hazard: found 1.0, must be 0 or greater and less than 1"),
        ({"acceptance": 1.5}, "decoding.acceptance: found 1.5, must be 0 or greater and at most 1"),
        ({"beam_parents": "no/such"}, "decoding.beam_parents: no such file or folder: 'no/such'"),
        (
            {"beam_parents": ".", "beam_churn": 0.5},
            "decoding.beam_churn: found 0.5, but decoding.beam_parents",
        ),
    ],
)
def test_options_of_decoding_that_contradict_are_refused_by_key(change: dict, message: str) -> None:
    config = RunConfig()
    config.decoding = replace(config.decoding, **change)
    assert any(str(error).startswith(message) for error in check_config(config))


def test_forked_drafts_in_contiguous_memory_are_refused_by_key() -> None:
    config = drafting(RunConfig(), SpeculationMode.fork)
    config.cache.policy = CachePolicy.contiguous_oracle
    assert [error.key for error in check_config(config)] == ["decoding.draft_place"]


def test_options_that_do_not_apply_make_no_other_point() -> None:
    one, other = RunConfig(), RunConfig()
    other.decoding.acceptance, other.decoding.branch_hazard = 0.5, 0.1
    other.decoding.draft_place, other.decoding.beam_parents = SpeculationMode.fork, "somewhere"
    assert normalise(one) == normalise(other)


@pytest.mark.nightly
def test_a_curve_has_room_for_a_metric_without_a_figure(config: RunConfig, tmp_path: Path) -> None:
    """A metric may have no figure at any point, as time per token where every answer has one token."""
    for drafts in (1, 2, 4):
        drafting(config).decoding.draft_tokens, config.measure = drafts, False
        result = run_point(config)
        rows = [row for row in result.record.comparison if row["metric"] != "tpot_p50"]
        which = {"config": asdict(config), "overrides": [f"decoding.draft_tokens={drafts}"]}
        record = replace(result.record, **which, comparison=rows)
        commit_point(tmp_path / "store", f"{drafts:032d}", record, result.tables)
    page = write_report(tmp_path / "store", options=ReportConfig(figures=Figures.svg))
    assert "no figure at these points" in page.read_text(encoding="utf-8")
