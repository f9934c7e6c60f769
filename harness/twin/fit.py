"""Fit the constants of a device to an engine's log, by running the simulator until its times are the log's.

The constants, their bounds and priors are in `residuals`, and how far the log allows other ones in `refits`.
`write_device` keeps the result as a file that `device=FILE` reads.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from harness.config.errors import UserError
from harness.config.schema import DeviceConfig, RunConfig
from harness.console import one_line
from harness.cost.seen import LARGEST, seen
from harness.point.bands import decode_step_s
from harness.store.atomic import write_files
from harness.twin.configured import UNSAID, Configured
from harness.twin.log import EngineLog, FloatArray, IntArray
from harness.twin.prediction import Errors, PredictedRun, compared, errors_by_part, errors_of, predictor
from harness.twin.refits import with_refits
from harness.twin.residuals import PRIOR_WEIGHT, FitProblem, Progress, Residuals, robust
from harness.twin.sharing import cached_before
from harness.twin.step_fit import StepResiduals, steps_to_fit
from harness.twin.what_ifs import figures_of, with_draws
from harness.workload.deployment import deployment_of, settings_text
from traces.formats.pagetwin import write_jsonl
from traces.trace import Trace

_ROUNDS = 12


@dataclass(frozen=True)
class FittedConstant:
    """One constant before and after. `spread` is that of its logarithm, given the log, or of the value itself where
    `linear`; `learned` if the log narrowed it to less than half of the prior's; `at_end` if the fit's bound held it."""

    key: str
    prior: float
    value: float
    spread: float
    learned: bool
    linear: bool = False
    at_end: bool = False

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
    fitted_on: IntArray  # places of the requests that were fitted, in order of their entry
    requests: int
    others: IntArray  # places of the requests that neither the fit nor the choice of its result has seen
    before: Errors  # on these, with the description's constants
    fitted: Errors  # on the part that was fitted
    held_out: Errors  # on the others
    simulations: int
    cpu_s: float
    prediction: PredictedRun
    kept: bool = True  # False: the description predicts the held-out part better, so that `device` is the described one
    cost: float = 0.0  # half the sum of squared residuals, priors included
    said: str = ""  # of a fit to steps: how their error splits

    @property
    def which(self) -> str:
        """The requests that were fitted, in words."""
        return which(self.fitted_on, self.requests)

    @property
    def others_are(self) -> str:
        """The requests of `held_out` in words, and what became of the rest."""
        chose = self.requests - len(self.fitted_on) - len(self.others)
        return f"{len(self.others)} others (by {chose} more the fit was preferred to the description, or not)"


_WINDOWS = 8
_MOST_IN_WINDOWS = 2_000  # requests of a log that every trial of a fit in windows simulates


def requests_to_fit(log: EngineLog) -> IntArray:
    """Places of the requests that a fit takes: a quarter of them, at least 30, at most 400, never all.

    They are the first ones. Where at most half as many run together while they begin as later, they are windows over
    the whole log: what a fit to a few running requests says of many is extrapolated, and the log has better. Of a log
    that does not keep the order in which they were sent they come from all over it.

    Raises:
        UserError: there are fewer than 40 requests.
    """
    requests = len(log.requests)
    if requests < 40:
        raise UserError(
            f"the log has {requests} finished requests; a fit needs 40, and holds some of them out. twin --no-fit "
            "compares it with the device's description"
        )
    count = min(max(round(0.25 * requests), 30), 400, requests - 10)
    if log.assumes_pauses:  # nor does it tell which requests came first
        return np.linspace(0, requests - 1, count).astype(np.int64)
    running = log.requests.under_way(log.requests.first_token_s)[0]
    grows = running.max() >= 2 * running[:count].max()
    if not grows or requests > _MOST_IN_WINDOWS or log.steps is not None:
        return np.arange(count)
    long = count // _WINDOWS
    starts = np.linspace(0, requests - long, _WINDOWS).astype(np.int64)
    return (starts[:, None] + np.arange(long)).ravel()


def not_in(chosen: IntArray, requests: int) -> IntArray:
    """The other places of so many requests."""
    return np.setdiff1d(np.arange(requests), chosen)


def parts_of_others(chosen: IntArray, requests: int) -> tuple[IntArray, IntArray]:
    """The places that a fit to `chosen` leaves, in windows by turns: to choose its result by, and to state errors of.

    Errors of requests by which the better of two predictions was chosen are too small: they are never stated.
    """
    windows = np.array_split(not_in(chosen, requests), _WINDOWS)
    return np.concatenate(windows[::2]), np.concatenate(windows[1::2])


def which(chosen: IntArray, requests: int) -> str:
    """The requests at these places, in words."""
    windows = 1 + int((np.diff(chosen) > 1).sum())
    if windows == 1:
        return f"first {len(chosen)} of {requests} requests"
    if windows > _WINDOWS:
        return f"{len(chosen)} of {requests} requests from all over the log"
    return f"{len(chosen)} of {requests} requests in {windows} windows"


def fit_device(
    log: EngineLog, config: RunConfig, *, first: int | None = None, progress: Progress | None = None
) -> Fit:
    """Fit the constants of `config.device` to a part of the log's requests, and judge them on `parts_of_others`.

    `first` is how many requests are fitted, in order of their entry; None takes those of `requests_to_fit`. Of other
    requests the fit sees arrivals and lengths, while the fitted are running, and no time, but their ranks
    where their order is not known (`compared`). The result is deterministic.

    Raises:
        ConfigError: the settings are not those of an engine that could have served the log.
        UserError: the log has too few requests.
    """
    began = time.process_time()
    count = len(log.requests)
    chosen = requests_to_fit(log) if first is None else np.arange(first)
    if not 1 <= len(chosen) < count - 1:
        reason = f"the fit takes {first} of {count} requests, must be at least 1 and leave two for the test"
        raise UserError(reason)
    steps = steps_to_fit(log, config, chosen)
    regression = StepResiduals(steps, config, progress) if steps is not None else None
    problem = regression or Residuals(log, config, chosen, progress)
    zero = np.zeros(len(problem.constants))
    place, cost = _searched(problem, problem.start())
    again = problem.start(place)
    if (again != place).any():  # what the priors took for the front end may have been the device's
        place, cost = min((place, cost), _searched(problem, again), key=lambda one: one[1])
    whole = predictor(config, log.workload)
    place = problem.without_idle(place)
    device = with_refits(problem, place)
    before, after = whole(problem.device(zero)), whole(device)
    device = replace(device, seen=_seen(config, device, log, after, chosen))
    if regression is not None:
        device = replace(device, ttft_spread=_of_quarters(after, log, chosen))
    choosing, rest = parts_of_others(chosen, count)
    kept = not errors_of(after, log, choosing).size > max(1.0, errors_of(before, log, choosing).size)
    if not kept:
        device, after = config.device, whole(config.device)
    return Fit(
        device,
        _described(problem, place),
        chosen,
        count,
        rest,
        errors_of(before, log, rest),
        errors_of(after, log, chosen),
        errors_of(after, log, rest),
        problem.simulations + 2,
        time.process_time() - began,
        after,
        kept,
        cost,
        "" if regression is None else regression.said(place),
    )


def _searched(problem: FitProblem, start: FloatArray) -> tuple[FloatArray, float]:
    """The place of the least cost near `start`, and that cost."""
    # The search has its origin at the start: the first step is as long as that is far from it, or 1.
    found = least_squares(
        lambda moved: problem.residuals(start + moved),  # type: ignore[misc]
        np.zeros_like(start),
        jac=lambda moved: problem.jacobian(start + moved),  # type: ignore[misc]
        bounds=(problem.scaled_low - start, problem.scaled_high - start),
        max_nfev=_ROUNDS,
        ftol=1e-4,
    )
    return start + found.x, float(found.cost)


def _of_quarters(found: PredictedRun, log: EngineLog, chosen: IntArray) -> float:
    """What a fit to steps leaves of TTFT: root mean square of its mean errors in quarters of the fitted requests."""
    measured = log.requests.take(chosen)
    floor = float(np.median(measured.ttft_s)) / 2
    errors = np.log((found.ttft_s(log.requests)[chosen] + floor) / (measured.ttft_s + floor))
    return float(np.sqrt(np.mean([part.mean() ** 2 for part in np.array_split(errors, 4)])))


def _seen(
    config: RunConfig, device: DeviceConfig, log: EngineLog, found: PredictedRun, chosen: IntArray
) -> str:
    """What the fitted requests show of the model and of steps, as `device.seen` keeps it."""
    deployment = deployment_of(replace(config, device=device))
    last_s = float(found.last_token_s[chosen].max())
    steps = found.log.steps
    until = {name: steps[name][np.asarray(steps["start_s"]) < last_s] for name in ("start_s", *LARGEST)}
    fitted = log.requests.take(chosen)
    longest = float((fitted.prompt_tokens + fitted.output_tokens).max())
    known = seen(deployment.shape, device.tensor_parallel, until, longest)
    rows, context, _ = known.step
    return str(replace(known, step=(rows, context, decode_step_s(deployment, rows, context))))


_DOUBTFUL = {"TPOT": 0.1, "TTFT": 0.25}  # errors of the fitted part that no noise of a log explains


def doubts(fit: Fit) -> list[str]:
    """What speaks against a fit, in sentences: constants at a bound, and errors on the requests that were fitted."""
    ends, found = [f"{one.key} = {one.value:.4g}" for one in fit.constants if one.at_end], []
    if not fit.kept:
        found.append(
            "the constants of the fit predict the requests that it has not seen worse than the description does, so "
            "that the description is kept: the first requests are not like the others, or the run had other settings."
        )
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
    unsaid = [note for note in found.notes if note.startswith(UNSAID)]
    if not unsaid:
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
    notes = (*(each for each in found.notes if each not in unsaid), note)
    return replace(ways[chosen], notes=notes), fits[chosen]


_PROVES_CACHED = 0.7  # of the cost with new prompts


def fit_log(
    log: EngineLog, found: Configured, *, first: int | None = None, progress: Progress | None = None
) -> tuple[EngineLog, Configured, Fit]:
    """`fit_schedule`; where the log does not say what its prompts share, with new prompts and with cached ones.

    A benchmark that is run again with its seed sends the same prompts, which the engine then has. Cached ones are taken
    where they explain the log far better: prompts that are computed slow down the requests that run beside them. The
    log that is returned has the prompts that were taken.

    Raises:
        ConfigError, UserError: as `fit_device`.
    """
    found, fit = fit_schedule(log, found, first=first, progress=progress)
    if log.assumes_pauses:
        more_s, paused = log_of_pauses(log, replace(found.config, device=fit.device), fit.fitted_on)
        if more_s:
            log, fit = paused, fit_device(paused, found.config, first=first, progress=progress)
            shown = "as the fitted requests show: their first tokens come so much sooner after a step"
            longer = f"{1e3 * more_s:g} ms longer between an answer and the next request"
            said = f"Its client pauses {longer} than the reader of the log assumes, {shown}."
            found = replace(found, notes=(*found.notes, said))
    other = log_of_cached_prompts(log, found)
    if other is None:
        return log, found, fit
    cached = fit_device(other, found.config, first=first, progress=progress)
    if cached.cost >= _PROVES_CACHED * fit.cost:
        return log, found, fit
    said = (
        "Its prompts were in the prefix cache before it began, as the times of its first requests show (a fit to new "
        f"prompts: TPOT p50 {100 * fit.held_out.tpot_p50:+.1f} %, TTFT p50 {100 * fit.held_out.ttft_p50:+.1f} % on "
        "requests held out)."
    )
    return other, replace(found, warnings=(*found.warnings, said)), cached


_PAUSES_S = tuple(0.002 * number for number in range(13))


def logs_of_a_fit(log: EngineLog, found: Configured) -> Iterator[EngineLog]:
    """Every log that `fit_log` may return for this one: as it is, with other pauses, with cached prompts."""
    pauses = _PAUSES_S if log.assumes_pauses else _PAUSES_S[:1]
    for paused in (_paused(log, more_s) if more_s else log for more_s in pauses):
        yield paused
        if (cached := log_of_cached_prompts(paused, found)) is not None:
            yield cached


def log_of_pauses(log: EngineLog, config: RunConfig, chosen: IntArray) -> tuple[float, EngineLog]:
    """The seconds beside what is assumed that explain the first tokens of the chosen requests best, and their log.

    A request that follows an answer waits for the rest of the step that has begun, so that it waits less by the time
    that its client takes. 0 where no pause explains them clearly better.
    """
    costs = {}
    for more_s in _PAUSES_S:
        found = predictor(config, _paused(log, more_s).workload)(config.device)
        ours = compared(found, log.requests, ordered=False)[0][chosen]
        costs[more_s] = float(np.square(robust(np.log(ours / log.requests.ttft_s[chosen]), 0.1)).sum())
    best = min(costs, key=lambda more_s: costs[more_s])
    best = best if costs[best] < _CLEARLY * costs[0.0] else 0.0
    return best, _paused(log, best)


def _paused(log: EngineLog, more_s: float) -> EngineLog:
    """The log of a client that pauses longer before each turn that follows an answer."""
    rows = tuple(
        row if row.think_us is None else replace(row, think_us=row.think_us + round(1e6 * more_s))
        for row in log.workload.requests
    )
    return replace(log, workload=log.workload.changed(rows, f"pauses longer by {1e3 * more_s:g} ms"))


def log_of_cached_prompts(log: EngineLog, found: Configured) -> EngineLog | None:
    """The log as if its prompts had been cached before; None where that is known, or cannot be."""
    if not found.config.cache.prefix_caching or log.requests.cached_tokens is not None:
        return None
    workload = cached_before(log.workload, deployment_of(found.config).pool.whole_tokens)
    return None if workload is None else replace(log, workload=workload)


def _described(problem: FitProblem, scaled: FloatArray) -> tuple[FittedConstant, ...]:
    """The constants before and after, with the spread that the log leaves them."""
    slopes = problem.jacobian(scaled) / PRIOR_WEIGHT  # in units in which the prior has the variance 1
    left = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    before, after = problem.device(np.zeros_like(scaled)), problem.device(scaled)
    found = []
    for one, share in zip(problem.constants, left, strict=True):
        prior, value = (float(getattr(device, one.key)) for device in (before, after))
        spread, learned = float(share * one.spread), bool(share < 0.5)
        found.append(FittedConstant(one.key, prior, value, spread, learned, one.linear, one.holds(value)))
    return tuple(found)


# -- the fitted device as a file --------------------------------------------------------------------------------------


def write_device(fit: Fit, log: EngineLog, found: Configured, command: str, path: Path) -> None:
    """Write the device, and beside it the deployment (the same with the model and the engine's settings) and its load.

    The load is a trace whose header names its client, which a replay of the deployment obeys.

    Raises:
        StoreError: a file cannot be written.
    """
    config = replace(found.config, device=fitted_device(fit, log))
    text = _device_text(fit, log, found, command, _trust(fit, log, config))
    head = "".join(f"{line}\n" for line in text.splitlines()[1:] if line.startswith("# "))
    whole = f"# The deployment of a log: start from it with deployment=FILE.\n{head}{settings_text(config)}"
    files = {path.name: text.encode(), deployment_file(path).name: whole.encode()}
    write_files(path.parent, {**files, workload_file(path).name: trace_bytes(log.workload)})


def _trust(fit: Fit, log: EngineLog, config: RunConfig) -> list[str]:
    """How far to trust the deployment, a line each: errors by load and lengths, and the bands of its figures."""
    found = with_draws(log, config, log.workload, fit.prediction).bands
    values = figures_of(log, fit.prediction)
    said = (f"{name}: {band.changes(values[name])} of what is predicted" for name, band in found.items())
    parts = errors_by_part(fit.prediction, log, fit.others)
    return [*parts, "Nine of ten measured values should lie", *said]


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
    if not fit.kept:
        return fit.device
    ran = f" of {log.settings.model}" if log.settings.model else ""
    errors = {"TPOT": fit.held_out.tpot_mean, "TTFT": fit.held_out.ttft_mean}
    missed = ", ".join(f"mean {name} {100 * one:+.1f} %" for name, one in errors.items() if isfinite(one))
    learned = f"{log.name}, {fit.which}{ran}"
    return replace(fit.device, fitted_from=f"{learned} (error on the others: {missed})")


def _device_text(fit: Fit, log: EngineLog, found: Configured, command: str, trust: Sequence[str]) -> str:
    """The file's text: comments that say where it comes from, then one key and value a line."""
    settings = found.settings
    engine = " ".join(filter(None, (settings.engine, settings.version)))
    lines = [
        f"# {fit.device.name} as the log of a deployment shows it: choose with device=FILE.",
        f"# Made by: {command}",
        f"# Log: {log.name} ({', '.join(log.sources)}), {engine}, model {settings.model or 'not named'}.",
        f"# {log.client}",
        f"# Digest of its requests: {log.workload.digest[:16]}",
        f"# Fitted on the {fit.which}. Errors on {fit.others_are}:",
        f"#   {fit.held_out}",
        *(f"#   {line}" for line in trust),
        f"#   with the constants of the description, before the fit: {fit.before}",
        *(f"# {warning}" for warning in found.warnings),
        *(f"# Warning: {doubt}" for doubt in doubts(fit)),
        "# Constants: value before the fit, and whether the log taught it (to half of the prior's spread or less).",
    ]
    learned = {constant.key: constant for constant in fit.constants} if fit.kept else {}
    device = fitted_device(fit, log)
    for one in fields(DeviceConfig):
        value = getattr(device, one.name)
        if value is None:
            continue
        constant = learned.get(one.name)
        comment = "" if constant is None else f"  # before {constant.prior:.4g}; {constant.how}"
        written = f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
        lines.append(f"{one.name}: {written}{comment}")
    return "\n".join(one_line(line, 10**6) for line in lines) + "\n"  # a name in the log adds no line
