"""The page in a real browser, without a network."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
from tiers import cases

from harness.report.style import inline

pytestmark = pytest.mark.browser
PATIENCE_MS = 120_000  # a safety net on a busy machine


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


def unfold(tab: Any) -> None:
    tab.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")


def test_title_names_the_sweep(opened):
    assert opened.title() == "<fragmentation> · PageTwin report"


def test_choice_figure_and_trust_are_on_the_first_screen(opened):
    parts = [".choices", "#figure-overview svg", ".answer"]
    boxes = [opened.locator(part).bounding_box() for part in parts]
    assert [box["y"] for box in boxes] == sorted(box["y"] for box in boxes)
    assert boxes[-1]["y"] + boxes[-1]["height"] < 800


def test_on_a_phone_the_choice_is_on_the_first_screen_and_the_figure_fits(browser, page):
    tab = context_of(browser, page, viewport={"width": 400, "height": 800})
    box = tab.locator(".choices").bounding_box()
    assert box["y"] + box["height"] < 800
    assert not tab.locator("#figure-overview svg").is_visible()
    drawn = tab.locator("#figure-overview_narrow svg").bounding_box()
    assert drawn["x"] + drawn["width"] <= 400
    tab.context.close()


def test_the_page_is_six_screens_and_1500_words_while_nothing_is_unfolded(opened):
    assert opened.evaluate("document.documentElement.scrollHeight") <= 6 * 800
    assert len(opened.locator("main").inner_text().split()) <= 1500


def test_figures_hold_selectable_text(opened):
    assert opened.locator("svg text").count() > 200


def test_tables_have_their_rows(opened):
    assert opened.locator("table.sortable tbody tr").count() == 12


def test_nothing_is_asked_of_the_network(opened):
    assert opened.requested
    assert all(url.startswith(("file:", "data:")) for url in opened.requested)


def test_the_console_stays_silent(opened):
    assert opened.complaints == []


@cases("width", [400, 800, 1280], day=1)
def test_no_horizontal_overflow(opened, width):
    opened.set_viewport_size({"width": width, "height": 800})
    unfold(opened)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width


def test_no_text_leaves_its_figure(opened):
    """A label that sticks out of the drawing is cut off."""
    unfold(opened)
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


def column(tab: Any, name: str) -> list[str]:
    """The shown cells of a column of the table of points."""
    return tab.evaluate(
        """name => { const table = document.querySelector('table.sortable');
            const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
            const place = heads.findIndex(head => head.textContent === name);
            return [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[place].textContent); }""",
        name,
    )


def test_a_click_on_a_head_sorts_the_points_and_a_second_one_turns_the_order(opened):
    unfold(opened)
    opened.get_by_role("button", name="block size", exact=True).click()
    once = [int(text) for text in column(opened, "block size")]
    opened.get_by_role("button", name="block size", exact=True).click()
    twice = [int(text) for text in column(opened, "block size")]
    assert once == sorted(once)
    assert twice == sorted(once, reverse=True)


def test_the_filter_leaves_the_points_that_have_all_words(opened):
    unfold(opened)
    opened.get_by_role("searchbox").fill("paged 16")
    assert set(column(opened, "cache")) == {"paged"}
    assert set(column(opened, "block size")) == {"16"}
    assert "4 of 12 points" in opened.locator(".count").inner_text()


@pytest.mark.nightly
def test_a_held_value_leaves_its_points_in_the_chart(opened):
    before = opened.locator(".chart circle").count()
    opened.get_by_role("combobox", name="hold beam width").select_option("1")
    assert 0 < opened.locator(".chart circle").count() < before


@pytest.mark.nightly
def test_axes_can_be_chosen_and_name_their_units(opened):
    opened.get_by_role("combobox", name="y axis").select_option(label="TTFT p50")
    opened.get_by_role("combobox", name="x axis").select_option(label="request throughput")
    said = opened.locator(".chart").text_content()
    assert "TTFT p50 (" in said
    assert "request throughput (requests/s)" in said


def test_a_point_shows_its_values_under_the_mouse_and_all_figures_on_the_keyboard(opened):
    dot = opened.locator(".chart circle").first
    dot.hover(force=True)
    assert "predicted" in opened.locator(".tip").inner_text()
    dot.focus()
    opened.keyboard.press("Enter")
    assert opened.locator(".detail tbody tr").count() > 10


@pytest.mark.nightly
def test_a_drag_zooms_and_a_button_resets(opened):
    chart = opened.locator(".chart")
    chart.scroll_into_view_if_needed()
    before, box = opened.locator(".chart circle").count(), chart.bounding_box()
    opened.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.02 * box["height"])
    opened.mouse.down()
    opened.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.6 * box["height"])
    opened.mouse.up()
    assert opened.locator(".chart circle").count() < before
    opened.get_by_role("button", name="Reset zoom").click()
    assert opened.locator(".chart circle").count() == before


def context_of(browser: Any, page: Any, **options: Any) -> Any:
    context = browser.new_context(offline=True, **options)
    context.set_default_timeout(PATIENCE_MS)
    tab = context.new_page()
    tab.goto(page.as_uri())
    return tab


@pytest.mark.nightly
def test_a_dark_theme_is_followed(browser, page):
    tab = context_of(browser, page, color_scheme="dark")
    shades = tab.evaluate(
        "['color', 'background-color'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g).map(Number)[0])"
    )
    assert shades[0] > 180 > 60 > shades[1]
    tab.context.close()


def test_without_script_every_point_is_in_the_table_and_the_figures(browser, page):
    tab = context_of(browser, page, java_script_enabled=False)
    assert tab.locator("table.sortable tbody tr").count() == 12
    assert tab.locator("figure svg").count() > 8
    assert "needs JavaScript" in tab.locator("#explore").inner_text()
    tab.context.close()


@pytest.mark.nightly
def test_a_word_of_a_table_is_not_broken_on_a_phone(browser, page):
    """Letter-by-letter breaks made cells that are many lines high and one letter wide."""
    tab = context_of(browser, page, viewport={"width": 400, "height": 900})
    narrow = tab.evaluate(
        """() => [...document.querySelectorAll('#trust td')].filter(cell => cell.textContent.trim().length > 8
            && cell.getBoundingClientRect().width < 40).map(cell => cell.textContent)"""
    )
    assert narrow == []
    tab.context.close()


@pytest.mark.nightly
def test_print_leaves_controls_out_and_keeps_headings_with_what_follows(browser, page):
    tab = context_of(browser, page)
    tab.emulate_media(media="print")
    assert not tab.locator("#explore").is_visible()
    assert tab.evaluate("getComputedStyle(document.querySelector('h2')).breakAfter") == "avoid"
    assert tab.pdf(format="A4").startswith(b"%PDF")
    tab.context.close()


def axe_faults(opened) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
    found = axe.Axe().run(opened, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{one['id']}: {one['help']}: {node['html'][:120]}" for one in found for node in one["nodes"]]


@cases(("scheme", "width"), [("light", 1280), ("dark", 400)], day=(("dark", 400),))
def test_axe_finds_no_fault(opened, scheme, width):
    """Contrast, names, landmarks, order of headings and what else axe-core checks, with every fold open."""
    opened.set_viewport_size({"width": width, "height": 800})
    opened.emulate_media(color_scheme=scheme)
    unfold(opened)
    assert axe_faults(opened) == []


def test_axe_notices_a_planted_fault(opened):
    opened.set_content(
        "<html lang=en><title>x</title><main><h1>x</h1><p style='color:#ccc'>pale</p><img src=a></main>"
    )
    assert {fault.partition(":")[0] for fault in axe_faults(opened)} >= {"color-contrast", "image-alt"}


@pytest.mark.nightly
def test_a_drawing_in_the_page_looks_as_its_file_does(browser, page):
    numpy = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    tab = browser.new_page(viewport={"width": 1000, "height": 1400})
    for name in ("curve_cache_block_size", "agreement", "heat"):
        svg = (page.parent / "figures" / f"{name}.svg").read_bytes()
        shots = []
        for drawing in (svg.decode()[svg.decode().index("<svg") :], inline(svg, name, name)):
            tab.set_content(
                f"<style>body {{ margin: 0; background: white }} svg {{ width: 900px; height: auto }}</style>{drawing}"
            )
            picture = image.open(io.BytesIO(tab.locator("svg").first.screenshot())).convert("L")
            shots.append(numpy.asarray(picture, dtype=float))
        assert shots[0].shape == shots[1].shape
        assert numpy.ptp(shots[0]) > 100  # something is drawn
        assert numpy.mean(numpy.abs(shots[0] - shots[1]) > 60) < 0.01  # text may move by a part of a pixel
    tab.close()
