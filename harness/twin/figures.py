"""The pictures of a twin: state over time, latencies, what-ifs. Call them inside `harness.report.style.style()`."""

from typing import TYPE_CHECKING

import numpy as np

from harness.report.style import GREY, PAGE_IN, PALETTE, Drawing, new_figure, panels
from harness.twin.twin import Twin

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_STATES = (
    ("running", "running requests", 1.0),
    ("waiting", "waiting requests", 1.0),
    ("kv_use", "KV use (%)", 100.0),
)
_SHOWN = (("tpot_p50", "TPOT p50"), ("ttft_p50", "TTFT p50"), ("output_throughput", "output tokens/s"))
_FAR = 1.0  # a change beyond this share is drawn at the edge with its number


def state(twin: Twin) -> Drawing:
    """Running, waiting and KV use per second, measured and predicted."""
    data = state_table(twin)
    figure, grid = panels(PAGE_IN, 4.6, 3, 1)
    errors = twin.series_errors()
    for panel, (name, label, scale) in zip(grid, _STATES, strict=True):
        has = f"measured_{name}" in data
        if has:
            panel.plot(
                data["time_s"], scale * data[f"measured_{name}"], color=GREY, linewidth=2.2, label="measured"
            )
        if f"predicted_{name}" in data:
            panel.plot(data["time_s"], scale * data[f"predicted_{name}"], color=PALETTE[0], label="predicted")
        note = f"mean absolute error {errors[name][0]:.2f}" if name in errors else "not logged by the engine"
        panel.set_title(note, loc="right")
        panel.set(ylabel=label, xlim=(float(data["time_s"].min()), float(data["time_s"].max())))
        panel.set_ylim(bottom=0)
        if name != "kv_use":
            panel.tick_params(labelbottom=False)
    grid[-1].set_xlabel("seconds from the first arrival")
    grid[0].legend(loc="upper left", ncols=2)
    source = "the engine's own log" if twin.log.series is not None else "the times of the requests"
    caption = f"The deployment second by second. Measured: {source}. Predicted: the simulation of the same requests."
    return Drawing("state", caption, figure, data)


def state_table(twin: Twin) -> "pd.DataFrame":
    """Time, and each state measured and predicted; a state that was not logged has no measured column."""
    import pandas as pd

    measured = twin.series
    predicted = twin.prediction.series(measured.at_s)
    columns = {"time_s": measured.at_s}
    for name, _, _ in _STATES:
        theirs, ours = getattr(measured, name), getattr(predicted, name)
        if theirs is not None:
            columns[f"measured_{name}"] = theirs
        if ours is not None:
            columns[f"predicted_{name}"] = ours
    return pd.DataFrame(columns)


def latency(twin: Twin) -> Drawing:
    """TTFT and TPOT of every request: distributions above, predicted against measured below."""
    data = latency_table(twin)
    figure, grid = panels(PAGE_IN, 4.8, 2, 2)
    for column, (name, label, factor) in enumerate((("ttft", "TTFT (s)", 1.0), ("tpot", "TPOT (ms)", 1e3))):
        ours, theirs = factor * data[f"predicted_{name}_s"], factor * data[f"measured_{name}_s"]
        known = ~(ours.isna() | theirs.isna())
        _distribution(grid[column], ours[known], theirs[known], label)
        _against(grid[2 + column], ours[known], theirs[known], data["fitted"][known], label)
    grid[0].legend(loc="lower right")
    if data["fitted"].any():
        grid[2].legend(loc="upper left")
    caption = "Above: the share of requests below each value. Below: each request, predicted against "
    caption += "measured; on the grey line both are equal."
    return Drawing("latency", caption, figure, data)


def latency_table(twin: Twin) -> "pd.DataFrame":
    """One row for each request."""
    import pandas as pd

    requests, prediction = twin.log.requests, twin.prediction
    return pd.DataFrame(
        {
            "request_id": requests.request_id,
            "entered_s": requests.entered_s,
            "prompt_tokens": requests.prompt_tokens,
            "output_tokens": requests.output_tokens,
            "fitted": np.isin(np.arange(len(requests)), [] if twin.fit is None else twin.fit.fitted_on),
            "measured_ttft_s": requests.ttft_s,
            "predicted_ttft_s": prediction.ttft_s(requests),
            "measured_tpot_s": requests.tpot_s,
            "predicted_tpot_s": prediction.tpot_s,
            "measured_end_s": requests.last_token_s,
            "predicted_end_s": prediction.last_token_s,
        }
    )


def _distribution(panel: "Axes", ours: "pd.Series[float]", theirs: "pd.Series[float]", label: str) -> None:
    for values, colour, width, name in (
        (theirs, GREY, 2.2, "measured"),
        (ours, PALETTE[0], 1.2, "predicted"),
    ):
        ordered = np.sort(values.to_numpy(np.float64))
        shares = 100 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
        panel.step(ordered, shares, where="post", color=colour, linewidth=width, label=name)
    panel.set(xlabel=label, ylabel="requests (%)", ylim=(0, 101))


def _against(
    panel: "Axes", ours: "pd.Series[float]", theirs: "pd.Series[float]", fitted: "pd.Series[bool]", label: str
) -> None:
    for chosen, colour, name in ((~fitted, PALETTE[0], "held out"), (fitted, PALETTE[1], "fitted")):
        panel.scatter(theirs[chosen], ours[chosen], s=7, color=colour, alpha=0.55, linewidths=0, label=name)
    if len(ours):
        low = float(min(ours.min(), theirs.min()))
        high = float(max(ours.max(), theirs.max()))
        panel.plot([low, high], [low, high], color=GREY, linewidth=0.9, zorder=0)
    panel.set(xlabel=f"measured {label}", ylabel=f"predicted {label}")


def changes(twin: Twin) -> Drawing:
    """Every what-if as its change from the prediction for the deployment's own settings."""
    data = changes_table(twin)
    rows = [one for one in twin.changes[1:] if one.figures]
    figure = new_figure(PAGE_IN, 0.9 + 0.21 * max(len(rows), 3))
    grid = figure.subplots(1, len(_SHOWN), sharey=True, squeeze=False)[0]
    for panel, (name, label) in zip(grid, _SHOWN, strict=True):
        panel.axvline(0, color=GREY, linewidth=0.8)
        for place, one in enumerate(rows):
            factor, band = one.factor(name), one.change.get(name)
            if factor is None:
                continue
            colour = GREY if not one.shows(name) else PALETTE[1] if one.unseen else PALETTE[0]
            ends = [factor] if band is None else [band.low, band.high]
            low, drawn, high = (float(np.clip(at - 1, -_FAR, _FAR)) for at in (min(ends), factor, max(ends)))
            panel.plot([100 * low, 100 * high], [-place, -place], color=colour, linewidth=0.9)
            panel.plot([100 * drawn], [-place], marker="o", color=colour, linestyle="none")
            if drawn != factor - 1:
                panel.annotate(
                    f"{100 * (factor - 1):+,.0f} %", (100 * drawn, -place), textcoords="offset points",
                    xytext=(-7, -2.5), ha="right", fontsize=6,
                )  # fmt: skip
        panel.set(xlabel=f"change of {label} (%)", xlim=(-108 * _FAR, 108 * _FAR))
    grid[0].set_yticks(-np.arange(len(rows)), [one.name for one in rows])
    grid[0].set_ylim(-len(rows) + 0.4, 0.6)
    caption = "What-ifs against the prediction for the settings as they are, with the band of each change. Grey: no "
    caption += "difference beyond it. Orange: with what the fit has not seen."
    return Drawing("what_ifs", caption, figure, data)


def changes_table(twin: Twin) -> "pd.DataFrame":
    """One row for each what-if, with its figures and their change from the base."""
    import pandas as pd

    rows = []
    for one in twin.changes[1:]:
        row: dict[str, object] = {"setting": one.name}
        for name in one.before:
            factor, band = one.factor(name), one.change.get(name)
            row[name] = (one.figures or {}).get(name, np.nan)
            row[f"{name}_change"] = np.nan if factor is None else factor - 1
            row[f"{name}_change_low"] = np.nan if band is None else band.low - 1
            row[f"{name}_change_high"] = np.nan if band is None else band.high - 1
        row |= {"kv_peak": one.kv_peak, "preemptions": one.preemptions, "hit_share": one.hit_share}
        row |= {"unseen": one.unseen, "refused": one.note if one.figures is None else "", "note": one.note}
        rows.append(row)
    return pd.DataFrame(rows)
