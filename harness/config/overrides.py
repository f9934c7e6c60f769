"""What the user writes on the command line, `key=value`, parsed by Hydra's grammar and checked against the keys.

Every key of a run exists in the schema, so nothing is ever appended or deleted: `+key`, `~key` and `group@package`
are refused, which is what keeps a misspelt key from being accepted silently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException

from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import EXPERIMENTS, groups, list_options
from harness.config.keys import leaves, suggestion


@dataclass(frozen=True)
class Setting:
    """One `key=value` without a choice left: a group's option, or the value of a key."""

    key: str
    value: Any
    text: str

    @property
    def is_group(self) -> bool:
        """Whether this chooses a file of a config group."""
        return self.key in groups()


@dataclass(frozen=True)
class Axis:
    """All settings that one override asks for; more than one makes a sweep."""

    key: str
    settings: tuple[Setting, ...]
    text: str


def parse_overrides(texts: Sequence[str]) -> list[Axis]:
    """Parse and check overrides; a later one replaces an earlier one of the same key.

    Raises:
        UserError: lists every override that cannot be parsed or whose key or option is unknown.
    """
    axes: dict[str, Axis] = {}
    problems: list[str] = []
    for text in texts:
        try:
            axis = parse_override(text)
        except UserError as error:
            problems.append(str(error))
        else:
            axes.pop(axis.key, None)
            axes[axis.key] = axis
    if problems:
        raise UserError("\n".join(problems))
    return list(axes.values())


@lru_cache(maxsize=4096)
def parse_override(text: str) -> Axis:
    """Parse one override into its key and its one or more settings.

    Raises:
        UserError: not `key=value` in Hydra's grammar.
        UnknownKeyError: no such key, group or option; names the nearest.
    """
    override = _parse(text)
    key = override.key_or_group
    _check_key(override, key, text)
    settings = tuple(Setting(key, value, shown) for value, shown in _values(override, key))
    for setting in settings:
        if setting.is_group:
            _check_option(setting)
    return Axis(key, settings, text)


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting {")[0]
        raise UserError(f"cannot read '{text}': {reason}; {_quoting(text)}") from None


def _quoting(text: str) -> str:
    key, _, value = text.partition("=")
    return f"""a value that holds = , ( ) [ ] or quotes must itself be quoted, like '{key}="{value}"'"""


def _check_key(override: Override, key: str, text: str) -> None:
    sign = text[: len(text) - len(text.lstrip("+~"))]
    known = key in leaves() or key in groups() or key == EXPERIMENTS
    if not known:
        raise UnknownKeyError(sign + key, f"no such key; {suggestion(key)}")
    if override.type is OverrideType.DEL:
        raise ConfigError(sign + key, f"nothing can be deleted; set another value, like {key}=...")
    if override.package is not None:
        raise ConfigError(f"{key}@{override.package}", f"groups have one place; write {key}=...")
    if sign:
        raise ConfigError(sign + key, f"the key exists, so write it without '{sign}': {key}=...")


def _values(override: Override, key: str) -> list[tuple[Any, str]]:
    """(value, text) of each value that an override asks for."""
    if isinstance(override._value, Glob) and key in groups():
        return [(name, f"{key}={name}") for name in _matching(override._value, groups()[key])]
    if not override.is_sweep_override():
        return [(override.value(), f"{key}={_shown(override)}")]
    if not override.is_discrete_sweep():
        raise ConfigError(key, "an interval is not a list of points; use range(start,stop,step) or a,b,c")
    texts = [f"{key}={_spelt(value)}" for value in override.sweep_string_iterator()]
    return [(_parse(text).value(), text) for text in texts]


def _spelt(value: str) -> str:
    """Hydra hands out a sweep's booleans as Python writes them; a user writes them small."""
    return value.lower() if value in ("True", "False") else value


def _shown(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _matching(pattern: Glob, names: Sequence[str]) -> list[str]:
    return [
        name
        for name in names
        if any(fnmatchcase(name, wanted) for wanted in pattern.include)
        and not any(fnmatchcase(name, unwanted) for unwanted in pattern.exclude)
    ]


def _check_option(setting: Setting) -> None:
    if setting.value not in groups()[setting.key]:
        raise UnknownKeyError(
            setting.key, f"no option '{setting.value}'; the options are\n{list_options(setting.key)}"
        )
