"""What holds for all tests: no test of Hypothesis fails because the machine is busy; and the browser of a test file."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

START_MS = 120_000  # for a browser to start: a safety net on a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium. The test skips where Playwright or the browser is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=START_MS)
        yield chromium
        chromium.close()


with suppress(ImportError):  # a machine that only runs the GPU tests may have no Hypothesis
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "any-load", settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    )
    settings.load_profile("any-load")
