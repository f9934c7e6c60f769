"""`twin --check`: a server's page beside the prediction, and the exit code."""

from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from harness.config.errors import UserError
from harness.twin.check import POOL, compared, pages
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
    series, blocks = run.series(at_s), run.log.capacity_slots // 16 + 1  # with vLLM's null block
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


def test_blocks_that_hold_a_part_of_the_layers_are_not_compared(run, tmp_path):
    rows = compared(run, pages(str(page_of(run, tmp_path))), plain=False)
    assert [row.name for row in rows if "a part of the layers" in row.why and row.real is None] == [POOL]


@pytest.mark.parametrize("address", ["http://[::1", "http://a b/", "http://127.0.0.1:1/"])
def test_an_address_that_leads_nowhere_is_refused(address):
    with pytest.raises(UserError, match=r"--check .*: cannot be read"):
        pages(address)


def with_pages(path: Path, *changes: tuple[str, str]) -> Path:
    """The same file with the page once more for each change, which holds from there on."""
    text = pages_text = path.read_text()
    for old, new in changes:
        text = text.replace(old, new)
        pages_text += "\n" + text
    path.write_text(pages_text)
    return path


def figures_of(run, path: Path) -> dict[str, tuple[float | None, str]]:
    return {row.name: (row.real, row.why) for row in compared(run, pages(str(path)))}


def test_counters_of_two_pages_are_those_of_the_time_between(run, tmp_path):
    counts = {"prefix_cache_hits_total": 40, "prefix_cache_queries_total": 100, "request_success_total": 10}
    path = page_of(run, tmp_path, **counts, num_preemptions_total=9)
    more = (("hits_total 40", "hits_total 100"), ("queries_total 100", "queries_total 200"))
    with_pages(path, *more, ("request_success_total 10", "request_success_total 50"))
    found = figures_of(run, path)
    assert found["hit ratio of prompt tokens"][0] == 0.6
    assert found["preemptions of 100 requests"][0] == 0
    assert "of 40 finished requests between" in pages(str(path)).said(300)


def test_a_server_that_is_idle_most_of_the_time_is_compared_while_it_works(run, tmp_path):
    path = page_of(run, tmp_path)
    before = figures_of(run, path)
    gauges = (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "kv_cache_token_usage_perc",
    )
    names = [next(line for line in path.read_text().splitlines() if f":{name} " in line) for name in gauges]
    idle = [(line, f"{line.split()[0]} 0") for line in names]
    with_pages(path, *idle)
    for gauge in ("running requests", "kv_cache_usage_perc", "kv_cache_token_usage_perc"):
        assert figures_of(run, path)[gauge] == before[gauge]


def test_hits_of_a_log_without_its_prompts_are_not_compared(tmp_path, capsys):
    """The prediction has none, because none are known; the server's are no difference."""
    rows = "".join(f"{at},200,5,{at}.2,{at}.4\n" for at in range(5))
    (tmp_path / "requests.csv").write_text(
        f"arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n{rows}"
    )
    counts = {"num_requests_running": 0, "num_requests_waiting": 0, "request_success_total": 5}
    counts |= {"prefix_cache_queries_total": 100, "prefix_cache_hits_total": 40, "num_preemptions_total": 0}
    page = tmp_path / "page.txt"
    page.write_text("".join(f"vllm:{name} {value}\n" for name, value in counts.items()))
    words = ("model=llama3_8b", "device=h100", "--out", str(tmp_path / "out"))
    assert main(["twin", str(tmp_path / "requests.csv"), "--no-fit", "--check", str(page), *words]) == 0
    said = capsys.readouterr().out
    assert "not compared: the log does not say which prompts share a beginning, the page has 40 %" in said
    assert "Of 1 figures none differs." in said


def test_pages_around_a_restart_are_refused(run, tmp_path):
    path = with_pages(
        page_of(run, tmp_path, request_success_total=10), ("success_total 10", "success_total 3")
    )
    with pytest.raises(UserError, match=r"request_success_total falls .*: the server was restarted"):
        pages(str(path))


def test_a_live_server_that_restarts_meanwhile_is_refused(run, tmp_path, monkeypatch):
    texts = [page_of(run, tmp_path, request_success_total=count).read_text() for count in (10, 11, 0, 1, 2)]
    monkeypatch.setattr("harness.twin.check.fetched", lambda *_: texts.pop(0))
    with pytest.raises(UserError, match="the server was restarted"):
        pages("http://server/metrics", sleep=lambda _: None)


@pytest.mark.parametrize(
    ("metric", "row"),
    [
        ("num_preemptions_total", "preemptions of 100 requests"),
        ("request_success_total", "preemptions of 100 requests"),
        ("prefix_cache_hits_total", "hit ratio of prompt tokens"),
        ("num_requests_waiting", "waiting requests"),
    ],
)
def test_what_a_page_does_not_have_is_not_taken_for_none(run, tmp_path, metric, row):
    path = page_of(run, tmp_path)
    path.write_text("\n".join(line for line in path.read_text().splitlines() if metric not in line))
    assert figures_of(run, path)[row] == (None, "the page has none")


def test_gauges_of_another_number_of_engines_are_not_compared(run, tmp_path):
    path = page_of(run, tmp_path)
    one = path.read_text().splitlines()
    each = [line.replace(" ", f'{{engine="{engine}"}} ') for engine in (0, 1) for line in one[:-1]]
    path.write_text("\n".join([*each, one[-1]]))
    found = figures_of(run, path)
    assert found["running requests"] == (None, "the page has 2 engines, the prediction 1")
    assert found["hit ratio of prompt tokens"][0] is not None


def test_a_page_of_several_models_is_refused(run, tmp_path):
    path = page_of(run, tmp_path)
    each = [path.read_text().replace("running ", f'running{{model_name="{name}"}} ') for name in "ab"]
    path.write_text("\n".join([each[0], each[1].splitlines()[0]]))
    with pytest.raises(UserError, match="several models: a, b"):
        pages(str(path))


def test_a_share_above_one_is_not_compared(run, tmp_path):
    found = figures_of(run, page_of(run, tmp_path, kv_cache_usage_perc=35.0))
    assert found["kv_cache_usage_perc"] == (None, "it is above 1, so it is no share")


def test_a_server_that_has_served_nothing_proves_nothing(run, tmp_path, capsys):
    zero = dict.fromkeys(
        (
            "num_requests_running",
            "num_requests_waiting",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
        ),
        0,
    )
    path = page_of(run, tmp_path, **zero, num_preemptions_total=0, request_success_total=0)
    assert main(["twin", str(RECORDED), *WORDS, "--check", str(path), f"--out={tmp_path / 'out'}"]) == 2
    assert "has served nothing" in capsys.readouterr().err


def test_what_is_fitted_is_no_question_where_nothing_is(capsys):
    assert main(["twin", str(RECORDED), *WORDS, "--no-fit", "--first", "3"]) == 2
    assert "--first says what is fitted" in capsys.readouterr().err


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
        "KV pool of a replica, tokens": 255.0 * 32,
        "running requests": 7.0,
        "waiting requests": 895.0,
        "kv_cache_usage_perc": pytest.approx(63 / 255),  # one of its 256 blocks is never given out
        "kv_cache_token_usage_perc": None,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tolerance", "0.2"), "--tolerance is of --check, which is not given"),
        (("--seconds", "5"), "--seconds is of --metrics, which is not given"),
        (("--what-if", "load=2", "--no-what-ifs"), "--what-if and --no-what-ifs: give one of them"),
    ],
)
def test_options_that_nothing_reads_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["twin", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err
