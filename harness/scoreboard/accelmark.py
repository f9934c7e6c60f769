"""AccelMark's verified runs of vLLM on many GPUs, beside our prediction without a fit.

A folder has one JSON for each run of a suite, the suites in `suites/`, and the prompts' lengths of one data set.
Source: github.com/FreedomIntelligence/AccelMark, whose client sends in the engine's own process (`loadgen/loadgen.py`):
Poisson arrivals (`online`), one request after another (`interactive`), or all at once (`offline`).

Assumed of all runs: each answer has the run's mean (tokens a second times seconds of the offline run, over its
requests). Prompts are those of the file, or of their suite's median where its data set is another. vLLM 0.7.3 runs its
first scheduler: prompts are not cut and nothing is cached. Newer versions have the defaults of a server, and their
prompts, which each load repeats, are cached when the measured one begins.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.config.errors import ConfigError, UserError
from harness.scoreboard.published_runs import composed, latencies, published_files
from harness.twin.configured import preset_of, preset_of_device
from harness.twin.prediction import figures_of_times
from harness.twin.settings import EngineSettings, with_vllm_defaults
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

FIGURES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "tokens_per_s")
_LENGTHS, _DATA_SET = "sharegpt_standard_v1.lengths.jsonl", "sharegpt_standard_v1"
_WEIGHTS = {"FP8": "fp8", "W8A8": "int8", "W8A16": "int8", "W4A16": "int4"}
_EIGHT_BITS = ("FP8", "W8A8")
_SECONDS_BETWEEN = 3600.0  # from the requests that fill the prefix cache to those that are measured


@dataclass(frozen=True)
class AccelmarkLoad:
    """One load of a run and what was measured: `rate` requests a second; None: one after another, or all at once."""

    scenario: str
    precision: str
    devices: int
    requests: int
    rate: float | None
    output_tokens: int
    measured: dict[str, float]


def accelmark_rows(folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each load of each run: the errors of the figures that it has (predicted / measured - 1).

    Raises UserError where a file is malformed.
    """
    with published_files(folder):
        lines = (folder / _LENGTHS).read_text(encoding="utf-8").splitlines()
        lengths = [int(json.loads(line)["input_tokens"]) for line in lines]
    rows = []
    for file in sorted(folder.glob("*.json")):
        with published_files(file):
            run = json.loads(file.read_text(encoding="utf-8"))
            suite = json.loads((folder / "suites" / f"{run['suite_id']}.json").read_text(encoding="utf-8"))
            whole = suite["dataset"] == _DATA_SET
            prompts = lengths if whole else [suite["request_distribution"]["input_tokens_p50"]]
            loads, longest = list(_loads(run, suite)), int(suite["max_model_len"])
            facts = {
                "run": file.stem,
                "device": run["chip"]["name"],
                "vllm": run["software"]["framework_version"].partition("+")[0],
                "model": run["model"]["model_id"],
            }
        for load in loads:
            row = facts | {
                "precision": load.precision,
                "devices": load.devices,
                "load": load.scenario if load.rate is None else f"{load.rate:g} requests/s",
            }
            try:
                row |= _errors(run, longest, load, prompts)
            except (ConfigError, UserError) as error:
                row["not priced"] = str(error)[:160]
            if load.precision in _EIGHT_BITS:
                row["note"] = "8-bit arithmetic is not priced: it counts as that of 16 bits"
            rows.append(row)
        say(f"AccelMark: {file.stem}")
    return rows


def _loads(run: dict[str, Any], suite: dict[str, Any]) -> Iterator[AccelmarkLoad]:
    """The loads of a run; those of a suite of precisions or of numbers of devices too."""
    metrics, devices = run["metrics"], run["chip"]["count"]
    for part in metrics.get("scaling", {}).get("results_by_chip_count", ()):
        yield from _of(part, run["model"]["precision"], part["chip_count"], suite)
    several = metrics.get("quantization_online", {}).get("results_by_precision", ())
    online = {part["precision"]: part for part in several}
    for part in metrics.get("quantization", {}).get("results_by_precision", ()):
        more = online.get(part["precision"], {})
        yield from _of({**part, "online": more}, part["precision"], devices, suite)
    if "offline" in metrics:
        yield from _of({**metrics, **metrics["offline"]}, run["model"]["precision"], devices, suite)


def _of(part: dict[str, Any], precision: str, devices: int, suite: dict[str, Any]) -> Iterator[AccelmarkLoad]:
    rows = part["results_by_concurrency"]
    done = [row for row in rows if row.get("throughput_tokens_per_sec") and not row.get("oom")]
    if not done:
        return
    offline, count = done[-1], suite["request_count"]
    tokens = offline["throughput_tokens_per_sec"] * offline["elapsed_seconds_median"]
    output = min(max(round(tokens / count), 2), suite["output_tokens_max"])
    rate = {"tokens_per_s": offline["throughput_tokens_per_sec"]}
    yield AccelmarkLoad("all at once", precision, devices, count, None, output, rate)
    alone = part.get("interactive")
    if alone and alone.get("tpot_ms_p50"):
        many = suite.get("interactive_request_count") or count
        yield AccelmarkLoad("one after another", precision, devices, many, None, output, _figures(alone))
    for row in (part.get("online") or {}).get("results_by_qps", ()):
        many = suite["online_request_count"]
        yield AccelmarkLoad("online", precision, devices, many, row["target_qps"], output, _figures(row))


def _figures(row: dict[str, Any]) -> dict[str, float]:
    return {f"{name}_{q}": row[f"{name}_ms_{q}"] for name in ("ttft", "tpot") for q in ("p50", "p90")}


def _words(run: dict[str, Any], longest: int, load: AccelmarkLoad) -> list[str]:
    device, model = preset_of_device(run["chip"]["name"]), preset_of(run["model"]["model_id"])
    if device is None or model is None:
        raise UserError(f"no preset of {run['chip']['name']} or of {run['model']['model_id']}")
    words = [f"device={device}", f"model={model}", "cost=roofline"]
    words += [f"device.tensor_parallel={load.devices}", f"cache.max_model_len={longest}"]
    if load.precision in _WEIGHTS:
        words.append(f"model.weight_dtype={_WEIGHTS[load.precision]}")
    version = run["software"]["framework_version"]
    if version.startswith("0.7."):
        words += ["scheduler=whole_prompt", "cache.prefix_caching=false", "cache.block_size=16"]
        return [*words, f"scheduler.max_batched_tokens={max(longest, 2048)}", "scheduler.max_running=256"]
    memory = composed((f"device={device}",)).device.memory_gb
    settings = with_vllm_defaults(EngineSettings("vllm", version), memory_gb=memory, device=device)
    return [*words, *settings.overrides()]


def _errors(run: dict[str, Any], longest: int, load: AccelmarkLoad, prompts: Sequence[int]) -> dict[str, Any]:
    words = _words(run, longest, load)
    if load.scenario == "one after another":
        words += ["replay.mode=closed", "replay.users=1"]
    config = composed(words)
    first = load.requests if config.cache.prefix_caching else 0  # these fill the prefix cache
    found = latencies(config, _trace(load, prompts, first, longest))
    predicted = figures_of_times(1e3 * found["ttft"][first:], 1e3 * found["tpot"][first:])
    predicted["tokens_per_s"] = load.requests * load.output_tokens / float(found["e2e"][first:].max())
    return {f"measured {name}": value for name, value in load.measured.items()} | {
        name: round(predicted[name] / value - 1, 4) for name, value in load.measured.items() if value
    }


def _trace(load: AccelmarkLoad, prompts: Sequence[int], first: int, longest: int) -> Trace:
    """The load; before it the same requests once more, `first` of them."""
    draw, rows = np.random.default_rng(0), list[TraceRequest]()
    for place in range(first + load.requests):
        own = (place - first) % load.requests
        tokens = min(prompts[own % len(prompts)], longest - load.output_tokens)
        sent_s = 0.0
        if load.rate is not None:
            sent_s = (rows[-1].arrival_us / 1e6 if rows else 0.0) + draw.exponential(1 / load.rate)
        if first and place >= first and load.scenario != "one after another":
            sent_s += _SECONDS_BETWEEN * (place == first or load.rate is None)
        segments = (Segment(own, tokens),)
        rows.append(TraceRequest(place, round(sent_s * 1e6), tokens, load.output_tokens, segments))
    header = TraceHeader("accelmark", "simple", "drawn", CHAINED, None, 1, "0" * 64, len(rows), len(rows))
    return Trace(header, tuple(rows))
