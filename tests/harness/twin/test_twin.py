"""`twin` writes a page, tables and what-ifs; `calibrate --from-log` writes a device that a later run can use."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from harness.cli.twin import _kept_fit
from harness.config.schema import CostKind, DeviceConfig, RunConfig
from harness.point.bands import Band
from harness.point.cost import cost_model
from harness.sweep.plan import one_configuration
from harness.twin.configured import configured
from harness.twin.fit import trace_bytes
from harness.twin.page import facts, summary
from harness.twin.prediction import PredictedRun, errors_of, predictor
from harness.twin.reading import read_engine_log
from harness.twin.twin import Twin, finding, grade, verdict
from harness.twin.what_ifs import WhatIf, questions, what_ifs
from harness.workload.deployment import settings_text
from harness.workload.point import resolve
from harness.workload.simulate import simulate
from traces.reading import read_trace
from traces.trace import CHAINED, Client, ClientKind, Segment, Trace, TraceHeader, TraceRequest

RECORDED = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the recorded excerpt, without a fit."""
    out = tmp_path_factory.mktemp("twin")
    folder = out / "<b>shop"
    shutil.copytree(RECORDED, folder)
    assert main(["twin", str(folder), "--device", "rtx_pro_6000", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def twin() -> Twin:
    log = read_engine_log(RECORDED)
    found = configured(log, ("device=rtx_pro_6000",))
    prediction = predictor(found.config, log.workload)(found.config.device)
    changes = what_ifs(log, found.config, prediction, questions(found.config, prediction))
    return Twin(log, found, found.config, prediction, None, changes, "python -m harness twin")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_needs_no_other_file_and_no_network(report: Path) -> None:
    page = (report / "index.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]+)"', page)
    links = [one for one in sources if not one.startswith(("#", "data:"))]
    assert {one.rpartition(".")[2] for one in links} == {"svg", "pdf", "csv"}
    assert "url(http" not in page


def test_the_page_has_every_section(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert re.findall(r'<section id="(\w+)"', page) == ["verdict", "state", "latency", "what_ifs", "settings"]


def test_the_page_has_the_band_of_each_figure_and_how_many_hold(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert "nine of ten measured values should lie in it" in page
    assert "of the 7 figures measured do" in page
    assert "TPOT mean" in page


def test_the_page_says_that_nothing_was_fitted(report: Path) -> None:
    assert "Not fitted here: the constants of the device" in (report / "index.html").read_text()


def test_every_request_is_in_the_table_of_latencies(report: Path) -> None:
    found = rows(report / "latency.csv")
    requests = read_engine_log(RECORDED).requests
    assert [row["request_id"] for row in found] == list(requests.request_id)
    assert [float(row["measured_ttft_s"]) for row in found] == pytest.approx(requests.ttft_s, abs=1e-8)


def test_the_state_has_no_measured_kv_use_where_none_was_logged(report: Path) -> None:
    columns = rows(report / "state.csv")[0].keys()
    assert "measured_running" in columns
    assert "measured_kv_use" not in columns


def test_the_workload_in_the_report_is_that_of_the_log(report: Path) -> None:
    assert read_trace(report / "workload.jsonl").digest == read_engine_log(RECORDED).workload.digest


def test_the_summary_has_every_what_if(report: Path) -> None:
    summary = (report / "summary.md").read_text()
    for row in rows(report / "what_ifs.csv"):
        assert f"| {row['setting']} |" in summary


def test_what_is_not_priced_is_said(report: Path) -> None:
    for name in ("index.html", "summary.md"):
        assert "does not price block size" in (report / name).read_text()


def test_a_name_is_escaped_in_the_page(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert "<b>shop" not in page
    assert "&lt;b&gt;shop" in page


def test_a_log_without_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", str(RECORDED)]) == 2
    assert "add device=./mine.yaml, or device= and a preset" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "no-such-folder", "device=h100"]) == 2
    assert "no-such-folder: no such file or folder" in capsys.readouterr().err


def test_every_question_has_an_answer(twin: Twin) -> None:
    told = " ".join(one.name for one in twin.changes)
    keys = ("block_size", "pool_tokens", "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")
    assert [told.count(f"{key}=") for key in keys] == [4, 5, 4, 4, 1]


def test_fewer_sequences_wait_longer(twin: Twin) -> None:
    few = what_ifs(twin.log, twin.config, twin.prediction, ["scheduler.max_running=2"])[-1]
    assert (few.factor("ttft_p50") or 0) > 1


def test_a_pool_smaller_than_what_is_used_preempts(twin: Twin) -> None:
    smallest = twin.changes[-2:]
    assert all(one.name.startswith("pool_tokens=") for one in smallest)
    assert twin.base.preemptions == 0
    assert min(one.preemptions for one in smallest) > 0


def test_the_state_of_replicas_is_that_of_all_together(twin: Twin) -> None:
    """Until the first request ends, those that run and wait are those that have arrived."""
    config = replace(twin.config, device=replace(twin.config.device, data_parallel=2))
    run = predictor(config, twin.log.workload)(config.device)
    at_s = np.array([0.5, 1.0, 1.5])
    assert run.last_token_s.min() > 1.5
    series = run.series(at_s)
    arrived = [(run.arrival_s <= at).sum() for at in at_s]
    assert (series.running + series.waiting).tolist() == arrived
    assert series.kv_use is None


def test_an_answer_beyond_the_fit_says_so() -> None:
    one = WhatIf(("load=2",), {"ttft_p50": 1.0}, {"ttft_p50": 2.0}, unseen="the fit has not seen this load")
    assert str(one).endswith("; the fit has not seen this load")


def test_what_is_to_be_known_first_stands_before_the_errors(twin: Twin) -> None:
    warned = replace(twin, configured=replace(twin.configured, warnings=("Warning: half of it is missing.",)))
    assert verdict(warned).startswith(
        "The client is an open loop. Warning: half of it is missing. On 20 requests"
    )


def test_settings_of_one_simulation_are_one_row(twin: Twin) -> None:
    results = [(one.figures, one.preemptions, one.hit_share) for one in twin.changes]
    assert all(one not in results[:place] for place, one in enumerate(results))
    assert {"as it is", "max_num_seqs=512"} <= set(twin.base.settings)


def jumped(low: float, high: float) -> WhatIf:
    """A median TTFT that is 17 % larger, with a band of this change."""
    settings, before, after = ("block_size=128",), {"ttft_p50": 1.0}, {"ttft_p50": 1.17}
    return WhatIf(settings, before, after, change={"ttft_p50": Band(low, high)})


def test_a_jump_inside_its_band_is_no_finding(twin: Twin) -> None:
    told = replace(twin, changes=[twin.base, jumped(0.9, 1.5)])
    assert "TTFT" not in finding(told)
    assert "within its band" in summary(told)


def test_a_jump_beyond_its_band_is_said_with_it(twin: Twin) -> None:
    assert "+17.0\u00a0%; +5.0\u00a0% to +30.0\u00a0%" in summary(
        replace(twin, changes=[twin.base, jumped(1.05, 1.3)])
    )


def test_a_device_that_was_fitted_to_the_same_log_is_said(twin: Twin) -> None:
    device = replace(twin.config.device, fitted_from=f"{twin.log.name}, first 5 of 20 requests")
    fitted = replace(twin, config=replace(twin.config, device=device))
    assert "first 5 of 20 requests, which are among these requests" in verdict(fitted)
    other = replace(fitted, log=replace(twin.log, name="another"))
    assert "among these" not in verdict(other)


def test_the_verdict_has_both_errors(twin: Twin) -> None:
    errors = twin.errors
    said = verdict(twin)
    assert f"{100 * abs(errors.tpot_p50):.1f} %" in said
    assert f"{100 * abs(errors.ttft_p50):.1f} %" in said


# -- calibrate --from-log -----------------------------------------------------------------------------------------

TRUE = DeviceConfig(
    name="planted",
    memory_gb=80.0,
    bandwidth_gbs=2000.0,
    tflops=300.0,
    step_overhead_us=2500.0,
    layer_overhead_us=8.0,
    bandwidth_efficiency=0.8,
    compute_efficiency=0.5,
)
ENGINE = ("scheduler.max_running=16", "scheduler.max_batched_tokens=512", "cache.pool_tokens=65536")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that the simulator wrote for a device with known constants, and a description that does not know them."""
    folder = tmp_path_factory.mktemp("planted")
    draw = np.random.default_rng(7)
    at = np.cumsum(draw.exponential(40_000, 60)).astype(int)
    lengths = zip(draw.integers(50, 500, 60), draw.integers(8, 40, 60), strict=True)
    requests = tuple(
        TraceRequest(i, int(at[i]), int(prompt), int(output), (Segment(None, int(prompt)),))
        for i, (prompt, output) in enumerate(lengths)
    )
    trace = Trace(TraceHeader("planted", "simple", "drawn", CHAINED, None, 1, "0" * 64, 60, 60), requests)
    run = simulated(trace)
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"]
    for i, row in enumerate(requests):
        times = f"{run.first_token_s[i]:.9f},{run.last_token_s[i]:.9f}"
        lines.append(f"{row.arrival_us / 1e6:.6f},{row.prompt_tokens},{row.output_tokens},{times}")
    (folder / "requests.csv").write_text("\n".join(lines) + "\n")
    described = (
        "name: planted\nmemory_gb: 80.0\nbandwidth_gbs: 2000.0\ntflops: 300.0\nstep_overhead_us: 500.0\n"
    )
    described += "layer_overhead_us: 8.0\nbandwidth_efficiency: 0.85\ncompute_efficiency: 0.6\n"
    (folder.parent / "described.yaml").write_text(described)
    return folder


def simulated(trace: Trace) -> PredictedRun:
    config = RunConfig(measure=False, device=TRUE)
    config.cost.kind = CostKind.roofline
    config.scheduler.max_running, config.scheduler.max_batched_tokens = 16, 512
    config.cache.pool_tokens = 65_536
    config.model.max_position = 2048
    return predictor(config, trace)(TRUE)


@pytest.fixture(scope="module")
def calibrated(planted: Path) -> Path:
    out = planted.parent / "fitted.yaml"
    words = ["calibrate", "--from-log", str(planted), "--first", "40", "--out", str(out)]
    words += [f"device={planted.parent / 'described.yaml'}", "model=tiny_llama", *ENGINE]
    assert main(words) == 0
    return out


def test_a_calibrated_device_has_the_times_of_the_log(calibrated: Path) -> None:
    """A step of the planted device takes 2.5 ms of overhead, which the description has as 0.5 ms."""
    found = dict(re.findall(r"^(\w+): ([\d.]+)", calibrated.read_text(), flags=re.MULTILINE))
    total = float(found["step_overhead_us"]) + 4 * float(found["layer_overhead_us"])
    assert total == pytest.approx(2500 + 4 * 8, rel=0.03)


def test_a_calibrated_device_says_where_it_comes_from(calibrated: Path) -> None:
    text = calibrated.read_text()
    assert "# Made by: python -m harness calibrate --from-log" in text
    assert "# Fitted on the first 40 of 60 requests" in text
    assert re.search(r"TPOT p50 [+-]\d", text)


def test_a_calibrated_device_predicts_the_log_without_a_fit(calibrated: Path, planted: Path) -> None:
    log = read_engine_log(planted)
    config = configured(log, (f"device={calibrated}", "model=tiny_llama", *ENGINE)).config
    errors = errors_of(predictor(config, log.workload)(config.device), log, slice(0, None))
    assert abs(errors.tpot_p50) < 0.01
    assert abs(errors.ttft_p50) < 0.05


def test_a_calibration_keeps_the_whole_deployment(calibrated: Path, planted: Path) -> None:
    """Beside the device: the settings of the engine, without which a prediction is of another server."""
    file = calibrated.with_name("fitted-deployment.yaml")
    config = one_configuration((f"deployment={file}",), "")
    assert (config.scheduler.max_running, config.scheduler.max_batched_tokens) == (16, 512)
    assert config.device.fitted_from.startswith("planted0, first 40 of 60 requests")
    log = read_engine_log(planted)
    found = configured(log, (f"deployment={file}",)).config
    assert abs(errors_of(predictor(found, log.workload)(found.device), log, slice(0, None)).tpot_p50) < 0.01


def test_a_deployment_that_is_run_on_the_load_of_its_log_obeys_its_client(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same requests, one at a time, as a file that `deployment=FILE` is run on."""
    log = read_engine_log(planted)
    one = log.workload.changed(log.workload.requests, "one", client=Client(ClientKind.capped, 1))
    (tmp_path / "load.jsonl").write_bytes(trace_bytes(one))
    words = (
        "trace=pagetwin",
        f"trace.path={tmp_path / 'load.jsonl'}",
        "measure=false",
        "model=tiny_llama",
        "device=h100",
    )
    point = resolve(one_configuration((*words, "workload.num_requests=null", "cost=roofline"), ""))
    steps = simulate(point, cost_model(point.deployment)).steps
    assert (steps["running"] + steps["waiting"]).max() == 1


def test_a_calibration_keeps_the_load_with_its_client(calibrated: Path, planted: Path) -> None:
    kept = read_trace(calibrated.with_name("fitted-workload.jsonl"), "pagetwin")
    assert kept.digest == read_engine_log(planted).workload.digest


@pytest.mark.nightly
def test_a_log_in_milliseconds_is_fitted_to_nothing_and_not_kept(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (planted / "requests.csv").read_text().splitlines()
    times = [0, 3, 4]
    for index, line in enumerate(lines[1:], 1):
        cells = line.split(",")
        lines[index] = ",".join(
            str(float(cell) * 1000) if i in times else cell for i, cell in enumerate(cells)
        )
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    out = tmp_path / "kept.yaml"
    words = ["calibrate", "--from-log", str(tmp_path), "--first", "30", "--out", str(out)]
    assert main([*words, f"device={planted.parent / 'described.yaml'}", "model=tiny_llama", *ENGINE]) == 2
    said = capsys.readouterr().err
    assert "the simulation cannot be fitted to this log" in said
    assert "units of time" in said
    assert not out.exists()
    words = ["twin", str(tmp_path), "--first", "30", "--no-what-ifs", "--out", str(tmp_path / "page")]
    assert main([*words, f"device={planted.parent / 'described.yaml'}", "model=tiny_llama", *ENGINE]) == 0
    assert "Warning: the fit misses even the requests that it was fitted to" in capsys.readouterr().out
    assert not (tmp_path / "page" / "fit.yaml").exists()


def test_settings_that_let_fewer_requests_run_than_the_log_shows_are_refused(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(planted / "requests.csv", tmp_path)
    (tmp_path / "engine.json").write_text('{"max_num_seqs": 1, "max_num_batched_tokens": 512}')
    assert (
        main(["twin", str(tmp_path), f"device={planted.parent / 'described.yaml'}", "model=tiny_llama"]) == 2
    )
    said = capsys.readouterr().err
    assert "requests between their first and their last token at once, but the settings let 1 run" in said


def test_a_dry_run_of_a_calibration_fits_nothing(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.yaml"
    words = ["calibrate", "--from-log", str(planted), "--dry-run", "--out", str(out), "device=h100"]
    assert main([*words, "model=tiny_llama", *ENGINE]) == 0
    assert "nothing was fitted" in capsys.readouterr().out
    assert not out.exists()


def test_a_calibration_of_a_short_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "calibrate",
        "--from-log",
        str(RECORDED),
        "device=rtx_pro_6000",
        "--out",
        str(tmp_path / "x.yaml"),
    ]
    assert main(words) == 2
    assert "the log has 20 finished requests; a fit needs 40" in capsys.readouterr().err


# -- in a browser -------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_the_page_opens_offline_without_an_error(report: Path, browser) -> None:
    page = browser.new_context(offline=True, viewport={"width": 1100, "height": 900}).new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "request",
        lambda request: troubles.extend([] if request.url.startswith("file:") else [request.url]),
    )
    page.goto((report / "index.html").as_uri(), timeout=120_000)
    figures = page.locator("figure svg").count()
    assert troubles == []
    assert figures == 3


@pytest.mark.browser
@pytest.mark.parametrize("width", [1100, 400])
def test_the_page_is_as_wide_as_the_window(report: Path, browser, width: int) -> None:
    page = browser.new_context(offline=True, viewport={"width": width, "height": 900}).new_page()
    page.goto((report / "index.html").as_uri(), timeout=120_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def of_one_token(twin: Twin) -> Twin:
    """The twin with a log whose requests have one output token each."""
    requests = twin.log.requests
    short = replace(requests, output_tokens=np.ones_like(requests.output_tokens))
    return replace(twin, log=replace(twin.log, requests=short))


def test_a_log_without_times_between_tokens_has_no_error_of_tpot(twin: Twin) -> None:
    said = verdict(of_one_token(twin))
    assert "nan" not in said
    assert "the median TPOT cannot be compared" in said


def test_a_measured_tpot_of_zero_gives_no_infinite_error(twin: Twin) -> None:
    requests = twin.log.requests
    at_once = replace(requests, last_token_s=requests.first_token_s)
    errors = errors_of(twin.prediction, replace(twin.log, requests=at_once), slice(0, None))
    assert np.isnan(errors.tpot_p50)


def test_a_twin_of_which_one_error_is_unknown_is_not_good(twin: Twin) -> None:
    unknown = of_one_token(twin)
    predicted = replace(unknown.prediction, first_token_s=unknown.log.requests.first_token_s.copy())
    ttft = unknown.log.requests.ttft_s
    exact = replace(predicted, seen_s=predicted.first_token_s - ttft)
    assert grade(replace(unknown, prediction=exact)) == "fair"


def test_the_page_does_not_claim_the_logs_pool_where_the_user_set_one(twin: Twin) -> None:
    log = replace(twin.log, settings=replace(twin.log.settings, pool_blocks=5000))
    found = configured(log, ("device=rtx_pro_6000", "cache.pool_blocks=4000"))
    shown = dict(facts(replace(twin, log=log, configured=found, config=found.config)))
    assert shown["pool"] == "4,000 blocks of 16, as the user set it"


def test_the_page_counts_the_devices_of_all_replicas(twin: Twin) -> None:
    words = ("device=rtx_pro_6000", "device.tensor_parallel=2", "device.data_parallel=2")
    found = configured(twin.log, words)
    shown = dict(facts(replace(twin, configured=found, config=found.config)))
    assert shown["device"] == "4 x rtx_pro_6000"


def test_the_page_says_which_setting_of_the_log_was_not_simulated(twin: Twin) -> None:
    found = configured(twin.log, ("device=rtx_pro_6000", "scheduler.max_running=7"))
    shown = dict(facts(replace(twin, configured=found, config=found.config)))
    assert shown["max_running"].endswith("the user set another value, which was simulated)")


@pytest.fixture(scope="module")
def own(twin: Twin) -> list[WhatIf]:
    asked = ["cache.block_size=32", "scheduler.max_running=2", "scheduler.max_batched_tokens=1024"]
    asked += ["load=1.5", "cache.pool_tokens=64"]
    return what_ifs(twin.log, twin.config, twin.prediction, asked)


def test_a_question_of_ones_own_is_answered_in_one_sentence_with_bands(own: list[WhatIf]) -> None:
    assert re.search(
        r"^max_num_batched_tokens=1024: median TTFT .* → .* \(.* to .*\), .*median TPOT ", str(own[1])
    )


def test_what_helps_most_stands_first(own: list[WhatIf]) -> None:
    names = ["as it is, block_size=32", "max_num_batched_tokens=1024", "load=1.5", "max_num_seqs=2"]
    assert [one.name for one in own[:4]] == names
    assert own[1].gain > 0 > own[3].gain


def test_what_is_refused_says_why(own: list[WhatIf]) -> None:
    assert str(own[4]).startswith("pool_tokens=64: refused: ")


def test_a_bad_question_is_refused_by_name_and_the_others_are_answered(twin: Twin) -> None:
    bad = ["load=fast", "load=-1", "device=h100", "scheduler.max_running=few", "no.key=1"]
    asked = [bad[0], "scheduler.max_running=0,2", *bad[1:]]
    first, answer, *refused = what_ifs(twin.log, twin.config, twin.prediction, asked)
    assert (first.name, answer.name) == ("as it is", "max_num_seqs=2")
    assert answer.figures is not None
    assert sorted(one.name for one in refused) == sorted([*bad, "max_num_seqs=0"])
    assert all(one.figures is None and one.note.startswith("refused: ") for one in refused)


def test_the_load_of_a_closed_loop_is_refused_because_nothing_would_change(twin: Twin) -> None:
    workload = twin.log.workload
    client = Client(ClientKind.closed, 2)
    log = replace(twin.log, workload=workload.changed(workload.requests, "closed", client=client))
    (_, refused) = what_ifs(log, twin.config, twin.prediction, ["load=1.5"])
    assert re.search(
        r"refused: .*a closed loop.* would change nothing; ask .*replay.max_in_flight=4", str(refused)
    )


UNHEARD = [
    "workload.request_rate=9",
    "replay.mode=offline",
    "device.memory_utilization=0.5",
    "oracle.engine=vllm",
]


@pytest.mark.parametrize("question", UNHEARD)
def test_a_question_that_the_prediction_would_not_hear_is_refused(question: str, twin: Twin) -> None:
    assert "this would change nothing; ask" in str(
        what_ifs(twin.log, twin.config, twin.prediction, [question])[-1]
    )


def test_a_question_whose_pool_would_be_another_says_that_it_is_kept(twin: Twin) -> None:
    asked = ["device.tensor_parallel=2", "cache.policy=contiguous_max"]
    found = {one.name: one for one in what_ifs(twin.log, twin.config, twin.prediction, asked)}
    assert "the KV pool keeps its size" in str(found["tensor_parallel_size=2"])
    assert "policy=contiguous_max" in found


def test_a_kept_fit_is_taken_for_the_same_log_and_device_alone(twin: Twin, tmp_path: Path) -> None:
    """The words that chose the device of the fit do not put its description in the place of what was fitted."""
    device = replace(twin.config.device, fitted_from="this log", step_overhead_us=777.0)
    deployment, load = tmp_path / "fit-deployment.yaml", tmp_path / "fit-workload.jsonl"
    deployment.write_text(settings_text(replace(twin.config, device=device)))
    load.write_bytes(trace_bytes(twin.log.workload))
    words = ("device=rtx_pro_6000", "scheduler.max_running=100")
    log, taken = _kept_fit(twin.log, words, tmp_path)
    found = configured(log, taken).config
    assert (found.device.step_overhead_us, found.scheduler.max_running) == (777.0, 100)
    assert _kept_fit(twin.log, ("device=h100",), tmp_path) == (twin.log, ("device=h100",))
    load.write_bytes(b"another log")
    assert _kept_fit(twin.log, words, tmp_path) == (twin.log, words)
