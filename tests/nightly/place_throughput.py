"""Points a second and CPU-seconds of a point, by where it runs: one local worker, two, two sweeps apart, Slurm, Ray.

    python tests/nightly/place_throughput.py [--rounds 5] [--points 16] [--requests N] [PLACE ...]

Rounds are interleaved. Start-up is left out: each process notes its CPU time and the clock when a point begins, and the
figures are from its first point to its last, divided by the points between. So all that a place adds to a point counts
(its commit or its way back, the journal, the dispatch). Points count that began while all processes of the place had
one: a process that is alone has the machine's caches and clock for itself. The throughput of a place is the sum over
its processes. The driver's CPU time, divided by all points, stands beside it. The clock says nothing on a busy machine;
CPU-seconds do.

`apart` is two sweeps with one worker each, which share nothing but the machine: no way of running two points at once on
it can be faster. At the end: are two workers at least 1.8 times as fast as one, and Slurm and Ray within 10 % of two
workers? Exit code 0 if so, 1 if not. For a test on this machine: a quiet one with two cores, `one two apart slurm ray`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.console import say

ROOT = Path(__file__).resolve().parents[2]
PLACES = {
    "one": ["workers=1"],
    "two": ["workers=2"],
    "apart": ["workers=1"],
    "slurm": ["execute=slurm", "execute.jobs=2", "execute.poll_s=1"],
    "ray": ["execute=ray", "workers=2"],
}
NOTES = "PAGETWIN_CPU_NOTES"
GOALS = (("one", "two", 1.8), ("apart", "two", 0.95), ("two", "slurm", 0.9), ("two", "ray", 0.9))


def check_point(config: Any) -> None:
    """That of `harness.point`."""
    from harness import point

    point.check_point(config)


def point_identity(config: Any) -> Any:
    """That of `harness.point`."""
    from harness import point

    return point.point_identity(config)


def run_point(config: Any, *, progress: Any = None) -> Any:
    """Note this process's CPU time, then run the point."""
    from harness import point

    with (Path(os.environ[NOTES]) / f"{os.uname().nodename}-{os.getpid()}").open("a") as file:
        file.write(f"{time.process_time()} {time.monotonic()}\n")
    return point.run_point(config, progress=progress)


Span = list[tuple[float, float]]
"""CPU-seconds and clock of a process at the begin of each of its points."""


def measure(place: str, points: int, requests: int) -> tuple[float, float, float, float]:
    """Of one sweep in a fresh store: CPU-seconds of a point, points a second, CPU-seconds of the driver per point, and
    wall seconds of the whole."""
    folder = Path(tempfile.mkdtemp(prefix="pt-speed-"))
    (folder / "notes").mkdir()
    begun, sweeps = time.monotonic(), 2 if place == "apart" else 1
    share = points // sweeps
    drivers = [
        _start(folder, place, range(number * share, (number + 1) * share), requests)
        for number in range(sweeps)
    ]
    used = [0.0] * sweeps
    while any(driver.poll() is None for driver in drivers):
        used = [_cpu_of(driver.pid) or last for driver, last in zip(drivers, used, strict=True)]
        time.sleep(0.1)
    if any(driver.returncode for driver in drivers):
        sys.exit("".join(file.read_text()[-3000:] for file in folder.glob("said-*")))
    cpu, speed = _figures([_span(file) for file in (folder / "notes").iterdir()])
    return cpu, speed, sum(used) / (share * sweeps), time.monotonic() - begun


def _start(folder: Path, place: str, seeds: range, requests: int) -> "subprocess.Popen[bytes]":
    words = ["sweep", "measure=false", "cost=roofline", "cost.bounds=false", "workload.oversize=drop"]
    words += [f"workload.num_requests={requests}", "replay.compiled=never"]
    words += [f"workload.seed=range({seeds.start},{seeds.stop})", f"out={folder}/store-{seeds.start}"]
    words += PLACES[place]
    words += [f"execute.folder={folder}/jobs"] if place == "slurm" else []
    script = "import sys, place_throughput as p, fake_point as f; from harness.cli.main import main; \
sys.exit(main(sys.argv[1:], point=p, report=f))"
    path = [ROOT / "tests" / "nightly", ROOT / "tests" / "support", ROOT, ROOT / "kernels"]
    environment = {
        **os.environ,
        NOTES: str(folder / "notes"),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
    }
    with (folder / f"said-{seeds.start}.txt").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-c", script, *words], env=environment, stdout=said, stderr=said, cwd=folder
        )


def _span(file: Path) -> Span:
    return [(float(cpu), float(clock)) for cpu, clock in map(str.split, file.read_text().splitlines())]


def _figures(spans: list[Span]) -> tuple[float, float]:
    """(CPU-seconds of a point, points a second) over the time in which all processes had points."""
    spans = [span for span in spans if len(span) > 1]
    if not spans:
        sys.exit("every process had one point; take more --points")
    low, high = max(span[0][1] for span in spans), min(span[-1][1] for span in spans)
    spans = [[note for note in span if low <= note[1] <= high] for span in spans]
    if any(len(span) < 2 for span in spans):
        sys.exit("the processes did not run at the same time for long enough; take more --points")
    between = sum(len(span) - 1 for span in spans)
    cpu = sum(span[-1][0] - span[0][0] for span in spans) / between
    return cpu, sum((len(span) - 1) / (span[-1][1] - span[0][1]) for span in spans)


def _cpu_of(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Measure in turns, print the medians, and say whether the goals are reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", default=["one", "two"], choices=[*PLACES, []])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--requests", type=int, default=1500)
    flags = parser.parse_args()
    found: dict[str, list[tuple[float, float, float, float]]] = {place: [] for place in flags.places}
    for number in range(flags.rounds):
        for place in flags.places:
            found[place].append(measure(place, flags.points, flags.requests))
            cpu, speed, _, wall = found[place][-1]
            say(
                f"round {number + 1}, {place}: {cpu:.3f} CPU-s a point, {speed:.3f} points/s, {wall:.1f} s in all"
            )
    for place, rounds in found.items():
        cpus, speeds, drivers, _ = (sorted(column) for column in zip(*rounds, strict=True))
        say(
            f"{place:6} {statistics.median(cpus):.3f} CPU-s a point ({cpus[0]:.3f} to {cpus[-1]:.3f}), "
            f"{statistics.median(speeds):.3f} points/s ({speeds[0]:.3f} to {speeds[-1]:.3f}); "
            f"driver {statistics.median(drivers):.3f} CPU-s a point"
        )
    missed = 0
    for base, place, goal in GOALS:
        if base in found and place in found:
            speed, cpu = (
                statistics.median(
                    a[column] / b[column] for a, b in zip(found[place], found[base], strict=True)
                )
                for column in (1, 0)
            )
            missed += speed < goal
            word = "reached" if speed >= goal else "not reached"
            say(
                f"{place} against {base}: {speed:.2f} of the throughput, goal {goal}, {word}; {cpu:.3f} of the CPU-s"
            )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
