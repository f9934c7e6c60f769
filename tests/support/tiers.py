"""The two tiers of the tests: what a day's run shows, and what is left to the night (`PAGETWIN_NIGHTLY=1`)."""

import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

import pytest

NIGHT = os.environ.get("PAGETWIN_NIGHTLY") == "1"
NIGHT_SEED = int(os.environ.get("PAGETWIN_SEED", datetime.now(UTC).toordinal()))
T = TypeVar("T")


def tier(day: T, night: T) -> T:
    """The value of this run's tier: a number of examples, of seeds, of operations."""
    return night if NIGHT else day


def nights_share(values: Iterable[T], count: int) -> list[T]:
    """`count` of the values, others every night: for a grid that would take an hour. PAGETWIN_SEED brings one back."""
    return random.Random(NIGHT_SEED).sample(list(values), count)


def cases(
    names: str | tuple[str, ...],
    values: Iterable[Any],
    day: int | Iterable[Any],
    night: int | None = None,
    **options: Any,
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all `values`, of which the day runs the first few or those in `day`.

    The night runs all, or with `night` so many others by date.
    """
    values = list(values)
    kept = values[:day] if isinstance(day, int) else list(day)
    assert kept, "the day runs no case"
    assert all(value in values for value in kept), f"the day names a case that does not exist: {kept}"
    if night is not None:
        values = [*kept, *nights_share((value for value in values if value not in kept), night)]
    taken = [number for number, value in enumerate(values) if NIGHT or value in kept]
    if isinstance(ids := options.get("ids"), Iterable):
        options["ids"] = [name for number, name in enumerate(ids) if number in taken]
    single = isinstance(names, str) and "," not in names
    chosen = [
        values[number]
        if values[number] in kept
        else pytest.param(*([values[number]] if single else values[number]), marks=pytest.mark.nightly)
        for number in taken
    ]
    return pytest.mark.parametrize(names, chosen, **options)
