"""A run of `bench kernels`, read from its table: for a cost model, for the report and for the checks of a GPU.

`COLUMNS` is the format of the table, `read_run` reads and checks it. Nothing here makes pictures, and nothing imports
torch or pandas. `bench kernels` writes such a run.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from harness.config.errors import UserError

COLUMNS: Mapping[str, str] = {
    "name": "the case's stable name",
    "batch": "sequences",
    "context": "cached tokens per sequence (mean, where ragged), queries included",
    "block_size": "tokens per block",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of a head",
    "dtype": "element type of the cache",
    "ragged": "whether lengths run from half to one and a half of the context",
    "shared_prefix": "leading tokens that all sequences share",
    "queries": "query tokens per sequence; 1 is a decode",
    "layout": "order of a block's axes in memory: NHD or HND",
    "provider": "whose attention",
    "how": "what was timed: CUDA graph, events around launches, CPU time",
    "error": "relative error against float64",
    "rounds": "timed rounds",
    "median_us": "time of one call, µs, median of the rounds",
    "least_us": "the fastest round, µs",
    "most_us": "the slowest round, µs",
    "spread": "interquartile range over the median",
    "gbytes_s": "10^9 bytes per second, every distinct byte counted once",
    "tflop_s": "10^12 operations per second",
    "copy_share": "of the bandwidth that a copy reached in the same run",
    "read_share": "of the bandwidth that a sum reached in the same run",
    "matmul_share": "of the rate that a matrix product reached in the same run",
    "flat_bytes": "bytes that are read where a shared prefix is read once per sequence",
    "against_ours": "time over that of our own kernels",
    "device": "the device's name, as a sweep's record gives it",
    "kernels": "digest of the kernel sources",
    "torch": "version of PyTorch",
    "triton": "version of Triton",
    "threads": "CPU threads; 0 on a GPU",
    "date": "day of the run, UTC",
}


OURS = "paged"  # our kernels, as an engine would call them
CONTIGUOUS = "contiguous"  # the same kernel on contiguous KV: what is left is the cost of paging
CASCADE = "cascade"  # our kernels, reading a shared prefix once
ALWAYS = "cascade-always"  # the same without asking whether it pays: shows where it begins to
NATIVE = "native"  # the compiled kernels that our engine runs on a CPU
SDPA = "sdpa"  # torch's fused attention on contiguous KV


TABLE = "kernels.parquet"
# Folders in which the run that belongs to a sweep is looked for, relative to the results folder: inside it, beside it
# (where `make gpu` writes it), and where `bench kernels` writes by default.
SEARCHED_FOLDERS = ("kernels", "../kernels", "../bench/kernels")

_POSITIVE = (
    *("batch", "context", "block_size", "heads", "kv_heads", "head_dim", "queries"),
    *("median_us", "least_us", "most_us", "gbytes_s", "tflop_s", "copy_share", "read_share", "matmul_share"),
)
_TEXT = ("name", "dtype", "layout", "provider", "how", "device", "kernels", "torch", "triton", "date")


@dataclass(frozen=True)
class MadeOn:
    """Device, kernel sources and packages of a run, as they stand in every row of its table.

    `kernels` is the digest of the kernel sources; `threads` are those of a CPU, 0 on a GPU.
    """

    device: str
    kernels: str
    torch: str
    triton: str
    threads: int
    date: str

    def values(self) -> dict[str, Any]:
        """The fields as columns."""
        return asdict(self)


@dataclass(frozen=True)
class Ceilings:
    """The rates that the device reached in this run: bytes/s copied (read and written), bytes/s read, FLOP/s."""

    copy_bytes_s: float
    read_bytes_s: float
    matmul_flop_s: float


class KernelRunError(UserError):
    """A named run of `bench kernels` does not exist or cannot be read; the message says what to do."""


@dataclass(frozen=True)
class KernelRun:
    """A run that was read: its file, the digest of the file's content, and the rows by the names of `COLUMNS`."""

    file: Path
    digest: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def made_on(self) -> MadeOn:
        """The device and versions of the run; those of the first row where several runs were joined."""
        return MadeOn(**{field.name: self.rows[0][field.name] for field in fields(MadeOn)})

    @property
    def devices(self) -> list[str]:
        """Every device that a row names, once each."""
        return list(dict.fromkeys(str(row["device"]) for row in self.rows))

    @property
    def ceilings(self) -> Ceilings:
        """The device's ceilings of that run: each row's speed over its share of them."""
        row = self.rows[0]
        return Ceilings(
            copy_bytes_s=1e9 * row["gbytes_s"] / row["copy_share"],
            read_bytes_s=1e9 * row["gbytes_s"] / row["read_share"],
            matmul_flop_s=1e12 * row["tflop_s"] / row["matmul_share"],
        )


def table_file(named: str | Path) -> Path:
    """The table of a run that was named by its folder or by the table itself.

    Raises:
        KernelRunError: there is none.
    """
    path = Path(named).expanduser()
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        advice = "name the folder that 'python -m harness bench kernels --out FOLDER' wrote"
        raise KernelRunError(f"no {TABLE} in '{named}' (looked for {file.absolute()}); {advice}")
    return file


def read_run(named: str | Path) -> KernelRun:
    """A run by its folder or its table.

    Raises:
        KernelRunError: it is not there, is no table of ours, or holds nothing.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = table_file(named)
    try:
        content = file.read_bytes()
        table = pq.read_table(pa.BufferReader(content))
    except (OSError, pa.ArrowInvalid) as error:
        raise KernelRunError(f"{file}: cannot be read: {error}; time the kernels again") from None
    if missing := ", ".join(name for name in COLUMNS if name not in table.column_names):
        wrong = f"is no table of this version's bench kernels: lacks {missing}"
        raise KernelRunError(f"{file}: {wrong}; time the kernels again")
    rows = table.select(list(COLUMNS)).to_pylist()
    _check(file, rows)
    return KernelRun(file, hashlib.blake2b(content, digest_size=8).hexdigest(), rows)


def _check(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        raise KernelRunError(f"{file}: holds no timed case; time the kernels again")
    for number, row in enumerate(rows):
        for name, what in _complaints(row):
            found = f"{file}: row {number}, {name}: found {row[name]!r}"
            raise KernelRunError(f"{found}, must be {what}; time the kernels again")


def _complaints(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(column, what its value must be)."""
    for name in _POSITIVE:
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            yield name, "a number above 0"
    yield from ((name, "text") for name in _TEXT if not isinstance(row[name], str))
