"""Kill a sweep again and again; say what was lost, what ran twice, and whether the result is that of a quiet sweep.

    python tests/nightly/kill_drill.py local 50
    python tests/nightly/kill_drill.py slurm 10      # needs SLURM_CONF, or a Slurm: tests/support/slurm_node.py
    python tests/nightly/kill_drill.py ray 10        # starts a cluster of two nodes
    options: --points N, --seed N, --measured (local, slurm: each point is measured too, all requests arrive at time 0),
             --repeats N (local: so many runs of a measured point, spread; a run that had ended must stay as it was)

Each kill comes at a random moment and is one of: kill -9 of the driver; kill -9 of a worker process; scancel or a
requeue of a job (slurm); the loss of a node with all its processes (ray). After each kill every committed point must be
as it was before, to the byte: a point that ran again would have other seconds. At the end the summary is compared with
that of a sweep that nobody disturbed: all columns that do not follow from time. Exit code 0 if all holds.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from harness.console import say

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 900
# What follows from time: the clock of the machine, and where a sweep ran.
TIMED = (
    "seconds.",
    "pace.",
    "levels.",
    "environment.load_average",
    "environment.runs_of_earlier_starts",
    "config.out",
    "overrides",
    "config.workers",
    "config.cost.cache_dir",
)
# Measured figures that count and do not time, where all requests arrive at time 0.
COUNTS = ("finished", "steps", "computed_tokens", "blocks_allocated", "copies_per_token", "recomputed_tokens")
COUNTS = (
    *COUNTS,
    "preemptions",
    "running_peak",
    "hit_tokens",
    "resumed_hit_tokens",
    "hit_ratio",
    "peak_kv",
    "tail_waste",
)


class Drill:
    """One sweep of real points in a folder, and what kills it."""

    def __init__(
        self, folder: Path, place: str, points: int, measured: bool, seed: int, repeats: int = 1
    ) -> None:
        self.folder, self.place, self.dice = folder, place, random.Random(seed)
        seeds = f"workload.seed=range({points})"
        words = ["cost=roofline", "workload.oversize=drop", "workload.num_requests=24", seeds]
        if measured:
            words += ["measure=true", "replay=offline", f"replay.repeats={repeats}", "cost.bounds=false"]
        else:
            words += ["measure=false", "workload.num_requests=200", "cost.bounds=true"]
        self.words = words
        self.execute = {
            "local": ["workers=2"],
            "slurm": ["execute=slurm", "execute.jobs=4", "execute.poll_s=0.5"],
        }
        self.cluster: Any = None
        self.kept: dict[str, str] = {}
        self.twice: set[str] = set()
        self.repeats = repeats
        self.runs: dict[tuple[str, str], str] = {}  # kept runs of open points: point and file
        self.lost: set[tuple[str, str]] = set()  # runs that had ended, and are neither kept nor in a record
        self.kills: dict[str, int] = {}

    def start(self, out: Path) -> "subprocess.Popen[bytes]":
        """Give the command of the sweep into a store."""
        more = self.execute.get(self.place, [])
        if self.place == "slurm":
            more = [*more, f"execute.folder={self.folder}/jobs"]
        if self.place == "ray":
            more = ["execute=ray", f"execute.address={self.cluster.address}", "execute.attempts=9"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "harness", "sweep", *self.words, *more, f"out={out}"],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def records(self, out: Path) -> dict[str, str]:
        """A digest of each record's bytes by point."""
        files = (out / "points").glob("*/record.json")
        return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    def look(self, out: Path) -> None:
        """Compare the committed points with what they were at the last look."""
        runs = self.kept_runs(out)  # before the records, into which they go
        now = self.records(out)
        self.twice |= {name for name, digest in self.kept.items() if now.get(name) != digest}
        self.lost |= {
            run for run, digest in self.runs.items() if run[0] not in now and runs.get(run) != digest
        }
        self.kept, self.runs = now, runs

    def kept_runs(self, out: Path) -> dict[tuple[str, str], str]:
        """A digest of each run that an open point has kept, by point and file."""
        found = {}
        for file in (out / ".open").glob("*/*.run"):
            with suppress(FileNotFoundError):  # its point was committed meanwhile
                found[file.parent.name, file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found

    def disturb(self, out: Path, points: int, kills: int) -> None:
        """Kill so many times, spread over the points that are left, or until none is; then let the sweep finish."""
        driver = self.start(out)
        done = 0
        while done < kills and len(self.records(out)) < points:
            # so few further points before the next kill that the sweep is not over before the last one
            target = len(self.records(out)) + self.dice.randint(
                0, max(0, (points - len(self.records(out))) // (kills - done + 1))
            )
            runs = len(self.kept_runs(out)) + self.dice.randint(1, 2) if self.repeats > 1 else None
            self._wait(partial(self._so_far, out, target, driver, runs))
            time.sleep(self.dice.uniform(0, 1.5 if self.place == "local" else 3.0))
            what = self._kill(driver)
            if what is not None:
                self.kills[what] = self.kills.get(what, 0) + 1
                done += 1
            self.look(out)
            if driver.poll() is not None:
                driver.wait()
                driver = self.start(out)
        code = driver.wait(LONGEST_S)
        while code != 0 and len(self.records(out)) < points and done < kills + 5:
            done += 1
            code = self.start(out).wait(
                LONGEST_S
            )  # a worker's death may have failed its point: the same command again
        self.look(out)

    def _so_far(self, out: Path, target: int, driver: "subprocess.Popen[bytes]", runs: int | None) -> bool:
        """Whether so many points are committed, or, of points with several runs, one more or so many runs are kept."""
        if runs is not None and len(self.kept_runs(out)) < runs and len(self.records(out)) <= len(self.kept):
            return driver.poll() is not None
        return len(self.records(out)) >= target or driver.poll() is not None

    def _wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + LONGEST_S
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError((self.folder / "said.txt").read_text()[-3000:])
            time.sleep(0.02)

    def _kill(self, driver: "subprocess.Popen[bytes]") -> str | None:
        """Kill something; None where there was nothing of the kind at that moment."""
        what = self.dice.choice(
            {
                "local": ["driver", "driver", "worker"],
                "slurm": ["driver", "worker", "cancel", "requeue"],
                "ray": ["driver", "worker", "node"],
            }[self.place]
        )
        if what == "driver":
            if driver.poll() is not None:
                return None
            driver.kill()
            driver.wait()
            return what
        if what == "worker":
            mark = {
                "local": b"multiprocessing.spawn",
                "slurm": b"submitit.core._submit",
                "ray": b"ray::run_remotely",
            }
            found = _processes(mark[self.place], parent=driver.pid if self.place == "local" else None)
            if not found:
                return None
            os.kill(self.dice.choice(found), signal.SIGKILL)
            return what
        if what == "node":
            node = self.cluster.nodes.pop(self.dice.randrange(len(self.cluster.nodes)))
            self.cluster.remove_node(node, allow_graceful=False)
            self.cluster.nodes.append(self.cluster.add_node(num_cpus=2))
            return what
        running = subprocess.run(
            ["squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i"], capture_output=True, text=True, check=True
        ).stdout.split()
        if not running:
            return None
        task = self.dice.choice(running)
        words = ["scancel", task] if what == "cancel" else ["scontrol", "requeue", task]
        return what if subprocess.run(words, capture_output=True, check=False).returncode == 0 else None


def _processes(mark: bytes, parent: int | None = None) -> list[int]:
    """Ids of running Python processes with a text in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            words = (folder / "cmdline").read_bytes()
            ours = parent is None or f"\nPPid:\t{parent}\n" in (folder / "status").read_text()
        except OSError:
            continue
        if mark in words and ours and not words.startswith((b"srun", b"/bin/bash", b"bash")):
            found.append(int(folder.name))
    return found


def differences(one: Path, other: Path, measured: bool) -> tuple[list[str], int]:
    """(columns that differ, columns compared) of two stores' summaries."""
    tables = [
        pd.read_parquet(out / "summary.parquet").set_index("fingerprint").sort_index() for out in (one, other)
    ]
    names = [name for name in tables[0].columns.union(tables[1].columns) if _compared(name, measured)]
    wrong = [name for name in names if not _equal(tables, name)]
    return wrong, len(names)


def _compared(name: str, measured: bool) -> bool:
    if name.startswith(TIMED):
        return False
    if name.startswith("measured."):
        return measured and name.rpartition(".")[2] in COUNTS and ".median." in name
    return not (measured and name.startswith(("comparison.", "cost.")))


def _equal(tables: list[pd.DataFrame], name: str) -> bool:
    if any(name not in table for table in tables):
        return False
    left, right = (table[name] for table in tables)
    return bool(left.equals(right))


def main() -> int:
    """Run the drill and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("place", choices=("local", "slurm", "ray"))
    parser.add_argument("kills", type=int)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--repeats", type=int, default=1)
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pt-drill-"))
    quiet = Drill(folder, "local", flags.points, flags.measured, flags.seed, flags.repeats)
    if quiet.start(folder / "quiet").wait(LONGEST_S):
        sys.exit((folder / "said.txt").read_text()[-3000:])
    drill = Drill(folder, flags.place, flags.points, flags.measured, flags.seed, flags.repeats)
    if flags.place == "ray":
        from ray.cluster_utils import Cluster

        os.environ["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        )
        drill.cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        drill.cluster.nodes = [drill.cluster.add_node(num_cpus=2) for _ in range(2)]
    begun = time.monotonic()
    drill.disturb(folder / "killed", flags.points, flags.kills)
    wrong, compared = differences(folder / "quiet", folder / "killed", flags.measured)
    lost = flags.points - len(drill.records(folder / "killed"))
    left = [
        path for path in (folder / "killed").rglob("*") if path.name.endswith(".tmp") or "probe-" in path.name
    ]
    if drill.cluster is not None:
        drill.cluster.shutdown()
    came, lasted_s = sum(drill.kills.values()), time.monotonic() - begun
    say(f"{flags.place}: {came} of {flags.kills} kills {drill.kills} in {lasted_s:.0f} s")
    say(
        f"points {flags.points}, lost {lost}, changed after commit {len(drill.twice)}, ended runs lost or taken twice "
        f"{len(drill.lost)}, left-over files {len(left)}"
    )
    say(f"summary: {compared} columns compared with an undisturbed sweep, {len(wrong)} differ {wrong[:8]}")
    say(f"folder: {folder}")
    return int(bool(lost or drill.twice or drill.lost or left or wrong))


if __name__ == "__main__":
    sys.exit(main())
