"""The built-in calibration tables: published quantiles and arrival figures of real traces, as JSON in `traces/data/`.

A table has figures only, no rows. Each file names its source, its licence, and how close draws come to the data.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.arrivals import ArrivalProcess
from traces.errors import ParameterError
from traces.synth.sharing import FixedPrefix

TABLES = (
    "azure_conv",
    "azure_code",
    "mooncake_conversation",
    "mooncake_synthetic",
    "ragpulse",
    "sharegpt_8k",
    "bwb",
    "arxiv",
    "agentic",
    "sosp23_sharegpt",
    "sosp23_alpaca",
    "sosp23_wmt16_one_shot",
    "sosp23_wmt16_five_shot",
    "sosp23_chatbot",
)
_Q21 = [step / 20 for step in range(21)]
_TAIL = [0.96, 0.97, 0.98, 0.99, 0.995, 0.999]
POSITIONS = np.array([*_Q21[:-1], *_TAIL, 1.0])


@dataclass(frozen=True)
class LengthTable:
    """Quantiles of a length in tokens: `q21` at 0, 5, ... 100 %, `tail` at 96, 97, 98, 99, 99.5, 99.9 %.

    The tail is needed: with `q21` alone, the last interval makes means up to 2.4 times too large. `ks` and `mean_ratio`
    compare draws with the data of the table (Kolmogorov-Smirnov distance; drawn mean / data mean).
    """

    q21: tuple[float, ...]
    tail: tuple[float, ...]
    mean: float
    ks: float | None  # None: only means are published
    mean_ratio: float

    def quantile(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Length in tokens below which `share` (0 to 1, any shape) of the requests lie; linear between knots."""
        lengths: npt.NDArray[np.float64] = np.interp(share, POSITIONS, self._knots())
        return lengths

    def cdf(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Share of drawn lengths at or below `tokens`, after rounding to whole tokens."""
        knots = self._knots()
        rising = np.maximum.accumulate(knots + np.arange(len(knots)) * 1e-9)  # interp needs increasing knots
        shares: npt.NDArray[np.float64] = np.interp(np.floor(tokens) + 0.5, rising, POSITIONS)
        return shares

    def _knots(self) -> npt.NDArray[np.float64]:
        return np.array([*self.q21[:-1], *self.tail, self.q21[-1]])


@dataclass(frozen=True)
class Arrivals:
    """A renewal process: gaps drawn from a gamma distribution of this shape, at this mean rate in requests/s."""

    rate_rps: float
    gamma_shape: float
    gamma_ks: float | None  # of the fit to recorded gaps; None if the recording clock hides them
    recorded_gap_cv: float | None
    note: str

    def process(self) -> ArrivalProcess:
        """The same as an arrival process."""
        return ArrivalProcess("gamma", self.rate_rps, shape=self.gamma_shape)


@dataclass(frozen=True)
class CalibrationTable:
    """The published figures that a generated trace is calibrated on."""

    name: str
    title: str
    source: str
    licence: str
    rows: int
    prompt_tokens: LengthTable
    output_tokens: LengthTable
    prompt_output_spearman: float
    arrivals: Arrivals
    copula: bool = False  # prompt and output lengths are drawn with their rank correlation
    shared_prefix_tokens: int = 0  # all prompts begin with this text

    def sharing(self) -> "FixedPrefix | None":
        """The sharing that the table describes, or None."""
        return FixedPrefix(self.shared_prefix_tokens) if self.shared_prefix_tokens else None

    def specification(self) -> dict[str, object]:
        """All figures, for the digest of a generated trace, without fields that the table does not use."""
        plain = asdict(self)
        unused = [name for name in ("copula", "shared_prefix_tokens") if not plain[name]]
        return {name: value for name, value in plain.items() if name not in unused}

    def quality(self) -> Mapping[str, float | str]:
        """How close draws come to the data, for the trace's header."""
        return {
            "calibrated_on": f"{self.title}: {self.source}",
            "prompt_ks": _or_unknown(self.prompt_tokens.ks),
            "prompt_mean_ratio": self.prompt_tokens.mean_ratio,
            "output_ks": _or_unknown(self.output_tokens.ks),
            "output_mean_ratio": self.output_tokens.mean_ratio,
            "recorded_prompt_output_spearman": self.prompt_output_spearman,
            "generated_prompt_output_spearman": self.prompt_output_spearman if self.copula else 0.0,
            "arrival_rate_rps": self.arrivals.rate_rps,
            "arrival_gamma_shape": self.arrivals.gamma_shape,
            "arrival_gamma_ks": _or_unknown(self.arrivals.gamma_ks),
            "recorded_gap_cv": _or_unknown(self.arrivals.recorded_gap_cv),
            "arrivals": self.arrivals.note,
        }


def _or_unknown(value: float | None) -> float | str:
    return "not known" if value is None else value


@lru_cache
def load_table(name: str) -> CalibrationTable:
    """The embedded table of that name. Raises ParameterError that lists the tables."""
    if name not in TABLES:
        raise ParameterError("table", f'no table "{name}"; there are {", ".join(TABLES)}')
    raw: dict[str, Any] = json.loads((files("traces") / "data" / f"{name}.json").read_text("utf-8"))
    return CalibrationTable(
        prompt_tokens=_lengths(raw.pop("prompt_tokens")),
        output_tokens=_lengths(raw.pop("output_tokens")),
        arrivals=Arrivals(**raw.pop("arrivals")),
        **raw,
    )


def _lengths(raw: dict[str, Any]) -> LengthTable:
    return LengthTable(**{**raw, "q21": tuple(raw["q21"]), "tail": tuple(raw["tail"])})
