"""Where the error comes from (kernel, step, whole run), and how it grows with load."""

from typing import TYPE_CHECKING, Any

from harness.metrics.verdict import RELATIVE_BAND, point_label
from harness.report.axes import Axes, policy_of
from harness.report.figures.series import policies, policy_style, side_by_side
from harness.report.study import Record, Study
from harness.report.style import PAGE_IN, Drawing, Missing, Picture, new_figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes as Panel


NAME = "levels"
_LEVELS = {
    "kernel": "1 attention,\nMAPE",
    "step": "2 per step,\nMAPE",
    "run_total": "2 total of\nthe run",
    "tpot_p50": "3 TPOT,\np50",
    "ttft_p50": "3 TTFT,\np50",
    "output_throughput": "3 output\nthroughput",
}


def draw(study: Study, axes: Axes) -> Picture:
    """Left: size of the error on each level; right: error of TTFT and of steps against the busy share."""
    del axes
    data = _table(study)
    if data.empty:
        return Missing(NAME, "No point was measured (measure=false), so no error can be attributed.")
    figure = new_figure(PAGE_IN, 2.8)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _strip(left, data)
    _load(right, data)
    for policy in policies(study.measured):
        left.scatter([], [], s=9, label=policy, **policy_style(policy))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    caption = (
        "Left: size of the error on each level: (1) the cost model pricing the attention of the steps that the "
        "engine took, (2) pricing those steps whole, (3) the simulator alone, in which errors of steps grow through "
        "queueing. Line: median; dots: points. Right: error of the median TTFT against the measured load."
    )
    return Drawing(NAME, caption, figure, data)


def _table(study: Study) -> "pd.DataFrame":
    import pandas as pd

    rows = [
        {
            "point": point_label(r),
            "policy": policy_of(r),
            "busy_share": _busy(r),
            "level": level,
            "error": error,
        }
        for r in study.measured
        for level, error in _errors(r).items()
        if error is not None
    ]
    return pd.DataFrame(rows, columns=["point", "policy", "busy_share", "level", "error"])


def _errors(record: Record) -> dict[str, Any]:
    levels = record.get("levels") or {}
    kernel, forced, free = (levels.get(k) or {} for k in ("kernel", "teacher_forced", "free_running"))
    alone = {row["metric"]: row["error"] for row in record.get("comparison") or ()} | free
    return {
        "kernel": kernel.get("mape"),
        "step": forced.get("mape"),
        "run_total": forced.get("total_error"),
        **{name: alone.get(name) for name in list(_LEVELS)[3:]},
    }


def _busy(record: Record) -> float:
    rows = {row["metric"]: row["measured"] for row in record.get("comparison") or ()}
    return float(rows.get("busy_share") or "nan")


def _strip(panel: "Panel", data: "pd.DataFrame") -> None:
    names = list(dict.fromkeys(data["policy"]))
    shown = [level for level in _LEVELS if (data["level"] == level).any()]
    for at, level in enumerate(shown):
        found = data[data["level"] == level]
        for offset, policy in zip(side_by_side(len(names), 0.28), names, strict=True):
            mine = found[found["policy"] == policy]
            sizes = 100 * mine["error"].abs()
            panel.scatter(
                [at + offset] * len(mine), sizes, s=9, alpha=0.6, linewidths=0, **policy_style(str(policy))
            )
        panel.hlines(
            100 * float(found["error"].abs().median()), at - 0.32, at + 0.32, color="#222222", linewidth=1.2
        )
    panel.set_xticks(range(len(shown)), [_LEVELS[level] for level in shown], fontsize=6.5)
    panel.set(ylabel="size of the error (%)", xlim=(-0.6, len(shown) - 0.4))
    panel.set_ylim(bottom=0)
    panel.grid(visible=False, axis="x")


def _load(panel: "Panel", data: "pd.DataFrame") -> None:
    found = data[data["level"] == "ttft_p50"]
    panel.axhspan(-100 * RELATIVE_BAND, 100 * RELATIVE_BAND, color="#f3f6f9", zorder=0)
    for policy, mine in found.groupby("policy"):
        look = policy_style(str(policy))
        panel.scatter(100 * mine["busy_share"], 100 * mine["error"], s=9, alpha=0.7, linewidths=0, **look)
    panel.axhline(0, color="#444444", linewidth=0.8)
    panel.set(xlabel="busy share, measured (%)", ylabel="error of TTFT p50 (%)")
    panel.locator_params(nbins=5)
