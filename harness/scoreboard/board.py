"""The scoreboard's tables: published runs, decode attention, and deployments of the user's, each as rows of a CSV."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from harness.config.errors import ConfigError
from harness.report.style import PAGE_IN, PALETTE, RC, filled
from harness.scoreboard import accelmark, published_runs, stage_table
from harness.scoreboard.fidelity import KINDS, Found, Row, Say, by_load, draw

_GROUP = ("model", "engine", "device", "precision")
_RUN = ("run", *_GROUP, "devices", "isl", "osl", "users", "cost")


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
            known = (run.name, *run.group, run.parallel, run.isl, run.osl, run.users, str(kind))
            row: Row = dict(zip(_RUN, known, strict=True))
            try:
                found = published_runs.simulated(run, kind)
            except ConfigError as error:
                rows.append(row | {"not priced": published_runs.reason_of(error)})
                continue
            ttft_ms, tpot_ms = (1e3 * float(found[name].mean()) for name in ("ttft", "tpot"))
            row |= {"ttft_ms": round(ttft_ms, 2), "tpot_ms": round(tpot_ms, 3)}
            row |= {"ttft_error": round(ttft_ms / run.ttft_ms - 1, 4)}
            rows.append(row | {"tpot_error": round(tpot_ms / run.tpot_ms - 1, 4)})
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
            how = f"{axis}; the package (cost=published)"
            rows.append(_attention_row("held out", gpu.system, how, error))
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
    folder: Path, tables: Mapping[str, Sequence[Row]], *, command: str, version: str, each: int
) -> Path:
    """Write README.md, the figure and the tables `runs`, `attention` and `not_simulated` into `folder`, which exists.

    Returns the page.
    """
    for name, rows in tables.items():
        if rows:
            write_csv(folder / f"{name}.csv", rows)
    runs, reasons = tables["runs"], tables["not_simulated"]
    text = filled(
        Path(__file__).with_name("board.md.j2"),
        command=command,
        version=version,
        total=sum(int(row["rows"]) for row in reasons) + len({row["run"] for row in runs}),
        each=each,
        table=_table,
        summary=_summary(runs),
        run_columns=("cost", "runs", "not priced", *_ERRORS),
        groups=_groups(runs),
        group_columns=(*_GROUP, "cost", "runs", *_ERRORS),
        reasons=[*reasons, *_refused(runs)],
        attention=tables["attention"],
    )
    page = folder / "README.md"
    page.write_text(text, encoding="utf-8")
    _figure(runs, folder)
    return page


def write_fidelity(folder: Path, found: Found, *, command: str) -> Path:
    """Write fidelity.md, its figure and its tables into `folder`, which exists; returns the page."""
    for name in ("stages", "accelmark", "logs", "kv", "noise"):
        if getattr(found, name):
            write_csv(folder / f"fidelity_{name}.csv", getattr(found, name))
    compared = stage_table.compared(found.stages, stage_table.ROOFLINE)
    others = dict.fromkeys(row["simulator"] for row in compared)
    errors = dict.fromkeys(name for row in found.logs for name in row if name.startswith(("ttft_", "tpot_")))
    ours = (stage_table.OURS, stage_table.ROOFLINE, stage_table.OTHER)
    shares = [f"{name} {what}" for name in accelmark.FIGURES for what in ("median", "bias")]
    text = filled(
        Path(__file__).with_name("fidelity.md.j2"),
        command=command,
        **vars(found),
        table=_table,
        compared=stage_table.compared,
        by_load=by_load,
        ours=ours[0],
        roofline=ours[1],
        other=ours[2],
        compare_columns=stage_table.COMPARED,
        stage_columns=("deployment", "stage", "rate", "figure", "measured_ms", *ours, *others),
        log_columns=("deployment", "cost", "fit", "requests", *errors, "not priced"),
        kv_columns=("deployment", "pool", *(name for row in found.kv[:1] for name in row if " " in name)),
        load_columns=("vllm", "device", "weights", "load", "loads", *shares),
    )
    page = folder / "fidelity.md"
    page.write_text(text, encoding="utf-8")
    if found.stages:
        draw(found.stages, folder)
    return page


_ERRORS = ("TPOT median", "TPOT bias", "TPOT worst", "TTFT median", "TTFT bias", "TTFT worst")
_SHARES = ("_p50", "_p90", "_p99", "_mean", "mape", "bias", "p95", "max", "median", "worst", "spread")
_UNSIGNED = ("mape", "p95", "max", "median", "spread")
_PARTS = ("mean ", "peak ")


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(name, row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(name: str, value: object) -> str:
    share = (
        name.endswith(_SHARES)
        or name.startswith(("PageTwin", "blis", *_PARTS))
        or "-" in name
        or name == "vidur"
    )
    if isinstance(value, float) and share:
        unsigned = name.endswith(_UNSIGNED) or name.startswith(_PARTS)
        return f"{100 * value:.1f} %" if unsigned else f"{100 * value:+.1f} %"
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
    names = [{row["run"] for row in _priced(runs) if row["cost"] == one} for one in ("roofline", "published")]
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
