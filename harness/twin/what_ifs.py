"""What-ifs: the deployment's requests under other settings, each beside the prediction for the settings that it has.

A question is `key=value,value` or `load=factor`: the user's own, or the `questions` that are always asked. Each answer
has bands of its figures and of their change, and says what of it the fit has not seen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
from scipy.special import stdtrit

from engine.runtime.options import VLLM_NAMES
from harness.config.checks import checked
from harness.config.compose import OF_MEMORY
from harness.config.errors import UserError
from harness.config.overrides import parse_override
from harness.config.schema import RunConfig
from harness.config.values import UnusualError, converted, replaced
from harness.metrics.compute import compute_metrics
from harness.point.bands import COVERS, Band, bands, unseen
from harness.point.cost import check_cost
from harness.report.numbers import digits, seconds
from harness.twin.log import EngineLog, FloatArray
from harness.twin.prediction import PredictedRun, figures_of_times, others, point_of, predictor
from harness.workload.deployment import deployment_of
from traces.errors import ParameterError
from traces.reshape import set_rate
from traces.trace import ClientKind, Trace

FIGURES = (*("ttft_p50", "ttft_mean", "ttft_p99", "tpot_p50", "tpot_mean", "tpot_p99", "output_throughput"),)
LOAD, BLOCK_SIZE, POOL, AS_IT_IS = "load", "cache.block_size", "cache.pool", "as it is"
NOT_PRICED = {
    BLOCK_SIZE: "the cost model does not price block size: sizes differ by the last, partly filled block and by prefix "
    "reuse",
    **dict.fromkeys(
        ("device.tensor_parallel", "model.dtype", "model.kv_dtype", "model.weight_dtype"),
        "the KV pool keeps its size in tokens (cache.pool_tokens)",
    ),
}
_SECTIONS = ("model", "device", "cache", "scheduler", "decoding", "cost")  # with what a prediction obeys
_IN_FLIGHT = "replay.max_in_flight"
_BLOCKS = (8, 16, 32, 64, 128)
_FACTORS = (0.25, 0.5, 2.0, 4.0)
_OF_POOL, _OF_PEAK = (2.0, 0.5), (1.0, 0.75, 0.5)
_LABELS = {"ttft_p50": "median TTFT", "tpot_p50": "median TPOT", "output_throughput": "output tokens/s"}
_SAME = 0.005  # of a figure: less is no change, whatever its band
_MOST = 1_500  # requests of a log that are simulated for bands


@dataclass(frozen=True)
class WhatIf:
    """Settings that are one and the same simulation, and what it gives. The first row is of those as they are.

    `figures` by name of `FIGURES`, and `before` those of the first row; None: refused, and `note` says why. `bands`
    are of the figures; a change is a factor, and `change` has its band, from the same draws of constants and chance
    before and after. Both are empty where nothing is known of the device's constants, and where no figure changes.
    `unseen` says what of model and load the fit has not seen.
    """

    settings: tuple[str, ...]
    before: Mapping[str, float]
    figures: Mapping[str, float] | None = None
    kv_peak: float = np.nan
    preemptions: int = 0
    hit_share: float = np.nan
    note: str = ""
    bands: Mapping[str, Band] = field(default_factory=dict)
    change: Mapping[str, Band] = field(default_factory=dict)
    unseen: str = ""

    @property
    def name(self) -> str:
        """The settings in words."""
        return ", ".join(self.settings)

    def factor(self, name: str) -> float | None:
        """The change of a figure; None where it was refused or is not known."""
        before, after = self.before.get(name), (self.figures or {}).get(name)
        known = before and after is not None and np.isfinite(before) and np.isfinite(after)
        return after / before if known and before and after is not None else None

    def shows(self, name: str) -> bool:
        """Whether a figure changes by more than its band holds."""
        factor, band = self.factor(name), self.change.get(name)
        return factor is not None and abs(factor - 1) > _SAME and (band is None or not band.holds(1.0))

    @property
    def changes(self) -> bool:
        """Whether a figure changes at all, whatever its band."""
        return any(abs((self.factor(name) or 1) - 1) > _SAME for name in FIGURES)

    @property
    def gain(self) -> float:
        """How much better it is: the logarithms of the factors that show, of latencies negative, together."""
        shown = {name: log(self.factor(name) or 1e-9) for name in _LABELS if self.shows(name)}
        return sum(each if name == "output_throughput" else -each for name, each in shown.items())

    def __str__(self) -> str:
        """The answer in one sentence."""
        if self.figures is None:
            return f"{self.name}: {self.note}"
        if self.settings[0] == AS_IT_IS:
            return f"{self.name}: one and the same simulation"
        said = [self._said(name) for name in _LABELS if self.factor(name) is not None] if self.changes else []
        parts = [", ".join(said) or f"no figure changes by {_SAME:.1%}", self.note]
        return f"{self.name}: " + "; ".join(filter(None, [*parts, self.unseen]))

    def _said(self, name: str) -> str:
        assert self.figures is not None
        before, after, band = self.before[name], self.figures[name], self.bands.get(name)
        show = digits if name == "output_throughput" else seconds
        within = f" ({band.words(show)})" if band else " (no band is known)"
        text = f"{_LABELS[name]} {show(before)} → {show(after)}{within}"
        if not self.shows(name):
            return f"{text}, no difference beyond its band"
        change = self.change.get(name)
        inside = band and change and band.holds(before)
        return f"{text}, a change of {change.words(signed)}" if inside and change else text


def signed(factor: float) -> str:
    """A factor as a change in percent."""
    return f"{100 * (factor - 1):+.1f}\u00a0%" if factor < 10 else f"x {factor:.0f}"


def questions(config: RunConfig, base: PredictedRun) -> list[str]:
    """What is asked of every deployment; pools are shares of the one that it has, and of what `base` uses of it."""
    cache, scheduler, tokens = config.cache, config.scheduler, deployment_of(config).pool.whole_tokens
    shares = (*_OF_POOL, *(_kv_peak(base) * share for share in _OF_PEAK))
    pools = (max(1, round(share * tokens / cache.block_size)) * cache.block_size for share in shares)
    asked = {
        BLOCK_SIZE: [size for size in _BLOCKS if size != cache.block_size],
        "cache.pool_tokens": pools,
        "scheduler.max_running": (max(1, round(each * scheduler.max_running)) for each in _FACTORS),
        "scheduler.max_batched_tokens": (
            max(16, round(each * scheduler.max_batched_tokens)) for each in _FACTORS
        ),
        "cache.prefix_caching": [str(not cache.prefix_caching).lower()],
    }
    return [f"{key}={','.join(map(str, values))}" for key, values in asked.items()]


def what_ifs(
    log_: EngineLog,
    config: RunConfig,
    base: PredictedRun,
    texts: Sequence[str],
    tell: Callable[[str], None] = lambda _: None,
) -> list[WhatIf]:
    """The settings as they are, then the answers to questions; what helps most first, what is refused last."""
    before = with_draws(log_, config, log_.workload, base)
    as_it_is = replace(_row(log_, base, (AS_IT_IS,), before.figures, ""), bands=before.bands)
    found, refused = {_result(as_it_is): as_it_is}, []
    for text in [one for each in texts for one in _one_by_one(each)]:
        setting = text
        try:
            setting, values, workload = _asked(config, log_.workload, text)
            tell(setting)
            changed = checked(replaced(config, values))
            check_cost(deployment_of(changed))
            run = predictor(changed, workload)(changed.device)
        except UserError as error:
            reason = "; ".join(str(error).splitlines())
            refused.append(WhatIf((setting,), before.figures, note=f"refused: {reason}"))
            continue
        note = next((why for key, why in NOT_PRICED.items() if key in values), "")
        if deployment_of(changed).pool.whole_tokens > deployment_of(config).pool.whole_tokens:
            note = "a pool larger than the deployment's needs more memory than it gave to KV"
        new = unseen(point_of(changed, workload), run.log.steps)
        row = replace(_row(log_, run, (setting,), before.figures, note), unseen=new)
        same = found.get(_result(row))
        if same is None and row.changes:
            after = with_draws(log_, changed, workload, run)
            row = replace(row, bands=after.bands, change=_changes(before, after))
        if same is not None:
            row = replace(same, settings=(*same.settings, setting), note=same.note or note)
        found[_result(row)] = row
    first, *rest = found.values()
    return [first, *sorted(rest, key=lambda one: -one.gain), *refused]


def _result(row: WhatIf) -> str:
    return str((row.figures, row.preemptions, row.hit_share))


def _row(
    log_: EngineLog, run: PredictedRun, settings: tuple[str, ...], before: Mapping[str, float], note: str
) -> WhatIf:
    prompts, hits, preemptions = (
        float(np.sum(run.log.requests[name])) for name in ("prompt_tokens", "hit_tokens", "preemptions")
    )
    share = hits / prompts if prompts else 0.0
    return WhatIf(settings, before, figures_of(log_, run), _kv_peak(run), int(preemptions), share, note)


def _kv_peak(found: PredictedRun) -> float:
    """The largest share of the pool in use."""
    steps = found.log.steps
    used = 1 - np.asarray(steps["free"] + steps["cached"], dtype=np.float64) / found.log.capacity_slots
    return float(used.max(initial=0.0))


def figures_of(log_: EngineLog, found: PredictedRun) -> dict[str, float]:
    """The figures of `FIGURES`, of the same requests and with the same definitions as those of the log."""
    rate = compute_metrics(found.log)["output_throughput"]
    return _figures(found.ttft_s(log_.requests), found.tpot_s, rate)


def measured_figures(log_: EngineLog) -> dict[str, float]:
    """The same figures of the log."""
    requests = log_.requests
    span = float(requests.last_token_s.max() - requests.entered_s.min())
    rate = float(requests.output_tokens.sum()) / span if span else np.nan
    return _figures(requests.ttft_s, requests.tpot_s, rate)


def _figures(ttft_s: FloatArray, tpot_s: FloatArray, rate: float) -> dict[str, float]:
    found = figures_of_times(ttft_s, tpot_s) | {"output_throughput": rate}
    return {name: found[name] for name in FIGURES}


@dataclass(frozen=True)
class Drawn:
    """Figures of all requests, of a log's first, of these in every draw of what the deployment may be, and bands."""

    figures: Mapping[str, float]
    first: Mapping[str, float]
    drawn: Sequence[Mapping[str, float]]
    bands: Mapping[str, Band]


def with_draws(log_: EngineLog, config: RunConfig, workload: Trace, run: PredictedRun) -> Drawn:
    """The bands of a prediction's figures, and what they are made of. Of a long log the first requests alone are drawn.

    Raises:
        ConfigError: a request can never be served with these settings, or `device.fits` cannot be read.
    """
    whole = first = figures_of(log_, run)
    if len(workload.requests) > _MOST:
        workload = workload.changed(workload.requests[:_MOST], f"the first {_MOST:,} requests")
        log_ = replace(log_, requests=log_.requests.take(slice(0, _MOST)), workload=workload)
        run = predictor(config, workload)(config.device)
        first = figures_of(log_, run)
    drawn = [figures_of(log_, one) for one in others(config, workload, run)]
    shares = {name: band.shares(first[name]) for name, band in bands(first, drawn, config.device).items()}
    found = {
        name: Band(whole[name] * (1 + low), whole[name] * (1 + high)) for name, (low, high) in shares.items()
    }
    return Drawn(whole, first, drawn, found)


def _changes(before: Drawn, after: Drawn) -> dict[str, Band]:
    """The factor by which each figure changes, in nine of ten draws."""
    found = {}
    for name in after.bands.keys() & before.bands.keys():
        pairs = [(b[name], a[name]) for b, a in zip(before.drawn, after.drawn, strict=True)]
        known = log(after.first[name] / before.first[name])
        errors = [log(a / b) - known for b, a in pairs if a > 0 and b > 0]
        spread = sqrt(sum(error**2 for error in errors) / max(1, len(errors)))
        reach = float(stdtrit(max(1, len(errors) - 1), 0.5 + COVERS / 2)) * spread
        factor = after.figures[name] / before.figures[name]
        found[name] = Band(factor * exp(-reach), factor * exp(reach))
    return found


def _one_by_one(text: str) -> list[str]:
    """The questions of one value each in a text; the text itself where it cannot be read."""
    key, _, values = text.partition("=")
    if key == LOAD:
        return [f"{LOAD}={value}" for value in values.split(",")]
    try:
        return [setting.text for setting in parse_override(text).settings]
    except UserError:
        return [text]


def _asked(config: RunConfig, workload: Trace, text: str) -> tuple[str, dict[str, Any], Trace]:
    """The setting that a question of one value names, the values that it sets, and the requests under it.

    Raises:
        UserError: it cannot be read, or the prediction would not hear it.
    """
    key, _, value = text.partition("=")
    if key == LOAD:
        return text, {}, _loaded(workload, value)
    (setting,) = parse_override(text).settings
    if setting.is_group:
        raise UserError("changes one key, as scheduler.max_running=64,96, or the load, as load=1.5")
    section, _, last = key.partition(".")
    if section not in _SECTIONS and key != _IN_FLIGHT:
        raise UserError(
            "the requests are those of the log, so this would change nothing; ask a setting of "
            f"{', '.join(_SECTIONS)}, {_IN_FLIGHT}, or the load, as load=1.5"
        )
    tokens = deployment_of(config).pool.whole_tokens
    if section == "device" and last in OF_MEMORY.split():
        raise UserError(
            "the pool is that of the deployment, so this would change nothing; ask another pool, as "
            f"cache.pool_tokens={2 * tokens}"
        )
    kept = {"cache.pool_tokens": None if key.startswith(POOL) else tokens}
    name = last if key == "cache.policy" else VLLM_NAMES.get(last, last)  # vLLM's policy is the scheduler's
    try:
        changed = {"cache.pool_blocks": None, **kept, key: converted(key, setting.value)}
    except UnusualError:
        raise UserError(f"{setting.value!r} is no value of {key}") from None
    return f"{name}={setting.value}", changed, workload


def _loaded(workload: Trace, factor: str) -> Trace:
    client = workload.header.client
    if client.kind is ClientKind.closed:
        raise UserError(
            f"the client is {client}, which sends as the server answers, so this would change nothing; ask how many "
            f"are in flight, as {_IN_FLIGHT}={2 * (client.max_in_flight or 1)}"
        )
    try:
        return set_rate(workload, float(factor) * (workload.mean_rate or 0.0))
    except (ValueError, ParameterError) as error:
        raise UserError(f"a factor on the rate of the log, above 0: {error}") from None
