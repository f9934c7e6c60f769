"""Fit the constants of a device to an engine's log, by running the simulator until its times are the log's.

The constants are those of the roofline's expected value: shares of the datasheet's rates, and fixed times. One log
cannot tell all of them apart (a plain least-squares fit puts the weights' time into the constant of a step), so each
has bounds and a weak prior: the value that the device's description gives, with a spread on the logarithm.
`write_device` keeps the result as a file that `device=FILE` reads.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from harness.config.errors import UserError
from harness.config.schema import DeviceConfig, RunConfig
from harness.store.atomic import write_files
from harness.twin.configured import Configured
from harness.twin.log import EngineLog, FloatArray, IntArray
from harness.twin.prediction import Errors, PredictedRun, errors_of, predictor
from harness.workload.deployment import settings_text
from traces.formats.pagetwin import write_jsonl
from traces.trace import OPEN, Trace

# Called after each simulation with how many there were and the cost so far.
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Constant:
    """A constant of the device that a log can teach: its key, spread of the prior's logarithm, and bounds.

    `centre` replaces the description's value where that is 0, which has no logarithm. With `linear` the spread is that
    of the value itself, which may be 0.
    """

    key: str
    spread: float
    low: float
    high: float
    centre: float = 0.0
    linear: bool = False

    def scale(self, value: float) -> float:
        """The value on the axis on which the prior's spread is measured."""
        return value if self.linear else float(np.log(value))

    def value(self, scaled: float) -> float:
        """The value at a place of that axis, within the bounds."""
        return min(max(scaled if self.linear else float(np.exp(scaled)), self.low), self.high)

    def prior(self, device: DeviceConfig) -> float:
        """The value that the description gives, inside the bounds."""
        value = float(getattr(device, self.key)) or self.centre
        return min(max(value, self.low * 1.001), self.high * 0.999)


CONSTANTS = (
    Constant("bandwidth_efficiency", 0.1, 0.4, 1.0, 0.85),
    Constant("kv_efficiency", 0.1, 0.4, 1.0, 0.85),
    Constant("compute_efficiency", 0.25, 0.15, 1.0, 0.6),
    Constant("attention_efficiency", 0.25, 0.1, 1.0, 0.5),
    Constant("step_overhead_us", 0.7, 30.0, 20_000.0, 500.0),
    Constant("layer_overhead_us", 0.5, 0.5, 200.0, 8.0),
    Constant("row_overhead_us", 0.7, 0.01, 10.0, 0.2),
)
# Only a log of several devices says anything about their link.
LINK_CONSTANTS = (
    Constant("link_efficiency", 0.5, 0.02, 1.0, 0.5),
    Constant("link_latency_us", 0.7, 1.0, 500.0, 10.0),
)

# Only a log of clients, whose requests come before the server's front end, says anything about that.
FRONT_END_CONSTANTS = (
    Constant("frontend_request_us", 10_000.0, 0.0, 200_000.0, linear=True),
    Constant("frontend_token_us", 2.0, 0.0, 50.0, linear=True),
)
# Only a client that sends when answers end sends several requests at once, which take turns.
TURN_CONSTANT = Constant("frontend_turn_us", 10_000.0, 0.0, 50_000.0, linear=True)

_PRIOR_WEIGHT = 3.0  # a prior counts as this many requests at their tolerance
# More requests than this do not make the fit surer: what is left is the form's error, not noise.
_EFFECTIVE = 75
# Of a logarithm; beyond it a request counts by its distance alone.
_TPOT_TOLERANCE, _TTFT_TOLERANCE = 0.03, 0.1
_STEP = 0.2  # of a spread: a smaller change moves too few steps for a derivative
_LINEAR_STEP = 0.05  # the same of a constant whose spread is wide beside what it may be
_EXPLAINS = 0.99  # of the cost without it: a front end that lowers it by less is none
_ROUNDS = 12
_INSIDE = 0.025  # of a spread: where a search begins whose prior is a bound, beside which it cannot move
# Microseconds of a front end from which a search may begin: its time to first token goes in steps, not in slopes.
_STARTS = {"frontend_request_us": (250.0, 3000.0, 8000.0), "frontend_turn_us": (100.0, 300.0, 1000.0)}


@dataclass(frozen=True)
class FittedConstant:
    """One constant before and after. `spread` is that of its logarithm, given the log, or of the value itself where
    `linear`; `learned` if the log narrowed it to less than half of the prior's."""

    key: str
    prior: float
    value: float
    spread: float
    learned: bool
    linear: bool = False

    @property
    def how(self) -> str:
        """In words, whether the log taught it, and the spread that is left."""
        left = f"{self.spread:.3g}" if self.linear else f"{100 * self.spread:.0f} %"
        return f"{'learned from the log' if self.learned else 'mostly the prior'}, spread {left}"


@dataclass(frozen=True)
class Fit:
    """The device as a log shows it, and how well it predicts the part of the log that the fit has not seen."""

    device: DeviceConfig
    constants: tuple[FittedConstant, ...]
    fitted_on: int
    requests: int
    before: Errors  # on the held-out part, with the description's constants
    fitted: Errors  # on the part that was fitted
    held_out: Errors
    simulations: int
    cpu_s: float
    prediction: PredictedRun
    cost: float = 0.0  # half the sum of squared residuals, priors included


def requests_to_fit(requests: int) -> int:
    """How many of the first requests a fit takes: a quarter of them, at least 30, at most 400, never all.

    Raises:
        UserError: there are fewer than 40 requests.
    """
    if requests < 40:
        raise UserError(
            f"the log has {requests} finished requests; a fit needs 40, and holds some of them out. twin --no-fit "
            "compares it with the device's description"
        )
    return min(max(round(0.25 * requests), 30), 400, requests - 10)


def fit_device(
    log: EngineLog, config: RunConfig, *, first: int | None = None, progress: Progress | None = None
) -> Fit:
    """Fit the constants of `config.device` to the first requests of the log, and judge them on the others.

    `first` is how many requests are fitted, in order of their entry; None takes a quarter. Of later requests the fit
    sees arrivals and lengths, while the first are running, and no time. The result is deterministic.

    Raises:
        ConfigError: the settings are not those of an engine that could have served the log.
        UserError: the log has too few requests.
    """
    began = time.process_time()
    count = len(log.requests)
    first = requests_to_fit(count) if first is None else first
    if not 1 <= first < count:
        reason = f"the fit takes {first} of {count} requests, must be at least 1 and leave some for the test"
        raise UserError(reason)
    problem = _Problem(log, config, first, progress)
    zero = np.zeros(len(problem.constants))
    start = problem.start()
    # The search has its origin at the start: the first step is as long as that is far from it, or 1.
    found = least_squares(
        problem.residuals_from,
        zero,
        jac=problem.jacobian_from,
        args=(start,),
        bounds=(problem.scaled_low - start, problem.scaled_high - start),
        max_nfev=_ROUNDS,
        ftol=1e-4,
    )
    whole = predictor(config, log.workload)
    place = problem.without_idle(start + found.x)
    device = problem.device(place)
    before, after = whole(problem.device(zero)), whole(device)
    rest = slice(first, None)
    return Fit(
        device,
        problem.described(place),
        first,
        count,
        errors_of(before, log, rest),
        errors_of(after, log, slice(0, first)),
        errors_of(after, log, rest),
        problem.simulations + 2,
        time.process_time() - began,
        after,
        float(found.cost),
    )


_DOUBTFUL = {"TPOT": 0.1, "TTFT": 0.25}  # errors of the fitted part that no noise of a log explains
_AT_BOUND = 0.005  # of the bound


def doubts(fit: Fit) -> list[str]:
    """What speaks against a fit, in sentences: constants at a bound, and errors on the requests that were fitted."""
    known = (*CONSTANTS, *LINK_CONSTANTS, *FRONT_END_CONSTANTS, TURN_CONSTANT)
    limits = {one.key: (one.high,) if one.linear else (one.low, one.high) for one in known}
    ends = [
        f"{one.key} = {one.value:.4g}"
        for one in fit.constants
        if any(abs(one.value / end - 1) < _AT_BOUND for end in limits[one.key])
    ]
    found = []
    if ends:
        found.append(
            f"{', '.join(ends)} lies at the end of what a GPU can do: the log asks for more. Are model, device, number "
            "of devices and units of time those of the run?"
        )
    errors = {"TPOT": fit.fitted.tpot_p50, "TTFT": fit.fitted.ttft_p50}
    far = [f"{name} {100 * error:+.0f} %" for name, error in errors.items() if abs(error) > _DOUBTFUL[name]]
    if far:
        found.append(
            f"the fit misses even the requests that it was fitted to ({', '.join(far)}): the run had other settings, "
            "another load beside this one, or another device than is simulated."
        )
    return found


def explains_nothing(fit: Fit) -> bool:
    """Whether a median of the fitted part is predicted at less than half or more than twice what was measured."""
    return any(error > 1 or error < -0.5 for error in (fit.fitted.tpot_p50, fit.fitted.ttft_p50))


_CLEARLY = 0.9  # of the other schedule's cost: a fit that is better by less proves nothing


def fit_schedule(
    log: EngineLog, found: Configured, *, first: int | None = None, progress: Progress | None = None
) -> tuple[Configured, Fit]:
    """`fit_device`; where neither log nor user say whether the engine scheduled ahead of its results, in both ways.

    The schedule whose fit is clearly better is taken, else the configured one. A note gives the errors of both.

    Raises:
        ConfigError, UserError: as `fit_device`.
    """
    if found.knows_schedule:
        return found, fit_device(log, found.config, first=first, progress=progress)
    ways = {ahead: found.scheduled(ahead) for ahead in (True, False)}
    fits = {ahead: fit_device(log, way.config, first=first, progress=progress) for ahead, way in ways.items()}
    usual = found.config.scheduler.async_scheduling
    chosen = (not usual) if fits[not usual].cost < _CLEARLY * fits[usual].cost else usual
    clear = fits[chosen].cost < _CLEARLY * fits[not chosen].cost
    said = "; ".join(
        f"{'on' if ahead else 'off'}: TPOT p50 {100 * fit.held_out.tpot_p50:+.1f} %, TTFT p50 "
        f"{100 * fit.held_out.ttft_p50:+.1f} % on requests held out"
        for ahead, fit in fits.items()
    )
    why = "the log does not tell which, so that the usual one is taken:"
    if clear:
        why = "the first requests show that it was"
    note = (
        f"The log does not say whether the engine scheduled ahead of its results; fitted both ways, {why} "
        f"{'on' if chosen else 'off'}. {said}. Set scheduler.async_scheduling=true or false if you know it."
    )
    return replace(ways[chosen], notes=(*found.notes_but_schedule, note)), fits[chosen]


def constants_of_log(log: EngineLog, config: RunConfig) -> tuple[Constant, ...]:
    """The constants about which a log of this configuration says anything."""
    links = LINK_CONSTANTS if config.device.tensor_parallel > 1 else ()
    if log.requests.queued_s is not None:
        return CONSTANTS + links
    turns = () if log.workload.header.client == OPEN else (TURN_CONSTANT,)
    return CONSTANTS + links + FRONT_END_CONSTANTS + turns


class _Problem:
    """The residuals of a fit over the constants' logarithms, in units of their priors' spreads."""

    def __init__(self, log: EngineLog, config: RunConfig, first: int, progress: Progress | None) -> None:
        self._base = config.device
        self.constants = constants_of_log(log, config)
        self._spread = np.array([one.spread for one in self.constants])
        self._centre = np.array([one.scale(one.prior(config.device)) for one in self.constants])
        ends = np.array([(one.scale(one.low), one.scale(one.high)) for one in self.constants]).T
        self.scaled_low, self.scaled_high = (ends - self._centre) / self._spread
        self._measured = log.requests.take(slice(0, first))
        last_s = float(self._measured.last_token_s.max())
        # Later requests may have entered before the last of the first ones had ended. A client that waits sends more
        # of them where it is served sooner.
        entered = int((log.requests.entered_s <= last_s).sum()) + (
            log.workload.header.client.max_in_flight or 0
        )
        rows = log.workload.requests[:entered]
        part = log.workload.changed(rows, f"the {len(rows)} requests until {last_s:.3f} s")
        self._predict = predictor(config, part)
        tpot = self._measured.tpot_s
        # An engine that gives all tokens at once leaves 0 between them, which has no logarithm.
        self._several = np.nan_to_num(tpot) > 0
        if self._several.any():
            self._floor_s = float(np.median(tpot[self._several]))
        else:
            self._floor_s = 0.1 * float(np.median(self._measured.ttft_s))
        if self._floor_s <= 0:
            raise UserError(
                f"of most of the first {first} requests the first token comes at the arrival and the last with it: "
                "the log has no durations that a fit could learn from"
            )
        self._weight = float(np.sqrt(min(1.0, _EFFECTIVE / first)))
        self._known: dict[bytes, FloatArray] = {}
        self._progress = progress
        self.simulations = 0

    def device(self, scaled: FloatArray) -> DeviceConfig:
        """The device at a place of the search."""
        found = replace(self._base)
        for constant, place in zip(self.constants, self._centre + scaled * self._spread, strict=True):
            setattr(found, constant.key, constant.value(float(place)))
        return found

    def start(self) -> FloatArray:
        """Where the search begins: at the priors, with the front end of `_STARTS` that is nearest to the log."""
        at_priors = _INSIDE * np.array([one.linear for one in self.constants], dtype=np.float64)
        keys = [one.key for one in self.constants]
        if TURN_CONSTANT.key not in keys:
            return at_priors
        places = []
        for values in product(*_STARTS.values()):
            place = at_priors.copy()
            for key, value in zip(_STARTS, values, strict=True):
                index = keys.index(key)
                place[index] = (value - self._centre[index]) / self._spread[index]
            places.append(place)
        return min(places, key=lambda place: float(np.square(self.residuals(place)).sum()))

    def residuals(self, scaled: FloatArray) -> FloatArray:
        """Of each request's TPOT and TTFT, and of each prior; TTFT beside one step's time, so that none is 0."""
        key = scaled.tobytes()
        if key not in self._known:
            predicted = self._predict(self.device(scaled))
            self.simulations += 1
            count, several = len(self._measured), self._several
            tpot = np.log(predicted.tpot_s[:count][several] / self._measured.tpot_s[several])
            floor = self._floor_s
            ttft = np.log((predicted.ttft_s(self._measured) + floor) / (self._measured.ttft_s + floor))
            pairs = (
                (_robust(tpot, _TPOT_TOLERANCE), several),
                (_robust(ttft, _TTFT_TOLERANCE), ~np.isnan(ttft)),
            )
            each = [
                np.sqrt(0.5) * _grouped(errors, order)
                for errors, chosen in pairs
                for order in (
                    np.arange(len(errors)),
                    np.argsort(self._measured.prompt_tokens[chosen], kind="stable"),
                )
            ]
            self._known[key] = np.concatenate([*(self._weight * one for one in each), _PRIOR_WEIGHT * scaled])
            if self._progress:
                self._progress(self.simulations, 0.5 * float(self._known[key] @ self._known[key]))
        return self._known[key]

    def residuals_from(self, moved: FloatArray, start: FloatArray) -> FloatArray:
        """`residuals` at a place relative to `start`."""
        return self.residuals(start + moved)

    def jacobian_from(self, moved: FloatArray, start: FloatArray) -> FloatArray:
        """`jacobian` at a place relative to `start`."""
        return self.jacobian(start + moved)

    def jacobian(self, scaled: FloatArray) -> FloatArray:
        """Differences over a fifth of a spread: a simulation is a step function of its constants."""
        here = self.residuals(scaled)
        columns = np.empty((len(here), len(scaled)))
        for i in range(len(scaled)):
            step = _LINEAR_STEP if self.constants[i].linear else _STEP
            step = step if scaled[i] + step < self.scaled_high[i] else -step
            moved = scaled.copy()
            moved[i] += step
            columns[:, i] = (self.residuals(moved) - here) / step
        return columns

    def without_idle(self, scaled: FloatArray) -> FloatArray:
        """The place with 0 for what is linear, where that explains the log as well."""
        none = np.where([one.linear for one in self.constants], self.scaled_low, scaled)
        costs = [float(each @ each) for each in (self.residuals(scaled), self.residuals(none))]
        return none if costs[1] * _EXPLAINS <= costs[0] else scaled

    def described(self, scaled: FloatArray) -> tuple[FittedConstant, ...]:
        """The constants before and after, with the spread that the log leaves them."""
        slopes = self.jacobian(scaled) / _PRIOR_WEIGHT  # in units in which the prior has the variance 1
        left = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
        before, after = self.device(np.zeros_like(scaled)), self.device(scaled)
        return tuple(
            FittedConstant(
                constant.key,
                float(getattr(before, constant.key)),
                float(getattr(after, constant.key)),
                float(share * constant.spread),
                bool(share < 0.5),
                constant.linear,
            )
            for constant, share in zip(self.constants, left, strict=True)
        )


_GROUP = 8  # requests


def _grouped(errors: FloatArray, order: IntArray) -> FloatArray:
    """Means of neighbours in an order, each as heavy as its requests.

    When a request arrives within a step is chance for a device whose steps are a little longer or shorter. Means have
    little of that, which a search would take for slopes.
    """
    groups = np.array_split(errors[order], max(1, len(errors) // _GROUP))
    return np.array([np.sqrt(len(group)) * group.mean() for group in groups])


def _robust(errors: FloatArray, tolerance: float) -> FloatArray:
    """Residuals whose squares grow linearly beyond the tolerance (pseudo-Huber), with the errors' signs."""
    loss = np.sqrt(1 + (errors / tolerance) ** 2) - 1
    rooted: FloatArray = np.sign(errors) * np.sqrt(2 * loss)
    return rooted


# -- the fitted device as a file --------------------------------------------------------------------------------------


def write_device(fit: Fit, log: EngineLog, found: Configured, command: str, path: Path) -> None:
    """Write the device, and beside it the deployment (the same with the model and the engine's settings) and its load.

    The load is a trace whose header names its client, which a replay of the deployment obeys.

    Raises:
        StoreError: a file cannot be written.
    """
    text = _device_text(fit, log, found, command)
    head = "".join(f"{line}\n" for line in text.splitlines()[1:] if line.startswith("# "))
    config = replace(found.config, device=fitted_device(fit, log))
    whole = f"# The deployment of a log: start from it with deployment=FILE.\n{head}{settings_text(config)}"
    files = {path.name: text.encode(), deployment_file(path).name: whole.encode()}
    write_files(path.parent, {**files, workload_file(path).name: trace_bytes(log.workload)})


def deployment_file(device: Path) -> Path:
    """The file of the deployment beside the file of its device."""
    return device.with_name(f"{device.stem}-deployment.yaml")


def workload_file(device: Path) -> Path:
    """The file of the requests beside the file of the device that they were fitted with."""
    return device.with_name(f"{device.stem}-workload.jsonl")


def trace_bytes(trace: Trace) -> bytes:
    """A trace as a file of PageTwin's own format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.jsonl"
        write_jsonl(trace, path)
        return path.read_bytes()


def fitted_device(fit: Fit, log: EngineLog) -> DeviceConfig:
    """The device of a fit, with the name of the log that it was fitted to."""
    ran = f" of {log.settings.model}" if log.settings.model else ""
    return replace(
        fit.device, fitted_from=f"{log.name}, first {fit.fitted_on} of {fit.requests} requests{ran}"
    )


def _device_text(fit: Fit, log: EngineLog, found: Configured, command: str) -> str:
    """The file's text: comments that say where it comes from, then one key and value a line."""
    settings = found.settings
    engine = " ".join(filter(None, (settings.engine, settings.version)))
    lines = [
        f"# {fit.device.name} as the log of a deployment shows it: choose with device=FILE.",
        f"# Made by: {command}",
        f"# Log: {log.name} ({', '.join(log.sources)}), {engine}, model {settings.model or 'not named'}.",
        f"# {log.client}",
        f"# Digest of its requests: {log.workload.digest[:16]}",
        f"# Fitted on the first {fit.fitted_on} of {fit.requests} requests. Errors on the others:",
        f"#   {fit.held_out}",
        f"#   with the constants of the description, before the fit: {fit.before}",
        *(f"# {warning}" for warning in found.warnings),
        *(f"# Warning: {doubt}" for doubt in doubts(fit)),
        "# Constants: value before the fit, and whether the log taught it (to half of the prior's spread or less).",
    ]
    learned = {constant.key: constant for constant in fit.constants}
    device = fitted_device(fit, log)
    for one in fields(DeviceConfig):
        value = getattr(device, one.name)
        if value is None:
            continue
        constant = learned.get(one.name)
        comment = ""
        if constant is not None:
            comment = f"  # before {constant.prior:.4g}; {constant.how}"
        written = json.dumps(value) if isinstance(value, bool | str) else str(value)
        if isinstance(value, float):
            written = f"{value:.6g}"
        lines.append(f"{one.name}: {written}{comment}")
    return "\n".join(lines) + "\n"
