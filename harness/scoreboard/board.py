"""The scoreboard's tables: published runs, decode attention, and deployments of the user's, each as rows of a CSV."""

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind
from harness.report.style import PAGE_IN, PALETTE, RC, filled
from harness.scoreboard import published_runs
from harness.twin.configured import configured
from harness.twin.fit import fit_device
from harness.twin.prediction import Errors, errors_of, predictor
from harness.twin.reading import read_engine_log

KINDS = (CostKind.roofline, CostKind.published)
# Presets of which a share is rounded from a fit to a public run of vLLM on the card, as their files say.
ROUNDED = ("rtx4090", "rtx_pro_6000")
_QUANTILES = ("ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90")
_GROUP = ("model", "engine", "device", "precision")
Row = dict[str, Any]
Say = Callable[[str], None]


def run_rows(each: int, say: Say) -> tuple[list[Row], Counter[str]]:
    """The errors of both cost models on published runs, and how many rows of the file are not simulated, by reason.

    `each` runs of every model, engine, device and precision; 0 takes all. An error is predicted / measured - 1. The
    measured values stand in the package alone.
    """
    runs, reasons = published_runs.read_runs()
    chosen = published_runs.sample(runs, each)
    reasons["left out by the sampling"] = len(runs) - len(chosen)
    rows: list[Row] = []
    for place, run in enumerate(chosen):
        for kind in KINDS:
            row: Row = {
                "run": run.name,
                "model": run.model,
                "engine": run.engine,
                "device": run.system,
                "precision": run.precision,
                "devices": run.parallel,
                "isl": run.isl,
                "osl": run.osl,
                "users": run.users,
                "cost": str(kind),
            }
            try:
                found = published_runs.simulated(run, kind)
            except ConfigError as error:
                rows.append(row | {"not priced": published_runs.reason_of(error)})
                continue
            rows.append(
                row
                | {
                    "ttft_ms": round(found.ttft_ms, 2),
                    "tpot_ms": round(found.tpot_ms, 3),
                    "ttft_error": round(found.ttft_ms / run.ttft_ms - 1, 4),
                    "tpot_error": round(found.tpot_ms / run.tpot_ms - 1, 4),
                }
            )
        say(f"{place + 1} of {len(chosen)}: {run.model}, {run.engine}, {run.system}")
    return rows, reasons


def attention_rows() -> list[Row]:
    """Held-out errors of tables by GPU and axis, and errors of the forms on GPUs that their fit has not seen."""
    tables = {gpu.system: published_runs.read_timings(gpu) for gpu in published_runs.GPUS}
    rows: list[Row] = []
    for system, table in tables.items():
        for by_ratio, how in ((True, "ratio to the form"), (False, "time on logarithms")):
            for axis, error in published_runs.held_out(table, by_ratio=by_ratio).items():
                rows.append(_attention_row("held out", system, f"{axis}; {how}", error))
    for gpu in published_runs.GPUS:
        for axis, error in published_runs.package_errors(gpu).items():
            rows.append(
                _attention_row("held out", gpu.system, f"{axis}; the package (cost=published)", error)
            )
    for test, transfers in (
        ("another GPU", published_runs.SAME_KERNELS),
        ("other kernels", published_runs.OTHER_KERNELS),
    ):
        for known, other in transfers:
            for form, error in published_runs.transfer_errors(
                [tables[name] for name in known], tables[other]
            ).items():
                rows.append(_attention_row(test, other, f"{form}, from {' + '.join(known)}", error))
    return rows


def _attention_row(what: str, system: str, how: str, error: Mapping[str, float]) -> Row:
    numbers = {name: round(error[name], 4) for name in ("mape", "bias", "p95", "max")}
    return {"test": what, "device": system, "how": how, "n": int(error["n"]), **numbers}


def deployment_rows(folders: Sequence[str], overrides: Sequence[str], say: Say) -> list[Row]:
    """The errors on logs of the user's: both cost models without a fit, and the roofline fitted to a first part.

    `overrides` say what the logs do not, as device=h100.
    """
    rows: list[Row] = []
    for folder in folders:
        log = read_engine_log(Path(folder).expanduser())
        for kind in KINDS:
            row: Row = {"deployment": log.name, "cost": str(kind), "fit": "none"}
            try:
                config = configured(log, overrides).config
                config = replace(config, cost=replace(config.cost, kind=kind))
                found = predictor(config, log.workload)(config.device)
            except (ConfigError, UserError) as error:
                rows.append(row | {"not priced": str(error)[:160]})
                continue
            if kind is CostKind.roofline and config.device.name in ROUNDED:
                row["fit"] = (
                    "none, but compute_efficiency of the preset is rounded from a fit to a public run"
                )
            rows.append(row | _errors(errors_of(found, log, slice(0, None))))
            if kind is CostKind.roofline:
                fit = fit_device(log, config)
                rows.append(
                    row | {"fit": f"first {fit.fitted_on}; errors of the others"} | _errors(fit.held_out)
                )
        say(f"deployment {log.name}")
    return rows


def _errors(errors: Errors) -> Row:
    return {"requests": errors.requests, **{name: round(getattr(errors, name), 4) for name in _QUANTILES}}


def write_csv(file: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV; the columns are those of all rows, in the order in which they come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.DictWriter(lines, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def counted(reasons: Mapping[str, int]) -> Iterable[Row]:
    """Reasons with their counts, the most frequent first."""
    return [{"reason": name, "rows": count} for name, count in Counter(reasons).most_common() if count]


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
    text = filled(
        Path(__file__).with_name("board.md.j2"),
        command=command,
        version=version,
        total=sum(int(row["rows"]) for row in reasons) + len({row["run"] for row in runs}),
        each=each,
        table=_table,
        deployments=deployments,
        deployment_columns=("deployment", "cost", "fit", "requests", *_QUANTILES, "not priced"),
        summary=_summary(runs),
        run_columns=("cost", "runs", "not priced", *_ERRORS),
        groups=_groups(runs),
        group_columns=(*_GROUP, "cost", "runs", *_ERRORS),
        reasons=[*reasons, *_refused(runs)],
        attention=attention,
    )
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
    names = (*_GROUP, "cost")
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in _priced(runs):
        groups[tuple(row[name] for name in names)].append(row)
    return [
        {**dict(zip(names, key, strict=True)), "runs": len(rows), **_statistics(rows)}
        for key, rows in sorted(groups.items())
    ]


def _refused(runs: Sequence[Row]) -> list[Row]:
    counts = Counter(
        f"{row['cost']} on {row['model']}, {row['device']}: {row['not priced']}"
        for row in runs
        if row.get("not priced")
    )
    return [{"reason": reason, "rows": count} for reason, count in sorted(counts.items())]


def _figure(runs: Sequence[Row], folder: Path) -> None:
    """The TPOT error of every run by model, engine and device; one colour for each cost model."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = _priced(runs)

    def label(row: Row) -> str:
        return f"{row['model'].rpartition('/')[2]}, {row['engine']}, {row['device']}, {row['precision']}"

    labels = sorted(set(map(label, rows)))
    with mpl.rc_context({**RC, "svg.hashsalt": "scoreboard"}):
        figure, axes = plt.subplots(figsize=(PAGE_IN, 1.2 + 0.17 * len(labels)), layout="constrained")
        for place, (cost, mark) in enumerate((("roofline", "o"), ("published", "D"))):
            mine = [row for row in rows if row["cost"] == cost]
            heights = [labels.index(label(row)) + 0.3 * place - 0.15 for row in mine]
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
