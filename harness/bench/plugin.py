"""The pytest plugin of a benchmark session. It passes the caller's settings to a bench file.

`harness.bench.session` loads it by its name. Only this module and the bench files need pytest at import.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file with the settings."""
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
