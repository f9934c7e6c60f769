"""A store of 100,000 points, and what planning, status and report of it take, and the page in a browser.

    python tests/nightly/large_store.py [--points 100000] [--folder FOLDER]

Planning is the real one. Of the points a few are run, spread over the settings. Every other point is committed by
the code that commits all points, with the record of the one that was run and is most like it, its figures moved by up
to a tenth so that they are not alike. Then the commands run as processes of their own; each is printed with its
CPU-seconds, wall seconds and largest resident memory. The page of the report is opened in headless Chromium where
Playwright and Chromium are installed. The folder is deleted at the end if it was not named; a named one is used again.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.console import say
from harness.metrics.record import PointRecord
from harness.point import run_point
from harness.store.commit import Layout
from harness.store.manifest import Manifest, SweepPoint, write_manifest
from harness.sweep.execute import commit_result
from harness.sweep.plan import PlannedPoint, plan_sweep, sweep_request
from harness.workers import in_workers

ROOT = Path(__file__).resolve().parents[2]
RATES, RUNNING, BLOCKS = range(1, 26), (8, 16, 32, 64), (8, 16)
MOVED = 0.1
_CHUNK = 5000  # points of a task
_TABS, _PATIENCE_MS = 5, 120_000


@dataclass(frozen=True)
class Result:
    record: PointRecord
    tables: dict[str, dict[str, Any]]
    files: dict[str, bytes]


def words(folder: Path, points: int) -> list[str]:
    """The overrides of a sweep of about so many points."""
    pools = max(1, points // (len(RATES) * len(RUNNING) * len(BLOCKS)))
    return [
        *("measure=false", "cost=roofline", "workload.num_requests=8", "replay.records=false"),
        f"cache.pool_tokens=range(8192,{8192 + 64 * pools},64)",
        f"cache.block_size={','.join(map(str, BLOCKS))}",
        f"workload.request_rate=range({RATES.start},{RATES.stop})",
        f"scheduler.max_running={','.join(map(str, RUNNING))}",
        f"out={folder}",
    ]


def moved(value: Any, by: float) -> Any:
    """Figures times `by`, in the sections of a record that hold them."""
    if isinstance(value, dict):
        return {key: moved(item, by) for key, item in value.items()}
    if isinstance(value, list):
        return [moved(item, by) for item in value]
    return value * by if isinstance(value, float) else value


def write_store(folder: Path, overrides: Sequence[str]) -> int:
    """Plan, run some points, commit all; returns their number."""
    from harness.point import PointSession

    sweep = plan_sweep(sweep_request(overrides), PointSession())
    chunks = [(folder, sweep.points[first : first + _CHUNK]) for first in range(0, len(sweep.points), _CHUNK)]
    for _ in in_workers(commit, chunks, os.cpu_count() or 1):
        pass
    asked = tuple(SweepPoint(planned.fingerprint, planned.varying) for planned in sweep.points)
    command = " ".join(["python -m harness sweep", *overrides])
    write_manifest(folder, Manifest(sweep.name, command, tuple(overrides), asked))
    return len(sweep.points)


def commit(chunk: tuple[Path, Sequence[PlannedPoint]]) -> None:
    """Commit these points, of which some are run. A task of a worker process."""
    folder, points = chunk
    ran: dict[tuple[Any, ...], Any] = {}
    for planned in points:
        key = _like(planned)
        if key not in ran:
            ran[key] = run_point(planned.config)
        ran_like = ran[key].record
        by = 1 + random.Random(planned.fingerprint).uniform(-MOVED, MOVED)
        record = replace(
            ran_like, simulated=moved(ran_like.simulated, by), comparison=moved(ran_like.comparison, by)
        )
        commit_result(planned, folder, Result(record, dict(ran[key].tables), dict(ran[key].files)), 0.02 * by)


def _like(planned: PlannedPoint) -> tuple[Any, ...]:
    config = planned.config
    return (
        config.cache.block_size,
        config.scheduler.max_running,
        round(config.workload.request_rate or 0) // 5,
    )


def measured(command: Sequence[str]) -> str:
    """Run a command line of the harness; its CPU-seconds, wall seconds and largest memory, in words."""
    begun = time.monotonic()
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "harness", *command],
            env={**os.environ, "PYTHONPATH": path},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(child.pid, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if os.waitstatus_to_exitcode(status):
        sys.exit(text[-3000:])
    cpu, wall = used.ru_utime + used.ru_stime, time.monotonic() - begun
    return f"{cpu:.1f} CPU-s, {wall:.1f} s, {used.ru_maxrss / 1e6:.2f} GB"


def opened(page: Path) -> str:
    """Seconds until a browser has loaded and drawn a page, of several fresh tabs, in words."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        return "not measured: Playwright or Chromium is missing"
    seconds = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=_PATIENCE_MS)
        for _ in range(_TABS):
            context = browser.new_context(offline=True, viewport={"width": 1280, "height": 800})
            context.set_default_timeout(_PATIENCE_MS)
            tab = context.new_page()
            begun = time.monotonic()
            tab.goto(page.resolve().as_uri())
            tab.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
            seconds.append(time.monotonic() - begun)
            context.close()
        browser.close()
    return f"{median(seconds):.2f} s in the median of {_TABS} tabs, {min(seconds):.2f} to {max(seconds):.2f}"


def main() -> None:
    """Write the store and measure the commands on it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    flags = parser.parse_args()
    folder = flags.folder or Path(tempfile.mkdtemp(prefix="pt-large-"))
    overrides = words(folder, flags.points)
    try:
        if not Layout(folder).manifest.exists():
            begun = time.monotonic()
            count = write_store(folder, overrides)
            say(f"written: {count:,} points in {time.monotonic() - begun:.0f} s")
        say(f"sweep --dry-run   {measured(['sweep', *overrides, '--dry-run'])}")
        say(f"status            {measured(['status', str(folder)])}")
        say(f"report            {measured(['report', str(folder)])}")
        say(f"doctor            {measured(['doctor', str(folder)])}")
        page = folder / "report" / "index.html"
        summary = Layout(folder).summary
        say(f"page opens        {opened(page)}")
        say(f"page {page.stat().st_size / 1e6:.1f} MB, summary {summary.stat().st_size / 1e6:.1f} MB")
    finally:
        if flags.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
