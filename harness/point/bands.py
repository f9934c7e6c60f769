"""The band of a predicted figure: nine of ten measured values should lie in it.

A point is simulated again with other constants that its device may have (`possible`), each time with other steps by
chance, and the figures' spread is the band (`bands`), whatever of its deployment was changed: `harness.twin.what_ifs`
asks for it, and `harness.capacity` for the ends of the constants alone. Where they may lie is known from

* the log that the device was fitted to: fits to other draws of its requests (`device.fits`), and what no constants
  explain of it, by parts of its time (`device.step_spread`, `device.ttft_spread`). Outside of what that log has shown
  (`device.seen`) a band is wider: for another model by all between a step that takes as long as before and one that
  takes as much longer as there is more work, which one model cannot tell apart; for larger steps and longer requests
  by 2 % of a step for each doubling. `unseen` says what it is. Or else
* the ranges of what a device's description assumes (`harness.cost.roofline.ASSUMED`).

Seconds of tables alone, and of a calibration, have no band: a calibration states its errors and its repeatability.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from engine.core.plan import Row, StepPlan
from harness.config.errors import ConfigError
from harness.config.schema import CostKind, DeviceConfig, EngineDevice
from harness.cost.roofline import ASSUMED, ASSUMED_FRONT_END
from harness.cost.seen import NOT_KEPT, seen_of
from harness.metrics.log import Column, FloatArray
from harness.point.cost import cost_model, resolve_cost_kind
from harness.replay.features import FeatureMeter
from harness.workload.deployment import Deployment
from harness.workload.point import Point
from traces.trace import Trace

DRAWS = 12
COVERS = 0.9  # of measured values
_USEFUL = 4.0  # times the lower end: half to twice a figure
# Of a logarithm: what repeats of a run on one GPU differ by, and what any form of a step leaves.
_REPEATS = {"tpot": 0.006, "ttft": 0.012}
_OTHER_REPEATS = 0.01
_DESCRIBED = 0.05  # the same where no log of the device was fitted: steps of another form than the roofline's
# Of a logarithm of a step, for each doubling beyond what was fitted: what fits to one or two running requests missed at
# 4 to 64, in public ramps of two models on an A10G (0.6 to 3 % a doubling).
PER_DOUBLING = 0.02
_JITTER_S = 0.01  # how far an arrival may lie from where it was: about a step, by which chance decides
_SAME_STEP = 0.001  # of a step's price: a file keeps six digits of its constants
_STEP_TIMES = (
    *("step_overhead_us", "layer_overhead_us", "attention_overhead_us", "row_overhead_us", "link_round_us"),
)
_STEP_FACTORS = ("tables_attention", "tables_dense")  # of published timings
_STEP_RATES = ("bandwidth_gbs", "tflops", "link_gbs")


@dataclass(frozen=True)
class Band:
    """The values between which nine of ten measured ones should lie, in the figure's own unit."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether a value lies in it, the ends included."""
        return self.low <= value <= self.high

    def words(self, show: Callable[[float], str]) -> str:
        """Both ends as `show` gives them; a band that is too wide to be of use has no upper one."""
        if self.high > _USEFUL * self.low:
            return f"at least {show(self.low)}, not bounded above"
        return f"{show(self.low)} to {show(self.high)}"

    def changes(self, value: float) -> str:
        """Both ends in words, as changes of `value`."""
        return self.words(lambda end: f"{100 * (end / value - 1):+.1f} %")

    def shares(self, value: float) -> tuple[float, float]:
        """Both ends as signed shares of `value`: (-0.05, 0.06) is from 5 % below to 6 % above it."""
        return self.low / value - 1, self.high / value - 1


def unseen(point: Point, steps: Mapping[str, Column] | None = None) -> str:
    """What of a point the fit of its device has not seen, in sentences; with its simulated `steps` also of its load.

    Empty where nothing was fitted, or all is known.
    """
    deployment = point.deployment
    if deployment.device.seen is None:
        return NOT_KEPT if deployment.device.fitted_from is not None else ""
    known = seen_of(deployment.device.seen)
    said = known.new_model(deployment.shape, deployment.device.tensor_parallel)
    load = known.new_load(steps, longest_request(point.trace)) if steps is not None else ""
    rows, context, before_s = known.step
    now_s = before_s if said else decode_step_s(deployment, rows, context)
    if abs(now_s / before_s - 1) > _SAME_STEP:
        both = f"takes {1e3 * now_s:.3g} ms here and took {1e3 * before_s:.3g} ms when it was fitted"
        why = "a constant was changed, or steps are priced in another form than the fit's"
        said = f"a typical step of the fit's log {both}: {why}"
    return "; ".join(filter(None, (said, load)))


def longest_request(trace: Trace) -> float:
    """Tokens of the longest request, prompt and output."""
    return float(max(row.prompt_tokens + row.output_tokens for row in trace.requests))


def beyond(point: Point, steps: Mapping[str, Column] | None) -> float:
    """How often the largest simulated step, or the longest request, doubles what the fit of the device has seen."""
    text = point.deployment.device.seen
    return (
        0.0 if text is None or steps is None else seen_of(text).doublings(steps, longest_request(point.trace))
    )


def bands(
    values: Mapping[str, float], drawn: Sequence[Mapping[str, float]], device: DeviceConfig
) -> dict[str, Band]:
    """The band of each figure above 0, from its values in simulations of `possible` points, named as metrics are."""
    found = {}
    for name, value in values.items():
        others = [one[name] for one in drawn if one.get(name, 0.0) > 0 and np.isfinite(one[name])]
        if value > 0 and np.isfinite(value) and len(others) > 1:
            found[name] = _band(name, value, np.log(np.array(others) / value), device)
    return found


def _band(name: str, value: float, errors: FloatArray, device: DeviceConfig) -> Band:
    family = name.partition("_")[0]
    left = [device.ttft_spread if family == "ttft" else 0.0]
    # the draws of a calibration have its errors
    if device.fits is None and device.name != EngineDevice.cpu.value:
        left += [_DESCRIBED, device.step_spread]
    if device.fits is None or family != "tpot":  # the steps that a fit's draws simulate have their repeats
        left.append(_REPEATS.get(family, _OTHER_REPEATS))
    spread = sqrt(float(np.mean(errors**2)) + sum(one**2 for one in left))
    reach = float(stdtrit(len(errors) - 1, 0.5 + COVERS / 2)) * spread
    return Band(value * exp(-reach), value * exp(reach))


def possible(point: Point, doublings: float = 0.0) -> Iterator[Point]:
    """The point as it may be: with other constants of its device, and other arrivals by chance.

    `doublings` is how far its steps lie `beyond` those that the fit has seen.
    """
    deployment = point.deployment
    for number, device in enumerate(possible_devices(deployment, doublings)):
        trace = jittered(point.trace, number)
        yield replace(point.of_trace(trace), deployment=replace(deployment, device=device))


def possible_devices(deployment: Deployment, doublings: float = 0.0) -> list[DeviceConfig]:
    """The device with other constants that it may have; none where none are known, or prices do not follow them.

    Those of a fit are slower or faster by chance, more so for another model than the fit's and for larger steps.
    """
    device = deployment.device
    kind = resolve_cost_kind(deployment)
    anchored = kind is CostKind.published and device.fits is not None
    if device.name == EngineDevice.cpu.value or not (anchored or kind is CostKind.roofline):
        return []
    from scipy.stats import qmc  # a second to import

    draw = qmc.LatinHypercube(len(ASSUMED) + len(ASSUMED_FRONT_END) + 1, rng=7)
    places = draw.random(DRAWS)
    if device.fits is not None:
        found = [replace(device, **values) for values in fits_of(device.fits)]
        spread = sqrt(device.step_spread**2 + _REPEATS["tpot"] ** 2 + (PER_DOUBLING * doublings) ** 2)
        low, high = _left_open(deployment)
        # Anywhere between the ends that another model leaves open; each end itself in one of twenty draws.
        factors = spread * ndtri(places[:, -1])
        factors += np.interp(places[:, 0], (0.05, 0.95), (log(low), log(high)))
        chances = np.exp(np.resize(factors, len(found)))
        return [slower(one, float(factor)) for one, factor in zip(found, chances, strict=True)]
    return [_drawn(device, place) for place in places] if device.fitted_from is None else []


def _left_open(deployment: Deployment) -> tuple[float, float]:
    """The factors on a step's time that the fit of another model leaves open; 1 and 1 for the model of the fit.

    The typical decode step of the log may take as long for this model as it did for that one, or as many times as long
    as this one has more work; the prediction lies between.
    """
    if deployment.device.seen is None:
        return 1.0, 1.0
    known, parallel = seen_of(deployment.device.seen), deployment.device.tensor_parallel
    if not known.new_model(deployment.shape, parallel):
        return 1.0, 1.0
    rows, context, before_s = known.step
    predicted = decode_step_s(deployment, rows, context) / before_s
    least, most = known.work_range(deployment.shape, parallel)
    return min(1.0, least / predicted), max(1.0, most / predicted)


def decode_step_s(deployment: Deployment, rows: float, context: float) -> float:
    """The predicted seconds of a step of so many rows of one token, each after `context` tokens."""
    row = (0, 0, int(context), 1, True, ())
    plan = StepPlan(0, [Row(*row) for _ in range(int(rows))])
    features = FeatureMeter({}, deployment.cache.block_size, deployment.shape.sight).single(plan, {})
    return float(cost_model(deployment).price([float(one) for one in features]).seconds)


def _drawn(device: DeviceConfig, place: FloatArray) -> DeviceConfig:
    """The device with each assumed constant at a place (0 to 1) between the ends of its range."""
    ranges = {**ASSUMED, **ASSUMED_FRONT_END}
    drawn: dict[str, Any] = {}
    for (key, (low, high)), share in zip(ranges.items(), place, strict=False):
        value = float(getattr(device, key))
        if value > 0:
            known = (log(min(low, value)), log(value), log(max(high, value)))
            drawn[key] = exp(float(np.interp(share, (0.05, 0.5, 0.95), known)))
    return replace(device, **drawn)


def slower(device: DeviceConfig, factor: float) -> DeviceConfig:
    """The device whose every step takes `factor` times as long."""
    times = {name: getattr(device, name) * factor for name in (*_STEP_TIMES, *_STEP_FACTORS)}
    return replace(device, **times, **{name: getattr(device, name) / factor for name in _STEP_RATES})


def jittered(trace: Trace, seed: int) -> Trace:
    """The trace with arrivals moved by up to `_JITTER_S`, in the same order."""
    moves = np.random.default_rng(seed).uniform(0, 1e6 * _JITTER_S, len(trace.requests))
    at = np.maximum.accumulate(trace.columns.arrival_us + moves.astype(np.int64))
    return trace.changed(
        replace(trace.columns, arrival_us=at), f"arrivals moved by up to {1e3 * _JITTER_S:g} ms"
    )


def fits_text(fits: Iterable[Mapping[str, float]]) -> str:
    """Several fits as text: `key=value,value,…; key=…`, one value of each."""
    rows = list(fits)
    return "; ".join(f"{key}={','.join(f'{row[key]:.5g}' for row in rows)}" for key in rows[0])


def fits_of(text: str) -> list[dict[str, Any]]:
    """The fits in a text of `fits_text`.

    Raises:
        ConfigError: it is none; names `device.fits`.
    """
    columns: dict[str, list[float]] = {}
    try:
        for part in text.split(";"):
            key, _, values = part.strip().partition("=")
            if not isinstance(getattr(DeviceConfig, key), float):
                raise ValueError
            columns[key] = [float(value) for value in values.split(",")]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            "device.fits",
            f"found {text[:60]!r}…, must be 'key=value,value,…; key=…' with constants of a device and as many values "
            "of each, as calibrate --from-log writes it; null: no band is known",
        ) from error
