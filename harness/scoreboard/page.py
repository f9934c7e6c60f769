"""The scoreboard's page: Markdown with coverage and errors, and a figure of the errors by model, engine and device."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness.report.style import PAGE_IN, PALETTE, RC

Row = Mapping[str, Any]
_INTRODUCTION = """\
# Predictions of GPUs beside published figures

Made by `{command}`. An error is predicted / measured - 1. Nothing here was measured on a GPU of ours, and no
constant was fitted to the figures that it is compared with, unless a row says so.

"""
_RUNS = """\
## Published runs

`silicon_sample.csv` of aiconfigurator-core {version} (Apache-2.0) has {total:,} runs of a closed loop with mean
TTFT and TPOT. Our simulation has as many users, each of whom sends the next request at once: ten requests a user,
fewer for many users, three at least; steps of at most 8,192 tokens, chunked prefill, no prefix cache, asynchronous
scheduling, and the pool that the memory gives. Lengths are drawn between 0.8 of the nominal and the nominal where
the runs are InferenceMAX's (its README: `RANDOM_RANGE_RATIO` 0.8). Quantised Llama 3.1 has static scales and FP8
KV, as NVIDIA's checkpoints say; the rows do not name the KV's element type. A checkpoint with a scale for each
block of its FP8 weights is priced with the kernels for such blocks, also where a row says `fp8`. Rows whose batch
size is a fraction of the concurrency are left out (several replicas, or data-parallel attention, which they do not
name), and so are runs whose own times need more than 70 % of the datasheet's FLOP/s (prompts came from a cache), and
runs whose own times say, by Little's law, that far fewer users got tokens at once than the pool has room for, while
steps were not half full: their engine had a limit that the row does not name. The rule stands in
`harness/scoreboard/published_runs.py`; it looks at no prediction.
The sample is deterministic: at most {each} runs of every model, engine, device and precision, on its most frequent
number of devices, evenly over lengths and users.

`roofline`: presets of `conf/device`. `published`: timings of operators from the same package, and 0.5 ms a step for
the host.

"""
_ATTENTION = """\
## Decode attention from tables

vLLM's kernels, bfloat16, 32 query heads and 8 KV heads of 128. *Held out*: every other inner value of an axis is
left out whole, then the others; what is kept lies four-fold apart. *Ratio to the form* is how `cost=operators`
interpolates (`harness/cost/decode_form.py`); *the package* is its own interpolation, behind `cost=published`, from a
copy of its table without these values. *Another GPU*: constants fitted to the GPUs named and tested on one that
was not among them and runs the same kernels (FlashAttention 2 on A100, L40S, RTX PRO 6000; 3 on Hopper). *Other
kernels*: the same where it does not, or where those of the fit differ. The plain form, `a0 + a1 rows + bytes /
(eta bandwidth)`, is the roofline's. The form was written with all six tables in view; its constants were fitted
without the GPU that is tested.

"""


def write_page(
    folder: Path,
    *,
    command: str,
    version: str,
    each: int,
    runs: Sequence[Row],
    reasons: Sequence[Row],
    attention: Sequence[Row],
    deployments: Sequence[Row],
) -> Path:
    """Write README.md and the figure into `folder`, which exists; returns the page."""
    total = sum(int(row["rows"]) for row in reasons) + len({row["run"] for row in runs})
    text = _INTRODUCTION.format(command=command)
    if deployments:
        names = (
            "deployment",
            "cost",
            "fit",
            "requests",
            "ttft_p50",
            "ttft_p90",
            "tpot_p50",
            "tpot_p90",
            "not priced",
        )
        text += "## Deployments\n\n" + _table(deployments, names) + "\n"
    text += _RUNS.format(version=version, total=total, each=each or "all")
    text += _table(_summary(runs), ("cost", "runs", "not priced", *_ERRORS)) + "\n"
    text += "![Errors of TPOT by group](tpot.svg)\n\n### By model, engine and device\n\n"
    text += _table(_groups(runs), ("model", "engine", "device", "precision", "cost", "runs", *_ERRORS)) + "\n"
    text += "### Not simulated\n\n" + _table([*reasons, *_refused(runs)], ("reason", "rows")) + "\n"
    text += _ATTENTION + _table(attention, ("test", "device", "how", "n", "mape", "bias", "p95", "max"))
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    _figure(runs, folder)
    return page


_ERRORS = ("TPOT median", "TPOT bias", "TPOT worst", "TTFT median", "TTFT bias", "TTFT worst")
_SHARES = ("_p50", "_p90", "mape", "bias", "p95", "max", "median", "worst")


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(name, row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(name: str, value: object) -> str:
    if isinstance(value, float) and name.endswith(_SHARES):
        signed = name.endswith(("bias", "_p50", "_p90", "worst"))
        return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"
    return str(value).replace("|", "/").replace("\n", " ")


def _priced(runs: Sequence[Row]) -> list[Row]:
    return [row for row in runs if row.get("tpot_error", "") != ""]


def _statistics(rows: Sequence[Row]) -> dict[str, float]:
    found = {}
    for name in ("TPOT", "TTFT"):
        errors = [float(row[f"{name.lower()}_error"]) for row in rows]
        found[f"{name} median"] = median(map(abs, errors))
        found[f"{name} bias"] = median(errors)
        found[f"{name} worst"] = max(errors, key=abs)
    return found


def _summary(runs: Sequence[Row]) -> list[Row]:
    found: list[Row] = []
    for cost in dict.fromkeys(row["cost"] for row in runs):
        rows = [row for row in runs if row["cost"] == cost]
        priced = _priced(rows)
        if priced:
            count = {"runs": len(priced), "not priced": len(rows) - len(priced)}
            found.append({"cost": cost, **count, **_statistics(priced)})
    names = [
        {row["run"] for row in _priced(runs) if row["cost"] == cost} for cost in ("roofline", "published")
    ]
    both = names[0] & names[1]
    for cost in ("roofline", "published"):
        rows = [row for row in _priced(runs) if row["cost"] == cost and row["run"] in both]
        if rows:
            found.append({"cost": f"{cost}, runs that both price", "runs": len(rows), **_statistics(rows)})
    return found


def _groups(runs: Sequence[Row]) -> list[Row]:
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in _priced(runs):
        groups[tuple(row[name] for name in ("model", "engine", "device", "precision", "cost"))].append(row)
    return [
        dict(zip(("model", "engine", "device", "precision", "cost"), key, strict=True))
        | {"runs": len(rows)}
        | _statistics(rows)
        for key, rows in sorted(groups.items())
    ]


def _refused(runs: Sequence[Row]) -> list[Row]:
    counts: defaultdict[str, int] = defaultdict(int)
    for row in runs:
        if row.get("not priced"):
            counts[f"{row['cost']} on {row['model']}, {row['device']}: {row['not priced']}"] += 1
    return [{"reason": reason, "rows": count} for reason, count in sorted(counts.items())]


def _figure(runs: Sequence[Row], folder: Path) -> None:
    """The TPOT error of every run by model, engine and device; one colour for each cost model."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = _priced(runs)
    labels = sorted(
        {
            f"{row['model'].rpartition('/')[2]}, {row['engine']}, {row['device']}, {row['precision']}"
            for row in rows
        }
    )
    with mpl.rc_context({**RC, "svg.hashsalt": "scoreboard"}):
        figure, axes = plt.subplots(figsize=(PAGE_IN, 1.2 + 0.17 * len(labels)), layout="constrained")
        for place, (cost, mark) in enumerate((("roofline", "o"), ("published", "D"))):
            mine = [row for row in rows if row["cost"] == cost]
            heights = [
                labels.index(
                    f"{row['model'].rpartition('/')[2]}, {row['engine']}, {row['device']}, {row['precision']}"
                )
                + 0.3 * place
                - 0.15
                for row in mine
            ]
            errors = [min(max(100 * float(row["tpot_error"]), -100), 150) for row in mine]
            axes.scatter(errors, heights, s=9, marker=mark, color=PALETTE[place], label=cost, alpha=0.8, lw=0)
        axes.axvspan(-10, 10, color="#ececec", zorder=0)
        axes.axvline(0, color="#6f6f6f", lw=0.6)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(-105, 155)
        axes.set_xlabel("error of the mean TPOT, % (errors beyond 150 % are drawn there; band: 10 %)")
        figure.legend(loc="outside upper right", ncols=2)
        figure.savefig(folder / "tpot.svg", metadata={"Date": None})
        plt.close(figure)
