"""What-ifs: the deployment's requests under other settings, each beside the prediction for the settings that it has.

Each answer has the trust that the fit earned: the error on requests that the fit had not seen, and the share of the
time in steps that are larger than any of the deployment, about which its log says nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from engine.core.options import Preemption
from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from harness.deployment.log import Deployment, FloatArray
from harness.deployment.prediction import Prediction, predictor
from harness.metrics import compute_metrics
from harness.workload.shapes import pool_shape

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "output_throughput")
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


def what_ifs(
    deployment: Deployment, config: RunConfig, base: Prediction, progress: Callable[[str], None] | None = None
) -> list[WhatIf]:
    """Every change of the base, in groups. `progress` is told each before it is simulated."""
    found = []
    peak = base_of(deployment, base).kv_peak
    for group, setting, changed, note in _changes(config, peak):
        if progress:
            progress(f"{group} {setting}")
        found.append(_tried(deployment, changed, base, group, setting, note))
    return found


def base_of(deployment: Deployment, base: Prediction) -> WhatIf:
    """The deployment's own settings as a row of the table."""
    return _row(deployment, base, base, "as it is", "", "")


def _changes(config: RunConfig, peak: float) -> Iterator[tuple[str, str, RunConfig, str]]:
    """(group, setting, configuration, what to know) of every change; the pool keeps its size in tokens.

    `peak` is the largest share of the pool that the base uses: smaller pools are shares of what it needs.
    """
    tokens = pool_shape(config).tokens
    cache = replace(config.cache, pool_tokens=tokens)
    if hasattr(cache, "pool_blocks"):
        cache = replace(cache, pool_blocks=None)
    config = replace(config, cache=cache)
    scheduler = config.scheduler
    for size in _BLOCKS:
        if size != cache.block_size:
            yield "block size", str(size), replace(config, cache=replace(cache, block_size=size)), _BLOCK
    for factor in (2.0, 0.5, peak, 0.75 * peak, _TIGHT * peak):
        changed = _with_pool(config, factor * tokens)
        yield "pool", f"{changed.cache.pool_tokens:,} tokens", changed, _MORE_MEMORY if factor > 1 else ""
    for factor in (0.25, 0.5, 2.0, 4.0):
        count = max(1, round(factor * scheduler.max_running))
        changed = replace(config, scheduler=replace(scheduler, max_running=count))
        yield "max_num_seqs", str(count), changed, ""
    for factor in (0.25, 0.5, 2.0, 4.0):
        count = max(16, round(factor * scheduler.max_batched_tokens))
        changed = replace(config, scheduler=replace(scheduler, max_batched_tokens=count))
        yield "max_num_batched_tokens", f"{count:,}", changed, ""
    tight = _with_pool(config, _TIGHT * peak * tokens)
    for way in (Preemption.recompute, Preemption.swap):
        changed = replace(
            tight,
            scheduler=replace(scheduler, preemption=way),
            cache=replace(tight.cache, host_tokens=tokens if way is Preemption.swap else 0),
        )
        note = _NO_SWAP if way is Preemption.swap else ""
        yield "preemption", f"{way}, {tight.cache.pool_tokens:,} tokens", changed, note
    other = not cache.prefix_caching
    yield (
        "prefix caching",
        "on" if other else "off",
        replace(config, cache=replace(cache, prefix_caching=other)),
        "",
    )


def _with_pool(config: RunConfig, tokens: float) -> RunConfig:
    """The configuration with a pool of about so many tokens, in whole blocks."""
    size = max(1, round(tokens / config.cache.block_size)) * config.cache.block_size
    return replace(config, cache=replace(config.cache, pool_tokens=size))


def _tried(
    deployment: Deployment, config: RunConfig, base: Prediction, group: str, setting: str, note: str
) -> WhatIf:
    try:
        found = predictor(config, deployment.workload)(config.device)
    except ConfigError as error:
        return WhatIf(group, setting, None, np.nan, 0, np.nan, np.nan, f"refused: {error.message}")
    return _row(deployment, found, base, group, setting, note)


def _row(
    deployment: Deployment, found: Prediction, base: Prediction, group: str, setting: str, note: str
) -> WhatIf:
    figures = figures_of(deployment, found)
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


def figures_of(deployment: Deployment, found: Prediction) -> dict[str, float]:
    """The figures of `FIGURES`, of the same requests and with the same definitions as those of the log."""
    ttft, tpot = found.ttft_s(deployment.requests), found.tpot_s
    several = tpot[~np.isnan(tpot)]
    rate = compute_metrics(found.log)["output_throughput"]
    return {
        "ttft_p50": _quantile(ttft, 0.5),
        "ttft_p99": _quantile(ttft, 0.99),
        "tpot_p50": _quantile(several, 0.5),
        "tpot_p99": _quantile(several, 0.99),
        "output_throughput": rate,
    }


def measured_figures(deployment: Deployment) -> dict[str, float]:
    """The same figures of the log."""
    requests = deployment.requests
    tpot = requests.tpot_s[~np.isnan(requests.tpot_s)]
    span = float(requests.last_token_s.max() - requests.entered_s.min())
    return {
        "ttft_p50": _quantile(requests.ttft_s, 0.5),
        "ttft_p99": _quantile(requests.ttft_s, 0.99),
        "tpot_p50": _quantile(tpot, 0.5),
        "tpot_p99": _quantile(tpot, 0.99),
        "output_throughput": float(requests.output_tokens.sum()) / span if span else np.nan,
    }


def outside_of(found: Prediction, base: Prediction) -> float:
    """The share of the time in steps with more rows, tokens or KV to read than any step of `base`."""
    if found is base:
        return 0.0
    steps = found.log.steps
    beyond = np.zeros(len(np.asarray(steps["seconds"])), dtype=bool)
    for name in ("rows", "query_tokens", "kv_read_tokens"):
        largest = float(np.max(base.log.steps[name], initial=0.0))
        beyond |= np.asarray(steps[name], dtype=np.float64) > largest
    seconds = np.asarray(steps["seconds"], dtype=np.float64)
    total = float(seconds.sum())
    return float(seconds[beyond].sum()) / total if total else 0.0


def _quantile(values: FloatArray, share: float) -> float:
    return float(np.quantile(values, share)) if len(values) else float("nan")
