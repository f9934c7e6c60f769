"""The pytest plugin of a benchmark session: it gives a bench file the settings of the caller.

`harness.bench.session` loads it by its name. Only this module and the bench files need pytest at import.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the file that the session wrote the settings to."""
    parser.addoption("--bench-settings", help="JSON file with the settings of this session")


def read_settings(config: pytest.Config) -> dict[str, Any]:
    """The caller's settings; for `pytest_generate_tests` of a bench file."""
    content: dict[str, Any] = json.loads(
        Path(config.getoption("--bench-settings")).read_text(encoding="utf-8")
    )
    return content


@pytest.fixture(scope="session")
def settings(pytestconfig: pytest.Config) -> dict[str, Any]:
    """The caller's settings."""
    return read_settings(pytestconfig)
