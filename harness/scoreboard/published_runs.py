"""Published end-to-end runs: rows of concurrency, lengths, mean TTFT and TPOT, and our simulation of each.

The rows are `silicon_sample.csv` of the installed package aiconfigurator-core. They are read there and not copied,
since many of them cite other collections.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind, RunConfig, TableEngine
from harness.cost.aiconfigurator import SYSTEMS, TableSetup, check_package
from harness.point.cost import check_cost, cost_model
from harness.point.published import published_cost
from harness.replay.cost_model import CostModel
from harness.sweep.plan import run_request
from harness.workload.simulate import simulate
from harness.workload.workload import build_workload
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

DEVICES = {system: name for name, system in SYSTEMS.items() if name != "b300"}  # b300 has no preset
# The names of models in the rows, and of the configurations that the package has of the same shape.
_SAME_SHAPE = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
_WEIGHTS = {
    "fp8": "fp8",
    "fp8_static": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "mxfp4",
    "int4_wo": "int4",
}  # of the roofline
_FASTER = {
    "fp8": 2.0,
    "fp8_static": 2.0,
    "fp8_block": 2.0,
    "nvfp4": 4.0,
}  # FLOP/s of tensor cores, as a multiple of bfloat16's
_DRAWN_FROM = 0.8
"""InferenceMAX draws lengths between 0.8 of the nominal and the nominal (RANDOM_RANGE_RATIO in its README)."""
_BATCHED_TOKENS = 8192  # InferenceMAX: --max-num-batched-tokens


@dataclass(frozen=True)
class PublishedRun:
    """One row: a model on devices under an engine, `users` who each wait for the answer, and the measured means."""

    name: str
    model: str
    engine: str
    system: str
    precision: str
    isl: int
    osl: int
    users: int
    parallel: int
    expert_parallel: bool
    weights: str | None
    expert_weights: str | None
    kv: str | None
    drawn: bool
    ttft_ms: float
    tpot_ms: float

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Model, engine, device and precision."""
        return self.model, self.engine, self.system, self.precision


@dataclass(frozen=True)
class Simulated:
    """Mean TTFT and TPOT in ms."""

    ttft_ms: float
    tpot_ms: float


def package_folder() -> Path:
    """Where the package lies. Raises ConfigError unless the pinned version is installed."""
    check_package()
    found = find_spec("aiconfigurator_core")
    if found is None or found.origin is None:
        raise UserError("aiconfigurator-core is installed without its package; install it again")
    return Path(found.origin).parent


def read_runs() -> tuple[list[PublishedRun], Counter[str]]:
    """The rows that can be simulated, and how many others there are by reason."""
    file = package_folder() / "systems" / "silicon_sample.csv"
    reasons: Counter[str] = Counter()
    runs = []
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            reason = _obstacle(row)
            if reason:
                reasons[reason] += 1
            else:
                runs.append(_run(row))
    return runs, reasons


def _obstacle(row: Mapping[str, str]) -> str:
    if row["mode"] != "agg":
        return "prefill and decode on separate workers (disaggregated)"
    if row["system"] not in DEVICES:
        return f"no preset of the device {row['system']}"
    if _number(row["pp_size"]) > 1:
        return "pipeline parallel"
    if _number(row["attention_dp_size"]) > 1:
        return "data-parallel attention"
    if not 1 <= _number(row["tp_size"]) <= 8:
        return "more than 8 devices"
    if not _users(row):
        return "no concurrency given"
    if not row["silicon_ttft_ms"] or not row["silicon_tpot_ms"]:
        return "no TTFT or no TPOT given"
    if not _config_file(row["model_path"]).is_file():
        return f"no configuration of {row['model_path']}"
    return ""


def _number(text: str) -> int:
    return int(float(text)) if text else 0


def _users(row: Mapping[str, str]) -> int:
    found = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return int(found[1]) if found else 0


def _run(row: Mapping[str, str]) -> PublishedRun:
    own = "gpt-oss" in row["model_path"]  # its checkpoint is quantised to MXFP4 whatever the row calls it
    # NVIDIA's quantised checkpoints have static scales and FP8 KV (their hf_quant_config.json says so).
    static = "Llama-3.1" in row["model_path"] and row["precision"] in ("fp8", "fp4")
    weights = "fp8_static" if static and row["precision"] == "fp8" else row["gemm_quant_mode"] or None
    return PublishedRun(
        name=row["id"],
        model=row["model_path"],
        engine=row["backend"],
        system=row["system"],
        precision=row["precision"] or "bf16",
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        users=_users(row),
        parallel=_number(row["tp_size"]),
        expert_parallel=_number(row["moe_ep_size"]) > 1,
        weights=None if own else weights,
        expert_weights=None if own else row["moe_quant_mode"] or None,
        kv="fp8" if static or (weights and not own and row["backend"] == "trtllm") else None,
        drawn="gap-analysis/" not in row["silicon_data_source"],
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


def sample(runs: Sequence[PublishedRun], each: int) -> list[PublishedRun]:
    """At most `each` runs of every group, on its most frequent number of devices, evenly over lengths and users.

    Deterministic. 0 takes all runs.
    """
    if not each:
        return sorted(runs, key=_order)
    groups: defaultdict[tuple[str, ...], list[PublishedRun]] = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    chosen: list[PublishedRun] = []
    for rows in groups.values():
        counts = Counter((row.parallel, row.expert_parallel) for row in rows)
        often = min(counts, key=lambda key: (-counts[key], key))
        kept = sorted((row for row in rows if (row.parallel, row.expert_parallel) == often), key=_order)
        places = np.linspace(0, len(kept) - 1, min(each, len(kept))).round().astype(int)
        chosen += [kept[place] for place in places]
    return sorted(chosen, key=_order)


def _order(run: PublishedRun) -> tuple[object, ...]:
    return (*run.group, run.parallel, run.expert_parallel, run.isl, run.osl, run.users, run.name)


def simulated(run: PublishedRun, kind: CostKind) -> Simulated:
    """A closed loop of our own: as many users as the row has, each of whom sends the next request at once.

    Ten requests a user as in InferenceMAX, fewer for many users, three at least. Chunked prefill, no prefix cache, and
    as many sequences as users. Lengths are drawn between 0.8 of the nominal and the nominal where the source did so.

    Raises:
        ConfigError: the cost model cannot price the model or the device, or no KV fits.
    """
    config = _configuration(run, kind)
    cost: CostModel
    if kind is CostKind.published:
        cost = published_cost(config, _setup(run))
    else:
        check_cost(config)
        cost = cost_model(config)
    rows = simulate(build_workload(config, _trace(run)), cost, None).requests
    first = np.asarray(rows["first_token_s"], dtype=np.float64)
    outputs = np.asarray(rows["output_tokens"], dtype=np.float64)
    spans = np.asarray(rows["finish_s"], dtype=np.float64) - first
    waits = first - np.asarray(rows["arrival_s"], dtype=np.float64)
    return Simulated(1e3 * float(waits.mean()), 1e3 * float((spans / np.maximum(outputs - 1, 1)).mean()))


def _configuration(run: PublishedRun, kind: CostKind) -> RunConfig:
    device = DEVICES[run.system]
    words = [
        *("measure=false", f"cost={kind}", f"device={device}", f"model.path={_checkpoint(run.model)}"),
        *("replay.mode=closed", f"replay.users={run.users}", "cache.prefix_caching=false"),
        *(f"scheduler.max_running={max(run.users, 8)}", f"scheduler.max_batched_tokens={_BATCHED_TOKENS}"),
        *(f"cache.max_model_len={run.isl + run.osl + 256}", "scheduler.async_scheduling=true"),
        *(f"device.tensor_parallel={run.parallel}", "cost.bounds=false", "model.dtype=bfloat16"),
        f"device.expert_parallel={str(run.expert_parallel).lower()}",
    ]
    if run.weights:
        words.append(f"model.weight_dtype={_WEIGHTS[run.weights]}")
    if run.kv:
        words.append("model.kv_dtype=fp8_e4m3")
    found = normalise(compose_config(axis.settings[0] for axis in run_request(tuple(words)).axes))
    if run.weights and kind is CostKind.roofline:
        found.device.tflops *= _FASTER.get(run.weights, 1.0)
    return found


def _setup(run: PublishedRun) -> TableSetup:
    return TableSetup(
        device=DEVICES[run.system],
        engine=TableEngine(run.engine),
        parallel=run.parallel,
        expert_parallel=run.expert_parallel,
        checkpoint=_checkpoint(run.model),
        shape=None,
        weights=run.weights,
        expert_weights=run.expert_weights,
        kv=run.kv,
    )


def _config_file(model: str) -> Path:
    name = _SAME_SHAPE.get(model, model).replace("/", "--")
    return package_folder() / "model_configs" / f"{name}_config.json"


@cache
def _checkpoint(model: str) -> str:
    """A folder with the model's config.json, kept while the process runs."""
    folder = Path(mkdtemp(prefix="pagetwin-scoreboard-")) / model.rpartition("/")[2]
    folder.mkdir()
    facts = json.loads(_config_file(model).read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    return str(folder)


def _trace(run: PublishedRun) -> Trace:
    count = run.users * min(10, max(3, 512 // run.users))
    rows = tuple(
        TraceRequest(rid, 0, prompt, output, (Segment(None, prompt),))
        for rid, (prompt, output) in enumerate(_lengths(run, count))
    )
    return Trace(TraceHeader(run.name, "simple", "drawn", CHAINED, None, 1, "0" * 64, count, count), rows)


def _lengths(run: PublishedRun, count: int) -> Iterator[tuple[int, int]]:
    draw = np.random.default_rng(0)
    low = _DRAWN_FROM if run.drawn else 1.0
    for _ in range(count):
        prompt, output = (
            int(draw.integers(max(int(low * nominal), 1), nominal + 1)) for nominal in (run.isl, run.osl)
        )
        yield prompt, max(output, 2)


def reason_of(error: ConfigError) -> str:
    """The reason of a refusal in a few words, so that like ones are counted together."""
    text = str(error)
    return re.sub(r"/\S*pagetwin-scoreboard-\S*/", "", text)[:160]
