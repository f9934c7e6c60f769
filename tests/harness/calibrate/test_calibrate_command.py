"""`python -m harness calibrate` from end to end, on a model so small that every case fits a short budget."""

import json
from pathlib import Path

import numpy as np
import pytest
from point_cases import TICKS_S, small_config, tick

from harness.calibrate.store import load_calibration, load_table
from harness.cli.main import main
from harness.config.schema import CostKind, RunConfig
from harness.cost.fitted import FittedCost
from harness.measure.cases import CASES, DRAFTING
from harness.point import run_point
from harness.replay.features import FEATURES
from harness.workload.deployment import deployment_of

WORDS = (
    *("calibrate", "model.layers=1", "model.hidden=64", "model.intermediate=128", "model.vocab=512"),
    *("model.heads=4", "model.kv_heads=2", "model.head_dim=16"),
)


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibration")


@pytest.fixture(scope="module", name="printed")
def printed_fixture(folder: Path) -> str:
    """What the command says; the calibration lies in `folder`."""
    import contextlib
    import io

    out = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
    ):
        tick(patch)
        code = main([*WORDS, "--budget", str(TICKS_S), f"cost.cache_dir={folder}", "decoding.draft_tokens=3"])
    assert code == 0, out.getvalue()
    return out.getvalue()


def document(folder: Path) -> dict:
    (file,) = folder.glob("*.json")
    return dict(json.loads(file.read_text()))


def configured(folder: Path) -> RunConfig:
    config = small_config(folder)
    config.decoding.draft_tokens = 3
    return config


def test_the_command_prints_the_errors_on_what_it_held_out(printed: str) -> None:
    assert "error on steps held out" in printed
    assert "Azure code, open loop" in printed
    assert "kept in" in printed


def test_every_term_has_a_coefficient_and_none_is_negative(printed: str, folder: Path) -> None:
    coefficients = document(folder)["coefficients_s"]
    assert set(coefficients) == set(FEATURES)
    assert min(coefficients.values()) >= 0
    assert max(coefficients[name] for name in ("step", "tokens", "tokens_to_8", "decode_steps")) > 0


def test_swaps_and_draft_passes_are_among_what_is_measured(printed: str, folder: Path) -> None:
    """Their prices are those of a few noisy steps and may be zero; `test_swap_cost.py` fits known ones."""
    measured = {entry.partition(":")[0] for entry in document(folder)["provenance"]["cases"]}
    assert measured == {case.name for case in (*CASES, *DRAFTING)}
    assert {(case.swaps, case.drafts > 0) for case in (*CASES, *DRAFTING)} >= {(True, False), (False, True)}


def test_a_model_that_drafts_for_itself_is_found_to_be_right(printed: str, folder: Path) -> None:
    assert document(folder)["draft_acceptance"] == 1.0


def test_the_file_says_where_its_numbers_come_from(printed: str, folder: Path) -> None:
    found = document(folder)
    facts = found["provenance"]
    assert {"device", "clock", "cases", "yardstick_s", "started", "seconds", "stability"} <= set(facts)
    assert facts["steps_fitted"] > 100
    assert found["heldout"]["step"]["n"] > 10
    assert all(
        np.isfinite(error["error"]) for metrics in found["validation"].values() for error in metrics.values()
    )


def test_a_sweep_finds_the_calibration_again(printed: str, folder: Path) -> None:
    cost = load_calibration(deployment_of(configured(folder)))
    assert isinstance(cost, FittedCost)
    assert min(cost.price([1.0] * len(FEATURES))) > 0


def test_a_measured_point_with_drafts_is_predicted_by_it(printed: str, folder: Path) -> None:
    config = configured(folder)
    config.cost.kind = CostKind.fitted
    record = run_point(config).record
    assert len(list(folder.glob("*.json"))) == 1  # nothing was calibrated anew
    assert record.levels["counts"]["identical"]
    assert record.simulated["steps"] == pytest.approx(record.measured["median"]["steps"], rel=0.5)


def test_a_table_is_there_if_time_was_left_for_it(printed: str, folder: Path) -> None:
    if "no time was left" in printed:
        assert not document(folder)["grids"]
    else:
        assert len(load_table(deployment_of(configured(folder))).decode.seconds)
