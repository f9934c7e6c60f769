"""A fit to the steps of a probe's log: a regression, where a log of requests needs a simulation for each trial.

The constants and their priors are those of any fit (`residuals`). What is compared are sums over neighbouring steps, in
three orders: of time, of tokens, of KV to read. A sum keeps the level, which single steps that the host held up do not.
"""

from dataclasses import replace

import numpy as np

from harness.config.schema import RunConfig
from harness.metrics.log import FloatArray
from harness.point.cost import cost_model
from harness.replay.features import AT
from harness.twin.log import EngineLog, IntArray
from harness.twin.residuals import CONSTANTS, LINK_CONSTANTS, FitProblem, Progress, robust
from harness.twin.steps import LoggedSteps
from harness.workload.deployment import deployment_of, model_shape

FEWEST = 60
"""Steps, of which a regression is made; fewer are left to the simulator."""
_GROUP = 16  # steps
_EFFECTIVE = 400  # more groups than this do not make the fit surer: what is left is the form's error
_TOLERANCE = 0.03  # of a logarithm
_ABOVE = 10  # times what a device's description says


def steps_to_fit(log: EngineLog, config: RunConfig, chosen: IntArray) -> LoggedSteps | None:
    """The steps until the requests at these places have ended; None where a regression on them is not possible.

    Layers with a window read less than a step's line tells, and replicas have a log each.
    """
    if log.steps is None or config.device.data_parallel > 1 or model_shape(config.model).window is not None:
        return None
    found = log.steps.until(float(log.requests.last_token_s[chosen].max()))
    return found if len(found) >= FEWEST else None


class StepResiduals(FitProblem):
    """The misfits of the seconds of steps. A unit is a group of neighbours in time."""

    def __init__(self, steps: LoggedSteps, config: RunConfig, progress: Progress | None) -> None:
        constants = (*CONSTANTS, *(LINK_CONSTANTS if config.device.tensor_parallel > 1 else ()))
        # Bounds of a GPU's times are no bounds of a CPU's, whose description says so.
        wider = (
            replace(one, high=max(one.high, _ABOVE * float(getattr(config.device, one.key))))
            if one.key.endswith("_us")
            else one
            for one in constants
        )
        super().__init__(tuple(wider), config.device, progress)
        self._steps = steps
        self._deployment = deployment_of(config)
        self._columns = list(steps.features.T)
        self._unit = np.arange(len(steps)) // _GROUP
        kv = steps.features[:, AT.decode_kv] + steps.features[:, AT.prefill_kv]
        by_value = (steps.features[:, AT.tokens], kv)
        self._orders = [np.arange(len(steps)), *(np.argsort(one, kind="stable") for one in by_value)]

    def seconds(self, scaled: FloatArray) -> FloatArray:
        """The price of each step at a place of the search."""
        cost = cost_model(replace(self._deployment, device=self.device(scaled)))
        return np.asarray(cost.price(self._columns).seconds, dtype=np.float64)

    def errors(self, scaled: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of each unit, twice: a step's error is that of the first token too."""
        found, _ = self._sums(self.seconds(scaled), self._orders[0], np.ones(len(self._unit)))
        return found, found

    def misfits(self, scaled: FloatArray, weights: FloatArray | None = None) -> FloatArray:
        """The misfits of the groups in each order, each as heavy as its time."""
        seconds = self.seconds(scaled)
        counts = np.ones(len(seconds)) if weights is None else weights[self._unit]
        found = []
        for order in self._orders:
            errors, shares = self._sums(seconds, order, counts)
            found.append(np.sqrt(_EFFECTIVE / len(self._orders) * shares) * robust(errors, _TOLERANCE))
        return np.concatenate(found)

    def _sums(
        self, seconds: FloatArray, order: IntArray, counts: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Logarithms of predicted over measured time of groups of neighbours, and the groups' shares of the time."""
        starts = np.arange(0, len(order), _GROUP)
        counts = np.maximum(counts, 1e-6)
        predicted, measured = (
            np.add.reduceat((counts * one)[order], starts) for one in (seconds, self._steps.seconds)
        )
        return np.log(predicted / measured), measured / measured.sum()

    def said(self, scaled: FloatArray) -> str:
        """How the error of a step splits into the model's and the host's part, in a sentence.

        What the host takes is a line over the rows; the rest of a step's price is the model's.
        """
        steps = self._steps
        rows = np.column_stack([np.ones(len(steps)), steps.rows])
        host = rows @ np.linalg.lstsq(rows, steps.host_s, rcond=None)[0]
        total = self.seconds(scaled) - steps.seconds
        off = {"device": total - (host - steps.host_s), "host": host - steps.host_s}
        mean = float(steps.seconds.mean())
        shares = {name: 100 * np.abs(one).mean() / mean for name, one in off.items()}
        parts = ", ".join(f"{share:.1f} % the {name}'s" for name, share in shares.items())
        return (
            f"Fitted to {len(steps):,} steps of {1e3 * mean:.2f} ms in the mean, "
            f"{100 * steps.host_s.mean() / mean:.0f} % of it the host's (schedule(), update_from_output(), between "
            f"steps). A step is off by {100 * np.abs(total).mean() / mean:.1f} % in the mean: {parts}. All are off by "
            f"{100 * total.mean() / mean:+.1f} %."
        )
