"""The two tiers of the tests: what a day's run shows, and what is left to the night (`PAGETWIN_NIGHTLY=1`)."""

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

NIGHT = os.environ.get("PAGETWIN_NIGHTLY") == "1"
T = TypeVar("T")


def tier(day: T, night: T) -> T:
    """The value of this run's tier: a number of examples, of seeds, of operations."""
    return night if NIGHT else day


def cases(
    names: str | tuple[str, ...], values: Iterable[Any], day: int | Iterable[Any], **options: Any
) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over all `values`, of which the day runs the first few or those in `day`."""
    values = list(values)
    kept = values[:day] if isinstance(day, int) else list(day)
    assert kept, "the day runs no case"
    assert all(value in values for value in kept), f"the day names a case that does not exist: {kept}"
    single = isinstance(names, str) and "," not in names
    left = [
        value if value in kept else pytest.param(*([value] if single else value), marks=pytest.mark.nightly)
        for value in values
    ]
    return pytest.mark.parametrize(names, left, **options)
