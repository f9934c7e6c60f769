"""The comparison rows of all points as one table: what the figures draw and what their CSV files hold."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.compare.verdict import point_label
from harness.report.axes import POLICY, Axes, setting

if TYPE_CHECKING:
    import pandas as pd

VALUES = ("analytic", "simulated", "measured", "low", "high", "spread", "error")


def comparison_table(
    records: Sequence[Mapping[str, Any]], axes: Axes, metrics: Sequence[str] | None = None
) -> "pd.DataFrame":
    """One row a point and metric: label, policy, the axes, metric, unit and `VALUES`; NaN where a side has none."""
    import pandas as pd

    rows = [
        {**settings, **row}
        for record in records
        for settings in (_settings(record, axes),)
        for row in record.get("comparison") or ()
        if metrics is None or row["metric"] in metrics
    ]
    columns = ["point", POLICY, *axes.values, "metric", "unit", *VALUES]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(VALUES, "float64"))


def _settings(record: Mapping[str, Any], axes: Axes) -> dict[str, Any]:
    return {"point": point_label(record), **{key: setting(record, key) for key in (POLICY, *axes.values)}}
