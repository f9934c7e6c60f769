"""Reading back what `bench kernels` left, for a report and for a cost model. Imports no pandas and no torch."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from harness.bench.kernels.made_on import MadeOn
from harness.bench.kernels.results import Ceilings
from harness.bench.kernels.writing import COLUMNS
from harness.config.errors import UserError

TABLE = "kernels.parquet"
PLACES = ("kernels", "../kernels", "../bench/kernels")
"""Where a run that belongs to a sweep is looked for, from the sweep's results folder: inside, beside (as `make gpu`
leaves it), and where `bench kernels` writes by default."""

_POSITIVE = (
    *("batch", "context", "block_size", "heads", "kv_heads", "head_dim", "queries"),
    *("median_us", "least_us", "most_us", "gbytes_s", "tflop_s", "copy_share", "read_share", "matmul_share"),
)
_TEXT = ("name", "dtype", "layout", "provider", "how", "device", "kernels", "torch", "triton", "date")


class KernelRunError(UserError):
    """No run of `bench kernels` where one was named, or one that cannot be read; the message says what to do."""


@dataclass(frozen=True)
class KernelRun:
    """A run read back: its file, the digest of the file's content, and the rows by the names of `COLUMNS`."""

    file: Path
    digest: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def made_on(self) -> MadeOn:
        """What it was made on and with; where several runs were put together, the first row's."""
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


def found_run(out: Path) -> Path | None:
    """The folder of the run that belongs to the results in `out`, the nearest of `PLACES`; None where there is none."""
    return next((out / place for place in PLACES if (out / place / TABLE).is_file()), None)


def table_file(named: str | Path) -> Path:
    """The table of a run that was named by its folder or by the table itself.

    Raises:
        KernelRunError: there is none.
    """
    path = Path(named).expanduser()
    file = path / TABLE if path.is_dir() else path
    if not file.is_file():
        raise KernelRunError(
            f"no {TABLE} in '{named}' (looked for {file.absolute()}); name the folder that "
            "'python -m harness bench kernels --out FOLDER' wrote"
        )
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
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise KernelRunError(
            f"{file}: is no table of this version's bench kernels: lacks {', '.join(missing)}; time the kernels again"
        )
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
