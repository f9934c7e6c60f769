"""A twin: a deployment beside its simulation, with the errors that were found and the what-ifs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.config.schema import RunConfig
from harness.point.bands import Band
from harness.twin.configured import Configured
from harness.twin.fit import Fit, doubts
from harness.twin.log import EngineLog, FloatArray, Timeseries
from harness.twin.prediction import Errors, PredictedRun, errors_of
from harness.twin.what_ifs import WhatIf, measured_figures

_TICK_S = 1.0
_MOST_TICKS = 5000


@dataclass(frozen=True)
class Twin:
    """A deployment, its configuration and its prediction. Without a `fit` the device's own constants predicted it.

    `changes` are the what-ifs, of which the first is the deployment as it is.
    """

    log: EngineLog
    configured: Configured
    config: RunConfig  # with the device that predicted
    prediction: PredictedRun
    fit: Fit | None
    changes: Sequence[WhatIf]
    command: str

    @property
    def errors(self) -> Errors:
        """On the requests that had no part in the fit; without a fit on all."""
        if self.fit is not None:
            return self.fit.held_out
        return errors_of(self.prediction, self.log, slice(0, None))

    @property
    def base(self) -> WhatIf:
        """The deployment's own settings, as predicted."""
        return self.changes[0]

    @property
    def bands(self) -> Mapping[str, Band]:
        """Of the figures of `base`; empty: none is known."""
        return self.base.bands

    @property
    def measured(self) -> dict[str, float]:
        """The figures of the log."""
        return measured_figures(self.log)

    @property
    def series(self) -> Timeseries:
        """The measured series; where none was logged, running and waiting counted from the times of the requests."""
        if self.log.series is not None:
            return self.log.series
        requests = self.log.requests
        end = float(requests.last_token_s.max())
        at_s: FloatArray = np.linspace(0.0, end, int(np.clip(end / _TICK_S + 2, 100, _MOST_TICKS)))
        running, waiting = requests.under_way(at_s)
        return Timeseries(at_s, running.astype(np.float64), waiting.astype(np.float64))

    @property
    def hits(self) -> tuple[float | None, float]:
        """Share of prompt tokens that the prefix cache had, measured (None: the log does not say) and predicted."""
        requests = self.log.requests
        measured = None
        if requests.cached_tokens is not None:
            measured = float(requests.cached_tokens.sum() / requests.prompt_tokens.sum())
        return measured, self.base.hit_share

    def series_errors(self) -> dict[str, tuple[float, float, float]]:
        """Mean absolute error, signed mean error and measured maximum of each state; KV use in points of 100."""
        measured = self.series
        predicted = self.prediction.series(measured.at_s)
        found = {}
        for name, scale in (("running", 1.0), ("waiting", 1.0), ("kv_use", 100.0)):
            ours, theirs = getattr(predicted, name), getattr(measured, name)
            if ours is not None and theirs is not None:
                off = scale * (ours - theirs)
                found[name] = (float(np.abs(off).mean()), float(off.mean()), float(scale * theirs.max()))
        return found


def verdict(twin: Twin) -> str:
    """The answer in one sentence, after what makes it doubtful from the start."""
    errors = twin.errors
    which = "requests that had no part in the fit"
    if twin.fit is None:
        which = f"requests, with {constants_of(twin)}"
    elif not twin.fit.kept:
        which += ", with the description's constants"
    known = {"TPOT": errors.tpot_p50, "TTFT": errors.ttft_p50}
    missing = [name for name, error in known.items() if not np.isfinite(error)]
    said = [
        f"the predicted median {name} {'is ' if index == 0 else ''}{_signed(error)}"
        for index, (name, error) in enumerate(one for one in known.items() if one[0] not in missing)
    ]
    parts = [", and ".join(said) + " the measured one"] if said else []
    parts += [
        f"the median {name} cannot be compared, because the log's is 0 or no request has one"
        for name in missing
    ]
    few = " So few requests prove little." if errors.requests < FEWEST else ""
    answer = f"On {errors.requests:,} {which}: {'; '.join(parts)}.{few}"
    doubtful = [f"Warning: {doubt}" for doubt in doubts(twin.fit)] if twin.fit is not None else []
    said = [twin.log.client, *twin.configured.warnings, *doubtful, answer, band_words(twin)]
    return " ".join(filter(None, said))


def band_words(twin: Twin) -> str:
    """How far the prediction may be off, and how many figures measured here lie in their bands; empty without one."""
    ours = twin.base.figures or {}
    shown = []
    for name, label in (("tpot_p50", "TPOT"), ("ttft_p50", "TTFT")):
        if name in twin.bands:
            shown.append(f"{twin.bands[name].changes(ours[name])} of the predicted median {label}")
    if not shown:
        return ""
    known = {name: twin.measured[name] for name in twin.bands if np.isfinite(twin.measured[name])}
    inside = sum(twin.bands[name].holds(value) for name, value in known.items())
    bands = (
        f"Nine of ten measured values should lie within the band of a prediction, here {' and '.join(shown)}"
    )
    return f"{bands}: {inside} of the {len(known)} figures measured do."


# Fewer requests than this give no median to rely on.
FEWEST = 30


def constants_of(twin: Twin) -> str:
    """Where the device's constants come from, in words."""
    fitted_from = twin.config.device.fitted_from
    if twin.fit is not None:
        return "constants " + ("fitted to this log" if twin.fit.kept else "of the device's description")
    if fitted_from is None:
        return "the constants of the device's description"
    same = fitted_from.startswith(f"{twin.log.name}, ")
    return f"constants fitted to {fitted_from}" + (", which are among these requests" if same else "")


def _signed(error: float) -> str:
    if abs(error) < 0.0005:
        return "within 0.1 % of"
    return f"{100 * abs(error):.1f} % {'above' if error > 0 else 'below'}"


def grade(twin: Twin) -> str:
    """good, fair or bad, by the goals for a fitted deployment: TPOT 3 % and TTFT 5 %, and three times that.

    With one of both unknown it is fair at best.
    """
    errors = twin.errors
    shares = (abs(errors.tpot_p50) / 0.03, abs(errors.ttft_p50) / 0.05)
    known = [share for share in shares if np.isfinite(share)]
    worst = max(known, default=np.inf)
    return "bad" if worst > 3 else "fair" if worst > 1 or len(known) < len(shares) else "good"


def finding(twin: Twin) -> str:
    """The what-if that helps most, in one sentence; empty where none was asked."""
    if len(twin.changes) < 2:
        return ""
    best = twin.changes[1]
    return f"What helps most: {best}." if best.gain > 0 else "No what-if helps by more than its band."
