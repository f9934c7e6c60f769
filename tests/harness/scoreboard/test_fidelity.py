"""The page of fidelity: the readers of public deployments, and what the page says of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import UserError
from harness.config.schema import CostKind
from harness.scoreboard import accelmark, stage_table
from harness.scoreboard.board import write_fidelity
from harness.scoreboard.fidelity import by_load, fidelity, log_rows
from harness.twin.reading import EngineLogError, read_engine_log
from traces.errors import TraceError
from traces.trace import ClientKind

SHARED = {
    "enable_multi_turn_chat": True,
    "num_unique_system_prompts": 2,
    "num_users_per_system_prompt": 3,
    "output_len": 8,
    "question_len": 40,
    "system_prompt_len": 32,
}
SPECIFICATION = {
    "id": "7",
    "model": "meta-llama/Llama-2-7b-hf",
    "hardware": "H100",
    "tp": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "total_kv_blocks": 400,
    "workload": {
        "inference_perf": {
            "shared_prefix": SHARED,
            "stages": [{"rate": 2, "duration": 10}, {"rate": 3, "duration": 10}],
        }
    },
}


def table_folder(folder: Path, **facts: Any) -> Path:
    table = folder / "table"
    table.mkdir()
    (table / "specifications.json").write_text(json.dumps({"experiments": [SPECIFICATION | facts]}, indent=1))
    (table / "measured_by_stage.csv").write_text(
        "folder,stage_index,e2e_mean,e2e_p90,e2e_p99,ttft_mean\n"
        "7-llama,-1,99,99,99,99\n7-llama,0,100,110,120,20\n7-llama,1,200,210,220,40\n"
    )
    (table / "predictions_of_others.csv").write_text(
        "simulator,experiment,stage_index,metric_name,predicted\n"
        "other,7,0,e2e_mean,150\nother,7,1,ttft_mean,20\nother,7,1,itl_mean,1\nother,8,0,e2e_mean,1\n"
    )
    return table


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return table_folder(tmp_path)


def test_prompts_of_a_stage_repeat_whole_or_share_their_system_prompt_alone(table: Path) -> None:
    (run,) = stage_table.read_staged_runs(table)
    keys = {
        whole: [tuple(part.key for part in row.segments) for row in run.trace(whole_prompts=whole).requests]
        for whole in (True, False)
    }
    assert len(set(keys[True])) == 6
    assert [key[0] for key in keys[False]] == [key[0] for key in keys[True]]
    assert {key[1] for key in keys[False]} == {None}


def test_a_stage_has_its_requests_within_its_time(table: Path) -> None:
    (run,) = stage_table.read_staged_runs(table)
    sent = [row.arrival_us / 1e6 for row in run.trace(whole_prompts=True).requests]
    assert [run.stage_of(place) for place in (0, 19, 20, 49)] == [0, 0, 1, 1]
    assert len(sent) == 50
    assert sent[19] == pytest.approx(10.0)
    assert sent[49] == pytest.approx(80.0)


def test_the_rows_have_the_errors_of_all_simulators_by_stage(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_table, "_PREDICTIONS", ((stage_table.OURS, "cost=roofline", True),))
    rows = stage_table.stage_rows(table, lambda _: None)
    assert [(row["stage"], row["figure"], row.get("other")) for row in rows[:1]] == [(0, "e2e_mean", 0.5)]
    assert all(stage_table.OURS in row for row in rows)
    shared = stage_table.compared(rows, stage_table.OURS)
    assert [(row["figure"], row["rows"], row["its median"]) for row in shared] == [
        ("all", 2, 0.5),
        ("e2e_mean", 1, 0.5),
        ("ttft_mean", 1, 0.5),
    ]


def test_a_measured_stage_that_is_not_specified_is_refused(table: Path) -> None:
    with (table / "measured_by_stage.csv").open("a") as file:
        file.write("7-llama,2,200,210,220,40\n")
    with pytest.raises(UserError, match=r"has stage 2 of 7, which specifications\.json has not"):
        stage_table.read_staged_runs(table)


def test_a_specification_without_a_length_is_placed(tmp_path: Path) -> None:
    shared = {key: value for key, value in SHARED.items() if key != "question_len"}
    workload = {"inference_perf": {"shared_prefix": shared, "stages": []}}
    with pytest.raises(TraceError, match=r"experiments\[0\]\.workload\.inference_perf\.shared_prefix"):
        stage_table.read_staged_runs(table_folder(tmp_path, workload=workload))


def levels(**changes: Any) -> dict[str, Any]:
    requests = [
        {"success": True, "prompt_len": 9, "ttft_ms": 20.0, "total_ms": 100.0 + place, "output_tokens": 5}
        for place in range(12)
    ]
    document = {
        "scenario_name": "ramp",
        "engine_name": "VLLMClient",
        "requests": requests,
        "engine_metrics_timeline": [],
        "scenario_config": {"concurrency_levels": [1, 4], "requests_per_level": 6},
        "run_metadata": {"model": "meta-llama/Llama-3.1-8B-Instruct"},
    }
    return document | changes


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "ramp.json"
    path.write_text(json.dumps(document, indent=1))
    return path


def test_requests_of_one_prompt_id_have_one_prompt(tmp_path: Path) -> None:
    document = levels()
    for place, row in enumerate(document["requests"]):
        row["prompt_id"] = f"text {place % 2}"
    first, second, third, *_ = read_engine_log(written(tmp_path, document)).workload.requests
    assert first.segments == third.segments != second.segments


def test_each_place_of_a_level_sends_after_its_answer(tmp_path: Path) -> None:
    log = read_engine_log(written(tmp_path, levels()))
    assert log.settings.model == "meta-llama/Llama-3.1-8B-Instruct"
    assert log.settings.engine == "vllm"
    assert log.workload.header.client.kind is ClientKind.multi_turn
    starts = log.requests.arrival_s
    assert starts[:6] == pytest.approx([0.0, 0.104, 0.209, 0.315, 0.422, 0.53])  # 4 ms after each answer
    assert starts[6:10] == pytest.approx([0.635] * 4)
    assert starts[10] == pytest.approx(0.635 + 0.106 + 0.004)
    assert any("counts words" in note for note in log.notes)


def test_levels_that_do_not_hold_the_requests_are_refused(tmp_path: Path) -> None:
    config = {"concurrency_levels": [1, 4], "requests_per_level": 7}
    with pytest.raises(EngineLogError, match=r"scenario_config.*2 levels of 7 requests, but the file has 12"):
        read_engine_log(written(tmp_path, levels(scenario_config=config)))


def test_kv_in_use_lies_between_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.scoreboard.fidelity.KINDS", (CostKind.roofline,))
    log = read_engine_log(written(tmp_path, levels()))
    rows, (kv,) = log_rows(log, ("device=a10g", "cache.max_model_len=512", "scheduler.max_running=8"))
    assert [row["fit"] for row in rows] == ["none", "a first part"]
    assert 0 < kv["mean at least"] < kv["mean at most"] < 1
    assert kv["mean measured"] == "not recorded"


RUN = {
    "suite_id": "suite_A",
    "chip": {"name": "NVIDIA L4", "count": 1},
    "software": {"framework_version": "0.7.3"},
    "model": {"model_id": "Qwen/Qwen2.5-0.5B-Instruct", "precision": "BF16"},
    "metrics": {
        "offline": {
            "results_by_concurrency": [{"throughput_tokens_per_sec": 800.0, "elapsed_seconds_median": 0.5}]
        },
        "online": {
            "results_by_qps": [
                {
                    "target_qps": 5,
                    **{f"{name}_ms_{q}": 10.0 for name in ("ttft", "tpot") for q in ("p50", "p90")},
                }
            ]
        },
    },
}
SUITE = {
    "dataset": "sharegpt_standard_v1",
    "max_model_len": 2048,
    "output_tokens_max": 64,
    "request_count": 10,
    "online_request_count": 12,
    "request_distribution": {"input_tokens_p50": 95},
}


def accelmark_folder(folder: Path, **changes: Any) -> Path:
    runs = folder / "runs"
    (runs / "suites").mkdir(parents=True)
    (runs / "suites" / "suite_A.json").write_text(json.dumps(SUITE))
    (runs / "sharegpt_standard_v1.lengths.jsonl").write_text('{"input_tokens": 50}\n{"input_tokens": 70}\n')
    (runs / "l4.json").write_text(json.dumps(RUN | changes))
    return runs


def test_each_load_of_a_run_has_its_errors(tmp_path: Path) -> None:
    rows = accelmark.accelmark_rows(accelmark_folder(tmp_path), lambda _: None)
    assert [row["load"] for row in rows] == ["all at once", "5 requests/s"]
    assert rows[0]["tokens_per_s"] > 0
    assert {"ttft_p50", "tpot_p90"} <= rows[1].keys()
    assert [line["vllm"] for line in by_load(rows)] == ["0.7.3 (first scheduler)"] * 2


def test_versions_of_vllm_are_those_of_the_runs() -> None:
    same = {"device": "L4", "precision": "BF16", "load": "all at once", "tokens_per_s": 0.1}
    found = by_load([{**same, "vllm": version} for version in ("0.12.0", "0.11.2", "0.12.0")])
    assert [(line["vllm"], line["loads"]) for line in found] == [("0.11.2 or 0.12.0", 3)]


def test_a_device_without_a_preset_is_named(tmp_path: Path) -> None:
    folder = accelmark_folder(tmp_path, chip={"name": "NVIDIA L40", "count": 1})
    (row, _) = accelmark.accelmark_rows(folder, lambda _: None)
    assert row["not priced"] == "no preset of NVIDIA L40 or of Qwen/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("lost", ["chip", "suite_id", "lengths"])
def test_a_run_that_is_not_as_it_was_published_is_named(tmp_path: Path, lost: str) -> None:
    folder = accelmark_folder(tmp_path, **{lost: {}})
    if lost == "lengths":
        (folder / "sharegpt_standard_v1.lengths.jsonl").write_text('{"tokens": 50}\n')
    with pytest.raises(UserError, match=r"runs.*not as it was published \((Key|FileNotFound)Error"):
        fidelity([str(folder)], (), lambda _: None)


def test_a_table_without_a_column_is_named(table: Path) -> None:
    (table / "measured_by_stage.csv").write_text("run,stage_index\n7-llama,0\n")
    with pytest.raises(UserError, match=r"table: not as it was published \(KeyError: 'folder'\)"):
        stage_table.read_staged_runs(table)


@pytest.mark.nightly
def test_the_page_says_what_was_assumed_and_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of folders stands for these."""
    predictions = (
        (stage_table.OURS, "cost=roofline", True),
        (stage_table.ROOFLINE, "cost=roofline", True),
        (stage_table.OTHER, "cost=roofline", False),
    )
    monkeypatch.setattr(stage_table, "_PREDICTIONS", predictions)
    public = tmp_path / "public"
    public.mkdir()
    table_folder(public)
    accelmark_folder(public)
    found = fidelity([str(public)], (), lambda _: None)
    text = write_fidelity(tmp_path, found, command="python -m harness scoreboard").read_text(encoding="utf-8")
    assert "nothing: no constant was fitted to any of its rows" in text
    assert "| other | all | 1 | 2 | 50.0 % |" in text
    assert "1 verified runs, 2 loads" in text
    assert (tmp_path / "h100.svg").stat().st_size > 1000
