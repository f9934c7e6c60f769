"""The page in a real browser, without a network."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.browser
PATIENCE_MS = 300_000  # a safety net on a busy machine


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=PATIENCE_MS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser, page) -> Iterator[Any]:
    """The report in a window of 1280 × 800, with what it asked for and what it complained about."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.requested, tab.complaints = [], []
    tab.on("request", lambda request: tab.requested.append(request.url))
    tab.on(
        "console", lambda message: tab.complaints.append(message.text) if message.type == "error" else None
    )
    tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.goto(page.as_uri())
    yield tab
    context.close()


def test_title_names_the_sweep(opened):
    assert opened.title() == "<fragmentation> · PageTwin report"


def test_verdict_is_on_the_first_screen(opened):
    box = opened.locator(".answer").bounding_box()
    assert box["y"] + box["height"] < 800
    assert opened.locator(".finished").bounding_box()["y"] < box["y"]


def test_figures_hold_selectable_text(opened):
    assert opened.locator("svg text").count() > 200


def test_tables_have_their_rows(opened):
    assert opened.locator("#tables .scroll").first.locator("tbody tr").count() == 12


def test_nothing_is_asked_of_the_network(opened):
    assert opened.requested
    assert all(url.startswith(("file:", "data:")) for url in opened.requested)


def test_the_console_stays_silent(opened):
    assert opened.complaints == []


@pytest.mark.parametrize("width", [800, 1280])
def test_no_horizontal_overflow(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    opened.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_no_text_leaves_its_figure(opened):
    """A label that sticks out of the drawing is cut off."""
    outside = opened.evaluate(
        """() => [...document.querySelectorAll('figure svg')].flatMap(svg => {
            const frame = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('text')].filter(text => {
                const box = text.getBoundingClientRect();
                return box.left < frame.left - 1 || box.right > frame.right + 1
                    || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
            }).map(text => text.textContent);
        })"""
    )
    assert outside == []
