"""Overrides: `key=value` as the user writes it on the command line.

Hydra's grammar parses an override. Its key is checked against the keys of the schema, and an unknown key gets a
suggestion.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException

from engine.core.options import Eviction
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.foreign import Foreign, accept, is_option_file
from harness.config.groups import DEPLOYMENT, EXPERIMENTS, groups, list_options, options
from harness.config.schema import config_keys

_LIKE_ENOUGH = 0.6
MOST_POINTS = 100_000  # of a sweep; more is most likely a typing error, and would fill the memory
_PLAIN = re.compile(r"""[^=,()\[\]{}"'\\$]+""")  # one plain value of a list
_SAFE = re.compile(r"[\w./@%+-]+", re.ASCII)  # read by Hydra as they stand
_EVICTION, _ALL = "cache.eviction", "all"  # of which all rules can be asked for at once
_ENDING = re.compile(r'\\+(?="|\Z)')  # backslashes that the grammar would read with a quote
_PLAIN_REFERENCE = re.compile(r"\$\{[\w.]+\}")  # to another key
_EMPTY_PLACE = re.compile(r"^\s*,|,\s*(,|$)")


def suggestion(key: str) -> str:
    """The end of an error message: it names the nearest known key, or the command that prints all keys."""
    near = nearest(key, [*config_keys(), *groups(), EXPERIMENTS, DEPLOYMENT])
    return f"did you mean '{near}'?" if near else "`python -m harness show` prints every key"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to `word`, or None where none is similar; the last part of a key counts most."""
    scored = [(_likeness(word, name), name) for name in candidates]
    best, name = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return name if best >= _LIKE_ENOUGH else None


def _likeness(word: str, name: str) -> float:
    last = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
    return 0.7 * last + 0.3 * SequenceMatcher(None, word, name).ratio()


@dataclass(frozen=True)
class Setting:
    """One `key=value` with a single value: a group's option, or the value of a key."""

    key: str
    value: Any
    text: str

    @property
    def is_group(self) -> bool:
        """Whether this chooses an option of a config group, by name or as a file of the user's."""
        return self.key in groups()

    @property
    def is_file(self) -> bool:
        """Whether this names a file of the user's as the option of a config group."""
        return self.is_group and is_option_file(self.value)


@dataclass(frozen=True)
class Axis:
    """All settings of one override; more than one make a sweep."""

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


def of_a_file(texts: Iterable[str], where: str, folder: Path | None = None) -> list[Foreign]:
    """Overrides that stand in the file `where`, checked; `folder` is what was downloaded with it (`Foreign`).

    Raises:
        UserError: one of them may not stand in a file (`accept`); or as `parse_overrides`.
    """
    found = [Foreign(text, where, folder) for text in texts]
    parse_overrides(found)
    return found


def refuse_resolver(key: str, value: Any) -> None:
    """Raise ConfigError where a value reads the environment (`${oc.env:X}`), which would stand in a shared record."""
    if isinstance(value, str) and "${" in _PLAIN_REFERENCE.sub("", value):
        raise ConfigError(
            key,
            f"found '{value}'; only ${{key}}, as in ${{cache.pool_tokens}}, is resolved: write the value itself",
        )


def parse_override(text: str) -> Axis:
    """Parse one override into its key and its one or more settings.

    Raises:
        UserError: not `key=value` in Hydra's grammar, or a `Foreign` text with a value that no file may give.
        UnknownKeyError: no such key, group or option; names the nearest.
    """
    axis = _parsed(_renamed(str(text)))
    if isinstance(text, Foreign):
        for setting in axis.settings:
            accept(axis.key, setting.value, text.where, text.folder)
    return axis


_FORMER = {
    "cache.keep": "cache.eviction",
    "cache.keep_s": "cache.ttl_s",
    "cache.keep_tokens": "cache.pinned_tokens",
}
# Former keys whose values mean something else today, so that they are not taken over.
_CHANGED = {
    "device.link_latency_us": "was the time of a whole all-reduce; device.link_round_us is that of one of its rounds, "
    "of which there are up to two. Was it fitted? Then fit the log again with calibrate --from-log. Else give the time "
    "of a round as device.link_round_us, or leave it to the device's preset"
}
_FORMER_RULES = {"recent": Eviction.lru, "pin": Eviction.pinned, "null": Eviction.lru, None: Eviction.lru}


def renamed(key: str, value: Any, place: str = "") -> tuple[str, Any]:
    """The key and the value of today for those of an older file: `cache.keep` had rules that `cache.eviction` has.

    Raises:
        ConfigError: the key's value means something else today; names `place`, where the key stands.
    """
    if key in _CHANGED:
        raise ConfigError(key, f"{place}{_CHANGED[key]}")
    key = _FORMER.get(key, key)
    return key, _FORMER_RULES.get(value, value) if key == _EVICTION else value


def _renamed(text: str) -> str:
    key, sign, value = text.partition("=")
    if key not in (*_FORMER, *_CHANGED, _EVICTION):
        return text
    return f"{renamed(key, '')[0]}{sign}{','.join(str(renamed(key, word)[1]) for word in value.split(','))}"


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Axis:
    override = _parse(text)
    key = override.key_or_group
    _check_key(override, key, text)
    settings = tuple(Setting(key, value, shown) for value, shown in _values(override, key))
    for setting in settings:
        if setting.is_group:
            _check_option(setting)
    return Axis(key, settings, text)


def _parse(text: str) -> Override:
    """Parse with Hydra's grammar. Plain words with characters it lacks (`/data/jürgen`, `~/x`) are quoted first."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        if not text.isascii() or "~" in text:
            quoted = _PLAIN.sub(lambda word: f'"{word[0].strip()}"', text.partition("=")[2])
            with suppress(HydraException):
                return OverridesParser.create().parse_override(f"{text.partition('=')[0]}={quoted}")
        raise UserError(_unreadable(text, str(error))) from None


def quoted(value: str, *, always: bool = False) -> str:
    """A text as the value of an override: in quotes where the grammar would read it otherwise, or `always`.

    The grammar takes a backslash as it stands, but before a quote and at the end.
    """
    if _SAFE.fullmatch(value) and not always:
        return value
    return '"' + _ENDING.sub(lambda end: end[0] * 2, value).replace('"', '\\"') + '"'


def with_own_options(words: Sequence[str], folder: Path) -> list[str]:
    """Overrides in which a name of the user's own becomes the file that holds it.

    `device=mine,h100` becomes `device=FOLDER/device/mine.yaml,h100` if that file exists. So the command that a sweep
    records needs no folder.

    Raises:
        UserError: the folder does not exist, holds a folder that is no group, or an option with a shipped name.
    """
    if not folder.expanduser().is_dir():
        raise UserError(f"--config-dir: no such folder: '{folder}'")
    own = {(file.parent.name, file.stem): file for file in sorted(folder.expanduser().glob("*/*.yaml"))}
    shipped = {**groups(), EXPERIMENTS: options(EXPERIMENTS)}
    for (group, name), file in own.items():
        if group not in shipped:
            reason = f"--config-dir: {file}: '{group}' is no group; the groups are {', '.join(shipped)}"
            raise UserError(reason)
        if name in shipped[group]:
            raise UserError(f"--config-dir: {file}: '{name}' is the name of a shipped option; choose another")
    return [_with_files(word, own) for word in words]


def _with_files(word: str, own: Mapping[tuple[str, str], Path]) -> str:
    key, sign, value = word.partition("=")
    if not sign or not any(group == key for group, _ in own):
        return word
    names = [quoted(str(own[key, name])) if (key, name) in own else name for name in value.split(",")]
    return f"{key}={','.join(names)}"


def _unreadable(text: str, reason: str) -> str:
    key, _, value = text.partition("=")
    if _EMPTY_PLACE.search(value):
        return f"cannot read '{text}': a value is missing beside a comma; write {key}=a,b,c"
    quoting = f"""a value that holds = , ( ) [ ] or quotes must itself be quoted, like '{key}="{value}"'"""
    return f"cannot read '{text}': {reason.splitlines()[0].partition(' expecting {')[0]}; {quoting}"


def _check_key(override: Override, key: str, text: str) -> None:
    sign = text[: len(text) - len(text.lstrip("+~"))]
    known = key in config_keys() or key in groups() or key in (EXPERIMENTS, DEPLOYMENT)
    if not key:
        raise UserError(f"cannot read '{text}': no key before the '='; write key=value")
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
        found = [
            name
            for name in groups()[key]
            if any(fnmatchcase(name, wanted) for wanted in override._value.include)
            and not any(fnmatchcase(name, unwanted) for unwanted in override._value.exclude)
        ]
        if not found:
            reason = f"no option fits '{_shown(override)}'; the options are\n{list_options(key)}"
            raise ConfigError(key, reason)
        return [(name, f"{key}={name}") for name in found]
    if isinstance(override._value, Glob):
        raise ConfigError(key, f"'{_shown(override)}' chooses among the files of a group, and {key} is none")
    if key == _EVICTION and _shown(override) == _ALL:
        return [(str(rule), f"{key}={rule}") for rule in Eviction]
    if not override.is_sweep_override():
        return [(override.value(), f"{key}={_shown(override)}")]
    if not override.is_discrete_sweep():
        raise ConfigError(key, "an interval is not a list of points; use range(start,stop,step) or a,b,c")
    # as a user writes them: Hydra gives booleans of a sweep as True and False
    values = [value.lower() if value in ("True", "False") else value for value in _listed(override, key)]
    texts = [f"{key}={value}" for value in values]
    return [(_parse(text).value(), text) for text in texts]


def _listed(override: Override, key: str) -> list[str]:
    """The values of a list or range as text; an empty or too long range is an error."""
    try:
        values = list(islice(override.sweep_string_iterator(), MOST_POINTS + 1))
    except ValueError as error:
        reason = f"cannot read '{_shown(override)}': {error}; use range(start,stop,step)"
        raise ConfigError(key, reason) from None
    if len(values) > MOST_POINTS:
        reason = f"'{_shown(override)}' has more than {MOST_POINTS:,} values; take larger steps"
        raise ConfigError(key, reason)
    if not values:
        reason = f"'{_shown(override)}' has no value; a range counts from start to before stop: range(8,33,8)"
        raise ConfigError(key, reason)
    return values


def _shown(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _check_option(setting: Setting) -> None:
    if is_option_file(setting.value):
        if not Path(setting.value).expanduser().is_file():
            reason = f"no such file: '{setting.value}' (looked for {Path(setting.value).absolute()})"
            raise ConfigError(setting.key, reason)
    elif setting.value not in groups()[setting.key]:
        reason = f"no option '{setting.value}'; the options are\n{list_options(setting.key)}"
        raise UnknownKeyError(setting.key, reason)
