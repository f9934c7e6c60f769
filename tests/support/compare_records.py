"""Check that a restructured checkout still writes the same records as another one.

`run` sweeps a fixed matrix of simulation-only points with the code of one checkout and keeps what the sweeps
stored. `diff` compares two such folders point by point. Points are matched by their group and overrides, never by
their fingerprint, because a fingerprint contains a digest of the code.

    python tests/support/compare_records.py run CHECKOUT --traces TRACES --out OLD
    python tests/support/compare_records.py run . --traces TRACES --out NEW
    python tests/support/compare_records.py diff OLD NEW

`--traces` names the folder of published traces: the Azure CSV files are expected in `azure-llm-2023/mini/`, the
Mooncake JSONL files in `mooncake-fast25/mini/`. `--only NAME ...` runs or compares some groups only.

What `diff` compares: every key of every record, every column of every table, `summary.parquet`, the points that
`sweep.json` lists, which points failed, and the exit codes. What it does not compare: the values of the keys in
`IGNORED`, the texts of errors, and the report. Exit codes of both commands: 0 equal (or all sweeps done), 1 different
(or a sweep failed), 2 wrong input.

A run depends on nothing but the checkout and the interpreter: traces are copied, the other inputs are written by
this script, and all caches lie in the output folder. The coefficients of the fitted cost model are invented here and
placed where the checkout's own `calibrate --dry-run` says that it looks for them, so nothing is measured.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

STORES, INPUTS, LOGS, CACHE, SUMMARY = "stores", "inputs", "logs", "cache", "run.json"
TRACES = {
    "azure_conv.csv": "azure-llm-2023/mini/conv.head400.csv",
    "azure_code.csv": "azure-llm-2023/mini/code.head400.csv",
    "mooncake_conversation.jsonl": "mooncake-fast25/mini/conversation.head400.jsonl",
    "mooncake_synthetic.jsonl": "mooncake-fast25/mini/synthetic.head400.jsonl",
}
IGNORED = (  # values that say which code, machine or moment it was; the keys themselves must be there on both sides
    *("fingerprint", "*.fingerprint", "digest", "digests.*", "environment.code", "seconds.*"),
    *(
        f"environment.{name}"
        for name in ("python", "torch", "transformers", "triton", "numpy", "scipy", "simpy")
    ),
    *(f"environment.{name}" for name in ("hydra-core", "cpu", "cores", "gpu", "device", "load_average")),
    *("error", "traceback", "traceback.*", "verdict", "verdict.*"),  # texts, which may be worded anew
)
POLICY_MODULE = "compared_policies"


# ----------------------------------------------------------------------------------------------- the matrix of points


@dataclass(frozen=True)
class Group:
    """The points of one sweep; `fitted` asks for calibrations for these extra settings before it runs."""

    name: str
    overrides: tuple[str, ...]
    fitted: tuple[tuple[str, ...], ...] = ()


def _own(key: str, name: str) -> str:
    return f"{key}=null,{POLICY_MODULE}:{name}"


_AZURE = (
    *("trace=azure", f"trace.path={INPUTS}/azure_conv.csv", "workload.num_requests=100"),
    *("workload.length_scale=0.1", "workload.request_rate=60", "workload.oversize=drop"),
)
_MOONCAKE = (
    *("trace=mooncake", f"trace.path={INPUTS}/mooncake_conversation.jsonl", "workload.num_requests=80"),
    *("workload.length_scale=0.02", "workload.request_rate=60", "workload.oversize=drop"),
)
_ROWS = ("trace=simple", f"trace.path={INPUTS}/rows.csv", "workload=as_recorded", "workload.oversize=drop")
_PLAIN = ("trace=simple", f"trace.path={INPUTS}/plain.csv", "workload=as_recorded", "workload.oversize=drop")
_PREEMPTIONS = ("cache.host_tokens=1024", "scheduler.preemption=recompute,swap,auto")
_COMPILED = (
    *(
        "workload.num_requests=500",
        "workload.oversize=drop",
        "workload.request_rate=40",
        "replay.mode=trace,offline",
    ),
    *(
        "cache.block_size=1,16",
        "cache.pool_tokens=2048",
        "cache.retention=lru,none",
        "replay.records=true,false",
    ),
)
_FITTED = ("cost.cache_dir=calibration", "engine=cpu", "scheduler.max_batched_tokens=256")

GROUPS = (
    Group("default", ("experiment=default", "cost=roofline")),
    Group(
        "cache",
        (
            *(*_AZURE, "cost=roofline", "cache.pool_tokens=1024", "workload.prefix_share=0.5", *_PREEMPTIONS),
            *("cache.prefix_caching=true,false", "cache.retention=lru,none", "cache.deduplicate=false,true"),
            *("cache.hash=sha256,xxh3_128", "decoding.beam_width=1"),
        ),
    ),
    Group(
        "scheduler",
        (
            *(*_ROWS, "cost=roofline", "cache.pool_tokens=1024", "scheduler.max_batched_tokens=1024"),
            *("scheduler.policy=fcfs,priority", "scheduler.chunked_prefill=true,false"),
            *("scheduler.static_batch=false,true", "scheduler.watermark=0,0.1"),
            "workload.widths=recorded,configured",
        ),
    ),
    Group(
        "chunks",
        (
            *(
                *_ROWS,
                "workload.num_requests=60",
                "cost=roofline",
                "cache.pool_tokens=768",
                "cache.host_tokens=512",
            ),
            *("scheduler.policy=fcfs,priority", "scheduler.preemption=recompute,auto"),
            *("scheduler.admit_whole_prompt=true,false", "scheduler.long_prefill_tokens=null,32"),
            *("scheduler.max_batched_tokens=64,256", "scheduler.max_running=16"),
        ),
    ),
    Group(
        "contiguous",
        (
            *("trace=azure", f"trace.path={INPUTS}/azure_conv.csv,{INPUTS}/azure_code.csv"),
            *("workload.num_requests=60", "workload.length_scale=0.1", "workload.request_rate=60"),
            *("workload.oversize=drop", "cost=roofline", "cache.pool_tokens=3000", "cache.max_model_len=512"),
            *(
                "cache=contiguous_max,contiguous_pow2,contiguous_oracle",
                "cache.placement=auto,first_fit,buddy",
            ),
            "decoding.beam_width=1,4",
        ),
    ),
    Group(
        "decoding",
        (
            *(*_MOONCAKE, "cost=roofline", "cache.pool_tokens=2048", "cache.block_size=8", *_PREEMPTIONS),
            *("decoding=greedy,sample,beam,speculative", "decoding.branch_hazard=0,0.05"),
            *("decoding.draft_place=lookahead,fork", "decoding.acceptance=0,0.6,1"),
            "cache.copy_at_fork=false,true",
        ),
    ),
    Group(
        "recorded_beams",
        (
            *(*_PLAIN, "cost=roofline", "decoding.beam_width=3", "cache.pool_tokens=1024", *_PREEMPTIONS),
            *(f"decoding.beam_parents=null,{INPUTS}/parents.parquet", "cache.copy_at_fork=false,true"),
            f"model.path=null,{INPUTS}/checkpoint",
        ),
    ),
    Group(
        "own_policies",
        (
            *(*_MOONCAKE, "cost=roofline", "cache.pool_tokens=1024", "cache.block_size=8"),
            *(_own("scheduler.order", "ShortPromptsFirst"), _own("scheduler.victim", "OldestFirst")),
            *(_own("scheduler.admission", "FewAtOnce"), _own("cache.eviction", "NewestFirst")),
            "decoding.beam_width=1,2",
        ),
    ),
    Group(
        "arrivals",
        (
            *(
                "trace=chat",
                "workload.num_requests=80",
                "workload.length_scale=0.1",
                "workload.request_rate=20",
            ),
            *("workload.oversize=drop", "cost=roofline", "cache.pool_tokens=1024", "replay.users=6"),
            *("replay.mode=trace,poisson,gamma,closed,offline,sessions", "replay.think_s=0,0.5"),
            *("replay.records=true,false", "replay.duration_s=null,2"),
        ),
    ),
    Group(
        "mooncake",
        (
            *("trace=mooncake", "workload.num_requests=80", "workload.length_scale=0.02", "cost=roofline"),
            f"trace.path={INPUTS}/mooncake_conversation.jsonl,{INPUTS}/mooncake_synthetic.jsonl",
            *("workload.request_rate=30", "workload.oversize=drop", "trace.ticks=keep,even,random"),
            *(
                "cache.block_size=4",
                "cache.prefix_caching=true,false",
                "workload.seed=1",
                "cache.pool_tokens=1024",
            ),
        ),
    ),
    Group(
        "generators",
        (
            "trace=azure_conv,azure_code,system_prompts,few_shot,prefix_tree,rag_passages,chat,mooncake_conversation,"
            "sosp23_alpaca,sosp23_sharegpt,sosp23_chatbot,sosp23_wmt16_one_shot,sosp23_wmt16_five_shot",
            *("workload.num_requests=60", "workload.length_scale=0.1", "workload.oversize=drop"),
            *("workload.request_rate=30", "cost=roofline", "cache.pool_tokens=2048"),
            "cache.prefix_caching=true,false",
        ),
    ),
    Group(
        "devices",
        (
            *("device=h200,a100_80gb", "model=llama3_8b,opt_13b", "device.tensor_parallel=1,2"),
            *(
                "model.kv_dtype=model,fp8_e4m3",
                "cost=roofline",
                "workload=window",
                "workload.num_requests=60",
            ),
            *("workload.prefix_share=0.25", "cache.pool_tokens=null", "cache.max_model_len=2048"),
            *("scheduler.max_batched_tokens=2048", "trace.arrivals=gamma", "trace.arrival_rate=8"),
        ),
    ),
    Group("compiled_never", (*_COMPILED, "replay.compiled=never", "cost=roofline")),
    Group("compiled_always", (*_COMPILED, "replay.compiled=always", "cost=roofline")),
    Group(
        "fitted",
        (
            *(*_MOONCAKE, *_FITTED, "cost=auto,fitted,table", "decoding=greedy,sample,beam,speculative"),
            *("cache.block_size=8,16", "cache.pool_tokens=2048"),
        ),
        fitted=(_FITTED, (*_FITTED, "decoding.draft_tokens=4")),
    ),
)


# ------------------------------------------------------------------------------------------- inputs written for a run

_POLICIES = '''\
"""Policies of a user's own, which know nothing of the code that calls them but the documented arguments."""

from engine.core.memory.eviction import EvictionPolicy


class ShortPromptsFirst:
    """Serve short prompts first."""

    def key(self, request, rank):
        return (request.prompt_tokens, rank)


class OldestFirst:
    """Preempt whoever came first."""

    def choose(self, candidates):
        return 0


class FewAtOnce:
    """Admit at most five requests, and none into a pool that is nearly full."""

    def allows(self, request, free_blocks, running):
        return running < 5 and (free_blocks > 4 or running == 0)


class Broken:
    """Fail whenever asked."""

    def key(self, request, rank):
        raise RuntimeError("broken on purpose")


class NewestFirst(EvictionPolicy):
    """Evict what was released last."""

    def __init__(self):
        super().__init__()
        self._order = {}

    def __len__(self):
        return len(self._order)

    def push(self, blocks, table):
        self._order.update(dict.fromkeys(blocks))

    def reuse(self, blocks, queued):
        for block in queued:
            del self._order[block]

    def pop(self, count):
        return [self._order.popitem()[0] for _ in range(count)]

    def blocks(self):
        return list(self._order)[::-1]
'''

_CHECKPOINT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}

_COEFFICIENTS_US = {  # invented; microseconds per unit of each feature of the fitted cost model
    "step": 700,
    "tokens": 9,
    "tokens_to_2": 25,
    "tokens_to_8": 40,
    "tokens_to_32": 12,
    "tokens_to_128": 5,
    "tokens_beyond_128": 3,
    "rows": 15,
    "sampled_rows": 11,
    "drawn_rows": 30,
    "beam_rows": 90,
    "beam_rows_to_16": 25,
    "beam_steps": 400,
    "decode_rows": 7,
    "decode_steps": 60,
    "decode_inputs": 35,
    "decode_kv": 0.02,
    "decode_distinct_kv": 0.05,
    "decode_padded_kv": 0.01,
    "decode_padded_blocks": 0.3,
    "prefill_rows": 45,
    "prefill_tokens": 1.5,
    "prefill_kv": 0.04,
    "prefill_blocks": 0.2,
    "prefill_work": 0.006,
    "blocks": 0.1,
    "new_blocks": 1.1,
    "copied_slots": 0.7,
    "freed_slots": 0.09,
    "swapped_slots": 0.8,
    "swapped_blocks": 6,
    "admitted_tokens": 0.6,
    "after_prefill": 180,
    "draft_passes": 400,
    "draft_tokens": 4,
    "draft_kv": 0.03,
    "decode_unseen_kv": 0.004,
    "prefill_unseen_kv": 0.01,
    "prefill_unseen_work": 0.002,
}
_CALIBRATION = {
    "name": "invented",
    "fingerprint": "invented",
    "coefficients_s": {name: value * 1e-6 for name, value in _COEFFICIENTS_US.items()},
    "heldout": {"step": {"n": 100.0, "mape": 0.02, "bias": 0.001, "p95": 0.05, "total_error": 0.003}},
    "beam_churn": {"2": 0.2, "4": 0.3},
    "beam_evenness": {"2": 0.9, "4": 0.6},
    "draft_acceptance": 0.7,
    "hull": {
        "rows": [1.0, 12.0],
        "query_tokens": [1.0, 200.0],
        "prefill_tokens": [0.0, 200.0],
        "kv_read_tokens": [1.0, 1500.0],
        "copies": [0.0, 3.0],
    },
    "validation": {"invented": {"tpot_mean": {"error": 0.01, "spread": 0.002}}},
    "grids": {
        "decode": {
            "across": [1.0, 4.0, 16.0],
            "along": [16.0, 128.0, 1024.0],
            "seconds": [[5e-5, 6e-5, 9e-5], [7e-5, 9e-5, 2e-4], [1e-4, 2e-4, None]],
        },
        "prefill": {
            "across": [16.0, 64.0, 256.0],
            "along": [0.0, 128.0, 1024.0],
            "seconds": [[8e-5, 9e-5, 1e-4], [2e-4, 3e-4, 6e-4], [7e-4, 1e-3, None]],
        },
    },
    "provenance": {"what": "invented", "device": "none", "probe_s": 0.001},
}


def write_inputs(folder: Path, traces: Path) -> None:
    """Write or copy everything that the points read into `folder`, the working directory of the sweeps."""
    inputs = folder / INPUTS
    (inputs / "checkpoint").mkdir(parents=True)
    for name, source in TRACES.items():
        shutil.copyfile(traces / source, inputs / name)
    rows = _workload_rows()
    _write_csv(inputs / "rows.csv", rows)
    forms = ("n", "best_of", "beam_width")
    _write_csv(inputs / "plain.csv", [{k: v for k, v in row.items() if k not in forms} for row in rows[:50]])
    _write_parents(inputs / "parents.parquet", [int(str(row["output_tokens"])) for row in rows[:50]])
    (inputs / "checkpoint" / "config.json").write_text(json.dumps(_CHECKPOINT), encoding="utf-8")
    (folder / f"{POLICY_MODULE}.py").write_text(_POLICIES, encoding="utf-8")


def _workload_rows() -> list[dict[str, object]]:
    """Requests with priorities, widths, tenants and shared prefixes, by plain arithmetic: the same everywhere."""
    rows: list[dict[str, object]] = []
    for i in range(90):
        prompt = 20 + (i * 37) % 180
        row: dict[str, object] = {"arrival_s": f"{i * 0.015:.3f}", "prompt_tokens": prompt}
        row |= {"output_tokens": 4 + (i * 13) % 60, "priority": (i * 7) % 4, "salt": "ab"[i % 9 == 0]}
        row |= {"session": f"s{i % 23}" if i % 3 == 0 else ""}
        row |= (
            {"prefix": f"text{i % 5}", "prefix_tokens": 8 + prompt // 2}
            if i % 4
            else {"prefix": "", "prefix_tokens": ""}
        )
        row |= {"n": 2 if i % 6 == 1 else "", "best_of": 3 if i % 12 == 1 else ""}
        row |= {"beam_width": (2, 4)[i % 2] if i % 10 in (2, 5) else ""}
        rows.append(row)
    return rows


def _write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_parents(path: Path, outputs: Sequence[int], width: int = 3) -> None:
    """A recording of beam search in the form that a measured point keeps: who continues whom at each selection."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = ("run", "request_id", "selection", "hypothesis", "parent")
    rows = [
        (0, request, selection, beam, (beam * (1 + (request + selection) % 3)) % width)
        for request, output in enumerate(outputs)
        for selection in range(output)
        for beam in range(width)
    ]
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)


# ---------------------------------------------------------------------------------------------------------------- run


class WrongInputError(Exception):
    """What the user asked for cannot be done; `str()` says why."""


def say(text: str) -> None:
    """A line of the answer, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Checkout:
    """Runs `python -m harness` with the code of one checkout, in a working directory of its own."""

    def __init__(self, root: Path, folder: Path) -> None:
        """`root` is the checkout; `folder` is the working directory and holds the caches."""
        self.root, self.folder = root.resolve(), folder.resolve()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PAGETWIN_")},
            "PYTHONPATH": f"{self.root}{os.pathsep}{self.root / 'kernels'}",
            "XDG_CACHE_HOME": str(self.folder / CACHE),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "PAGETWIN_NATIVE": "0",
        }

    def check(self) -> None:
        """Raise WrongInputError unless `import harness` finds the package of this checkout."""
        found = self.python("-c", "import harness; print(harness.__file__)")
        place = Path(found.stdout.strip() or "nowhere").resolve()
        if found.returncode or not place.is_relative_to(self.root):
            raise WrongInputError(
                f"{self.root}: 'import harness' finds {place} {found.stderr.strip()[-500:]}"
            )

    def harness(self, *words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command line of the harness."""
        return self.python("-m", "harness", *words, timeout=timeout)

    def python(self, *words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run the interpreter of this script on the checkout's code."""
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def empty_folder(path: Path) -> Path:
    """Create the output folder. Raises WrongInputError if something is in it already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WrongInputError(f"{path} is not an empty folder; name another one with --out")
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def run(root: Path, traces: Path, out: Path, groups: Sequence[Group]) -> int:
    """Run the groups with the code of the checkout `root`; returns the exit code."""
    missing = [source for source in TRACES.values() if not (traces / source).is_file()]
    if missing:
        raise WrongInputError(f"--traces {traces}: there is no {missing[0]}")
    folder = empty_folder(out)
    checkout = Checkout(root, folder)
    checkout.check()
    write_inputs(folder, traces)
    (folder / LOGS).mkdir()
    started, results = time.perf_counter(), {}
    for group in groups:
        results[group.name] = _run_group(checkout, group)
    facts = {"checkout": str(checkout.root), "folder": str(folder), "groups": results}
    (folder / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    points = sum(result["points"] for result in results.values())
    say(f"{points} points in {len(results)} groups, {time.perf_counter() - started:.0f} s, kept in {folder}")
    return 1 if any(result["exit_code"] for result in results.values()) else 0


def _run_group(checkout: Checkout, group: Group) -> dict[str, Any]:
    started = time.perf_counter()
    store = f"{STORES}/{group.name}"
    for settings in group.fitted:
        _plant_calibration(checkout, settings)
    fixed = ("measure=false", "workers=1", f"name={group.name}", f"out={store}")
    done = checkout.harness("sweep", *fixed, *group.overrides)
    log = checkout.folder / LOGS / f"{group.name}.txt"
    log.write_text(f"{done.stdout}\n--- standard error\n{done.stderr}", encoding="utf-8")
    points = len(list((checkout.folder / store).glob("points/*/record.json")))
    seconds = round(time.perf_counter() - started, 1)
    say(
        f"{group.name:16} {points:4} points {seconds:6.1f} s"
        + (f"  EXIT CODE {done.returncode}, see {log}" if done.returncode else "")
    )
    return {"exit_code": done.returncode, "points": points, "wall_seconds": seconds}


def _plant_calibration(checkout: Checkout, settings: Sequence[str]) -> None:
    """Write invented coefficients where the checkout looks for those of this machine."""
    told = checkout.harness("calibrate", "--dry-run", *settings)
    found = re.search(r"calibration/[\w.+-]+\.json", told.stdout)
    if told.returncode or not found:
        raise WrongInputError(f"'calibrate --dry-run' names no file:\n{told.stdout}{told.stderr}")
    path = checkout.folder / found[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(_CALIBRATION), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- diff

Point = tuple[str, ...]  # its overrides, which name it
_MISSING = "(missing)"


@dataclass(frozen=True)
class Difference:
    """One value that differs: at which point, under which key, and both values."""

    point: str
    key: str
    left: object
    right: object

    @property
    def title(self) -> str:
        """What differs."""
        return self.point

    @property
    def line(self) -> str:
        """How it differs."""
        return f"{self.key}: {_shown(self.left)} | {_shown(self.right)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 300 else text[:297] + "..."


class Results:
    """What `run` left in a folder. Strings are read with the folder and the checkout replaced by fixed words."""

    def __init__(self, folder: Path) -> None:
        """Raises WrongInputError if the folder holds no finished run."""
        try:
            facts = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise WrongInputError(f"{folder} holds no finished run ({error})") from None
        self.folder, self.groups = folder, facts["groups"]
        self._places = ((facts["folder"], "<folder>"), (facts["checkout"], "<checkout>"))

    def points(self, group: str) -> dict[Point, Path]:
        """Folders of the group's points, finished or failed, by overrides."""
        found: dict[Point, Path] = {}
        for path in sorted((self.folder / STORES / group).glob("points/*/*.json")):
            point = tuple(self.document(path)["overrides"])
            if found.setdefault(point, path.parent) != path.parent:
                raise WrongInputError(f"{path}: another point has the same overrides")
        return found

    def document(self, path: Path) -> dict[str, Any]:
        """A JSON file."""
        text = path.read_text(encoding="utf-8")
        for place, word in self._places:
            text = text.replace(place, word)
        content: dict[str, Any] = json.loads(text)
        return content

    def table(self, path: Path) -> dict[str, list[Any]]:
        """A Parquet file as columns, each led by its type."""
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        return {
            name: [str(table.column(name).type), *table.column(name).to_pylist()]
            for name in table.column_names
        }


def diff(left: Results, right: Results, only: Sequence[str]) -> Iterator[Difference]:
    """Every difference between two runs."""
    chosen = [name for name in dict.fromkeys([*left.groups, *right.groups]) if not only or name in only]
    for group in chosen:
        if (group in left.groups) != (group in right.groups):
            yield Difference(
                group, "the group", *("(run)" if group in one.groups else _MISSING for one in (left, right))
            )
            continue
        codes = [one.groups[group]["exit_code"] for one in (left, right)]
        if codes[0] != codes[1]:
            yield Difference(group, "exit code of the sweep", *codes)
        yield from _diff_group(left, right, group)


def _diff_group(left: Results, right: Results, group: str) -> Iterator[Difference]:
    points = left.points(group), right.points(group)
    common = set.intersection(*map(set, (*points[0], *points[1]))) if any(points) else set()
    for point in dict.fromkeys([*points[0], *points[1]]):
        label = f"{group}: {' '.join(text for text in point if text not in common)}"
        folders = [found.get(point) for found in points]
        if folders[0] is None or folders[1] is None:
            yield Difference(label, "the point", *(_MISSING if one is None else "(there)" for one in folders))
        else:
            yield from _diff_point(left, right, label, folders[0], folders[1])
    stores = left.folder / STORES / group, right.folder / STORES / group
    yield from _diff_files(
        left, right, f"{group}: sweep.json", stores[0] / "sweep.json", stores[1] / "sweep.json"
    )
    summaries = [store / "summary.parquet" for store in stores]
    yield from _diff_files(left, right, f"{group}: summary.parquet", *summaries)


def _diff_point(left: Results, right: Results, label: str, one: Path, other: Path) -> Iterator[Difference]:
    for name in sorted({path.name for folder in (one, other) for path in folder.iterdir()}):
        yield from _diff_files(left, right, label, one / name, other / name)


def _diff_files(left: Results, right: Results, label: str, one: Path, other: Path) -> Iterator[Difference]:
    if not (one.exists() and other.exists()):
        if one.exists() or other.exists():
            there = ("(there)" if path.exists() else _MISSING for path in (one, other))
            yield Difference(label, one.name, *there)
    elif one.suffix == ".json":
        pairs = dict(_leaves(left.document(one))), dict(_leaves(right.document(other)))
        yield from _diff_leaves(label, one.name, *pairs)
    elif one.suffix == ".parquet":
        yield from _diff_columns(label, one.name, left.table(one), right.table(other))
    else:
        yield Difference(label, one.name, "a file that this script cannot read", "")


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys joined by dots, places of a list in brackets; an empty container is a value of its own."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value:
        for place, item in enumerate(value):
            yield from _leaves(item, f"{prefix}.[{place}]")
    else:
        yield prefix, value


def is_ignored(key: str) -> bool:
    """Whether the value under a key may differ."""
    return any(fnmatchcase(key, pattern) for pattern in IGNORED)


def _diff_leaves(
    label: str, file: str, one: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[Difference]:
    for key in dict.fromkeys([*one, *other]):
        left, right = one.get(key, _MISSING), other.get(key, _MISSING)
        ignored = is_ignored(key) and (key.endswith("]") or _MISSING not in (left, right))
        if not ignored and not _equal(left, right):
            yield Difference(label, f"{file} {key}", left, right)


def _diff_columns(
    label: str, file: str, one: Mapping[str, list[Any]], other: Mapping[str, list[Any]]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*one, *other]):
        left, right = one.get(name), other.get(name)
        if left is None or right is None:
            yield Difference(
                label, f"{file} column {name}", *(_MISSING if c is None else "(there)" for c in (left, right))
            )
        elif left[0] != right[0] and not is_ignored(name):
            yield Difference(label, f"{file} type of column {name}", left[0], right[0])
        elif len(left) != len(right):
            yield Difference(label, f"{file} rows of column {name}", len(left) - 1, len(right) - 1)
        elif not is_ignored(name):
            rows = [row for row in range(1, len(left)) if not _equal(left[row], right[row])]
            if rows:
                where = f"{file} {name}, row {rows[0] - 1} ({len(rows)} of {len(left) - 1} rows differ)"
                yield Difference(label, where, left[rows[0]], right[rows[0]])


def _equal(one: object, other: object) -> bool:
    """Equal in type and value; two NaN are equal."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and one == other


class Told(Protocol):
    """A difference that can be printed."""

    @property
    def title(self) -> str:
        """What differs."""
        ...

    @property
    def line(self) -> str:
        """How it differs."""
        ...


def print_differences(differences: Iterable[Told], most: int) -> int:
    """Print up to `most` of them and say how many there are; returns the exit code."""
    count, title = 0, ""
    for count, difference in enumerate(differences, start=1):
        if count <= most and difference.title != title:
            title = difference.title
            say(title)
        if count <= most:
            say(f"    {difference.line}")
    if count > most:
        say(f"... and {count - most} more; --most N prints N")
    say(f"{count} differences" if count else "no differences")
    return 1 if count else 0


def _chosen(names: Sequence[str] | None) -> tuple[Group, ...]:
    known = {group.name: group for group in GROUPS}
    for name in names or ():
        if name not in known:
            raise WrongInputError(f"--only: there is no group '{name}'; there are {', '.join(known)}")
    return tuple(group for group in GROUPS if not names or group.name in names)


def main() -> int:
    """Read the command line; returns the exit code."""
    first, _, rest = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawTextHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    runs = actions.add_parser("run", help="run the points of a checkout")
    runs.add_argument("checkout", type=Path)
    runs.add_argument("--out", type=Path, required=True, help="an empty folder for the results")
    runs.add_argument("--traces", type=Path, required=True, help="the folder of the published traces")
    runs.add_argument("--only", nargs="+", metavar="GROUP", help="these groups only")
    diffs = actions.add_parser("diff", help="compare the results of two runs")
    diffs.add_argument("left", type=Path)
    diffs.add_argument("right", type=Path)
    diffs.add_argument("--only", nargs="+", metavar="GROUP", help="these groups only")
    diffs.add_argument("--most", type=int, default=100, metavar="N", help="print so many differences (100)")
    flags = parser.parse_args()
    try:
        groups = _chosen(flags.only)
        if flags.action == "run":
            return run(flags.checkout, flags.traces.resolve(), flags.out, groups)
        results = Results(flags.left), Results(flags.right)
        return print_differences(diff(*results, flags.only or ()), flags.most)
    except WrongInputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
