"""What-ifs: the deployment's requests under other settings, each beside the prediction for the settings that it has.

Each answer has the trust that the fit earned: the error on requests that the fit had not seen, and the share of the
time in steps that are larger than any of the deployment, about which its log says nothing. `own_what_ifs` answers the
user's own questions, with bands of the figures and of their change.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
from scipy import stats

from engine.core.options import Preemption
from engine.runtime.options import VLLM_NAMES
from harness.config.checks import checked
from harness.config.errors import ConfigError, UserError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.config.values import converted, replaced
from harness.metrics.compute import compute_metrics
from harness.point.bands import COVERS, Band, bands
from harness.report.numbers import digits, seconds
from harness.twin.log import EngineLog, FloatArray
from harness.twin.prediction import PredictedRun, figures_of_times, others, predictor
from harness.workload.deployment import deployment_of
from traces.errors import ParameterError
from traces.reshape import set_rate
from traces.trace import Trace

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


LOAD = "load"
_LABELS = {"ttft_p50": "median TTFT", "tpot_p50": "median TPOT", "output_throughput": "output tokens/s"}
_SAME = 0.005  # of a figure: less is no change, whatever its band


@dataclass(frozen=True)
class OwnWhatIf:
    """A question of the user's: figures before and after, the band of each after, and the band of its change.

    The change is a factor; its band comes from the same draws of constants and chance before and after. Both are empty
    where nothing is known of the device's constants.
    """

    setting: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    bands: Mapping[str, Band]
    change: Mapping[str, Band]

    def shows(self, name: str) -> bool:
        """Whether a figure changes by more than its band holds."""
        factor, band = self.after[name] / self.before[name], self.change.get(name)
        return abs(factor - 1) > _SAME and (band is None or not band.holds(1.0))

    def __str__(self) -> str:
        """The answer in one sentence."""
        said = [self._said(name) for name in _LABELS if self.before.get(name) and name in self.after]
        return f"{self.setting}: {', '.join(said)}"

    def _said(self, name: str) -> str:
        before, after, band = self.before[name], self.after[name], self.bands.get(name)
        show = digits if name == "output_throughput" else seconds
        within = f" ({show(band.low)} to {show(band.high)})" if band else " (no band is known)"
        text = f"{_LABELS[name]} {show(before)} → {show(after)}{within}"
        return text if self.shows(name) else f"{text}, no difference beyond its band"


def own_what_ifs(
    log_: EngineLog, config: RunConfig, texts: Sequence[str], progress: Callable[[str], None]
) -> list[OwnWhatIf]:
    """The answers to `key=value,value` and `load=factor` questions, one a value, those that show most first.

    Raises:
        UserError: a question cannot be read, or its setting is not allowed.
    """
    changes = [one for text in texts for one in _asked(config, log_.workload, text)]
    base, drawn = _figures_with_draws(log_, config, log_.workload)
    found = []
    for setting, changed, workload in changes:
        progress(setting)
        after, others_after = _figures_with_draws(log_, changed, workload)
        change = {
            name: _factor_band(
                value, base[name], [(b[name], a[name]) for b, a in zip(drawn, others_after, strict=True)]
            )
            for name, value in after.items()
            if drawn and base[name] > 0 and value > 0
        }
        found.append(OwnWhatIf(setting, base, after, bands(after, others_after, config.device), change))
    return sorted(
        found, key=lambda one: -max((_size(one, name) for name in _LABELS if one.shows(name)), default=0.0)
    )


def _size(one: OwnWhatIf, name: str) -> float:
    return abs(log(one.after[name] / one.before[name]))


def _factor_band(after: float, before: float, drawn: Sequence[tuple[float, float]]) -> Band:
    """The factor by which a figure changes, in nine of ten draws."""
    errors = [log(a / b) - log(after / before) for b, a in drawn if a > 0 and b > 0]
    spread = sqrt(sum(error**2 for error in errors) / max(1, len(errors)))
    reach = float(stats.t.ppf(0.5 + COVERS / 2, max(1, len(errors) - 1))) * spread
    return Band(after / before * exp(-reach), after / before * exp(reach))


def _figures_with_draws(
    log_: EngineLog, config: RunConfig, workload: Trace
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The figures, and those of everything that the device may be as well."""
    found = predictor(config, workload)(config.device)
    return figures_of(log_, found), [figures_of(log_, one) for one in others(config, workload)]


def _asked(config: RunConfig, workload: Trace, text: str) -> Iterator[tuple[str, RunConfig, Trace]]:
    key, _, values = text.partition("=")
    if key == LOAD:
        for value in values.split(","):
            yield f"{LOAD}={value}", config, _loaded(workload, value)
        return
    (axis,) = parse_overrides([text])
    if axis.settings[0].is_group:
        raise UserError(
            f"--what-if {text}: changes one key, as scheduler.max_running=64,96, or the load, as load=1.5"
        )
    kept = {} if key.startswith("cache.pool") else {"cache.pool_tokens": deployment_of(config).pool.tokens}
    for setting in axis.settings:
        values_ = {"cache.pool_blocks": None, **kept, key: converted(key, setting.value)}
        name = VLLM_NAMES.get(key.rpartition(".")[2], key)
        yield f"{name}={setting.value}", checked(replaced(config, values_)), workload


def _loaded(workload: Trace, factor: str) -> Trace:
    try:
        return set_rate(workload, float(factor) * (workload.mean_rate or 0.0))
    except (ValueError, ParameterError) as error:
        raise UserError(
            f"--what-if load={factor}: a factor on the rate of the log, above 0: {error}"
        ) from None
