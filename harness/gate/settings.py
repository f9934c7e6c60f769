"""The margins of the gate, from `conf/gate/<option>.yaml` and overrides such as `gate.latency.material=0.03`.

Margins are not part of the configuration of a run, so the fingerprint of a point does not depend on them.

`effect` says how much slower than its baseline a case is: the ratio of two medians, of the rounds measured now and of
those of the baseline. Each round is itself a ratio of kernel to yardstick, so the influence of clocks and of a busy
machine cancels. The bounds are a bootstrap percentile interval (Efron 1979; `scipy.stats.bootstrap`). It assumes that
rounds are independent, and nothing about their distribution. The verdict answers two questions, so that noise can
neither raise an alarm nor hide a regression:

* regressed: even the lower bound is above the baseline by more than the negligible margin;
* pass: even the upper bound is above the baseline by less than the material margin, and the bounds are close together;
* inconclusive: neither of the two.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isfinite
from typing import Any

import numpy as np

from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import GATE, option_file, options
from harness.gate.findings import Baseline, GateVerdict, Measured

CONFIDENCE = 0.99
RESAMPLES = 2000
FEWEST_ROUNDS = 10  # a bootstrap of fewer rounds has bounds that are too narrow


@dataclass(frozen=True)
class Margins:
    """A case slower by less than `negligible` raises no alarm; a case slower by `material` must not pass.

    With bounds further apart than `widest` no case passes, because a single lucky run could produce them.
    """

    negligible: float
    material: float
    widest: float


@dataclass(frozen=True)
class Effect:
    """Time now divided by time of the baseline, with bounds at `CONFIDENCE`. 1.0 is no change, 1.05 is 5 % slower."""

    ratio: float
    lower: float
    upper: float

    @property
    def width(self) -> float:
        """How far the bounds are apart."""
        return self.upper - self.lower

    def verdict(self, margins: Margins) -> GateVerdict:
        """The verdict that the bounds allow."""
        if self.lower > 1 + margins.negligible:
            return GateVerdict.regressed
        close = self.width < margins.widest
        return GateVerdict.passed if close and self.upper < 1 + margins.material else GateVerdict.inconclusive

    def __str__(self) -> str:
        bounds = f"{CONFIDENCE:.0%} bounds {self.lower:.3f} to {self.upper:.3f}"
        return f"{self.ratio:.3f} of the baseline ({bounds})"


def effect(now: Sequence[float], baseline: Sequence[float] = (1.0,) * FEWEST_ROUNDS) -> Effect:
    """Compare two sets of rounds, each round a ratio of kernel to yardstick; or ratios to accepted code, with 1.

    Raises:
        ValueError: fewer than `FEWEST_ROUNDS` rounds, or a round that is not a positive number.
    """
    mine, theirs = _rounds(now, "now"), _rounds(baseline, "in the baseline")
    return Effect(float(np.median(mine) / np.median(theirs)), *_bounds(mine, theirs))


def compared(now: Measured, baseline: Baseline) -> dict[str, Effect]:
    """The effect on each case that both have, from their `ratios`."""
    cases = sorted(now.cases.keys() & baseline.cases.keys())
    return {case: effect(now.cases[case]["ratios"], baseline.cases[case]["ratios"]) for case in cases}


def _bounds(mine: "np.ndarray[Any, Any]", theirs: "np.ndarray[Any, Any]") -> tuple[float, float]:
    from scipy.stats import bootstrap

    if np.ptp(mine) == 0 and np.ptp(theirs) == 0:  # nothing to resample; scipy would warn about it
        same = float(mine[0] / theirs[0])
        return same, same
    interval = bootstrap(
        (mine, theirs),
        lambda a, b, axis: np.median(a, axis=axis) / np.median(b, axis=axis),
        vectorized=True,
        paired=False,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _rounds(values: Sequence[float], where: str) -> "np.ndarray[Any, Any]":
    rounds = np.asarray(values, dtype=np.float64)
    if len(rounds) < FEWEST_ROUNDS:
        rule = f"{FEWEST_ROUNDS} are the fewest that bounds can rest on"
        raise ValueError(f"{len(rounds)} rounds {where}; {rule}")
    if not (np.isfinite(rounds) & (rounds > 0)).all():
        raise ValueError(f"a round {where} is not a positive number")
    return rounds


DEFAULT = "default"
_MOST = 10.0  # largest margin, as a share; more would let everything pass


@dataclass(frozen=True)
class ResourceMargins:
    """The shares by which a compiled kernel may grow."""

    more_instructions: float = 0.10


@dataclass(frozen=True)
class GateSettings:
    """Margins by layer, and overrides that differ from the default."""

    latency: Margins
    policy: Margins
    cpu: Margins
    resource: ResourceMargins
    changed: tuple[str, ...] = field(default=())

    def margins(self) -> Mapping[str, Any]:
        """The sections by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "changed"}


@cache
def default_settings() -> GateSettings:
    """The margins of `conf/gate/default.yaml`."""
    return _read(DEFAULT)


def gate_settings(overrides: Sequence[str]) -> GateSettings:
    """The chosen file with the overrides applied.

    Raises:
        UserError: an override is not `gate=FILE` or `gate.<layer>.<margin>=number`, or its value is not allowed.
    """
    values = {key: _number_of(key, value) for key, value in map(_split, overrides) if key != GATE}
    chosen = [value for key, value in map(_split, overrides) if key == GATE]
    if chosen and chosen[-1] not in options(GATE):
        raise UnknownKeyError(GATE, f"no option '{chosen[-1]}'; the options are {', '.join(options(GATE))}")
    found = _read(chosen[-1] if chosen else DEFAULT)
    for key, value in values.items():
        _, section, name = key.split(".")
        found = replace(found, **{section: replace(getattr(found, section), **{name: value})})
    _check(found)
    return replace(found, changed=tuple(_changes(found)))


def keys() -> list[str]:
    """Every key that can be overridden."""
    sections = default_settings().margins().items()
    return [f"{GATE}.{section}.{one.name}" for section, margins in sections for one in fields(margins)]


def _split(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or (key != GATE and key not in keys()):
        from harness.config.overrides import nearest  # imports Hydra, which only the hint needs

        near = nearest(key, [GATE, *keys()])
        hint = f"did you mean '{near}'?" if near else f"there are {', '.join([GATE, *keys()])}"
        raise UnknownKeyError(key, f"no such key of the gate; {hint}")
    return key, value


def _number_of(key: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        raise ConfigError(key, f"found '{value}', must be a number, as 0.05 for 5 %") from None
    if not (isfinite(number) and 0 <= number <= _MOST):
        raise ConfigError(key, f"found {value}, must be 0 or greater and at most {_MOST:g}; 0.05 is 5 %")
    return number


@cache
def _read(option: str) -> GateSettings:
    """The margins of an option's file. A missing or unknown section or margin raises UserError."""
    import yaml

    file = option_file(GATE, option)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        kinds = {"latency": Margins, "policy": Margins, "cpu": Margins, "resource": ResourceMargins}
        sections: dict[str, Any] = {}
        for name, kind in kinds.items():
            given = content.pop(name).items()
            sections[name] = kind(**{key: _number_of(f"{GATE}.{name}.{key}", value) for key, value in given})
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: no margins of a gate ({type(error).__name__}: {error})") from error
    if content:
        raise UserError(f"{file}: unknown sections {', '.join(map(str, content))}")
    found = GateSettings(**sections)
    _check(found)
    return found


def _check(settings: GateSettings) -> None:
    for name, margins in settings.margins().items():
        if isinstance(margins, Margins) and margins.material <= margins.negligible:
            least = f"{GATE}.{name}.negligible={margins.negligible:g}"
            reason = f"found {margins.material:g}, must be greater than {least}"
            raise ConfigError(f"{GATE}.{name}.material", reason)
        if isinstance(margins, Margins) and margins.widest <= 0:
            reason = "found 0, must be greater than 0: no bounds are so close"
            raise ConfigError(f"{GATE}.{name}.widest", reason)


def _changes(settings: GateSettings) -> Iterator[str]:
    plain = default_settings().margins()
    for section, margins in settings.margins().items():
        for one in fields(margins):
            now, before = getattr(margins, one.name), getattr(plain[section], one.name)
            if now != before:
                yield f"{GATE}.{section}.{one.name}={now:g} (default {before:g})"
