"""What a run of `bench kernels` looks like: roofline, block size, paging overhead, gain from shared prefixes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from harness.bench.kernels.results import Ceilings
    from harness.report.drawing import Picture


def pictures(table: "pd.DataFrame", limits: "Ceilings") -> "Iterator[Picture]":
    """All figures of a run, each with its data or with the reason why there is none; call under `report.style`."""
    from harness.bench.kernels.figures import block_size, paging, prefix, roofline

    yield roofline.draw(table, limits)
    yield block_size.draw(table)
    yield paging.draw(table)
    yield prefix.draw(table)
