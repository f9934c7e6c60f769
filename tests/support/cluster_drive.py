"""Drives a sweep of fake points (`fake_point`) from outside, as a user does: start, kill, count what ran."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
SCRIPT = "import sys; import fake_point; fake_point.heed_every_signal(); from harness.cli.main import main; \
sys.exit(main(sys.argv[1:], point=fake_point, report=fake_point))"
LONGEST_WAIT_S = 240  # a safety net: no test rests on it


def environment() -> dict[str, str]:
    """That of a driver and its jobs: this checkout and the fake points can be imported."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, ROOT, ROOT / "kernels")))}


class Sweep:
    """One sweep in a folder, by one command that may be given several times."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.words = ["sweep", "measure=false", f"cost.cache_dir={folder}", *words]

    def start(self, *more: str) -> "subprocess.Popen[str]":
        """Give the command; its output goes to `said.txt`."""
        with (self.folder / "said.txt").open("a") as said:
            return subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *self.words, *more],
                cwd=self.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def finish(self, *more: str) -> int:
        """Give the command and wait for its end; returns the exit code."""
        return self.start(*more).wait(LONGEST_WAIT_S)

    @property
    def said(self) -> str:
        """What all commands have printed so far."""
        return (self.folder / "said.txt").read_text()

    def runs(self) -> Counter[str]:
        """How often each point has begun, by its seed."""
        file = self.folder / "runs.txt"
        return Counter(file.read_text().splitlines() if file.exists() else [])

    def records(self) -> list[Path]:
        """The records that are there."""
        return list((self.folder / "results").rglob("record.json"))

    def let_run(self, count: int) -> None:
        """Let so many runs go on in all; those that begin after them wait."""
        (self.folder / "limit").write_text(str(count))

    def let_all_run(self) -> None:
        """Let all go on."""
        (self.folder / "limit").unlink(missing_ok=True)

    def jobs(self) -> list[dict[str, object]]:
        """The submissions of the store's book."""
        value = json.loads((self.folder / "results" / "default" / "jobs.json").read_text())
        return list(value["submissions"])

    def wait_until(self, what: str, process: "subprocess.Popen[str] | None" = None) -> None:
        """Wait until the driver has printed a text."""
        wait(lambda: what in self.said, f"{what!r} in the output", self, process)

    def wait_for_runs(self, count: int, process: "subprocess.Popen[str] | None" = None) -> None:
        """Wait until so many runs have begun."""
        wait(lambda: self.runs().total() >= count, f"{count} runs", self, process)

    def wait_for_records(self, count: int, process: "subprocess.Popen[str] | None" = None) -> None:
        """Wait until so many points are committed."""
        wait(lambda: len(self.records()) >= count, f"{count} records", self, process)


def wait(condition, what, sweep, process=None) -> None:  # type: ignore[no-untyped-def]
    """Wait for a condition; fails with the driver's output when it takes too long or the driver has ended."""
    end = time.monotonic() + LONGEST_WAIT_S
    while not condition():
        ended = process is not None and process.poll() is not None
        if (ended and not condition()) or time.monotonic() > end:
            raise AssertionError(f"waited in vain for {what}; the driver said:\n{sweep.said}")
        time.sleep(0.05)
