"""Rows of timed kernels, arranged for the goals: one case with the times of everybody who served it in that run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.bench.kernels.names import OURS
from harness.bench.kernels.reading import TABLE, KernelRunError, read_run
from harness.cli.say import remark

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TimedCase:
    """One case of one run: our row, and everyone's median time in µs."""

    run: str
    ours: Row
    us: Mapping[str, float]

    @property
    def name(self) -> str:
        """The case's stable name."""
        return str(self.ours["name"])

    @property
    def decode(self) -> bool:
        """One query a sequence, nothing shared."""
        return self.ours["queries"] == 1 and not self.ours["shared_prefix"]

    def over(self, provider: str) -> float | None:
        """Our time over the provider's; None where it did not serve the case."""
        return self.us[OURS] / self.us[provider] if provider in self.us else None


def timed_cases(out: Path) -> list[TimedCase]:
    """The cases of every `bench kernels` folder directly below `out`; a case that we did not serve is left out.

    A table that cannot be read, or that holds nothing because its time was over, is said and left out.
    """
    files = sorted(out.glob(f"*/{TABLE}"))
    return [case for file in files for case in cases_of(file.parent.name, _rows(file))]


def _rows(file: Path) -> Sequence[Row]:
    try:
        return read_run(file).rows
    except KernelRunError as error:
        remark(str(error))
        return ()


def cases_of(run: str, rows: Sequence[Row]) -> Iterator[TimedCase]:
    """The cases of one run's rows."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(str(row["name"]), {})[str(row["provider"])] = float(row["median_us"])
    for row in rows:
        if row["provider"] == OURS:
            yield TimedCase(run, row, times[str(row["name"])])
