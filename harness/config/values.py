"""Values of keys set in a typed configuration, each converted exactly as OmegaConf converts it.

Composing a point through OmegaConf's trees takes 20 ms, and a sweep may have 100,000 points. Here OmegaConf's own node
of a key converts the value, and the section is a dataclass that is copied. Whatever needs more than one node (an
interpolation, a list, a value that cannot be converted) is `UnusualError`, and the caller takes OmegaConf's way.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import cache, lru_cache
from types import NoneType
from typing import Any, Generic, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.config.schema import RunConfig

T = TypeVar("T")
V = TypeVar("V")
_SCALARS = (str, int, float, bool, NoneType)


class PerObject(Generic[T, V]):
    """A function of one object, whose last results are remembered for these very objects while they do not change."""

    def __init__(self, function: Callable[[T], V], most: int) -> None:
        self._function, self._most = function, most
        # By id: the object, which keeps the id its own, its values at that time, and the result.
        self._known: dict[int, tuple[T, tuple[Any, ...], V]] = {}

    def __call__(self, of: T) -> V:
        """The result for `of`, remembered or new."""
        known = self._known.get(id(of))
        values = tuple(vars(of).values()) if is_dataclass(of) else ()
        if known is None or known[1] != values:
            if len(self._known) >= self._most:
                self._known.clear()
            known = self._known[id(of)] = (of, values, self._function(of))
        return known[2]


class UnusualError(Exception):
    """A value that only a tree of OmegaConf can take, or that it refuses with a message of its own."""


@cache
def _nodes() -> dict[str, Any]:
    """OmegaConf's node of every key of the schema, by dotted name."""
    tree = OmegaConf.structured(RunConfig)
    found: dict[str, Any] = {}
    for name in tree:
        node = tree._get_node(name)
        inner = list(node) if OmegaConf.is_dict(node) else []
        found |= {f"{name}.{each}": node._get_node(each) for each in inner} or {name: node}
    return found


def converted(key: str, value: Any) -> Any:
    """`value` as the schema's type of `key`.

    Raises:
        UnusualError: not a plain scalar, or none that the key can hold.
    """
    if type(value) not in _SCALARS or (isinstance(value, str) and ("$" in value or value == "???")):
        raise UnusualError
    return _as_node_does(key, value)


@lru_cache(maxsize=1 << 14, typed=True)
def _as_node_does(key: str, value: Any) -> Any:
    try:
        return _nodes()[key].validate_and_convert(value)
    except OmegaConfBaseException:
        raise UnusualError from None


def replaced(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values at some dotted keys. Sections are shared with other configurations."""
    changes: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else changes)[name] = value
    for section, inner in sections.items():
        changes[section] = with_values(getattr(config, section), **inner)
    return replace(config, **changes)


Section = TypeVar("Section")
# By the section that one was made of and its new values: both sections. Holding the first keeps its id its own.
_made: dict[tuple[Any, ...], tuple[Any, Any]] = {}
_MOST_MADE = 1 << 14


def with_values(section: Section, **values: Any) -> Section:
    """A section with these scalar values: itself where it has them, or one that was made so before.

    Equal points then share their sections, in memory and in all that is remembered of a section.
    """
    known = vars(section)
    for name, value in values.items():
        if not _same(known[name], value):
            break
    else:
        return section
    key = (id(section), *((name, type(value), repr(value)) for name, value in values.items()))
    if key not in _made:
        if len(_made) >= _MOST_MADE:
            _made.clear()
        _made[key] = section, replace(section, **values)  # type: ignore[type-var]
    made: Section = _made[key][1]
    return made


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal and written alike: 0.0 and -0.0 are not."""
    return one is other or (type(one) is type(other) and one == other and repr(one) == repr(other))
