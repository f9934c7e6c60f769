"""The scoreboard's choice of runs, its page and its command."""

import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.cli.main import main
from harness.config.errors import ConfigError
from harness.config.schema import CostKind
from harness.scoreboard.board import counted, write_csv, write_page
from harness.scoreboard.fidelity import log_rows
from harness.scoreboard.published_runs import (
    PublishedRun,
    _check_batch,
    _obstacle,
    read_runs,
    sample,
    simulated,
)
from harness.twin.prediction import Errors
from harness.twin.reading import read_engine_log


def run(name: str, users: int, parallel: int = 1, model: str = "a/model") -> PublishedRun:
    return PublishedRun(
        name=name,
        model=model,
        engine="vllm",
        system="h100_sxm",
        precision="bf16",
        isl=1024,
        osl=1024,
        users=users,
        parallel=parallel,
        expert_parallel=False,
        weights=None,
        expert_weights=None,
        kv=None,
        drawn=True,
        ttft_ms=100.0,
        tpot_ms=10.0,
    )


RUNS = [run(f"r{users}", users) for users in (64, 4, 16, 32, 8)] + [run("wide", 4, parallel=8)]


def test_the_sample_takes_the_most_frequent_number_of_devices_and_spans_the_users() -> None:
    assert [row.users for row in sample(RUNS, 3)] == [4, 16, 64]


def test_the_sample_does_not_depend_on_the_order_of_the_file() -> None:
    assert sample(RUNS, 2) == sample(RUNS[::-1], 2)


def test_every_group_is_sampled() -> None:
    assert {row.model for row in sample([*RUNS, run("other", 4, model="b/model")], 1)} == {
        "a/model",
        "b/model",
    }


def test_a_sample_of_0_is_all_runs() -> None:
    assert len(sample(RUNS, 0)) == len(RUNS)


def row(name: str, cost: str, tpot: float) -> dict[str, object]:
    return {
        "run": name,
        "model": "a/model",
        "engine": "vllm",
        "device": "h100_sxm",
        "precision": "bf16",
        "cost": cost,
        "ttft_ms": 1.0,
        "tpot_ms": 1.0,
        "ttft_error": -0.5,
        "tpot_error": tpot,
    }


@pytest.fixture
def page(tmp_path: Path) -> str:
    runs = [row("x", "roofline", -0.1), row("y", "roofline", 0.3), row("z", "roofline", -0.2)]
    runs.append(row("x", "published", 0.04))
    runs.append(
        {"run": "y", "model": "a/model", "device": "h100_sxm", "cost": "published", "not priced": "no table"}
    )
    written = write_page(
        tmp_path,
        {"runs": runs, "attention": [], "not_simulated": list(counted({"disaggregated": 7, "never": 0}))},
        command="python -m harness scoreboard --each 2",
        version="0.12.0",
        each=2,
    )
    assert (tmp_path / "tpot.svg").stat().st_size > 1000
    return written.read_text(encoding="utf-8")


def test_the_page_has_median_bias_and_worst_of_each_cost_model(page: str) -> None:
    assert "| roofline | 3 | 0 | 20.0 % | -10.0 % | +30.0 % |" in page


def test_the_page_compares_both_models_on_the_runs_that_both_price(page: str) -> None:
    assert "| roofline, runs that both price | 1 |  | 10.0 % | -10.0 % | -10.0 % |" in page


def test_the_page_says_what_is_not_priced_and_why(page: str) -> None:
    assert "| published on a/model, h100_sxm: no table | 1 |" in page
    assert "| disaggregated | 7 |" in page


def test_the_page_counts_the_rows_of_the_file(page: str) -> None:
    assert "has 10 runs of a closed loop" in page


def test_the_page_says_that_narrow_arithmetic_is_not_priced(page: str) -> None:
    assert "does not price 8- and 4-bit arithmetic" in page


def test_the_roofline_refuses_a_published_run_of_8_bit_arithmetic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024}
    facts = {"model_type": "llama", "vocab_size": 1000, "max_position_embeddings": 4096, **shape}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    monkeypatch.setattr("harness.scoreboard.published_runs.checkpoint_of", lambda _: str(tmp_path))
    with pytest.raises(ConfigError, match="arithmetic of 8 and 4 bits"):
        simulated(replace(RUNS[0], weights="fp8"), CostKind.roofline)


def test_a_deployment_on_a_preset_that_was_rounded_from_a_fit_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("harness.scoreboard.fidelity.KINDS", (CostKind.roofline,))
    monkeypatch.setattr("harness.scoreboard.fidelity.fit_log", lambda log, _: (log, None, _fit_of_nothing()))
    recorded = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"
    (unfitted, _), _ = log_rows(read_engine_log(recorded), ("device=rtx_pro_6000",))
    assert "compute_efficiency of the preset is rounded from a fit" in unfitted["fit"]


def _fit_of_nothing() -> SimpleNamespace:
    """The recorded excerpt is too short for a fit; its row is not what is looked at."""
    return SimpleNamespace(which="no requests", kept=True, held_out=Errors(0, 0, 0, 0, 0))


def test_a_csv_has_the_columns_of_all_rows(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"a": 1}, {"a": 2, "b": "x"}])
    assert (tmp_path / "a.csv").read_text() == "a,b\n1,\n2,x\n"


def test_without_the_extra_the_command_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("harness.cost.published.metadata.version", version)
    assert main(["scoreboard", "--out", str(tmp_path)]) == 2
    assert "pip install '.[gpu-tables]'" in capsys.readouterr().err


RUN = {
    "mode": "agg",
    "system": "h100_sxm",
    "pp_size": "1",
    "attention_dp_size": "1",
    "tp_size": "2",
    "batch_size": "13",
    "silicon_data_source": "silicon_concurrency=416",
    "silicon_ttft_ms": "700",
    "silicon_tpot_ms": "13",
    "model_path": "a/model",
}


def test_a_row_of_several_replicas_is_refused_by_name() -> None:
    """416 users on a batch of 13 are 32 replicas; on one engine the row would be predicted 8 times too slow."""
    assert "several replicas" in _obstacle(RUN)


def test_a_row_whose_engine_ran_a_fraction_of_its_users_is_refused_by_name() -> None:
    """512 users wait 20 s and get 1,024 tokens in 4.8 s: 99 of them at once, in steps of 180 tokens."""
    limited = replace(RUNS[0], users=512, ttft_ms=19_977.0, tpot_ms=4.7)
    with pytest.raises(ConfigError, match="far fewer requests at once than there is room for"):
        _check_batch(limited, pool_tokens=3_000_000)


def test_a_row_whose_users_wait_for_a_small_pool_is_kept() -> None:
    """The simulation has the same pool, so that its users wait as well."""
    _check_batch(replace(RUNS[0], users=512, ttft_ms=19_977.0, tpot_ms=4.7), pool_tokens=200_000)


def test_a_row_whose_steps_are_full_of_prompts_is_kept() -> None:
    """The longest prompts and the shortest answers: users wait for prompts of others, as they do in the simulation."""
    full = replace(RUNS[0], users=64, isl=8192, osl=32, ttft_ms=40_000.0, tpot_ms=650.0)
    _check_batch(full, pool_tokens=3_000_000)


def test_a_row_without_a_queue_is_kept() -> None:
    _check_batch(RUNS[0], pool_tokens=3_000_000)


class TestInstalled:
    """Against the package itself; it is an optional extra."""

    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("aiconfigurator_core", reason="needs pagetwin[gpu-tables]")

    def test_every_row_of_the_file_is_a_run_or_has_a_reason(self) -> None:
        runs, reasons = read_runs()
        assert len(runs) + sum(reasons.values()) == 5221  # rows of silicon_sample.csv in 0.12.0

    def test_a_published_run_is_predicted_within_a_fifth(self) -> None:
        chosen = [
            row
            for row in read_runs()[0]
            if row.model == "meta-llama/Llama-3.1-70B"
            and (row.engine, row.system, row.parallel) == ("vllm", "h100_sxm", 2)
            and (row.isl, row.osl, row.users) == (1024, 1024, 4)
        ]
        assert chosen
        assert simulated(chosen[0], CostKind.published).tpot_ms == pytest.approx(chosen[0].tpot_ms, rel=0.2)

    def test_a_checkpoint_with_block_scales_has_the_kernels_for_blocks(self) -> None:
        """Rows of vLLM call it fp8, whose kernels take five times as long in the tables."""
        rows = [
            row for row in read_runs()[0] if row.model == "Qwen/Qwen3-235B-A22B-FP8" and row.engine == "vllm"
        ]
        assert {(row.weights, row.expert_weights) for row in rows} == {("fp8_block", "fp8_block")}

    def test_a_run_that_cannot_have_computed_its_prompts_is_refused(self) -> None:
        """112 users with prompts of 1,000 tokens on one H200 in 1.19 s each: 94,000 prompt tokens a second."""
        rows = [row for row in read_runs()[0] if row.model == "nvidia/Llama-3.1-8B-Instruct-FP8"]
        run = next(row for row in rows if (row.engine, row.users, row.isl) == ("vllm", 112, 1000))
        with pytest.raises(ConfigError, match="did not compute all prompts"):
            simulated(run, CostKind.roofline)

    def test_the_runs_of_an_engine_with_a_smaller_limit_are_refused(self) -> None:
        """About 100 of the 512 users get tokens at once in all eight rows, on two, four and eight H100."""
        rows = [
            row
            for row in read_runs()[0]
            if (row.model, row.engine, row.system) == ("openai/gpt-oss-120b", "vllm", "h100_sxm")
        ]
        run = next(row for row in rows if (row.users, row.isl, row.parallel) == (512, 8192, 4))
        with pytest.raises(ConfigError, match="Little's law"):
            simulated(run, CostKind.roofline)
