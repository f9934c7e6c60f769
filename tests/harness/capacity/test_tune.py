"""The best cell of a grid with few measurements, beside grids of which every cell was measured.

`tests/data/measured_grids.json` has three grids of 48 cells of tiny-llama on engine=cpu, three runs each, on a busy
machine: predicted figures of each cell, and those of each run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import cases

from harness.capacity.slo import parse_slo
from harness.capacity.tune import Tuned, regret_words, score, scores_of, tune
from harness.cli.main import main
from harness.cli.workload import case_of
from harness.config.errors import UserError
from harness.config.schema import ReplayMode

GRIDS = json.loads((Path(__file__).parents[2] / "data" / "measured_grids.json").read_text())
SLOS = ("output_throughput>1", "ttft_p50<0.05,tpot_mean<0.005", "e2e_p90<1")
BEYOND = 0.03  # of the best cell, above the noise


def tuned(grid: str, slo_text: str, most: int = 8) -> tuple[Tuned, Any]:
    """What is chosen, and the median score of each cell."""
    slo, cells = parse_slo(slo_text), GRIDS["grids"][grid]

    def scored(figures: list[float]) -> float:
        return score(slo, dict(zip(GRIDS["metrics"], figures, strict=True)))

    runs = [[scored(one) for one in cell["runs"]] for cell in cells]
    predicted = [scored(cell["predicted"]) for cell in cells]
    found = tune([cell["values"] for cell in cells], predicted, lambda place: runs[place], most)
    return found, np.array([np.median(each) for each in runs])


@pytest.mark.nightly
@cases("slo", SLOS, day=1)
@cases("grid", GRIDS["grids"], day=1)
def test_the_choice_of_few_measured_cells_is_as_good_as_it_says(grid: str, slo: str) -> None:
    found, true = tuned(grid, slo)
    regret = true[found.place] / true.min() - 1
    assert len(true) >= 48
    assert len(found.cells) <= 8
    assert regret <= max(found.regret, found.noise)
    assert regret <= BEYOND + found.noise


@pytest.mark.nightly
def test_another_kind_of_cpu_measures_the_same_cells() -> None:
    script = (
        "import test_tune; print([cell.place for cell in test_tune.tuned('mooncake', 'e2e_p90<1')[0].cells])"
    )
    folders = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    found = {
        subprocess.check_output(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": folders, "OPENBLAS_CORETYPE": kind},
        )
        for kind in ("Haswell", "Nehalem")
    }
    assert len(found) == 1


def test_no_cell_is_measured_twice_and_no_more_than_asked() -> None:
    found, _ = tuned(next(iter(GRIDS["grids"])), "e2e_p90<1", most=2)
    assert len({cell.place for cell in found.cells}) == len(found.cells) == 2


def test_one_cell_that_is_left_is_the_best() -> None:
    found = tune([["16"]], [1.0], lambda _: [1.0, 1.1], 3)
    assert (found.place, found.regret, len(found.cells)) == (0, 0.0, 1)


@pytest.mark.parametrize("figures", [{"queue_mean": 0.0}, {}])
def test_a_run_whose_figure_is_missing_or_0_is_refused(figures: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--slo: somewhere there is no queue_mean, or it is 0"):
        scores_of(parse_slo("queue_mean<1"), [{"queue_mean": 0.1}, figures])


def test_a_prediction_that_is_wrong_by_a_factor_is_corrected_by_the_first_cells() -> None:
    predicted = [1.0, 1.1, 1.2, 1.3]
    found = tune([("a",), ("b",), ("c",), ("d",)], predicted, lambda place: [3 * predicted[place]] * 3, 4)
    assert (found.place, len(found.cells)) == (0, 3)
    assert found.regret < 0.05


@pytest.mark.nightly
def test_cells_that_are_all_equal_are_known_to_be() -> None:
    """As throughput where the arrivals set it."""
    values = [cell["values"] for cell in next(iter(GRIDS["grids"].values()))]
    draw = np.random.default_rng(1)
    predicted = np.exp(draw.normal(0, 0.001, len(values))).tolist()

    def measure(place: int) -> list[float]:
        return list(predicted[place] * np.exp(draw.normal(0.05, 0.0005, 3)))

    found = tune(values, predicted, measure, 8)
    assert found.known
    assert found.regret < 0.01


@pytest.mark.nightly
def test_a_value_that_is_worse_than_predicted_sends_the_search_elsewhere() -> None:
    values = [(axis, other) for axis in "ab" for other in range(6)]
    predicted = [1.0 + 0.01 * other + 0.1 * (axis == "b") for axis, other in values]
    true = [each * (1.5 if axis == "a" else 1.0) for each, (axis, _) in zip(predicted, values, strict=True)]
    found = tune(values, predicted, lambda place: [true[place]] * 3, 8)
    assert values[found.place] == ("b", 0)


def test_a_regret_of_throughput_is_a_share_of_what_the_best_cell_has() -> None:
    """The score is a bound over the figure, so a regret of a quarter is four fifths of the best figure."""
    found = Tuned(0, (), 0.25, 0.0)
    (more,), (less,) = parse_slo("output_throughput>1"), parse_slo("e2e_p90<1")
    assert regret_words(found, more) == "in 95 of 100 cases its output_throughput is at most 20.0 % below"
    assert regret_words(found, less) == "in 95 of 100 cases its e2e_p90 is at most 25.0 % above"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--measure", "3"), "needs a grid"),
        (("--measure", "0", "cache.block_size=8,16"), "at least 1 cell"),
        (("--measure", "3", "cache.block_size=8,16", "measure=false"), "leave out measure=false"),
        (
            ("--measure", "3", "cache.block_size=8,16", "replay.repeats=1"),
            "replay.repeats must be at least 2",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,20,5\n0.1,30,6\n")
    assert main(["advise", str(trace), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_client_that_the_user_names_sends_the_requests(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,20,5\n0.1,30,6\n")
    found = case_of(trace, ["replay=closed"], parse_slo("tpot_mean<1")).case
    assert found.config.replay.mode is ReplayMode.closed
