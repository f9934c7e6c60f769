"""Benchmarks of our own claims: `pytest benchmarks/`. Times are CPU-seconds, because machines are shared.

`--benchmark-autosave` stores a run in `.benchmarks/`, `--benchmark-compare` compares with the last one,
`--benchmark-compare-fail=median:10%` fails where it was faster. `-k replay` chooses a part.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the amount of work."""
    group = parser.getgroup("PageTwin")
    group.addoption("--small", action="store_true", help="little work: shows that all runs, times nothing")
    group.addoption("--requests", type=int, default=2_000, help="of every replay; default: %(default)s")


@pytest.fixture(scope="session")
def small(pytestconfig: pytest.Config) -> bool:
    """Whether to do little work."""
    return bool(pytestconfig.getoption("--small"))
