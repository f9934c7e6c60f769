"""How fast the device was beside the measured runs, by which predictions were scaled, and what that was worth."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from harness.report.study import Record


def pace_lines(records: Sequence[Record]) -> list[str]:
    """One sentence on the pace of the device; none where no prediction was scaled by it."""
    paced = [(record, record["pace"]) for record in records if (record.get("pace") or {}).get("ratio")]
    if not paced:
        return []
    ratio = median(pace["ratio"] for _, pace in paced)
    low = min(pace.get("low", pace["ratio"]) for _, pace in paced)
    high = max(pace.get("high", pace["ratio"]) for _, pace in paced)
    where = "1 point" if len(paced) == 1 else f"{len(paced):,} points"
    return [
        f"Pace: beside the runs the device took {ratio:.2f} times as long as at calibration (probes from {low:.2f} to "
        f"{high:.2f}, {where}), and the prediction was scaled by it{_worth(paced)}."
    ]


def _worth(paced: Sequence[tuple[Record, Mapping[str, Any]]]) -> str:
    """The error of step times on the measured plans, with the scaling and without."""
    found = [
        (_mape((record.get("levels") or {}).get("teacher_forced")), _mape(pace.get("unscaled")))
        for record, pace in paced
    ]
    pairs = [(scaled, plain) for scaled, plain in found if scaled is not None and plain is not None]
    if not pairs:
        return ""
    scaled, plain = (median(errors) for errors in zip(*pairs, strict=True))
    return f"; mean error of a step's time {100 * scaled:.1f} % with it, {100 * plain:.1f} % without"


def _mape(errors: Mapping[str, Any] | None) -> float | None:
    return None if errors is None else errors.get("mape")
