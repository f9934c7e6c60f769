"""A live server's state from its Prometheus endpoint: scraped once a second into files that `read_deployment` reads.

Names: `vllm/v1/metrics/loggers.py` of vLLM 0.19.0 (`vllm:num_requests_running`, `vllm:kv_cache_usage_perc`, called
`vllm:gpu_cache_usage_perc` before 0.11), and `sglang/srt/observability/metrics_collector.py` of SGLang 0.5.23.
`timeseries.csv` has the columns of LLMServingSim's recorder, `engine.json` has the pool (`vllm:cache_config_info`).
"""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from harness.config.errors import UserError
from harness.deployment.recorder_log import SERIES_COLUMNS
from harness.store.atomic import write_files

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
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
    fetch = fetch or _fetched
    began, last = clock(), (0.0, 0.0, 0.0)
    rows: list[list[float]] = []
    first: Samples | None = None
    while (now := clock() - began) < seconds:
        samples = parse(fetch(url))
        if first is None:
            first = _checked(samples, url)
        counters = (now, _sum(samples, _PROMPT), _sum(samples, _GENERATED))
        span = counters[0] - last[0]
        rates = [(counters[i] - last[i]) / span if rows and span > 0 else 0.0 for i in (1, 2)]
        state = [_sum(samples, _RUNNING), _sum(samples, _WAITING), 100 * _mean(samples, _KV)]
        rows.append([now, *rates, *state])
        last = counters
        sleep(max(0.0, len(rows) * every_s - (clock() - began)))
    assert first is not None
    lines = [",".join(SERIES_COLUMNS), *(",".join(f"{value:.6g}" for value in row) for row in rows)]
    write_files(folder, {"timeseries.csv": ("\n".join(lines) + "\n").encode()})
    return [f"{len(rows)} states in {folder / 'timeseries.csv'}.", *_write_settings(first, folder)]


def parse(text: str) -> Samples:
    """The samples of a page in Prometheus' text format, by name, with their labels."""
    found: Samples = {}
    for line in text.splitlines():
        sample = _LINE.match(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        found.setdefault(sample[1], []).append((dict(_LABEL.findall(sample[2] or "")), value))
    return found


def _fetched(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--metrics {url}: an address that starts with http:// or https:// expected")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text: bytes = answer.read()
    except (urllib.error.URLError, OSError) as error:
        raise UserError(f"--metrics {url}: cannot be read: {getattr(error, 'reason', error)}") from error
    return text.decode("utf-8", "replace")


def _checked(samples: Samples, url: str) -> Samples:
    if not any(name in samples for name in _RUNNING):
        raise UserError(f"--metrics {url}: has none of {', '.join(_RUNNING)}: no endpoint of vLLM or SGLang")
    return samples


def _values(samples: Samples, names: tuple[str, ...]) -> list[float]:
    chosen = next((name for name in names if name in samples), None)
    return [value for _, value in samples[chosen]] if chosen else []


def _sum(samples: Samples, names: tuple[str, ...]) -> float:
    return sum(_values(samples, names))


def _mean(samples: Samples, names: tuple[str, ...]) -> float:
    values = _values(samples, names)
    return sum(values) / len(values) if values else 0.0


def _write_settings(samples: Samples, folder: Path) -> list[str]:
    """`engine.json` with what the endpoint says of the pool, unless the folder has one."""
    labels = next((labels for labels, _ in samples.get("vllm:cache_config_info", ())), None)
    if labels is None:
        return ["The endpoint does not describe the pool (vllm:cache_config_info)."]
    known = {name: labels[name] for name in ("block_size", "enable_prefix_caching", "gpu_memory_utilization")
             if labels.get(name) not in (None, "None")}  # fmt: skip
    blocks = labels.get("num_gpu_blocks")
    facts = (
        {"num_gpu_blocks": int(blocks), "block_size": int(labels["block_size"])}
        if blocks and blocks.isdigit()
        else {}
    )
    path = folder / "engine.json"
    if path.exists():
        return [f"{path} is there already and was kept."]
    record = {"engine_kwargs": known, "kv_cache": facts}
    write_files(folder, {path.name: (json.dumps(record, indent=1) + "\n").encode()})
    return [f"{path} has the pool; max_num_seqs and max_num_batched_tokens are not on the endpoint."]
