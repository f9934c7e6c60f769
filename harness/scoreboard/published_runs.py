"""Published end-to-end runs (concurrency, lengths, mean TTFT and TPOT) and our simulation of each; decode attention.

The rows are `silicon_sample.csv` of the installed package aiconfigurator-core. They are read there and not copied,
since many of them cite other collections.
"""

import csv
import json
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from engine.runtime.options import KVDtype
from harness.config.compose import normalise
from harness.config.errors import ConfigError, UserError
from harness.config.schema import CostKind, ReplayMode, RunConfig, TableEngine, WeightDtype
from harness.cost.fitted import held_out_error
from harness.cost.grid import TimedShape, shape_errors
from harness.cost.operators import AttentionMachine, Timings, decode_errors, fitted_form, form_us
from harness.cost.published import SYSTEMS, TableSetup, check_package, compiled
from harness.metrics import compute
from harness.metrics.log import FloatArray
from harness.point.cost import check_cost, cost_model, published_cost
from harness.replay.cost_model import CostModel
from harness.sweep.plan import one_configuration
from harness.workload.deployment import model_shape, unmodelled
from harness.workload.point import Point, resolve
from harness.workload.simulate import often_replayed, simulate
from traces.errors import TraceError
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
# Weights of the roofline.
_WEIGHTS = {"fp8": "fp8", "fp8_static": "fp8", "fp8_block": "fp8", "nvfp4": "mxfp4", "int4_wo": "int4"}
# FLOP/s of tensor cores, as a multiple of bfloat16's.
_FASTER = {"fp8": 2.0, "fp8_static": 2.0, "fp8_block": 2.0, "nvfp4": 4.0}
# InferenceMAX draws lengths between 0.8 of the nominal and the nominal (RANDOM_RANGE_RATIO in its README).
_DRAWN_FROM = 0.8
# Of the datasheet's FLOP/s. Published serving of GPUs stays far below; a row that needs more did not compute all of its
# prompts.
_MOST_USED = 0.7
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
    if _users(row) != _number(row["batch_size"]):
        return "concurrency over several replicas or data-parallel attention, which the row does not name"
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
    experts = row["moe_quant_mode"] or None
    if weights == "fp8" and _has_block_scales(row["model_path"]):
        weights, experts = "fp8_block", "fp8_block" if experts == "fp8" else experts
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
        expert_weights=None if own else experts,
        kv="fp8" if static or (weights and not own and row["backend"] == "trtllm") else None,
        drawn="gap-analysis/" not in row["silicon_data_source"],
        ttft_ms=float(row["silicon_ttft_ms"]),
        tpot_ms=float(row["silicon_tpot_ms"]),
    )


@cache
def _has_block_scales(model: str) -> bool:
    """Whether the checkpoint's FP8 weights have a scale for each block of them, which other kernels multiply.

    Rows of the same checkpoint call it `fp8` or `fp8_block`, as their engine does.
    """
    facts = json.loads(_config_file(model).read_text(encoding="utf-8"))
    return bool((facts.get("quantization_config") or {}).get("weight_block_size"))


@contextmanager
def published_files(folder: Path) -> Iterator[None]:
    """While the files of a public folder are read: what is wrong with them is a UserError that names the folder."""
    try:
        yield
    except (UserError, TraceError):
        raise
    except (OSError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{folder}: not as it was published ({type(error).__name__}: {error})") from error


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


def simulated(run: PublishedRun, kind: CostKind) -> dict[str, FloatArray]:
    """A closed loop of our own: as many users as the row has, each of whom sends the next request at once.

    Ten requests a user as in InferenceMAX, fewer for many users, three at least. Chunked prefill, no prefix cache, and
    as many sequences as users. Lengths are drawn between 0.8 of the nominal and the nominal where the source did so.

    Raises:
        ConfigError: the cost model cannot price the model or the device, no KV fits, or the row contradicts itself.
    """
    config = _configuration(run, kind)
    _check_possible(run, config)
    point = resolve(config, _trace(run))
    _check_batch(run, point.pool.tokens)
    cost: CostModel
    if kind is CostKind.published:
        refusal = _refusal(_setup(run))
        if refusal:
            raise ConfigError("cost.kind", refusal)
        cost = published_cost(point.deployment, _setup(run))
    else:
        if run.weights in _FASTER:
            raise ConfigError("cost.kind", "roofline: it does not price the arithmetic of 8 and 4 bits")
        check_cost(point.deployment)
        cost = cost_model(point.deployment)
    return _latencies(point, cost)


def composed(words: Sequence[str]) -> RunConfig:
    """The configuration of overrides, for a prediction."""
    return normalise(one_configuration(("measure=false", *words), "a prediction has"))


def latencies(config: RunConfig, trace: Trace) -> dict[str, FloatArray]:
    """What a configuration predicts of the requests of `trace`, in their order (`harness.metrics.compute.latencies`).

    Raises:
        ConfigError: the cost model cannot price it, or a request can never be served.
    """
    point = resolve(config, trace)
    check_cost(point.deployment)
    return _latencies(point, cost_model(point.deployment))


def _latencies(point: Point, cost: CostModel) -> dict[str, FloatArray]:
    point = often_replayed(point, cost, len(point.trace.requests))  # a page has many such loads
    rows = compute.as_floats(simulate(point, cost).requests)
    order = np.argsort(rows["request_id"], kind="stable")
    return compute.latencies({name: column[order] for name, column in rows.items()})


def _check_possible(run: PublishedRun, config: RunConfig) -> None:
    """Raise ConfigError where the row's own times need more FLOP/s than engines reach: prompts came from a cache."""
    if unmodelled(config.model, "model.path"):
        return
    shape = model_shape(config.model)
    mean = (1 + _DRAWN_FROM) / 2 if run.drawn else 1.0
    seconds = 1e-3 * (run.ttft_ms + max(mean * run.osl - 1, 0) * run.tpot_ms)
    needed = 2.0 * shape.token_weights * run.users * mean * (run.isl + run.osl) / seconds
    tflops = _base(DEVICES[run.system], checkpoint_of(run.model)).device.tflops
    used = needed / (run.parallel * tflops * 1e12 * _FASTER.get(run.weights or "", 1.0))
    if used > _MOST_USED:
        raise ConfigError(
            "run",
            f"its times need more than {100 * _MOST_USED:.0f} % of the datasheet's FLOP/s: it did not compute "
            "all prompts",
        )


def _check_batch(run: PublishedRun, pool_tokens: int) -> None:
    """Raise ConfigError where the row's own times say that its engine ran far fewer requests at once than assumed.

    In a closed loop a user waits for the first token, or gets tokens: by Little's law `users * span / latency` of them
    get tokens in the mean. The assumed engine has room for all users whose tokens fit the pool. While one of these
    waits, its steps are full. So if steps are less than half full in the mean, only the first wave waits, in which all
    begin at once: users * isl / (isl + osl) / 2 in the mean, were there no later wave.
    """
    mean = (1 + _DRAWN_FROM) / 2 if run.drawn else 1.0
    prompt, output = mean * run.isl, mean * run.osl
    span = max(output - 1, 0) * run.tpot_ms
    latency = run.ttft_ms + span
    running = run.users * span / latency
    step_tokens = run.users / latency * (prompt + output) * run.tpot_ms
    room = min(run.users, pool_tokens / (prompt + output))
    least = room - run.users * prompt / (prompt + output) / 2
    if running < least and step_tokens < _BATCHED_TOKENS / 2:
        raise ConfigError(
            "run",
            "its own times say that its engine ran far fewer requests at once than there is room for (Little's law): "
            "a limit of sequences, a smaller pool, or time before its scheduler, which the row does not name",
        )


@lru_cache(maxsize=64)
def _base(device: str, checkpoint: str) -> RunConfig:
    """The configuration of a model on a device; what differs among runs is set on a copy."""
    own = (f"device={device}", f"model.path={checkpoint}")
    return composed(("cost=roofline", *own, "model.dtype=bfloat16"))


def _configuration(run: PublishedRun, kind: CostKind) -> RunConfig:
    found = deepcopy(_base(DEVICES[run.system], checkpoint_of(run.model)))
    found.cost.kind, found.cost.bounds = kind, False
    found.replay.mode, found.replay.users = ReplayMode.closed, run.users
    found.scheduler.max_running, found.scheduler.max_batched_tokens = max(run.users, 8), _BATCHED_TOKENS
    found.scheduler.async_scheduling = True
    found.cache.prefix_caching, found.cache.max_model_len = False, run.isl + run.osl + 256
    found.device.tensor_parallel, found.device.expert_parallel = run.parallel, run.expert_parallel
    if run.weights:
        found.model.weight_dtype = WeightDtype(_WEIGHTS[run.weights])
    if run.kv:
        found.model.kv_dtype = KVDtype.fp8_e4m3
    return normalise(found)


@cache
def _refusal(setup: TableSetup) -> str:
    """Why the tables cannot price a setup; empty where they can. Asked once: each answer takes seconds."""
    try:
        compiled(setup)
    except ConfigError as error:
        return error.message
    return ""


def _setup(run: PublishedRun) -> TableSetup:
    return TableSetup(
        device=DEVICES[run.system],
        engine=TableEngine(run.engine),
        parallel=run.parallel,
        expert_parallel=run.expert_parallel,
        checkpoint=checkpoint_of(run.model),
        shape=None,
        weights=run.weights,
        expert_weights=run.expert_weights,
        kv=run.kv,
    )


def _config_file(model: str) -> Path:
    name = _SAME_SHAPE.get(model, model).replace("/", "--")
    return package_folder() / "model_configs" / f"{name}_config.json"


@cache
def checkpoint_of(model: str) -> str:
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
    ends = [(max(int(low * nominal), 1), nominal + 1) for nominal in (run.isl, run.osl)]
    for _ in range(count):
        prompt, output = (int(draw.integers(*each)) for each in ends)
        yield prompt, max(output, 2)


def reason_of(error: ConfigError) -> str:
    """The reason of a refusal in a few words, so that like ones are counted together."""
    return re.sub(r"/\S*pagetwin-scoreboard-\S*/", "", str(error))[:160]


HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
_SLOT_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # K and V, bfloat16


@dataclass(frozen=True)
class PublishedSystem:
    """A system of the package: version of vLLM, and the datasheet's GB/s, multiprocessors, L2 in MiB and boost GHz.

    NVIDIA's white papers on A100, H100, Ada, RTX Blackwell and Blackwell.
    """

    system: str
    version: str
    gbs: float
    multiprocessors: int
    l2_mib: float
    clock_ghz: float

    @property
    def machine(self) -> AttentionMachine:
        """The same for the form."""
        cache = self.l2_mib * 2**20
        return AttentionMachine(
            self.gbs * 1e9, _SLOT_BYTES, KV_HEADS, self.multiprocessors, cache, self.clock_ghz
        )


GPUS = (
    PublishedSystem("a100_sxm", "0.14.0", 2039, 108, 40, 1.41),
    PublishedSystem("h100_sxm", "0.24.0", 3350, 132, 50, 1.98),
    PublishedSystem("h200_sxm", "0.24.0", 4800, 132, 50, 1.98),
    PublishedSystem("l40s", "0.24.0", 864, 142, 96, 2.52),
    PublishedSystem("rtx_pro_6000_server", "0.24.0", 1597, 188, 128, 2.617),
    PublishedSystem("b200_sxm", "0.24.0", 8000, 148, 126, 1.965),
)
# FlashAttention 2 runs on A100, L40S and RTX PRO 6000, FlashAttention 3 on Hopper, and other kernels on B200.
SAME_KERNELS = (
    (("h100_sxm",), "h200_sxm"),
    (("h200_sxm",), "h100_sxm"),
    (("a100_sxm",), "l40s"),
    (("l40s",), "a100_sxm"),
    (("a100_sxm",), "rtx_pro_6000_server"),
    (("a100_sxm", "l40s"), "rtx_pro_6000_server"),
    (("a100_sxm", "rtx_pro_6000_server"), "l40s"),
    (("l40s", "rtx_pro_6000_server"), "a100_sxm"),
)
OTHER_KERNELS = (
    (("a100_sxm", "h100_sxm"), "h200_sxm"),
    (("a100_sxm", "h200_sxm"), "h100_sxm"),
    (("h100_sxm", "h200_sxm"), "a100_sxm"),
    (("a100_sxm", "h100_sxm", "h200_sxm"), "l40s"),
    (("a100_sxm", "h100_sxm", "h200_sxm", "l40s"), "rtx_pro_6000_server"),
    (("h100_sxm", "h200_sxm"), "b200_sxm"),
)


def read_timings(gpu: PublishedSystem) -> Timings:
    """The timings of a GPU; those of one shape take their median."""
    import pandas as pd

    folder = package_folder() / "systems" / "data" / gpu.system / "attention" / "vllm" / gpu.version
    table = pd.read_parquet(Path(folder) / "generation_attention_perf.parquet")
    chosen = (
        (table["num_heads"] == HEADS)
        & (table["num_key_value_heads"] == KV_HEADS)
        & (table["head_dim"] == HEAD_DIM)
        & (table["kv_cache_dtype"] == "bfloat16")
    )
    if "window_size" in table:
        chosen &= table["window_size"] == 0
    found = table[chosen].groupby(["batch_size", "step"], as_index=False)["latency"].median()
    numbers = {name: found[name].to_numpy(dtype=np.float64) for name in ("batch_size", "step", "latency")}
    return Timings(gpu.machine, numbers["batch_size"], numbers["step"] + 1.0, numbers["latency"] * 1e3)


def held_out(timings: Timings, *, by_ratio: bool) -> dict[str, dict[str, float]]:
    """Errors along rows and along slots: every other inner value is left out whole and predicted, then the others.

    By the ratio to the form, as `cost=operators` interpolates, or by logarithms of times.
    """
    shapes = [
        TimedShape(rows, slots, 64, us * 1e-6)
        for rows, slots, us in zip(timings.rows, timings.slots, timings.us, strict=True)
    ]
    names = ("rows", "KV slots a row")
    found = decode_errors(shapes, timings.machine) if by_ratio else shape_errors("decode", shapes, names)
    return {name: found[f"decode grid along {name}"] for name in names}


def package_errors(gpu: PublishedSystem) -> dict[str, dict[str, float]]:
    """The same of the package's own interpolation, which `cost=published` uses: its table without the values left out.

    The package prices a model with these heads from a copy of its folder in which only that table differs.
    """
    import pandas as pd
    from aiconfigurator_core.sdk.engine import EngineHandle

    root = package_folder() / "systems"
    folder = Path("data") / gpu.system / "attention" / "vllm" / gpu.version
    place = folder / "generation_attention_perf.parquet"
    table, known = pd.read_parquet(root / place), read_timings(gpu)
    checkpoint = checkpoint_of("Qwen/Qwen3-8B")
    whole = EngineHandle.compile(checkpoint, gpu.system, "vllm")
    columns = {"rows": (table["batch_size"], known.rows), "KV slots a row": (table["step"] + 1, known.slots)}
    found = {}
    for axis, (column, places) in columns.items():
        predicted, measured = [], []
        for parity in (0, 1):
            left_out = np.unique(column)[1:-1][parity::2]
            with TemporaryDirectory() as copied:
                shutil.copytree(root, Path(copied) / "systems", copy_function=os.symlink)
                file = Path(copied) / "systems" / place
                file.unlink()
                table[~column.isin(left_out)].to_parquet(file)
                part = EngineHandle.compile(checkpoint, gpu.system, "vllm", systems_path=f"{copied}/systems")
                for chosen in np.flatnonzero(np.isin(places, left_out)):
                    shape = int(known.rows[chosen]), max(int(known.slots[chosen]) - 1, 1), 2
                    predicted.append(_attention_ms(part, shape))
                    measured.append(_attention_ms(whole, shape))
        found[axis] = held_out_error(np.array(predicted), np.array(measured))
    return found


def _attention_ms(handle: Any, shape: tuple[int, int, int]) -> float:
    return float(sum(ms for name, ms, _, _ in handle.decode_step_per_op(*shape) if "attention" in name))


def plain_us(constants: FloatArray, timings: Timings) -> FloatArray:
    """a0 + a1 rows + bytes / (eta bandwidth), in us, the roofline's form; constants (a0, a1, eta)."""
    read = timings.rows * timings.slots * timings.machine.slot_bytes / timings.machine.bandwidth * 1e6
    us: FloatArray = constants[0] + constants[1] * timings.rows + read / constants[2]
    return us


def fitted_plain(tables: Sequence[Timings]) -> FloatArray:
    """The constants of the plain form that make relative errors small, in which few large errors count little."""

    def errors(constants: FloatArray) -> FloatArray:
        return np.concatenate([plain_us(constants, table) / table.us - 1.0 for table in tables])

    bounds = ([0.0, 0.0, 0.3], [50.0, 2.0, 1.2])
    found = least_squares(errors, [10.0, 0.2, 0.9], bounds=bounds, loss="soft_l1", f_scale=0.05)
    return np.asarray(found.x, dtype=np.float64)


def transfer_errors(known: Sequence[Timings], other: Timings) -> Mapping[str, dict[str, float]]:
    """The errors of the forms, fitted to other GPUs, on a GPU that they have not seen."""
    waves = form_us(fitted_form(known), other.machine, other.rows, other.slots)
    plain = plain_us(fitted_plain(known), other)
    return {
        "form with waves and cache": held_out_error(waves, other.us),
        "plain form": held_out_error(plain, other.us),
    }
