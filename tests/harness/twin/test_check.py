"""`twin --check`: a server's page beside the prediction, and the exit code."""

from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from harness.config.errors import UserError
from harness.twin.check import compared, pages
from harness.twin.configured import configured
from harness.twin.prediction import PredictedRun, predictor
from harness.twin.reading import read_engine_log

RECORDED = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"
WORDS = ("device=rtx_pro_6000", "model=llama31_8b")


@pytest.fixture(scope="module")
def run() -> PredictedRun:
    log = read_engine_log(RECORDED)
    config = configured(log, WORDS).config
    return predictor(config, log.workload)(config.device)


def page_of(run: PredictedRun, tmp_path: Path, **other: float) -> Path:
    """The page that a server would show if it did what is predicted, with other figures by name."""
    requests = run.log.requests
    at_s = np.linspace(float(run.arrival_s.min()), float(run.last_token_s.max()), 101)[[50]]
    series, blocks = run.series(at_s), run.log.capacity_slots // 16
    found = {
        "num_requests_running": series.running[0],
        "num_requests_waiting": series.waiting[0],
        "kv_cache_usage_perc": series.kv_use[0],
        "kv_cache_token_usage_perc": run.token_use(at_s)[0],
        "prefix_cache_queries_total": np.sum(requests["prompt_tokens"]),
        "prefix_cache_hits_total": np.sum(requests["hit_tokens"]),
        "num_preemptions_total": np.sum(requests["preemptions"]),
        "request_success_total": len(run.arrival_s),
        f'cache_config_info{{block_size="16",num_gpu_blocks="{blocks}"}}': 1,
    }
    lines = [f"vllm:{name} {value}" for name, value in {**found, **other}.items()]
    path = tmp_path / "metrics.txt"
    path.write_text("\n".join(lines))
    return path


def differing(run: PredictedRun, path: Path) -> list[str]:
    return [row.name for row in compared(run, pages(str(path))) if not row.agrees(0.1)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_figure_that_no_server_can_have_is_refused_by_name(run, tmp_path, value):
    with pytest.raises(UserError, match="vllm:prefix_cache_hits_total"):
        differing(run, page_of(run, tmp_path, prefix_cache_hits_total=value))


def test_more_hits_than_were_asked_for_are_not_compared(run, tmp_path):
    rows = compared(run, pages(str(page_of(run, tmp_path, prefix_cache_hits_total=1e9))))
    assert "more hits than were asked for" in rows[0].line(0.1)


@pytest.mark.parametrize("blocks", ["²", "9" * 5000, "-3", ""])
def test_a_pool_that_is_no_number_is_not_compared(run, tmp_path, blocks):
    path = page_of(run, tmp_path)
    path.write_text(path.read_text().replace('num_gpu_blocks="', f'num_gpu_blocks="{blocks}", was="'))
    assert len(compared(run, pages(str(path)))) == 6


@pytest.mark.parametrize("address", ["http://[::1", "http://a b/", "http://127.0.0.1:1/"])
def test_an_address_that_leads_nowhere_is_refused(address):
    with pytest.raises(UserError, match=r"--check .*: cannot be read"):
        pages(address)


def test_check_takes_no_question_beside_it(capsys):
    assert main(["twin", str(RECORDED), *WORDS, "--check", "page", "--what-if", "load=2"]) == 2
    assert "--check compares and ends" in capsys.readouterr().err


def test_a_page_of_what_is_predicted_agrees_in_every_figure(run, tmp_path):
    rows = compared(run, pages(str(page_of(run, tmp_path))))
    assert len(rows) == 7
    assert all(row.real is not None and row.agrees(0) for row in rows)


@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        ("prefix_cache_hits_total", 2e4, "hit ratio of prompt tokens"),
        ("num_preemptions_total", 1e4, "preemptions of 100 requests"),
        ("num_requests_waiting", 1e4, "waiting requests"),
        ("kv_cache_usage_perc", 1.0, "kv_cache_usage_perc"),
        ("kv_cache_token_usage_perc", 0.3, "kv_cache_token_usage_perc"),
    ],
)
def test_a_figure_that_differs_is_named(run, tmp_path, name: str, value: float, row: str):
    assert differing(run, page_of(run, tmp_path, **{name: value})) == [row]


def test_gauges_of_an_idle_server_are_not_compared(run, tmp_path):
    idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    rows = compared(run, pages(str(page_of(run, tmp_path, **idle))))
    assert [row.why for row in rows if row.real is None] == ["the server is idle"] * 4


def test_a_page_of_something_else_is_refused(tmp_path):
    path = tmp_path / "page.txt"
    path.write_text("up 1\n")
    with pytest.raises(UserError, match="no /metrics page of a vLLM server"):
        pages(str(path))


@pytest.mark.parametrize(("other", "code"), [({}, 0), ({"num_preemptions_total": 1e4}, 1)])
def test_the_exit_code_says_whether_a_figure_differs(run, tmp_path, capsys, other, code):
    path = page_of(run, tmp_path, **other)
    out = f"--out={tmp_path / 'out'}"
    assert main(["twin", str(RECORDED), *WORDS, "--check", str(path), out]) == code
    assert "Of 7 figures" in capsys.readouterr().out


def test_a_page_of_vllm_itself_is_read_in_every_figure(run):
    """Recorded from `vllm serve` 0.32 on a CPU with a tiny random model, under more load than it could serve."""
    page = Path(__file__).resolve().parents[2] / "data" / "vllm_metrics.txt"
    real = {row.name: row.real for row in compared(run, pages(str(page)))}
    assert real == {
        "hit ratio of prompt tokens": pytest.approx(0.53, abs=0.03),
        "preemptions of 100 requests": 0.0,
        "KV pool of a replica, tokens": 8192.0,
        "running requests": 7.0,
        "waiting requests": 895.0,
        "kv_cache_usage_perc": pytest.approx(63 / 255),  # one of its 256 blocks is never given out
        "kv_cache_token_usage_perc": None,
    }
