"""Published figures: every file can run, verdicts follow from the values, and stopped work goes on."""

import json

import pytest
from tiers import cases

from harness import point
from harness.cli.main import main
from harness.config.errors import UserError
from harness.config.groups import REPRODUCE, conf_dir, options
from harness.papers.reproduce import Bar, Experiment, JudgedBar, Result, experiment, run_experiment
from harness.papers.reproduce_page import kept
from harness.papers.sizes import memory, pages
from harness.sweep.plan import plan_sweep, run_request

KEPT = conf_dir().parent / "results" / "reference" / "papers" / "results.json"
TINY = (
    "measure=false",
    "workers=1",
    "model=tiny_llama",
    "device=h100",
    "cost=roofline",
    "workload.num_requests=4",
    "workload.length_scale=0.05",
    "cache.max_model_len=1024",
)


def figure(**changes: object) -> Experiment:
    values = {
        "grids": {"all": ["cache=paged,contiguous_max"]},
        "bars": (
            Bar("paged", 1.0, value=("all", ("cache=paged",), "finished")),
            Bar(
                "ratio",
                1.0,
                value=("all", ("cache=paged",), "finished"),
                over=("all", ("cache=contiguous_max",), "finished"),
            ),
        ),
        **changes,
    }
    return Experiment("tiny", "Fig. 0", "a tiny figure", "nobody", "No data.", base=TINY, **values)


def result_of(bars: list[tuple[float, float]], **changes: object) -> Result:
    judged = tuple(JudgedBar(Bar("a", printed), ours) for printed, ours in bars)
    return Result(figure(**changes), judged, {}, 0, 0.0)


@cases("name", options(REPRODUCE), day=3)
def test_every_point_of_a_figure_can_be_planned(name: str) -> None:
    found = experiment(name)
    for grid in found.grids.values():
        assert plan_sweep(run_request([*found.base, *grid]), point).points
    assert found.bars or found.curves or found.needs or found.not_comparable


@pytest.mark.parametrize("name", options(REPRODUCE))
def test_every_bar_names_a_grid_or_a_value(name: str) -> None:
    found = experiment(name)
    for bar in found.bars:
        assert (bar.value is not None and bar.value[0] in found.grids) or bar.take


@pytest.mark.parametrize("name", options(REPRODUCE))
def test_no_text_is_left_to_be_filled_in(name: str) -> None:
    assert "REASON" not in (conf_dir() / "reproduce" / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("printed", "ours", "error"),
    [
        (10.0, 11.0, 0.1),
        (10.0, 9.0, -0.1),
        ((2.0, 4.0), 3.0, 0.0),
        ((2.0, 4.0), 5.0, 0.25),
        ((2.0, 4.0), 1.0, -0.5),
    ],
)
def test_an_error_is_relative_to_the_value_or_the_nearer_end(printed, ours: float, error: float) -> None:
    assert JudgedBar(Bar("a", printed), ours).error == pytest.approx(error)


def test_all_values_within_the_bound_are_reproduced() -> None:
    assert result_of([(10, 10.9), (5, 4.6)]).verdict == "reproduced: all 2 values within 10 %"


def test_a_value_beyond_it_comes_with_the_reason() -> None:
    assert result_of([(10, 12.0), (5, 5)], reason="shorter lengths").verdict == (
        "1 of 2 values within 10 %: shorter lengths"
    )


def test_a_fitted_value_does_not_count() -> None:
    fitted = JudgedBar(Bar("a", 10, fitted=True), 10)
    said = Result(figure(), (fitted, JudgedBar(Bar("b", 10), 20)), {}, 0, 0.0).verdict
    assert said.startswith("0 of 1 values within 10 % (1 more were fitted to the paper and prove nothing)")


def test_a_fitted_value_that_misses_is_said() -> None:
    fitted = JudgedBar(Bar("a", 30.42, fitted=True), 37.25)
    said = Result(figure(), (fitted, JudgedBar(Bar("b", 10), 10)), {}, 0, 0.0).verdict
    assert "prove nothing, though 1 of them are off by more" in said
    rows = kept(Result(figure(), (fitted,), {}, 0, 0.0)).bars
    assert [row["error"] for row in rows] == ["fitted, +22.5 %"]


def test_a_range_that_is_met_is_said_apart() -> None:
    ranged = Result(figure(), (JudgedBar(Bar("a", (5, 50)), 20), JudgedBar(Bar("b", 10), 10)), {}, 0, 0.0)
    assert "(1 of them inside a printed range, which is no agreement to a number)" in ranged.verdict
    assert [bar["error"] for bar in kept(ranged).bars] == ["in the range", "+0.0 %"]


def test_a_kernel_needs_a_gpu() -> None:
    assert experiment("sosp23_fig18a").needs.startswith("a GPU")
    assert not experiment("sosp23_fig18a").bars


def test_a_figure_runs_its_points_and_not_again(tmp_path) -> None:
    first = run_experiment(figure(), tmp_path, point, lambda text: None)
    assert [one.ours for one in first.bars] == [4.0, 1.0]
    done = [json.loads(file.read_text())["seconds"] for file in tmp_path.rglob("record.json")]
    assert first.seconds == pytest.approx(sum(one["point"] for one in done))  # which holds that of simulating

    class Refusing:
        check_point, point_identity = point.check_point, point.point_identity

        @staticmethod
        def run_point(*_: object, **__: object) -> None:
            raise AssertionError("a finished point ran again")

    again = run_experiment(figure(), tmp_path, Refusing, lambda text: None)
    assert again.bars == first.bars


def test_a_bar_that_fits_no_single_point_is_refused(tmp_path) -> None:
    wrong = figure(bars=(Bar("a", 1.0, value=("all", (), "finished")),))
    with pytest.raises(UserError, match="2 points of the grid all have"):
        run_experiment(wrong, tmp_path, point, lambda text: None)


def test_pages_of_a_driver_are_blocks_of_32_to_128_tokens() -> None:
    found = pages({"a": (32, 4, 2), "b": (32, 8, 1)}, [64])
    assert (found["fewest_tokens_64"], found["most_tokens_64"]) == (32, 128)


def test_the_slots_of_table_1() -> None:
    found = memory({"opt_13b": 12}, "opt_13b", 40)
    assert found["slots_opt_13b"] == 15_728
    assert found["weights_percent"] == pytest.approx(64.2, abs=0.1)


def test_a_pool_as_large_as_the_device_is_all_of_it() -> None:
    assert memory({"opt_13b": 12}, "opt_13b", 12 * 2**30 / 1e9)["kv_percent"] == pytest.approx(100)


def test_the_list_names_every_figure(capsys) -> None:
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in options(REPRODUCE))


def test_an_unknown_figure_is_refused_with_those_that_exist(capsys) -> None:
    assert main(["reproduce", "fig99"]) == 2
    assert "no figure 'fig99'; choose one of" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_later_figure_is_added_to_the_page(tmp_path, capsys) -> None:
    places = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    assert main(["reproduce", "vattention_table8", *places]) == 0
    assert main(["reproduce", "sosp23_fig01", *places]) == 0
    assert "all 6 values within 10 %" in capsys.readouterr().out
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.index("sosp23_fig01") < page.index("vattention_table8")
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| 64 KB most waste, MB | 15 | 15 | +0.0 % |" in readme
    assert "Not run yet: jenga, " in readme
    assert "](vattention_table8.svg)" in readme
    assert (tmp_path / "out" / "vattention_table8.svg").stat().st_size > 1000


def test_a_damaged_result_is_refused(tmp_path, capsys) -> None:
    (tmp_path / "results.json").write_text("[1]", encoding="utf-8")
    assert main(["reproduce", "vattention_table8", "--out", str(tmp_path), "--runs", str(tmp_path)]) == 2
    assert "results.json cannot be read" in capsys.readouterr().err


def test_the_kept_results_are_of_the_figures_as_they_are() -> None:
    kept = {row["name"]: row for row in json.loads(KEPT.read_text(encoding="utf-8"))}
    assert kept.keys() <= set(options(REPRODUCE))
    assert len(kept) > 5
    for name, row in kept.items():
        found = experiment(name)
        printed = [
            f"{bar.printed[0]:g} to {bar.printed[1]:g}"
            if isinstance(bar.printed, tuple)
            else f"{bar.printed:g}"
            for bar in found.bars
        ]
        assert [bar["printed"] for bar in row["bars"]] == printed
        assert [bar["error"].startswith("fitted") for bar in row["bars"]] == [
            bar.fitted for bar in found.bars
        ]
