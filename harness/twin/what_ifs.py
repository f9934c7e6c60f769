"""What-ifs: the deployment's requests under other settings, each beside the prediction for the settings that it has.

Each answer has the trust that the fit earned: the error on requests that the fit had not seen, and the share of the
time in steps that are larger than any of the deployment, about which its log says nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.core.options import Preemption
from engine.runtime.options import VLLM_NAMES
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.metrics.compute import compute_metrics
from harness.twin.log import EngineLog, FloatArray
from harness.twin.prediction import PredictedRun, figures_of_times, predictor
from harness.workload.deployment import deployment_of

FIGURES = (*("ttft_p50", "ttft_mean", "ttft_p99", "tpot_p50", "tpot_mean", "tpot_p99", "output_throughput"),)
_BLOCKS = (8, 16, 32, 64, 128)
_TIGHT = 0.5  # share of the KV that the base uses at most: a pool in which requests are preempted
_NO_SWAP = "vLLM's V1 scheduler does not swap; the price of a swap is the datasheet's link, which no log was fitted to"
_MORE_MEMORY = "a pool larger than the deployment's needs more memory than it gave to KV"
_BLOCK = (
    "the cost model does not price block size: what differs is the last, partly filled block and prefix reuse"
)


@dataclass(frozen=True)
class WhatIf:
    """One change and what it gives. `figures` by name of `FIGURES`; None: refused, and `note` says why.

    `outside` is the share of the time in steps with more rows, tokens or KV than any step of the base.
    """

    group: str
    setting: str
    figures: dict[str, float] | None
    kv_peak: float
    preemptions: int
    hit_share: float
    outside: float
    note: str
    same_as: str = ""  # the row before it with the same figures: it changed nothing, or is the same change


def what_ifs(
    log: EngineLog, config: RunConfig, base: PredictedRun, progress: Callable[[str], None] | None = None
) -> list[WhatIf]:
    """Every change of the base, in groups. `progress` is told each before it is simulated."""
    found: list[WhatIf] = []
    as_it_is = base_of(log, base)
    peak = as_it_is.kv_peak
    for group, setting, changed, note in _changes(config, peak):
        if progress:
            progress(f"{group} {setting}")
        try:
            predicted = predictor(changed, log.workload)(changed.device)
        except ConfigError as error:
            refused = f"refused: {error.message}"
            found.append(WhatIf(group, setting, None, np.nan, 0, np.nan, np.nan, refused))
            continue
        row = _row(log, predicted, base, group, setting, note)
        result = (row.figures, row.preemptions, row.hit_share)
        same = (one for one in (as_it_is, *found) if (one.figures, one.preemptions, one.hit_share) == result)
        found.append(replace(row, same_as=next((f"{one.group} {one.setting}".strip() for one in same), "")))
    return found


def base_of(log: EngineLog, base: PredictedRun) -> WhatIf:
    """The deployment's own settings as a row of the table."""
    return _row(log, base, base, "as it is", "", "")


def _changes(config: RunConfig, peak: float) -> Iterator[tuple[str, str, RunConfig, str]]:
    """(group, setting, configuration, what to know) of every change; the pool keeps its size in tokens.

    `peak` is the largest share of the pool that the base uses: smaller pools are shares of what it needs.
    """
    cache, scheduler, tokens = config.cache, config.scheduler, deployment_of(config).pool.tokens

    def changed(limits: Mapping[str, Any], **values: Any) -> RunConfig:
        fixed = {"pool_tokens": tokens, "pool_blocks": None, **values}
        return replace(config, cache=replace(cache, **fixed), scheduler=replace(scheduler, **limits))

    def pool(share: float) -> int:
        """So much of the pool, in whole blocks."""
        return max(1, round(share * tokens / cache.block_size)) * cache.block_size

    for size in _BLOCKS:
        if size != cache.block_size:
            yield "block size", str(size), changed({}, block_size=size), _BLOCK
    for share in (2.0, 0.5, peak, 0.75 * peak, _TIGHT * peak):
        note = _MORE_MEMORY if share > 1 else ""
        yield "pool", f"{pool(share):,} tokens", changed({}, pool_tokens=pool(share)), note
    for factor in (0.25, 0.5, 2.0, 4.0):
        count = max(1, round(factor * scheduler.max_running))
        yield VLLM_NAMES["max_running"], str(count), changed({"max_running": count}), ""
    for factor in (0.25, 0.5, 2.0, 4.0):
        count = max(16, round(factor * scheduler.max_batched_tokens))
        yield VLLM_NAMES["max_batched_tokens"], f"{count:,}", changed({"max_batched_tokens": count}), ""
    tight = pool(_TIGHT * peak)
    for way, host_tokens, note in ((Preemption.recompute, 0, ""), (Preemption.swap, tokens, _NO_SWAP)):
        config_of_way = changed({"preemption": way}, pool_tokens=tight, host_tokens=host_tokens)
        yield "preemption", f"{way}, {tight:,} tokens", config_of_way, note
    other = not cache.prefix_caching
    yield "prefix caching", "on" if other else "off", changed({}, prefix_caching=other), ""


def _row(
    log: EngineLog, found: PredictedRun, base: PredictedRun, group: str, setting: str, note: str
) -> WhatIf:
    figures = figures_of(log, found)
    steps, requests = found.log.steps, found.log.requests
    used = 1 - np.asarray(steps["free"] + steps["cached"], dtype=np.float64) / found.log.capacity_slots
    prompts = float(np.sum(requests["prompt_tokens"]))
    return WhatIf(
        group,
        setting,
        figures,
        float(used.max(initial=0.0)),
        int(np.sum(requests["preemptions"])),
        float(np.sum(requests["hit_tokens"])) / prompts if prompts else 0.0,
        outside_of(found, base),
        note,
    )


def figures_of(log: EngineLog, found: PredictedRun) -> dict[str, float]:
    """The figures of `FIGURES`, of the same requests and with the same definitions as those of the log."""
    rate = compute_metrics(found.log)["output_throughput"]
    return _figures(found.ttft_s(log.requests), found.tpot_s, rate)


def measured_figures(log: EngineLog) -> dict[str, float]:
    """The same figures of the log."""
    requests = log.requests
    span = float(requests.last_token_s.max() - requests.entered_s.min())
    rate = float(requests.output_tokens.sum()) / span if span else np.nan
    return _figures(requests.ttft_s, requests.tpot_s, rate)


def _figures(ttft_s: FloatArray, tpot_s: FloatArray, rate: float) -> dict[str, float]:
    found = figures_of_times(ttft_s, tpot_s) | {"output_throughput": rate}
    return {name: found[name] for name in FIGURES}


def outside_of(found: PredictedRun, base: PredictedRun) -> float:
    """The share of the time in steps with more rows, tokens or KV to read than any step of `base`."""
    if found is base:
        return 0.0
    steps = found.log.steps
    seconds = np.asarray(steps["seconds"], dtype=np.float64)
    beyond = np.zeros(len(seconds), dtype=bool)
    for name in ("rows", "query_tokens", "kv_read_tokens"):
        largest = float(np.max(base.log.steps[name], initial=0.0))
        beyond |= np.asarray(steps[name], dtype=np.float64) > largest
    total = float(seconds.sum())
    return float(seconds[beyond].sum()) / total if total else 0.0
