"""The page of fidelity: measured deployments of others beside our predictions, without a fit and fitted.

A folder is the public H100 table, AccelMark's runs, or engine logs as `twin` reads them. What the public folders do not
say in a file (device, engine settings) stands in `PUBLIC`, from their own descriptions.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind, RunConfig
from harness.report.style import PAGE_IN, PALETTE, RC
from harness.scoreboard import accelmark, stage_table
from harness.twin.configured import Configured, configured
from harness.twin.fit import fit_log
from harness.twin.log import EngineLog, FloatArray
from harness.twin.prediction import Errors, PredictedRun, errors_of, predictor
from harness.twin.reading import read_engine_log

KINDS = (CostKind.roofline, CostKind.published)
# Presets of which a share is rounded from a fit to a public run of vLLM on the card, as their files say.
ROUNDED = ("rtx4090", "rtx_pro_6000")
Row = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class PublicFolder:
    """Where the logs of a public deployment lie in its folder, and what its files do not say, as overrides.

    A fit takes both schedules for SGLang, which overlaps its steps in a way of its own: the log shows which is nearer.
    """

    logs: str
    words: tuple[str, ...]

    def words_of(self, log: EngineLog) -> tuple[str, ...]:
        """The overrides of a log."""
        return tuple(word for word in self.words if log.settings.engine != "sglang" or "async" not in word)


_SERVER = (
    *("cache.block_size=16", "scheduler.max_batched_tokens=2048", "scheduler.async_scheduling=true"),
    "scheduler.max_running=256",
)
_MEMORY = "device.memory_utilization=0.85"
PUBLIC: Mapping[str, PublicFolder] = {
    "rtxpro6000-llama31-8b": PublicFolder("", ("device=rtx_pro_6000",)),
    "rtx5070ti-qwen2.5-0.5b": PublicFolder(
        "*.json", ("device=rtx5070ti", "model=qwen25_05b", *_SERVER, "cache.max_model_len=4096", _MEMORY)
    ),
    "l40s-qwen2.5-1.5b-guidellm": PublicFolder(
        "benchmark.json", ("device=l40s", "model=qwen25_15b", *_SERVER)
    ),
    "a10g-vllm-sglang": PublicFolder(
        "results*/*/*.json.gz", ("device=a10g", *_SERVER, "cache.max_model_len=8192", _MEMORY)
    ),
}
_LEFT_OUT = {
    "manifest": "",  # a list of the runs
    **dict.fromkeys(
        ("ngram", "eagle3"), "speculative decoding, whose accepted tokens the file does not have"
    ),
}


@dataclass
class Found:
    """The tables of the page."""

    stages: list[Row]
    accelmark: list[Row]
    logs: list[Row]
    kv: list[Row]
    noise: list[Row]


def fidelity(folders: Sequence[str], overrides: Sequence[str], say: Say) -> Found:
    """The tables of all folders; one that holds nothing but folders stands for these.

    `overrides` say what logs of the user's do not, as device=h100.

    Raises:
        UserError, TraceError: a folder cannot be read.
    """
    found = Found([], [], [], [], [])
    repeats: defaultdict[tuple[Any, ...], list[EngineLog]] = defaultdict(list)
    for folder in _each(folders):
        if (folder / "specifications.json").is_file():
            found.stages += stage_table.stage_rows(folder, say)
        elif (folder / "suites").is_dir():
            found.accelmark += accelmark.accelmark_rows(folder, say)
        else:
            public = PUBLIC.get(folder.name)
            for path, reason in _logs(folder, public):
                name = folder.name if path == folder else f"{folder.name}: {_short(path)}"
                if reason:
                    found.logs.append({"deployment": name, "not priced": reason})
                    continue
                log = replace(read_engine_log(path), name=name)
                repeats[_workload(log)].append(log)
                rows, kv = log_rows(log, tuple(overrides) if public is None else public.words_of(log))
                found.logs += rows
                found.kv += kv
                say(f"deployment {name}")
    found.noise = [_spread(logs) for logs in repeats.values() if len(logs) > 1]
    return found


def _each(folders: Sequence[str]) -> Iterator[Path]:
    for name in folders:
        folder = Path(name).expanduser()
        inside = sorted(folder.iterdir()) if folder.is_dir() else []
        several = [path for path in inside if path.is_dir()]
        marks = (folder / "specifications.json", folder / "suites")
        known = folder.name in PUBLIC or any(mark.exists() for mark in marks)
        yield from several if several and not known else [folder]


def _logs(folder: Path, public: PublicFolder | None) -> Iterator[tuple[Path, str]]:
    """The logs of a folder, each with the reason if it is left out."""
    if public is None or not public.logs:
        yield folder, ""
        return
    for path in sorted(folder.glob(public.logs)):
        reasons = [reason for word, reason in _LEFT_OUT.items() if word in path.name]
        if reasons != [""]:
            yield path, (reasons or [""])[0]


def _short(path: Path) -> str:
    name = path.name.partition(".json")[0]
    return f"{path.parent.name}/{name}" if path.name.endswith(".gz") else name


def _workload(log: EngineLog) -> tuple[Any, ...]:
    """What is equal in repeats of one workload on one engine."""
    requests = log.requests
    lengths = sorted(zip(requests.prompt_tokens.tolist(), requests.output_tokens.tolist(), strict=True))
    folder, _, name = log.name.partition(": ")
    return folder, "sglang" in name.lower(), log.settings.model, log.client, tuple(lengths)


def _spread(logs: Sequence[EngineLog]) -> Row:
    """How far repeats of one workload differ: the largest over the smallest median, less one."""
    row: Row = {"workload": logs[0].name, "repeats": len(logs), "requests": len(logs[0].requests)}
    for name in ("ttft_s", "tpot_s"):
        medians = [float(np.nanmedian(getattr(log.requests, name))) for log in logs]
        row[f"{name.removesuffix('_s')}_p50 spread"] = round(max(medians) / min(medians) - 1, 4)
    return row


def log_rows(log: EngineLog, overrides: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """The errors of both cost models without a fit, and of the roofline fitted to a first part; and the KV in use."""
    rows, kv, read = list[Row](), list[Row](), None
    for kind in KINDS:
        row: Row = {"deployment": log.name, "cost": str(kind), "fit": "none"}
        try:
            read = read or configured(log, overrides)
            config = replace(read.config, cost=replace(read.config.cost, kind=kind))
            found = predictor(config, log.workload)(config.device)
        except (ConfigError, UserError) as error:
            if kind is CostKind.roofline:
                rows.append(row | {"not priced": str(error)[:160]})
            continue  # most devices have no published tables
        if kind is CostKind.roofline and config.device.name in ROUNDED:
            row["fit"] = "none, but compute_efficiency of the preset is rounded from a fit to a public run"
        rows.append(row | _errors(errors_of(found, log, slice(0, None))))
        if kind is CostKind.roofline:
            rows.append(row | _fitted(log, read))
            kv = [_kv_row(log, config, found)]
    return rows, kv


def _fitted(log: EngineLog, read: Configured) -> Row:
    try:
        taken, _, fit = fit_log(log, read)
    except UserError as error:
        return {"fit": "a first part", "not priced": str(error).partition(";")[0]}
    how = "" if taken is log else ", with cached prompts or pauses of the client that it found"
    how += "" if fit.kept else ", of the description, which predicts them better than the fit does"
    return {"fit": f"{fit.which}; errors of half of the others{how}"} | _errors(fit.held_out)


def _errors(errors: Errors) -> Row:
    values = {one.name: getattr(errors, one.name) for one in fields(errors)}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def _kv_row(log: EngineLog, config: RunConfig, found: PredictedRun) -> Row:
    """KV slots in use over time: predicted and, where it was logged, measured, between bounds from measured times.

    At least the tokens that requests have so far from their first token on, at most all tokens of those that the client
    waits for, with blocks rounded up. Shared prefixes can lie below the lower bound.
    """
    requests, pool = log.requests, found.log.capacity_slots
    at_s: FloatArray = np.linspace(0.0, float(requests.last_token_s.max()), 500, endpoint=False)
    now = at_s[:, None]
    under_way = (now >= requests.entered_s) & (now < requests.last_token_s)
    size = config.cache.block_size
    whole = size * np.ceil((requests.prompt_tokens + requests.output_tokens) / size)
    low = requests.held(at_s, requests.first_token_s) / pool
    high = np.minimum((under_way * whole).sum(axis=1) / pool, 1.0)
    ours = found.series(at_s).kv_use
    use = None if log.series is None else log.series.kv_use
    logged = use is not None and bool(use.any())
    shown = {"at least": low, "predicted": ours, "at most": high, "measured": use if logged else None}
    row: Row = {"deployment": log.name, "pool": int(pool)}
    for name, values in shown.items():
        for what, of in (("mean", np.mean), ("peak", np.max)):
            row[f"{what} {name}"] = "not recorded" if values is None else round(float(of(values)), 4)
    return row


def by_load(rows: Sequence[Row]) -> list[Row]:
    """AccelMark's errors by scheduler of vLLM, device and kind of load: medians of their sizes."""
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if "not priced" not in row:
            load = row["load"] if "requests/s" not in row["load"] else "open loop"
            bits = "16 bits" if row["precision"] in ("BF16", "FP16") else "8 or 4 bits"
            first = " (first scheduler)" if row["vllm"].startswith("0.7") else ""
            groups[first, row["device"], bits, load].append(row)
    found = []
    for (first, device, bits, load), some in sorted(groups.items()):
        vllm = " or ".join(sorted({row["vllm"] for row in some})) + first
        line: Row = {"vllm": vllm, "device": device, "weights": bits, "load": load, "loads": len(some)}
        for name in accelmark.FIGURES:
            errors = [row[name] for row in some if name in row]
            if errors:
                line |= {f"{name} median": median(map(abs, errors)), f"{name} bias": median(errors)}
        found.append(line)
    return found


def draw(rows: Sequence[Row], folder: Path) -> None:
    """`h100.svg`: the error of each row of the H100 table by simulator, one line a figure."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    names = [stage_table.OURS, stage_table.ROOFLINE, stage_table.OTHER]
    names += dict.fromkeys(row["simulator"] for row in stage_table.compared(rows, stage_table.ROOFLINE))
    with mpl.rc_context({**RC, "svg.hashsalt": "fidelity"}):
        figure, panels = plt.subplots(
            1, len(stage_table.FIGURES), figsize=(PAGE_IN, 3.0), layout="constrained", sharey=True
        )
        for panel, figure_name in zip(panels, stage_table.FIGURES, strict=True):
            for place, name in enumerate(names):
                errors = [row[name] for row in rows if row["figure"] == figure_name and name in row]
                shown = np.clip(100 * np.array(errors), -100, 200)
                color = PALETTE[0] if "PageTwin" in name else PALETTE[1]
                panel.scatter(shown, [place] * len(shown), s=10, color=color, alpha=0.6, lw=0)
            panel.axvspan(-10, 10, color="#ececec", zorder=0)
            panel.axvline(0, color="#6f6f6f", lw=0.6)
            panel.set(title=figure_name, xlim=(-110, 210))
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        figure.supxlabel("error, % (beyond 200 % drawn there; band: 10 %)", fontsize="small")
        figure.savefig(folder / "h100.svg", metadata={"Date": None})
        plt.close(figure)
