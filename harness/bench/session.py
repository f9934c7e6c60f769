"""Timings with pytest-benchmark: one session in its own process, with its raw samples kept as JSON.

A bench file is part of the package, for example `harness/bench/policy/benchmarks.py`. Its tests take two fixtures:
`benchmark` from pytest-benchmark, and `settings`, the mapping that the caller passed. The separate process keeps the
caller's imports out of the measurement, and a session can start from anywhere, also from a test.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness.config.errors import UserError

NO_TESTS, ALL_PASSED = 5, 0


class BenchError(UserError):
    """The session did not finish. The message contains the end of pytest's output."""


@dataclass(frozen=True)
class Timing:
    """One benchmark of a session: its name and parameters, its extra figures, and every sample in seconds."""

    name: str
    group: str | None
    parameters: Mapping[str, Any]
    extra: Mapping[str, Any]
    samples_s: tuple[float, ...]
    median_s: float


def run_session(
    files: Sequence[Path], settings: Mapping[str, object], out: Path, *, timer: str = "time.perf_counter"
) -> list[Timing]:
    """Time every benchmark of `files` and return the timings in the order in which they ran.

    Args:
        files: bench files; functions named `test_*` in them are run.
        settings: passed to them as the fixture `settings`; any values that JSON can hold.
        out: the file for pytest-benchmark's JSON with every raw sample. Its folder is created.
        timer: dotted name of a clock in seconds; use `time.process_time` on shared cores.

    Raises:
        BenchError: pytest-benchmark is not installed, a benchmark failed, or none was found.
    """
    if find_spec("pytest_benchmark") is None:
        raise BenchError("timing needs the package pytest-benchmark; set up with 'make setup'")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="pagetwin-bench-") as folder:
        chosen = Path(folder) / "settings.json"
        chosen.write_text(json.dumps(dict(settings)), encoding="utf-8")
        done = subprocess.run(
            _command(files, chosen, out.resolve(), timer),
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode == ALL_PASSED and out.exists():
        return read_timings(out)
    if done.returncode == NO_TESTS:
        raise BenchError(f"no benchmark was found in {', '.join(map(str, files))}")
    tail = "\n".join(done.stdout.splitlines()[-60:])
    raise BenchError(f"the benchmark session failed (pytest's exit code {done.returncode}):\n{tail}")


def read_timings(file: Path) -> list[Timing]:
    """The timings of a pytest-benchmark JSON file with raw samples."""
    return [
        Timing(
            one["name"],
            one["group"],
            one["params"] or {},
            one["extra_info"],
            tuple(one["stats"]["data"]),
            one["stats"]["median"],
        )
        for one in json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    ]


def _command(files: Sequence[Path], settings: Path, out: Path, timer: str) -> list[str]:
    options = ("-q", "-s", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "harness.bench.plugin")
    return [
        *(sys.executable, "-m", "pytest", *options, "-c", os.devnull, "--rootdir", str(files[0].parent)),
        *(f"--bench-settings={settings}", f"--benchmark-json={out}", f"--benchmark-timer={timer}"),
        *("--benchmark-disable-gc", "--benchmark-quiet", *map(str, files)),
    ]


def _environment() -> dict[str, str]:
    """The environment of the child process. It finds the same packages, including those only on the caller's path."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**outer, "PYTHONPATH": path}  # independent of a pytest that starts this session
