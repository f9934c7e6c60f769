"""What holds for all tests: the day's and the night's, their order, Hypothesis; and the browser of a test file.

By day the examples are few and the same in every run, and no test fails because the machine is busy. By night
(`PAGETWIN_NIGHTLY=1`) the tests marked `nightly` run too, and seeds are free.
"""

import gc
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tiers import NIGHT

LONGEST = (
    *("test_compiled.py", "test_triton.py", "test_lesson_pages.py", "test_light_start.py", "test_page.py"),
    *("test_kill_and_resume.py", "test_twin.py", "test_calibrate_command.py"),
)  # files of five seconds and more run first, so that no worker begins one when the others have ended
THIRD = os.environ.get("PAGETWIN_THIRD")  # 0, 1 or 2; see tests/nightly/night_parts.py
MANY = 6  # cases of a test that run by thirds
START_MS = 120_000  # for a browser to start: a safety net on a busy machine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in any order"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not NIGHT:
        left = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    if THIRD is not None:
        left = others_turn(items, int(THIRD))
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if (seed := config.getoption("--shuffle")) is not None:
        draw = random.Random(seed)
        place = {file: draw.random() for file in sorted({item.path for item in items})}
        items.sort(key=lambda item: (place[item.path], draw.random()))


def others_turn(items: list[pytest.Item], third: int) -> list[pytest.Item]:
    """Of each test with many cases the two thirds that `make nightly` runs on the next two dates."""
    tests = [item.nodeid.partition("[")[0] for item in items]
    cases, seen = Counter(tests), Counter[str]()
    left = []
    for item, test in zip(items, tests, strict=True):
        seen[test] += 1
        if cases[test] > MANY and seen[test] % 3 != third:
            left.append(item)
    return left


@pytest.fixture(scope="module", autouse=True)
def _leave_old_objects_alone() -> None:
    """Every measured run collects garbage first: what earlier files imported and cached is not searched again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _begin_alike() -> None:
    """The global generators start alike in each test: torch's has another seed in every process."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)  # the CPU's alone, in microseconds
    if simulate := sys.modules.get("harness.workload.simulate"):
        simulate._LEFT_TO_CORE.clear()  # what other tests replayed does not choose how this one does


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

    any_load = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("day", any_load, max_examples=25, derandomize=True, database=None)
    settings.register_profile("night", any_load, max_examples=200, print_blob=True)
    settings.load_profile("night" if NIGHT else "day")
