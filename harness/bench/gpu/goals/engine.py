"""What decode steps say about the goals."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bench.gpu.goals.goal import Found, missing

MODELS = ("1b", "8b")
OURS, PEER = "pagetwin", "transformers_cb"


def engine_findings(out: Path) -> dict[str, Found]:
    """By goal: what was found; from `<model>.json` of `programs.decoding`."""
    found: dict[str, Found] = {}
    for model in MODELS:
        file = out / f"{model}.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found |= _of_model(model, document)
    return found


def _of_model(model: str, document: Mapping[str, Any]) -> dict[str, Found]:
    recorded = [row for row in document.get("steps", ()) if row["graphs"]]
    largest = max(recorded, key=lambda row: int(row["batch"]), default=None)
    return {
        f"host_{model}": _worst_host_share(recorded),
        f"tokens_{model}": _of_largest(largest, "tokens_s", 1.0),
        f"bytes_{model}": _of_largest(largest, "bytes_s", 1e9),
        f"peer_{model}": _peer(document.get("peers", ())),
    }


def _worst_host_share(rows: Sequence[Mapping[str, Any]]) -> Found:
    known = [row for row in rows if row["host_share"] is not None]
    if not known:
        return missing("no decode step was measured with its device time")
    worst = max(known, key=lambda row: float(row["host_share"]))
    return Found(float(worst["host_share"]), f"batch {worst['batch']}, of {len(known)} batch sizes")


def _of_largest(row: Mapping[str, Any] | None, figure: str, unit: float) -> Found:
    if row is None:
        return missing("no decode step was measured")
    value = float(row[figure]) / unit
    return Found(
        round(value, 1),
        f"batch {row['batch']}, {row['context']} tokens each, {1e3 * row['step_s']:.2f} ms a step",
    )


def _peer(rows: Sequence[Mapping[str, Any]]) -> Found:
    rates = {row["name"]: row for row in rows}
    ours, theirs = rates.get(OURS), rates.get(PEER)
    failed = next((row for row in (ours, theirs) if row and row.get("error")), None)
    if failed:
        return missing(f"{failed['name']}: {failed['error']}")
    if not (ours and theirs):
        return missing("the peer did not run")
    return Found(
        ours["tokens_s"] / theirs["tokens_s"], f"{ours['tokens_s']:.0f} and {theirs['tokens_s']:.0f} tokens/s"
    )
