"""Timings with pytest-benchmark, and the results of a run: a row for each case and provider, problems, versions.

A session runs in its own process, and its raw samples are kept as JSON. A bench file reads what the caller passed with
`read_settings`. The separate process keeps the caller's imports out of the measurement, and a session can start from
anywhere, also from a test. A case that a provider did not serve is kept with the reason, because a missing figure must
be explained.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

from harness.bench.cases import KernelCase
from harness.config.errors import UserError
from harness.cost.timings import OURS, Ceilings, MadeOn

_SETTINGS = "PAGETWIN_BENCH_SETTINGS"  # in the environment of a session: the file that has its settings


class BenchError(UserError):
    """The session did not finish. The message contains the end of pytest's output."""


@dataclass(frozen=True)
class Timing:
    """One benchmark of a session: its name and parameters, its extra figures, and every sample in seconds."""

    name: str
    group: str | None
    extra: Mapping[str, Any]
    samples_s: tuple[float, ...]
    median_s: float


def run_session(
    file: Path, settings: Mapping[str, object], out: Path, *, timer: str = "time.perf_counter"
) -> list[Timing]:
    """Time every benchmark of a bench file and return the timings in the order in which they ran.

    Args:
        file: the bench file; functions named `test_*` in it are run.
        settings: for its `read_settings`; any values that JSON can hold.
        out: the file for pytest-benchmark's JSON with every raw sample. Its folder is created.
        timer: dotted name of a clock in seconds.

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
            _command(file, out.resolve(), timer),
            env=_environment(chosen),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode or not out.exists():
        tail = "\n".join(done.stdout.splitlines()[-60:])
        raise BenchError(f"the benchmark session failed (pytest's exit code {done.returncode}):\n{tail}")
    found = [(one, one["stats"]) for one in json.loads(out.read_text(encoding="utf-8"))["benchmarks"]]
    return [
        Timing(one["name"], one["group"], one["extra_info"], tuple(stats["data"]), stats["median"])
        for one, stats in found
    ]


def read_settings() -> dict[str, Any]:
    """What the caller of the present session passed."""
    content: dict[str, Any] = json.loads(Path(os.environ[_SETTINGS]).read_text(encoding="utf-8"))
    return content


def _command(file: Path, out: Path, timer: str) -> list[str]:
    return [
        *(sys.executable, "-m", "pytest", "-q", "-s", "--import-mode=importlib", "-p", "no:cacheprovider"),
        *("-c", os.devnull, "--rootdir", str(file.parent), f"--benchmark-json={out}"),
        *(f"--benchmark-timer={timer}", "--benchmark-disable-gc", "--benchmark-quiet", str(file)),
    ]


def _environment(settings: Path) -> dict[str, str]:
    """The environment of the child process. It finds the same packages, including those only on the caller's path."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**outer, "PYTHONPATH": path, _SETTINGS: str(settings)}  # independent of a pytest that starts it


class ProblemKind(StrEnum):
    """The kind of a problem."""

    unsupported = "unsupported"  # the provider refused the case; no error
    wrong = "wrong"  # it ran, and its output is wrong
    failed = "failed"  # it raised an error of its own


@dataclass(frozen=True)
class Problem:
    """One case that one provider did not serve."""

    case: str
    provider: str
    kind: ProblemKind
    reason: str


def kind_of(error: Exception) -> ProblemKind:
    """The kind of problem that an error of a provider means."""
    from paged_kernels.case import DisagreementError
    from paged_kernels.providers import UnsupportedCaseError

    if isinstance(error, UnsupportedCaseError):
        return ProblemKind.unsupported
    return ProblemKind.wrong if isinstance(error, DisagreementError) else ProblemKind.failed


def note(file: Path, problem: Problem) -> None:
    """Append a problem to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(problem)) + "\n")


def read_problems(file: Path) -> list[Problem]:
    """The problems in a file of JSON lines; none if there is no file."""
    if not file.exists():
        return []
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Problem(**{**values, "kind": ProblemKind(values["kind"])}) for values in found]


def shortened(text: str, most: int = 600) -> str:
    """A compiler's message in one line. Its beginning names the attempt, its end the error; the middle is left out."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 3]} … {line[-2 * most // 3 :]}"


def made_on(device: str, threads: int) -> MadeOn:
    """Device, kernel sources and versions of this run. `device` is `cpu` or `cuda`."""
    from harness.environment import kernel_digest, versions

    found = versions()
    return MadeOn(
        device=device_name(device),
        kernels=kernel_digest(),
        torch=found["torch"] or "none",
        triton=found["triton"] or "none",
        threads=threads if device == "cpu" else 0,
        date=datetime.now(UTC).date().isoformat(),
    )


def device_name(device: str) -> str:
    """The device's name as in the record of a sweep: the GPU's, or the CPU's with its number of cores."""
    from harness.config.schema import EngineDevice
    from harness.environment import device_identity, gpu_names

    if device == "cuda" and not gpu_names():  # some containers hide the driver's files but have the device
        import torch

        return str(torch.cuda.get_device_name())
    return device_identity(EngineDevice(device))


@dataclass(frozen=True)
class TimingRow:
    """One case by one provider.

    `spread` is the interquartile range over the median. `gbytes_s` counts every distinct byte once (a prefix that all
    sequences share counts once; queries and output count), so it is what a perfect kernel would have to move.
    `against_ours` is this provider's time over ours.
    """

    case: KernelCase
    provider: str
    how: str
    error: float
    rounds: int
    median_us: float
    least_us: float
    most_us: float
    spread: float
    gbytes_s: float
    tflop_s: float
    copy_share: float
    read_share: float
    matmul_share: float
    flat_bytes: int
    against_ours: float | None

    def flat(self) -> dict[str, Any]:
        """Plain columns, the case's own first (`KernelCase.values`), `name` its key."""
        own = {name: value for name, value in vars(self).items() if name != "case"}
        return {"name": self.case.name, **self.case.values(), **own}


def ceilings_of(timings: Iterable[Timing]) -> Ceilings:
    """The device's ceilings, each from its fastest round.

    Raises:
        KeyError: a ceiling was not timed.
    """
    found = {one.name.partition("[")[2].rstrip("]"): one for one in timings if one.group == "ceiling"}
    copy, read, matmul = (found[name] for name in ("copy", "read", "matmul"))
    return Ceilings(
        copy.extra["bytes"] / min(copy.samples_s),
        read.extra["bytes"] / min(read.samples_s),
        matmul.extra["flops"] / min(matmul.samples_s),
    )


def rows_of(timings: Sequence[Timing]) -> list[TimingRow]:
    """A row for every timed case and provider, in the order of the run."""
    limits = ceilings_of(timings)
    timed = [one for one in timings if one.group != "ceiling"]
    mine = {one.group: one.median_s for one in timed if one.extra["provider"] == OURS}
    return [_row(one, limits, mine) for one in timed]


def _row(one: Timing, limits: Ceilings, mine: Mapping[str | None, float]) -> TimingRow:
    moved, flops = one.extra["bytes"] / one.median_s, one.extra["flops"] / one.median_s
    low, high = one.samples_s[0], one.samples_s[0]
    if len(one.samples_s) > 1:
        low, _, high = quantiles(one.samples_s, n=4, method="inclusive")
    own = mine.get(one.group)
    return TimingRow(
        case=KernelCase(**one.extra["case"]),
        provider=one.extra["provider"],
        how=one.extra["how"],
        error=one.extra["error"],
        rounds=len(one.samples_s),
        median_us=one.median_s * 1e6,
        least_us=min(one.samples_s) * 1e6,
        most_us=max(one.samples_s) * 1e6,
        spread=(high - low) / one.median_s,
        gbytes_s=moved / 1e9,
        tflop_s=flops / 1e12,
        copy_share=moved / limits.copy_bytes_s,
        read_share=moved / limits.read_bytes_s,
        matmul_share=flops / limits.matmul_flop_s,
        flat_bytes=one.extra["flat_bytes"],
        against_ours=one.median_s / own if own else None,
    )
