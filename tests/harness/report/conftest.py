"""One small report, written once: writing takes seconds, and most tests only look at it."""

from pathlib import Path

import pytest
from shared_folder import made_once
from synthetic_store import grid, write_store
from tiers import tier

from harness.config.schema import Figures, ReportConfig
from harness.report import write_report

SMALL = {"cache.block_size": (8, 16), "workload.prefix_share": (0.0, 0.5), "decoding.beam_width": (1, 2)}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured sweep of both allocators over all three axes, with markup in its name."""
    return write_store(tmp_path_factory.mktemp("store"), grid(SMALL), name="<fragmentation>")


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on such a store, by day without PDFs."""

    def write(folder: Path) -> None:
        write_store(folder, grid(SMALL), name="<fragmentation>")
        write_report(folder, options=ReportConfig(figures=tier(Figures.svg, Figures.all)))

    return made_once(tmp_path_factory, "store_with_page", write) / "report" / "index.html"


@pytest.fixture(autouse=True)
def _no_pdf(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that write a report of their own look at the page alone; the PDFs take half of the time."""
    if "page" not in request.fixturenames:
        monkeypatch.setattr("harness.report.style.pdf_bytes", lambda figure: b"%PDF-none")
