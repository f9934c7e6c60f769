"""A public table of vLLM on H100 by stages of load, our prediction of each row, and those of other simulators.

A folder of the table has `specifications.json` (engine, and the stages of inference-perf), `measured_by_stage.csv`
(mean, p90 and p99 by stage, ms) and `predictions_of_others.csv`. Source: the repository inference-sim (BLIS).

**What the table does not say, and what is assumed for all of its rows.** It was fixed before any error was looked at,
and nothing is fitted to a row.

* Whole prompts repeat. inference-perf makes `num_unique_system_prompts` x `num_users_per_system_prompt` prompts once
  and sends them in turn (`shared_prefix_datagen.py` of kubernetes-sigs/inference-perf at e60b98d: `data_index %
  len(prompts)`); the prompts have the same lengths in both stages, so conversations do not grow. The other reading, of
  which the page has the errors too: the system prompt is shared, and questions are new.
* Each prompt has the tokens of its system prompt and its question, and each answer `output_len`.
* Gaps between requests are exponential and fill their stage (`ConstantLoadTimer` there). A stage begins when the one
  before has been answered.
* vLLM with asynchronous scheduling (one run is dated 2026-02-17, and 0.14 of January 2026 made it the default),
  prefix cache, blocks of 16 tokens, and a pool of `total_kv_blocks`. Blocks in host memory are left out.
* 5 ms a request before the scheduler: clients of other deployments saw 3 to 7 ms.
* `cost=published` is our prediction: on the published runs that both price, its TPOT was nearer than the roofline's
  (9.6 % to 22.5 % in the median). The roofline's errors stand beside it.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness.config.errors import ConfigError, UserError
from harness.scoreboard.published_runs import composed, latencies, published_files
from harness.twin.configured import preset_of
from harness.twin.rows import JsonDocument
from traces.errors import RowError
from traces.formats.files import open_source
from traces.formats.parsing import number, whole
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

FIGURES = ("e2e_mean", "e2e_p90", "e2e_p99", "ttft_mean")
WHOLE_PROMPTS_REPEAT = True
ENGINE = (
    *("scheduler.async_scheduling=true", "cache.prefix_caching=true", "cache.block_size=16"),
    *("cache.max_model_len=4096", "device.frontend_request_us=5000", "model.dtype=bfloat16"),
)
_BETWEEN_S = 60.0  # from the last request of a stage to the next stage; the engine is idle then
# No prompt here reaches Scout's chunks of 8,192 tokens, so that its chunked attention is full attention; all of its
# layers count as FP8, though its attention is not. Its shape: config.json on the Hugging Face hub.
_SCOUT = "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic"
_SCOUT_WORDS = (
    *("model=llama31_8b", "model.name=llama-4-scout", "model.family=qwen3_moe", "model.weight_dtype=fp8"),
    *("model.layers=48", "model.hidden=5120", "model.heads=40", "model.intermediate=16384"),
    *("model.vocab=202048", "model.experts=16", "model.expert_intermediate=8192"),
    "model.shared_intermediate=8192",
)


@dataclass(frozen=True)
class Stage:
    """So many requests a second, for so many seconds."""

    rate: float
    duration_s: float


@dataclass(frozen=True)
class StagedRun:
    """One deployment of the table: its engine as overrides, and its load.

    There are `systems` system prompts of `system_tokens`, and as many questions of `question_tokens` to each as `users`
    says. `measured` has figures in ms by stage (from 0) and name, `others` the same by simulator.
    """

    name: str
    model: str
    words: tuple[str, ...]
    stages: tuple[Stage, ...]
    systems: int
    users: int
    system_tokens: int
    question_tokens: int
    output_tokens: int
    measured: Mapping[tuple[int, str], float]
    others: Mapping[str, Mapping[tuple[int, str], float]]

    def trace(self, *, whole_prompts: bool) -> Trace:
        """The requests. Prompts are sent in turn; `whole_prompts` repeat, or else their questions are new."""
        draw, rows, start_s = np.random.default_rng(0), list[TraceRequest](), 0.0
        prompts = self.systems * self.users
        order = draw.permutation(prompts)
        for stage in self.stages:
            gaps = draw.exponential(1.0, int(stage.rate * stage.duration_s))
            for sent_s in start_s + np.cumsum(gaps) * stage.duration_s / gaps.sum():
                prompt = int(order[len(rows) % prompts])
                question = self.systems + prompt if whole_prompts else None
                shared = Segment(prompt // self.users, self.system_tokens)
                segments = (shared, Segment(question, self.question_tokens))
                at_us, tokens = round(sent_s * 1e6), self.system_tokens + self.question_tokens
                rows.append(TraceRequest(len(rows), at_us, tokens, self.output_tokens, segments))
            start_s += stage.duration_s + _BETWEEN_S
        count = len(rows)
        header = TraceHeader(self.name, "simple", "drawn", CHAINED, None, 1, "0" * 64, count, count)
        return Trace(header, tuple(rows))

    def stage_of(self, request: int) -> int:
        """The stage in which a request is sent."""
        ends = np.cumsum([int(stage.rate * stage.duration_s) for stage in self.stages])
        return int(np.searchsorted(ends, request, side="right"))


def read_staged_runs(folder: Path) -> list[StagedRun]:
    """The deployments of the table.

    Raises:
        TraceError: a file cannot be read, or the specification is malformed (line and path are named).
        UserError: nothing was measured of a deployment, its model is not known, or a table is malformed.
    """
    document = JsonDocument(open_source(str(folder / "specifications.json")))
    places = range(len(document.items(("experiments",))))
    with published_files(folder):
        measured = list(_table(folder / "measured_by_stage.csv"))
        others = list(_table(folder / "predictions_of_others.csv"))
        return [_run(document, ("experiments", place), measured, others) for place in places]


def _table(file: Path) -> Iterator[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def _run(
    document: JsonDocument,
    path: tuple[str | int, ...],
    measured: Sequence[Mapping[str, str]],
    others: Sequence[Mapping[str, str]],
) -> StagedRun:
    facts, load = document.object(path), (*path, "workload", "inference_perf")
    shared = document.object((*load, "shared_prefix"))
    stages = []
    for place in range(len(document.items((*load, "stages")))):
        stage = document.object((*load, "stages", place))
        with document.placed((*load, "stages", place)):
            stages.append(Stage(number(stage, "rate"), number(stage, "duration")))
    with document.placed(path):
        name, model = str(facts["id"]), str(facts["model"])
        preset = preset_of(model)
        if (preset is None and model != _SCOUT) or facts.get("hardware") != "H100":
            raise RowError("model", f"{model} on {facts.get('hardware')}: no preset describes both")
        words = (
            *("device=h100", *((f"model={preset}",) if preset else _SCOUT_WORDS), *ENGINE),
            f"device.tensor_parallel={whole(facts, 'tp', 1)}",
            f"scheduler.max_running={whole(facts, 'max_num_seqs', 1)}",
            f"scheduler.max_batched_tokens={whole(facts, 'max_num_batched_tokens', 1)}",
            f"cache.pool_blocks={whole(facts, 'total_kv_blocks', 1)}",
        )
    with document.placed((*load, "shared_prefix")):
        tokens = [whole(shared, key) for key in ("system_prompt_len", "question_len", "output_len")]
        counts = [whole(shared, of, 1) for of in ("num_unique_system_prompts", "num_users_per_system_prompt")]
    rows = [row for row in measured if row["folder"] == name or row["folder"].startswith(f"{name}-")]
    if not rows:
        raise UserError(f"measured_by_stage.csv has no row of {name}, which specifications.json describes")
    if (last := max(int(row["stage_index"]) for row in rows)) >= len(stages):
        raise UserError(
            f"measured_by_stage.csv has stage {last} of {name}, which specifications.json has not"
        )
    found: dict[str, dict[tuple[int, str], float]] = {}
    for row in others:
        if row["experiment"] == name and int(row["stage_index"]) >= 0 and row["metric_name"] in FIGURES:
            place_of = int(row["stage_index"]), row["metric_name"]
            found.setdefault(row["simulator"], {})[place_of] = float(row["predicted"])
    sent = tuple(stages), counts[0], counts[1], tokens[0], tokens[1], tokens[2]
    return StagedRun(
        *(name, model, words, *sent),
        measured={
            (int(row["stage_index"]), figure): float(row[figure])
            for row in rows
            for figure in FIGURES
            if int(row["stage_index"]) >= 0
        },
        others=found,
    )


COMPARED = ("simulator", "figure", "deployments", "rows", "its median", "our median")
_KNOWN = ("deployment", "model", "stage", "rate", "figure", "measured_ms")
OURS, ROOFLINE, OTHER = "PageTwin", "PageTwin, roofline", "PageTwin, questions new"
_PREDICTIONS = (
    (OURS, "cost=published", WHOLE_PROMPTS_REPEAT),
    (ROOFLINE, "cost=roofline", WHOLE_PROMPTS_REPEAT),
    (OTHER, "cost=published", not WHOLE_PROMPTS_REPEAT),
)


def stage_rows(folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row for each figure of each stage: measured in ms, and each simulator's error (predicted / measured - 1)."""
    rows = []
    for run in read_staged_runs(folder):
        predicted: dict[str, Mapping[tuple[int, str], float]] = {}
        refused = {}
        for name, cost, whole_prompts in _PREDICTIONS:
            try:
                predicted[name] = _predicted(run, cost, whole_prompts)
            except ConfigError as error:
                refused[f"{name} refuses"] = error.message
        for place, measured in run.measured.items():
            errors = {
                name: round(values[place] / measured - 1, 4)
                for name, values in (predicted | dict(run.others)).items()
                if place in values
            }
            stage, figure = place
            known = (run.name, run.model, stage, run.stages[stage].rate, figure, measured)
            rows.append(dict(zip(_KNOWN, known, strict=True)) | errors | refused)
        say(f"H100 table: {run.name}, {run.model}")
    return rows


def _predicted(run: StagedRun, cost: str, whole_prompts: bool) -> dict[tuple[int, str], float]:
    trace = run.trace(whole_prompts=whole_prompts)
    found = latencies(composed((*run.words, cost)), trace)
    sent_ms, e2e_ms = trace.columns.arrival_us / 1e3, 1e3 * found["e2e"]
    stages = np.array([run.stage_of(row.request_id) for row in trace.requests])
    values: dict[tuple[int, str], float] = {}
    for stage in range(len(run.stages)):
        chosen = stages == stage
        ended = float((sent_ms + e2e_ms)[chosen].max())
        if (sent_ms[stages > stage] < ended).any():
            raise UserError(f"{run.name}: stage {stage} is not answered before the next begins")
        e2e, ttft = e2e_ms[chosen], 1e3 * found["ttft"][chosen]
        figures = (e2e.mean(), np.quantile(e2e, 0.9), np.quantile(e2e, 0.99), ttft.mean())
        values |= {(stage, name): float(value) for name, value in zip(FIGURES, figures, strict=True)}
    return values


def compared(rows: Sequence[Mapping[str, Any]], ours: str) -> list[dict[str, Any]]:
    """Of each simulator the median error in size over the rows that it shares with `ours`, and that of `ours` there."""
    found = []
    names = dict.fromkeys(key for row in rows for key in row if key not in _KNOWN and "PageTwin" not in key)
    for name in names:
        shared = [row for row in rows if name in row and ours in row]
        for figure in ("all", *FIGURES):
            some = [row for row in shared if figure in ("all", row["figure"])]
            if some:
                deployments = len({row["deployment"] for row in some})
                theirs, own = (median(abs(row[each]) for row in some) for each in (name, ours))
                line = (name, figure, deployments, len(some), theirs, own)
                found.append(dict(zip(COMPARED, line, strict=True)))
    return found
