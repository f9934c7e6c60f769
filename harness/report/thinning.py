"""Which points of a very large sweep the page shows: a grid of its settings' values, spread evenly.

Figures compare points that differ in one setting alone. So values are left out, not points: of each key some values
stay, and every point that has no other value is shown.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

MOST_WHOLE = 2000
"""The most points of a store that is shown whole."""
MOST_SHOWN = 1000
"""The most points that the page shows of a larger one."""
_SHRINK = 0.95  # of the key with the most values, in one step


def shown_points(asked: Mapping[str, Sequence[str]], most_whole: int, most: int) -> list[str]:
    """The fingerprints to show, of points with these overrides, in their order: all up to `most_whole`."""
    if len(asked) <= most_whole:
        return list(asked)
    values: dict[str, dict[str, None]] = {}
    for words in asked.values():
        for word in words:
            values.setdefault(word.partition("=")[0], {})[word] = None
    counts = {key: len(found) for key, found in values.items()}
    while True:
        stay = {word for key, found in values.items() for word in spread(list(found), counts[key])}
        names = [name for name, words in asked.items() if stay.issuperset(words)]
        widest = max(counts, key=lambda key: counts[key], default="")
        if len(names) <= most or not widest or counts[widest] <= 2:
            return spread(names, most)
        share = (most / len(names)) ** (1 / len(counts))
        for key in [key for key, count in counts.items() if count > _SHRINK * counts[widest]]:
            counts[key] = max(2, min(counts[key] - 1, int(counts[key] * max(share, 0.5))))


def spread(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of these values, evenly spread, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]
