"""The folder that a run of `bench kernels` leaves behind.

kernels.json       every raw sample, as pytest-benchmark keeps it
kernels.csv        a row per case and provider (columns: `COLUMNS`)
kernels.parquet    the same, for cost models and notebooks
figures/           each figure as SVG and PDF with its data as CSV
index.html         all of it on one page that needs no other file
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.bench.kernels.made_on import MadeOn
from harness.bench.kernels.problems import Problem
from harness.bench.kernels.results import Row, ceilings_of, rows_of
from harness.bench.session import Timing
from harness.store.atomic import write_files

if TYPE_CHECKING:
    import pandas as pd

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


def write_run(
    timings: Sequence[Timing],
    problems: Sequence[Problem],
    absent: Mapping[str, str],
    facts: MadeOn,
    out: Path,
) -> Path:
    """Write everything but the raw samples, which are there already; returns the page."""
    from harness.bench.kernels.figures import pictures
    from harness.bench.kernels.page import build_page
    from harness.report.drawing import Drawing
    from harness.report.style import pdf_bytes, style, svg_bytes

    table = table_of(rows_of(timings), facts)
    files: dict[str, bytes] = {}
    with style():
        drawn = list(pictures(table, ceilings_of(timings)))
        for picture in drawn:
            if isinstance(picture, Drawing):
                files[f"{picture.name}.svg"] = svg_bytes(picture.figure, picture.name)
                files[f"{picture.name}.pdf"] = pdf_bytes(picture.figure)
                files[f"{picture.name}.csv"] = _csv(picture.data)
    write_files(out / "figures", files)
    svgs = {name.removesuffix(".svg"): data for name, data in files.items() if name.endswith(".svg")}
    page = build_page(table, ceilings_of(timings), drawn, svgs, problems, absent, facts)
    tables = {"kernels.csv": _csv(table), "kernels.parquet": table.to_parquet(index=False)}
    write_files(out, {**tables, "index.html": page.encode()})
    return out / "index.html"


def table_of(rows: Sequence[Row], facts: MadeOn) -> "pd.DataFrame":
    """The rows as a table with exactly the columns of `COLUMNS`."""
    import pandas as pd

    return pd.DataFrame([{**row.flat(), **facts.values()} for row in rows], columns=list(COLUMNS))


def _csv(table: "pd.DataFrame") -> bytes:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n").encode()
