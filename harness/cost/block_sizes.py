"""How the block size changes decode attention, from a table of the static model of our Triton kernels.

`conf/block_sizes.csv` is made from the compiled kernels (`harness.kernel_speed.block_sizes`) and read here, where no
compiler is needed. It is a model and no measurement: no public table has the block size as an axis, so nothing could
judge this one.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.config.errors import UserError
from harness.config.groups import conf_dir

HEAD_DIM, MOST_GROUP = 128, 16  # the shapes that share the code of the table's kernels
REFERENCE = 64  # the page size at which the tables were timed that `kv_efficiency` comes from
UNCERTAINTY = 0.18
"""The largest median error of the static model on a GPU, above 128 MB of KV (docs/kernel-speed.md). It is for whole
times of a public kernel at one page size; how far errors at two block sizes cancel is not known."""


@dataclass(frozen=True)
class BlockSizeFactor:
    """Seconds of decode attention at a block size over those at the reference, and what limits the kernel there."""

    factor: float
    limit: str


Table = dict[tuple[str, int, int], BlockSizeFactor]


def table_file() -> Path:
    """The table in `conf/`, in a checkout or in the installed package."""
    return conf_dir() / "block_sizes.csv"


@cache
def read_table() -> Table:
    """Factors by device, bytes of a cached element, and block size.

    Raises:
        UserError: the file cannot be read as such a table.
    """
    file = table_file()
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
        return {
            (row["device"], int(row["element_bytes"]), int(row["block_size"])): BlockSizeFactor(
                float(row["factor"]), row["limit"]
            )
            for row in csv.DictReader(lines)
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: no table of block sizes ({type(error).__name__}: {error})") from error


def block_size_factor(
    device: str, element_bytes: int, block_size: int, head_dim: int, group: int
) -> BlockSizeFactor:
    """The factor of one configuration.

    Raises:
        LookupError: the table does not hold it; the message says what it holds.
    """
    if head_dim != HEAD_DIM or group > MOST_GROUP:
        raise LookupError(
            f"heads of {head_dim} in groups of {group}; it holds heads of {HEAD_DIM} in groups up to {MOST_GROUP}"
        )
    table = read_table()
    found = table.get((device, element_bytes, block_size))
    if found is None:
        devices = sorted({name for name, *_ in table})
        sizes = sorted({size for name, width, size in table if (name, width) == (device, element_bytes)})
        if device not in devices:
            raise LookupError(f"device {device}; it holds {', '.join(devices)}")
        if not sizes:
            raise LookupError(f"a cache of {element_bytes} bytes an element on {device}")
        raise LookupError(f"block size {block_size}; it holds {', '.join(map(str, sizes))}")
    return found
