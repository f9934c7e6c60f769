"""A live server's Prometheus page becomes the same series and settings as a log."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.errors import UserError
from harness.twin.reading import read_engine_log
from harness.twin.scrape import scrape

RECORDED = Path(__file__).resolve().parents[2] / "data" / "deployments" / "servingsim-recorder"
PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 2.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.75
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}
"""
POOL = (
    'vllm:cache_config_info{block_size="16",cache_dtype="auto",enable_prefix_caching="True",'
    'gpu_memory_utilization="0.9",num_gpu_blocks="2588"} 1.0\n'
)


class Second:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def pages(states: list[tuple[int, int, int]]) -> Callable[[str], str]:
    found: Iterator[tuple[int, int, int]] = iter(states)

    def fetch(url: str) -> str:
        running, prompt, generated = next(found)
        return PAGE.format(running=running, prompt=prompt, generated=generated) + POOL

    return fetch


@pytest.fixture
def scraped(tmp_path: Path) -> Path:
    """A folder with a log of requests, and three seconds of a server's page."""
    shutil.copy(RECORDED / "requests.jsonl", tmp_path)
    clock, fetch = Second(), pages([(5, 100, 10), (7, 400, 60), (6, 450, 110)])
    scrape("http://server/metrics", 3, tmp_path, fetch=fetch, clock=clock, sleep=clock.sleep)
    return tmp_path


def test_the_page_becomes_a_series(scraped: Path) -> None:
    series = read_engine_log(scraped).series
    assert series is not None
    assert series.running.tolist() == [6, 8, 7]
    assert series.waiting.tolist() == [2, 2, 2]
    assert series.at_s[1] - series.at_s[0] == pytest.approx(1)


def test_replicas_are_added_up_and_their_kv_use_is_averaged(scraped: Path) -> None:
    series = read_engine_log(scraped).series
    assert series is not None
    assert series.kv_use is not None
    assert series.kv_use.tolist() == [0.5, 0.5, 0.5]


def test_counters_become_rates(scraped: Path) -> None:
    rows = (scraped / "timeseries.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == [0, 300, 50]


def test_a_server_that_is_started_again_ends_the_series_and_that_is_said(tmp_path: Path) -> None:
    second = Second()
    states = pages([(1, 100, 50), (2, 300, 90), (0, 10, 0), (1, 20, 5)])
    notes = scrape("http://here", 4.0, tmp_path, fetch=states, clock=second, sleep=second.sleep)
    assert notes[0].startswith("2 states in")
    assert "started again" in notes[0]
    assert "-" not in (tmp_path / "timeseries.csv").read_text()


def test_the_page_gives_the_pool(scraped: Path) -> None:
    settings = read_engine_log(scraped).settings
    assert (settings.pool_blocks, settings.tokens_of_pool) == (2587, 41392)  # without vLLM's null block


def test_the_pool_of_several_engines_is_that_of_one(tmp_path: Path) -> None:
    """vLLM 0.33 adds the blocks of data-parallel engines up, and shows the sum once for each."""
    both = "".join(POOL.replace("{", f'{{engine="{engine}",').replace("2588", "5176") for engine in "01")
    clock = Second()
    scrape(
        "http://here", 1, tmp_path, fetch=lambda _: PAGE.format(running=1, prompt=1, generated=1) + both,
        clock=clock, sleep=clock.sleep,
    )  # fmt: skip
    assert json.loads((tmp_path / "engine.json").read_text())["kv_cache"]["num_gpu_blocks"] == 2588


def test_settings_that_are_there_are_kept(tmp_path: Path) -> None:
    shutil.copy(RECORDED / "engine.json", tmp_path)
    clock = Second()
    notes = scrape("u", 1, tmp_path, fetch=pages([(1, 0, 0)]), clock=clock, sleep=clock.sleep)
    assert any("there already and was kept" in note for note in notes)
    assert (tmp_path / "engine.json").read_bytes() == (RECORDED / "engine.json").read_bytes()


def test_a_page_of_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://x: has none of vllm:num_requests_running"):
        scrape("http://x", 1, tmp_path, fetch=lambda url: "go_goroutines 7\n")


def test_a_server_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--metrics http://127\.0\.0\.1:1/metrics: cannot be read"):
        scrape("http://127.0.0.1:1/metrics", 1, tmp_path)


@pytest.mark.parametrize("name", ["missing", "file.csv"])
def test_a_folder_that_is_none_is_named_before_a_server_is_asked(tmp_path: Path, name: str, capsys) -> None:
    (tmp_path / "file.csv").write_text("arrival_s\n")
    assert main(["twin", str(tmp_path / name), "--metrics", "http://127.0.0.1:1/metrics"]) == 2
    said = capsys.readouterr().err
    assert f"there is no such folder: '{tmp_path / name}'" in said
    assert "scraping" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["file.csv"]


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="starts with http"):
        scrape("file:///etc/passwd", 1, tmp_path)
