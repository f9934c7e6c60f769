"""The keys that exist, their types, and the nearest one to a key that does not."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from difflib import SequenceMatcher
from enum import StrEnum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from harness.config.groups import EXPERIMENTS, groups
from harness.config.schema import RunConfig

_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LIKE_ENOUGH = 0.6


@dataclass(frozen=True)
class Leaf:
    """One setting: its dotted key, its type without None, and whether null is allowed."""

    key: str
    kind: Any
    optional: bool

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        words = "one of " + ", ".join(self.kind) if issubclass(self.kind, StrEnum) else _NAMES[self.kind]
        return words + " or null" if self.optional else words


@cache
def leaves() -> dict[str, Leaf]:
    """Every setting of the schema by its dotted key."""
    return {leaf.key: leaf for leaf in _walk(RunConfig, "")}


def _walk(section: type, prefix: str) -> Iterator[Leaf]:
    for name, hint in get_type_hints(section).items():
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _walk(hint, f"{prefix}{name}.")
            continue
        kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        yield Leaf(prefix + name, kinds[0], NoneType in get_args(hint))


def suggestion(key: str) -> str:
    """A closing half sentence that names the nearest known key, or tells how to see all of them."""
    near = nearest(key, [*leaves(), *groups(), EXPERIMENTS])
    return f"did you mean '{near}'?" if near else "`python -m harness show` prints every key"


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` most likely stands for, or None; a matching last part counts most."""
    scored = [(_likeness(word, name), name) for name in candidates]
    best, name = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return name if best >= _LIKE_ENOUGH else None


def _likeness(word: str, name: str) -> float:
    last = SequenceMatcher(None, word.rpartition(".")[2], name.rpartition(".")[2]).ratio()
    return 0.7 * last + 0.3 * SequenceMatcher(None, word, name).ratio()
