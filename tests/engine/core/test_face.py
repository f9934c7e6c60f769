"""`from engine.core import …`: every name is there, and the examples in the docstrings run."""

import doctest
from importlib import import_module

import pytest

import engine.core
from engine.core.memory import block_manager, block_pool
from engine.core.scheduling import scheduler


@pytest.mark.parametrize(
    "module",
    [engine.core, block_manager, block_pool, scheduler],
    ids=lambda module: module.__name__,
)
def test_the_examples_of_the_docstrings_run(module: object) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_a_name_is_the_one_of_its_own_module() -> None:
    faces = {name: getattr(engine.core, name) for name in engine.core.__all__}
    own = {name: getattr(import_module(found.__module__), name) for name, found in faces.items()}
    assert [name for name, found in faces.items() if own[name] is not found] == []


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(AttributeError, match=r"no name .Schedular.; it has .*Scheduler"):
        engine.core.Schedular  # noqa: B018
