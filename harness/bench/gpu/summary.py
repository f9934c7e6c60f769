"""The page that `bench gpu` leaves: which steps answered, and the figures that the kernels were written for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bench.gpu.steps import Outcome
from harness.bench.kernels.names import CONTIGUOUS, OURS
from harness.environment import versions
from harness.store.atomic import write_files

LARGE_BYTES = 256e6  # of KV a call: below that a call is bound by launches, not by the memory
LONG_QUERIES = 512
AIMS = {"copy": 0.90, "paging": 0.02, "prefill": 0.60}
"""Share of copy bandwidth in decode, overhead of paging, share of the matrix ceiling in prefill."""


def write_summary(out: Path, outcomes: Sequence[Outcome], device: str) -> Path:
    """Write `README.md` and `summary.json` into `out`; returns the page."""
    aims = list(aims_of(_rows(out / "kernels" / "kernels.parquet")))
    facts = {
        "device": device,
        "versions": versions(),
        "steps": [
            {"name": one.step.name, "state": one.state, "code": one.code, "seconds": round(one.seconds, 1)}
            for one in outcomes
        ],
        "aims": aims,
    }
    page = "\n".join(_page(device, outcomes, aims)) + "\n"
    content = {"README.md": page.encode(), "summary.json": (json.dumps(facts, indent=1) + "\n").encode()}
    write_files(out, content)
    return out / "README.md"


def _rows(file: Path) -> list[dict[str, Any]]:
    """The kernel benchmark's table, a mapping a row; none where that step did not finish."""
    if not file.exists():
        return []
    import pandas as pd

    return [
        {str(key): value for key, value in row.items()} for row in pd.read_parquet(file).to_dict("records")
    ]


def aims_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The worst case of each aim: one bad shape is what an engine waits for."""
    ours = [row for row in rows if row["provider"] == OURS]
    twins = {row["name"]: row["median_us"] for row in rows if row["provider"] == CONTIGUOUS}
    decode = [row for row in ours if row["queries"] == 1 and row["flat_bytes"] >= LARGE_BYTES]
    own = {row["name"]: float(row["copy_share"]) for row in decode if not row["shared_prefix"]}
    taxes = {row["name"]: row["median_us"] / twins[row["name"]] - 1 for row in decode if row["name"] in twins}
    prefill = {row["name"]: float(row["matmul_share"]) for row in ours if row["queries"] >= LONG_QUERIES}
    if own:
        yield _aim(
            "decode: share of copy bandwidth", min(own, key=own.__getitem__), own, AIMS["copy"], least=True
        )
    if taxes:
        worst = max(taxes, key=taxes.__getitem__)
        yield _aim("paging: time over contiguous KV", worst, taxes, AIMS["paging"], least=False)
    if prefill:
        worst = min(prefill, key=prefill.__getitem__)
        yield _aim("prefill: share of the matrix ceiling", worst, prefill, AIMS["prefill"], least=True)


def _aim(what: str, case: str, figures: Mapping[str, float], wanted: float, *, least: bool) -> dict[str, Any]:
    found = figures[case]
    met = found >= wanted if least else found <= wanted
    return {"what": what, "worst case": case, "found": round(found, 4), "aim": wanted, "met": bool(met)}


def _page(device: str, outcomes: Sequence[Outcome], aims: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"# {device}"
    yield ""
    yield "Made by `make gpu`; every figure was measured in this one run. `kernels/index.html` shows the kernels,"
    yield "`gate.md` the latency gate, `sweep/` the engine beside its prediction, `logs/` what each step printed."
    yield ""
    yield "| step | state | seconds | command |"
    yield "| --- | --- | --- | --- |"
    for one in outcomes:
        words = " ".join(one.step.command[1:])
        yield f"| {one.step.name} | {one.state} | {one.seconds:.0f} | `python {words}` |"
    if aims:
        yield ""
        yield "| aim, worst case | case | found | aim | met |"
        yield "| --- | --- | --- | --- | --- |"
    for aim in aims:
        met = "yes" if aim["met"] else "no"
        yield f"| {aim['what']} | `{aim['worst case']}` | {aim['found']:.1%} | {aim['aim']:.0%} | {met} |"
