"""The margins of the gate, from `conf/gate/<option>.yaml` and overrides such as `gate.latency.material=0.03`.

Margins are not part of the configuration of a run, so the fingerprint of a point does not depend on them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import isfinite
from typing import Any

from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import GATE, gate_options, option_file
from harness.gate.effect import Margins

DEFAULT = "default"
_MOST = 10.0  # largest margin, as a share; more would let everything pass


@dataclass(frozen=True)
class ResourceMargins:
    """The shares by which a compiled kernel may grow."""

    more_instructions: float = 0.10


@dataclass(frozen=True)
class GateSettings:
    """Margins by layer (`attention`: the layer `cpu`), and overrides that differ from the default."""

    latency: Margins
    policy: Margins
    attention: Margins
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
    found = _read(_option(chosen[-1]) if chosen else DEFAULT)
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
        raise UnknownKeyError(key, f"no such key of the gate; {_hint(near)}")
    return key, value


def _hint(near: str | None) -> str:
    return f"did you mean '{near}'?" if near else f"there are {', '.join([GATE, *keys()])}"


def _option(name: str) -> str:
    if name not in gate_options():
        raise UnknownKeyError(GATE, f"no option '{name}'; the options are {', '.join(gate_options())}")
    return name


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
        kinds = {"latency": Margins, "policy": Margins, "attention": Margins, "resource": ResourceMargins}
        sections = {
            name: kind(
                **{key: _number_of(f"{GATE}.{name}.{key}", value) for key, value in content.pop(name).items()}
            )
            for name, kind in kinds.items()
        }
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
            raise ConfigError(
                f"{GATE}.{name}.material",
                f"found {margins.material:g}, must be greater than {GATE}.{name}.negligible={margins.negligible:g}",
            )
        if isinstance(margins, Margins) and margins.widest <= 0:
            raise ConfigError(
                f"{GATE}.{name}.widest", "found 0, must be greater than 0: no bounds are so close"
            )


def _changes(settings: GateSettings) -> Iterator[str]:
    plain = default_settings().margins()
    for section, margins in settings.margins().items():
        for one in fields(margins):
            now, before = getattr(margins, one.name), getattr(plain[section], one.name)
            if now != before:
                yield f"{GATE}.{section}.{one.name}={now:g} (default {before:g})"
