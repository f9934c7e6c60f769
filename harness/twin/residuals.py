"""How far a simulation is from a log, as residuals over the constants of a device that a log can teach.

The constants are those of the roofline's expected value: shares of the datasheet's rates, and fixed times, and those of
the server's front end. One log cannot tell all of them apart (a plain least-squares fit puts the weights' time into the
constant of a step), so each has bounds and a weak prior: the value that the device's description gives, with a spread
on the logarithm.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from harness.config.errors import UserError
from harness.config.schema import CostKind, DeviceConfig, RunConfig
from harness.twin.client import BoolArray
from harness.twin.log import EngineLog, FloatArray, IntArray
from harness.twin.prediction import compared, predictor, together
from traces.trace import OPEN

# Called after each simulation with how many there were and the cost so far.
Progress = Callable[[int, float], None]


_AT_BOUND = 0.005  # of the bound


@dataclass(frozen=True)
class Constant:
    """A constant of the device that a log can teach: its key, spread of the prior's logarithm, and bounds.

    `centre` replaces the description's value where that is 0, which has no logarithm. With `linear` the spread is that
    of the value itself, which may be 0. `step`, in spreads, is how far a derivative looks: a smaller change moves too
    few steps.
    """

    key: str
    spread: float
    low: float
    high: float
    centre: float = 0.0
    linear: bool = False
    step: float = 0.2

    def scale(self, value: float) -> float:
        """The value on the axis on which the prior's spread is measured."""
        return value if self.linear else float(np.log(value))

    def value(self, scaled: float) -> float:
        """The value at a place of that axis, within the bounds."""
        return min(max(scaled if self.linear else float(np.exp(scaled)), self.low), self.high)

    def holds(self, value: float) -> bool:
        """Whether a bound keeps the value from what a log asks for; what is linear may well be at 0."""
        return any(abs(value / end - 1) < _AT_BOUND for end in (self.high, self.low)[: 2 - self.linear])

    def prior(self, device: DeviceConfig) -> float:
        """The value that the description gives, inside the bounds."""
        value = float(getattr(device, self.key)) or self.centre
        return min(max(value, self.low * 1.001), self.high * 0.999)


CONSTANTS: tuple[Constant, ...] = (
    Constant("bandwidth_efficiency", 0.1, 0.4, 1.0, 0.85),
    Constant("kv_efficiency", 0.1, 0.4, 1.0, 0.85),
    Constant("compute_efficiency", 0.25, 0.15, 1.0, 0.6),
    Constant("attention_efficiency", 0.25, 0.1, 1.0, 0.5),
    Constant("step_overhead_us", 0.7, 30.0, 20_000.0, 500.0),
    Constant("layer_overhead_us", 0.5, 0.5, 200.0, 8.0),
    Constant("row_overhead_us", 0.7, 0.01, 10.0, 0.2),
)
# The same of published timings: a factor on each part, and the host.
TABLE_CONSTANTS = (
    Constant("tables_dense", 0.15, 0.3, 3.0),
    Constant("tables_attention", 0.25, 0.2, 5.0),
    Constant("step_overhead_us", 0.7, 30.0, 20_000.0, 500.0),
)
# Only a log of several devices says anything about their link.
LINK_CONSTANTS = (
    Constant("link_efficiency", 0.5, 0.02, 1.0, 0.3),
    Constant("link_round_us", 0.7, 1.0, 500.0, 5.0),
)

# Only a log of clients, whose requests come before the server's front end, says anything about that. A client that is
# far away has a network before it.
FRONT_END_CONSTANTS = (
    Constant("frontend_request_us", 20_000.0, 0.0, 500_000.0, linear=True, step=0.025),
    Constant("frontend_token_us", 2.0, 0.0, 50.0, linear=True, step=0.05),
)
# Only a client that sends when answers end sends several requests at once, which take turns. It is what one thread
# computes, whatever the way to it: a server with 5 ms could serve 100 requests a second, each with its answer.
TURN_CONSTANT = Constant("frontend_turn_us", 4000.0, 0.0, 10_000.0, linear=True, step=0.1)

PRIOR_WEIGHT = 3.0  # a prior counts as this many requests at their tolerance
# More requests than this do not make the fit surer: what is left is the form's error, not noise.
_EFFECTIVE = 75
# Of a logarithm; beyond it a request counts by its distance alone.
_TPOT_TOLERANCE, _TTFT_TOLERANCE = 0.03, 0.1
# A constant of the front end that lowers the sum of squares by less is none (Akaike's criterion).
_EXPLAINS = 2.0
# Microseconds of a front end from which a search may begin: its time to first token goes in steps, not in slopes.
_STARTS = {
    "frontend_request_us": (250.0, 1500.0, 3000.0, 5000.0, 8000.0),
    "frontend_turn_us": (100.0, 400.0, 800.0, 1500.0, 2500.0),
}


def constants_of_log(log: EngineLog, config: RunConfig) -> tuple[Constant, ...]:
    """The constants about which a log of this configuration says anything."""
    links = LINK_CONSTANTS if config.device.tensor_parallel > 1 else ()
    shares = CONSTANTS
    if config.cost.kind is CostKind.published:
        shares, links = TABLE_CONSTANTS, ()
    if log.requests.queued_s is not None:
        return shares + links
    turns = () if log.workload.header.client == OPEN else (TURN_CONSTANT,)
    request, token = FRONT_END_CONSTANTS
    # A network may take half of the shortest time.
    spread = max(request.spread, 0.5e6 * float(log.requests.ttft_s.min()))
    wide = replace(request, spread=spread, step=request.step * request.spread / spread)
    return (*shares, *links, wide, token, *turns)


class FitProblem(ABC):
    """A fit over the constants' logarithms, in units of their priors' spreads: misfits to a log, and to the priors.

    The misfits belong to `units`: requests in the order of their entry, or neighbouring steps.
    """

    def __init__(self, constants: Sequence[Constant], base: DeviceConfig, progress: Progress | None) -> None:
        self._base = base
        self.constants = tuple(constants)
        self._spread = np.array([one.spread for one in self.constants])
        self._centre = np.array([one.scale(one.prior(base)) for one in self.constants])
        ends = np.array([(one.scale(one.low), one.scale(one.high)) for one in self.constants]).T
        self.scaled_low, self.scaled_high = (ends - self._centre) / self._spread
        self._known: dict[bytes, tuple[FloatArray, FloatArray]] = {}
        self._progress = progress
        self.simulations = 0

    @abstractmethod
    def misfits(self, scaled: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """The residuals without those of the priors; `weights` says how often each unit counts, None once."""

    @abstractmethod
    def errors(self, scaled: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Logarithms of predicted over measured time of each unit: per token or step, and to the first token."""

    def start(self, found: FloatArray | None = None) -> FloatArray:
        """Where the search begins: at the priors, beside one that is a bound: on it the search cannot move; or again,
        at what it `found`.
        """
        return np.array([0.5 * one.step * one.linear for one in self.constants]) if found is None else found

    def device(self, scaled: FloatArray) -> DeviceConfig:
        """The device at a place of the search."""
        found = replace(self._base)
        for constant, place in zip(self.constants, self._centre + scaled * self._spread, strict=True):
            setattr(found, constant.key, constant.value(float(place)))
        return found

    def residuals(self, scaled: FloatArray) -> FloatArray:
        """The misfits, and those of the priors."""
        return np.concatenate([self.misfits(scaled), PRIOR_WEIGHT * scaled])

    def jacobian(self, scaled: FloatArray) -> FloatArray:
        """Differences over a fifth of a spread: a simulation is a step function of its constants."""
        return np.vstack([self.slopes(scaled), PRIOR_WEIGHT * np.eye(len(scaled))])

    def slopes(self, scaled: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """The derivatives of `misfits`."""
        here = self.misfits(scaled, weights)
        columns = np.empty((len(here), len(scaled)))
        for i in range(len(scaled)):
            step = self.constants[i].step
            step = step if scaled[i] + step < self.scaled_high[i] else -step
            moved = scaled.copy()
            moved[i] += step
            columns[:, i] = (self.misfits(moved, weights) - here) / step
        return columns

    def without_idle(self, scaled: FloatArray) -> FloatArray:
        """The place with 0 for what is linear, where that explains the log as well."""
        linear = np.array([one.linear for one in self.constants])
        none = np.where(linear, self.scaled_low, scaled)
        costs = [float(each @ each) for each in (self.residuals(scaled), self.residuals(none))]
        return none if costs[1] <= costs[0] + _EXPLAINS * int(linear.sum()) else scaled


def _begun(log: EngineLog, chosen: IntArray) -> BoolArray:
    """The requests whose time to first token counts: without those with which a client opens its connections.

    That of a client that waits takes as long again as all else before the queue. All count where they are the half.
    """
    waits = log.workload.header.client.max_in_flight or 0
    opening = waits if log.requests.queued_s is None and 2 * waits <= len(chosen) else 0
    return chosen >= opening


class Residuals(FitProblem):
    """The misfits of TPOT and TTFT of each request, by running the simulator.

    TTFT counts beside one step's time, so that none is 0.
    """

    def __init__(
        self, log: EngineLog, config: RunConfig, chosen: IntArray, progress: Progress | None
    ) -> None:
        super().__init__(constants_of_log(log, config), config.device, progress)
        self._chosen, self._ordered = chosen, not log.assumes_pauses
        self._measured = log.requests.take(chosen)
        last_s = float(self._measured.last_token_s.max())
        # Later requests may have entered before the last of the fitted ones had ended. A client that waits sends more
        # of them where it is served sooner.
        more = log.workload.header.client.max_in_flight or 0
        entered = int((log.requests.entered_s <= last_s).sum()) + more
        rows = log.workload.requests[:entered]
        self._simulated = log.requests.take(slice(0, entered))
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
                f"of most of the {len(chosen)} fitted requests the first token comes at the arrival and the last "
                "with it: the log has no durations that a fit could learn from"
            )
        self._begun, self._together = _begun(log, chosen), together(self._simulated)[chosen]
        self._weight = float(np.sqrt(min(1.0, _EFFECTIVE / len(chosen))))

    def start(self, found: FloatArray | None = None) -> FloatArray:
        """The same, with the front end of `_STARTS` that is nearest to the log, where that is nearer than it is."""
        begin = super().start(found)
        keys = [one.key for one in self.constants]
        if TURN_CONSTANT.key not in keys:
            return begin
        places = [] if found is None else [begin]
        for values in product(*_STARTS.values()):
            place = begin.copy()
            for key, value in zip(_STARTS, values, strict=True):
                index = keys.index(key)
                place[index] = (value - self._centre[index]) / self._spread[index]
            places.append(place)
        return min(places, key=lambda place: float(np.square(self.residuals(place)).sum()))

    def misfits(self, scaled: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """The residuals without those of the priors; `weights` says how often each request counts, None once."""
        tpot, ttft = self.errors(scaled)
        weights = np.ones(len(ttft)) if weights is None else weights
        found = []
        for errors, tolerance, chosen, times in (
            (tpot, _TPOT_TOLERANCE, self._several, self._measured.tpot_s),
            (ttft, _TTFT_TOLERANCE, self._begun, self._measured.ttft_s),
        ):
            by_prompt = np.argsort(self._measured.prompt_tokens[chosen], kind="stable")
            misfits = robust(errors[chosen], tolerance)
            orders = (np.arange(len(misfits)), by_prompt)
            if not self._ordered:  # which of those that ran together was which is not known
                orders = (np.lexsort((times[chosen], self._together[chosen])),) * 2
            found += [np.sqrt(0.5) * _grouped(misfits, weights[chosen], order) for order in orders]
        residuals: FloatArray = self._weight * np.concatenate(found)
        return residuals

    def errors(self, scaled: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Logarithms of predicted over measured TPOT (nan without) and TTFT of each request."""
        key = scaled.tobytes()
        if key not in self._known:
            predicted = self._predict(self.device(scaled))
            self.simulations += 1
            several, floor = self._several, self._floor_s
            times = compared(predicted, self._simulated, ordered=self._ordered)
            our_ttft, our_tpot = (each[self._chosen] for each in times)
            tpot = np.full(len(self._measured), np.nan)
            tpot[several] = np.log(our_tpot[several] / self._measured.tpot_s[several])
            ttft = np.log((our_ttft + floor) / (self._measured.ttft_s + floor))
            self._known[key] = (tpot, ttft)
            if self._progress:
                residuals = self.residuals(scaled)
                self._progress(self.simulations, 0.5 * float(residuals @ residuals))
        return self._known[key]


_GROUP = 8  # requests


def _grouped(errors: FloatArray, weights: FloatArray, order: IntArray) -> FloatArray:
    """Means of neighbours in an order, each as heavy as its requests are together.

    When a request arrives within a step is chance for a device whose steps are a little longer or shorter. Means have
    little of that, which a search would take for slopes.
    """
    if not len(errors):
        return errors
    starts = [group[0] for group in np.array_split(np.arange(len(errors)), max(1, len(errors) // _GROUP))]
    weighed = np.add.reduceat((weights * errors)[order], starts)
    found: FloatArray = weighed / np.sqrt(np.maximum(np.add.reduceat(weights[order], starts), 1e-9))
    return found


def robust(errors: FloatArray, tolerance: float) -> FloatArray:
    """Residuals whose squares grow linearly beyond the tolerance (pseudo-Huber), with the errors' signs."""
    loss = np.sqrt(1 + (errors / tolerance) ** 2) - 1
    rooted: FloatArray = np.sign(errors) * np.sqrt(2 * loss)
    return rooted
