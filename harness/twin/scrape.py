"""The state of a server once a second, as `timeseries.csv`: reading it, and scraping it from a live server.

The file is that of LLMServingSim's vLLM recorder (`bench/core/stat_logger.py` of
github.com/casys-kaist/LLMServingSim at 5daddb2). A live server's state comes from its Prometheus endpoint.

Names: `vllm/v1/metrics/loggers.py` of vLLM 0.19.0 (`vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, called
`vllm:gpu_cache_usage_perc` before 0.11), and `sglang/srt/observability/metrics_collector.py` of SGLang 0.5.23.
`engine.json` has the pool (`vllm:cache_config_info`).
"""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from math import inf
from pathlib import Path

import numpy as np

from engine.runtime.options import VLLM_NAMES
from harness.config.errors import UserError
from harness.store.atomic import write_files
from harness.twin.log import Timeseries
from harness.twin.rows import LATEST_S, csv_rows, placed
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile
from traces.formats.parsing import MAX_INTEGER, text_number

SERIES_COLUMNS = ("t", "prompt_throughput", "gen_throughput", "running", "waiting", "kv_cache_pct")
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_MOST = {"t": LATEST_S, "kv_cache_pct": 100.0}
_TIMEOUT_S = 5.0
Samples = dict[str, list[tuple[dict[str, str], float]]]
Fetch = Callable[[str], str]


def scrape(
    url: str,
    seconds: float,
    folder: Path,
    *,
    every_s: float = 1.0,
    fetch: Fetch | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Scrape `url` for `seconds` and write `timeseries.csv` and `engine.json` into `folder`; returns notes.

    Raises:
        UserError: the endpoint cannot be read, or is not that of a known engine.
    """
    if not seconds >= every_s:
        raise UserError(f"--seconds is {seconds:g}, must be at least {every_s:g}")
    fetch = fetch or fetched
    began, last = clock(), (0.0, 0.0, 0.0)
    rows: list[list[float]] = []
    first: Samples | None = None
    ends = ""
    while (now := clock() - began) < seconds:
        samples = parse(fetch(url))[-1]
        if first is None and not any(name in samples for name in RUNNING):
            reason = f"--metrics {url}: has none of {', '.join(RUNNING)}: no endpoint of vLLM or SGLang"
            raise UserError(reason)
        first = first or samples
        counted = (sum(values(samples, names)) for names in (_PROMPT, _GENERATED, RUNNING, WAITING))
        prompt, generated, running, waiting = counted
        counters = (now, prompt, generated)
        if rows and (prompt < last[1] or generated < last[2]):
            ends = " The server was started again then, and what came after is left out."
            break
        span = counters[0] - last[0]
        rates = [(counters[i] - last[i]) / span if rows and span > 0 else 0.0 for i in (1, 2)]
        use = values(samples, KV)
        rows.append([now, *rates, running, waiting, 100 * sum(use) / len(use) if use else 0.0])
        last = counters
        sleep(max(0.0, len(rows) * every_s - (clock() - began)))
    assert first is not None
    lines = [",".join(SERIES_COLUMNS), *(",".join(f"{value:.6g}" for value in row) for row in rows)]
    write_files(folder, {"timeseries.csv": ("\n".join(lines) + "\n").encode()})
    return [f"{len(rows)} states in {folder / 'timeseries.csv'}.{ends}", *_write_settings(first, folder)]


def parse(text: str) -> list[Samples]:
    """The samples in Prometheus' text format, by name, with their labels: of a page, or of several in their order.

    No page has one name with the same labels twice, so that is where the next one begins.
    """
    found: list[Samples] = [{}]
    for line in text.splitlines():
        sample = _LINE.match(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        labels = dict(_LABEL.findall(sample[2] or ""))
        if any(labels == other for other, _ in found[-1].get(sample[1], ())):
            found.append({})
        found[-1].setdefault(sample[1], []).append((labels, value))
    return found


def fetched(url: str, flag: str = "--metrics") -> str:
    """The text of a page. Raises UserError, which names the flag that gave its address."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{flag} {url}: an address that starts with http:// or https:// expected")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read()
    except (OSError, HTTPException, ValueError) as error:  # no answer, one that is not HTTP, and no address
        raise UserError(f"{flag} {url}: cannot be read: {getattr(error, 'reason', error)}") from error
    return text.decode("utf-8", "replace")


def values(samples: Samples, names: tuple[str, ...]) -> list[float]:
    """The values of the first of these names that the page has, one for each engine; empty where it has none.

    Raises:
        UserError: a value is no number of at least 0.
    """
    name = next((name for name in names if name in samples), "")
    found = [value for _, value in samples.get(name, ())]
    for value in found:
        if not 0 <= value < inf:
            raise UserError(f"the /metrics page has {name} {value:g}: a number of at least 0 expected")
    return found


def pool_of(samples: Samples) -> dict[str, int]:
    """Blocks of one engine's pool, vLLM's null block among them, and tokens of a block; empty where it is not said.

    `vllm:cache_config_info` has a line for each engine, and in each the blocks of all (vLLM 0.33).
    """
    found, names = samples.get("vllm:cache_config_info", ()), ("num_gpu_blocks", "block_size")
    for labels, _ in found:
        if all(re.fullmatch("[0-9]{1,12}", labels.get(name, "")) for name in names):
            blocks, size = (int(labels[name]) for name in names)
            return dict(zip(names, (blocks // len(found), size), strict=True))
    return {}


def _write_settings(samples: Samples, folder: Path) -> list[str]:
    """`engine.json` with what the endpoint says of the pool, unless the folder has one."""
    labels = next((labels for labels, _ in samples.get("vllm:cache_config_info", ())), None)
    if labels is None:
        return ["The endpoint does not describe the pool (vllm:cache_config_info)."]
    names = [VLLM_NAMES[name] for name in ("block_size", "prefix_caching", "memory_utilization")]
    known = {name: labels[name] for name in names if labels.get(name) not in (None, "None")}
    path = folder / "engine.json"
    if path.exists():
        return [f"{path} is there already and was kept."]
    record = {"engine_kwargs": known, "kv_cache": pool_of(samples)}
    write_files(folder, {path.name: (json.dumps(record, indent=1) + "\n").encode()})
    return [f"{path} has the pool; max_num_seqs and max_num_batched_tokens are not on the endpoint."]


def read_series(file: SourceFile) -> tuple[Timeseries, list[str]]:
    """The series on its own clock, and notes. KV use of 0 throughout was not recorded. Raises TraceError."""
    rows: list[list[float]] = []
    for line, row in csv_rows(file, SERIES_COLUMNS):
        with placed(file, line):
            rows.append([text_number(row, name, 0, _MOST.get(name, MAX_INTEGER)) for name in SERIES_COLUMNS])
            if len(rows) > 1 and rows[-1][0] <= rows[-2][0]:
                raise RowError("t", f"{rows[-1][0]:g} is not after {rows[-2][0]:g} of the row before")
    if not rows:
        raise TraceError(file.path, 1, None, "no data rows")
    at_s, _, _, running, waiting, kv = np.array(rows).T
    notes = [] if kv.any() else [f"{file.name}: kv_cache_pct is 0 throughout, so KV use was not recorded."]
    return Timeseries(at_s, running, waiting, kv / 100 if kv.any() else None), notes
