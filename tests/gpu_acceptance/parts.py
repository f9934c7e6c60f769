"""The parts, and the steps of each: the command, its time limit, and how it is rehearsed without a GPU.

`quick` is a first look. `kernels` tests and times every kernel. `engine` times decode steps. `prediction` compares
prediction with measurement. A part takes at most ten minutes, starting and packing included.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from gpu_acceptance.contact import WRONG_DECODE
from gpu_acceptance.counters import HITS, INSTRUCTIONS, READ
from harness.config.errors import UserError

SECONDS = "{seconds}"
"""In a command, a placeholder for the seconds that it may work: its limit less the time for starting and writing."""

START_AND_WRITE_S = 12.0
_TOOL_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/bin")  # of the CUDA toolkit, often not on the PATH

PARTS = ("quick", "kernels", "engine", "prediction")
HARNESS = ("-m", "harness")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
STREAMED = ("-p", "gpu_acceptance.stream", "--stream")
RISKY = "hopper"  # in the names of tests of a kernel that no GPU has run: they come last, in processes of their own
ALL_GPU_TESTS = ("--continue-on-collection-errors", "tests/paged_kernels", "tests/engine")

# Seconds that a calibration is asked for. Its limit is longer, to start the engine and to compile its kernels.
QUICK_CALIBRATION_S = 45
CALIBRATION_S = 65
LIMITS_S = {"1b": 230, "8b": 335}  # of the engine's steps, by model

SMALL_TESTS = (
    "test_decode_at_any_block_size or test_prefill_at_any_block_size or test_heads_before_slots_in_memory "
    "or test_any_number_of_parts or test_a_cascade_equals_the_whole or test_tokens_are_written_as_torch_writes_them "
    "or test_copies_of_all_layers_are_simultaneous or test_partial_attentions_merge"
)
"""Some tests of each kernel. Under a checker of memory accesses a test takes many times longer."""

# torch's allocator places tensors inside large allocations. There an access beyond a tensor's end hits another tensor,
# which the checker cannot see. Without torch's cache every tensor is an allocation of its own.
_NO_CACHING = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
_MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "99")
# ncu leaves the device's clocks unchanged. It collects whole sections, whose names are the same in all versions, and
# the metrics that the block-size curve needs.
_NCU = (
    "ncu",
    "--clock-control",
    "none",
    "--target-processes",
    "all",
    "--profile-from-start",
    "off",
    "--csv",
    "--print-units",
    "base",
)
_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats", "LaunchStats")
_METRICS = ",".join((READ, HITS, INSTRUCTIONS))
VECTOR = "gpu_acceptance.ncu_calls:attend"
"""Our decode kernel, reading block ids in the same way at every block size, so that one variant makes the curve."""

SETS: tuple[tuple[str, str, int], ...] = (  # name, providers, seconds
    ("decode", "contiguous,sdpa,flashinfer", 125),
    ("blocks", "contiguous,flashinfer", 35),
    ("cascade", "cascade,cascade-always", 65),
    ("flex", "flex", 40),
    ("prefill", "paged-hopper,sdpa,flashinfer", 60),
)
_MODEL = ("model=small_llama", "model.dtype=bfloat16")
_POLICIES = "cache=paged,contiguous_max,contiguous_pow2,contiguous_oracle"


@dataclass(frozen=True)
class Step:
    """One command of a part.

    `answers` are the exit codes that count as success; a gate without a baseline answers 3, for example. `rehearsal` is
    the command of a dry run, which needs no GPU. `tool` is an optional program that starts the command. Where the tool
    is not installed the step is left out, which is no failure. After an exit code of `ends` no other step is begun.
    """

    name: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit_s: float
    answers: tuple[int, ...] = (0,)
    tool: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    ends: tuple[int, ...] = ()

    def within(self, limit_s: float) -> "Step":
        """The step with another limit. `SECONDS` in its commands is replaced by the time that they may work."""
        seconds = str(max(1, round(limit_s - START_AND_WRITE_S)))

        def filled(words: Sequence[str]) -> tuple[str, ...]:
            return tuple(word.replace(SECONDS, seconds) for word in words)

        return replace(self, limit_s=limit_s, command=filled(self.command), rehearsal=filled(self.rehearsal))

    @property
    def words(self) -> tuple[str, ...]:
        """The command line to start. A tool comes first, by its full path."""
        return (found_tool(self.tool) or self.tool, *self.command) if self.tool else self.command


@dataclass(frozen=True)
class Outcome:
    """How a step ended. `state`: `done`, `failed`, `stopped` (out of time), `left out` (no time), `not installed`."""

    step: Step
    state: str
    code: int | None
    seconds: float


def found_tool(name: str) -> str | None:
    """The path of an optional program; None where it is not installed."""
    beside = (str(Path(folder) / name) for folder in _TOOL_FOLDERS)
    return shutil.which(name) or next((path for path in beside if shutil.which(path)), None)


REHEARSED = ("engine=auto", "device.name=cpu")
"""Overrides of a rehearsal: the machine at hand takes the GPU's place, because it may have none."""


@dataclass(frozen=True)
class Setting:
    """What the steps of a part depend on.

    `out` is the folder for everything that the part writes. `device` holds the overrides that describe this
    machine's GPU; its memory sizes the simulated pool. `trace` is an Azure LLM inference CSV; None takes a
    generated trace.
    """

    out: Path
    device: tuple[str, ...]
    trace: str | None = None


def steps_of(part: str, setting: Setting) -> list[Step]:
    """The steps of a part. Steps that others depend on come first.

    Raises:
        UserError: there is no such part.
    """
    builders: Mapping[str, Callable[[Setting], list[Step]]] = {
        "quick": quick_steps,
        "kernels": kernel_steps,
        "engine": engine_steps,
        "prediction": prediction_steps,
    }
    if part not in builders:
        raise UserError(f"--part {part}: there is no such part; choose {', '.join(PARTS)}")
    return builders[part](setting)


def workers() -> tuple[str, ...]:
    """Options for a few test processes, where pytest-xdist is installed. Most test time is compiling on the host."""
    return ("-n", "4") if find_spec("xdist") else ()


def program(name: str) -> tuple[str, str]:
    """The words that start a program of this folder."""
    return ("-m", f"gpu_acceptance.{name}")


def step(
    name: str,
    command: Sequence[str],
    rehearsal: Sequence[str],
    limit_s: float,
    *,
    answers: tuple[int, ...] = (0,),
    tool: Sequence[str] = (),
    environment: tuple[tuple[str, str], ...] = (),
) -> Step:
    """A step that runs in this Python. `tool` is an optional program, with its options, that starts the command."""
    name_of_tool, *options = tool or ("",)
    return Step(
        name,
        (*options, sys.executable, *command),
        (sys.executable, *rehearsal),
        limit_s,
        answers,
        name_of_tool or None,
        environment,
    )


def quick_steps(setting: Setting) -> list[Step]:
    """The part `quick`: tests, kernels, latency gate, calibration and a small sweep."""
    out = setting.out
    kernels = (
        *(*HARNESS, "bench", "kernels", "--preset", "gpu", "--device", "cuda"),
        *("--seconds", SECONDS, "--out", str(out / "kernels")),
    )
    written = ("--save", str(out / "latency.json"), "--markdown", str(out / "gate.md"))
    gate = (*HARNESS, "gate", "--layer", "latency", *written)
    same = ("experiment=gpu", *setting.device, f"cost.cache_dir={out / 'calibration'}")
    calibrate = (*_calibration(same, QUICK_CALIBRATION_S), "--no-grid")
    return [
        _contact(setting),
        _tests(setting, "tests", 100),
        step("kernels", kernels, (*kernels, "--dry-run"), 195),
        step("gate", gate, (*gate, "--dry-run"), 75, answers=(0, 1, 3)),
        step("calibration", calibrate, (*calibrate, *REHEARSED, "--dry-run"), 70),
        _sweep(setting, "sweep", same, 90),
    ]


def _calibration(overrides: Sequence[str], budget_s: int) -> tuple[str, ...]:
    """The command of a calibration. It measures one point, and its coefficients serve all points of the part."""
    one_point = ("cache=paged", "cache.block_size=16", "decoding.beam_width=1")
    return (*HARNESS, "calibrate", *overrides, *one_point, "--budget", str(budget_s))


def kernel_steps(setting: Setting) -> list[Step]:
    """The part `kernels`: first contact, tests, memory checker, the grid of calls in five sets, hardware counters.

    What runs the prefill kernel for Hopper comes last.
    """
    *sets, prefill = _sets(setting)
    tests = _contact(setting), _tests(setting, "tests", 80)
    return [*tests, _memcheck(setting), *sets, _counters(setting), _tests(setting, "hopper", 20), prefill]


def _contact(setting: Setting) -> Step:
    command = (*program("contact"), "--out", str(setting.out / "contact.jsonl"))
    made = step("contact", command, (*command, "--dry-run"), 40, answers=(0, 1))
    return replace(made, ends=(WRONG_DECODE,))


def _tests(setting: Setting, name: str, limit_s: float) -> Step:
    """All tests but those of risky kernels, or those (`hopper`), each result written at once."""
    chosen = ("-k", RISKY if name == "hopper" else f"not {RISKY}")
    command = (*PYTEST, *workers(), *ALL_GPU_TESTS, *chosen, *STREAMED, str(setting.out / f"{name}.jsonl"))
    return step(name, command, (*command, "--collect-only"), limit_s)


def _memcheck(setting: Setting) -> Step:
    command = (*PYTEST, "tests/paged_kernels", "-k", SMALL_TESTS)
    tool = (*_MEMCHECK, "--log-file", str(setting.out / "memcheck.txt"))
    return step("memcheck", command, (*command, "--collect-only"), 60, tool=tool, environment=_NO_CACHING)


def _sets(setting: Setting) -> list[Step]:
    made = []
    for name, providers, limit in SETS:
        command = (
            *(*HARNESS, "bench", "kernels", "--preset", f"full-{name}", "--provider", providers),
            *("--device", "cuda", "--rounds", "10", "--seconds", SECONDS, "--out", str(setting.out / name)),
            *(("--function", VECTOR) if name == "blocks" else ()),
        )
        made.append(step(name, command, (*command, "--dry-run"), limit))
    return made


def _counters(setting: Setting) -> Step:
    out = ("--out", str(setting.out / "counters"))
    sections = [word for section in _SECTIONS for word in ("--section", section)]
    tool = (
        *_NCU,
        "--page",
        "raw",
        *sections,
        "--metrics",
        _METRICS,
        "--log-file",
        str(setting.out / "counters.csv"),
    )
    command = (*program("ncu_calls"), *out)
    return step("counters", command, (*command, "--dry-run"), 45, tool=tool)


def engine_steps(setting: Setting) -> list[Step]:
    """The part `engine`, one step for each model: batch 1 to 256, graphs on and off, then the peer on its weights."""
    return [_model_step(setting, model, limit) for model, limit in LIMITS_S.items()]


def _model_step(setting: Setting, model: str, limit: int) -> Step:
    out = ("--out", str(setting.out / f"{model}.json"))
    command = (*program("decoding"), "--model", model, *out)
    return step(model, (*command, "--seconds", SECONDS), (*command, "--dry-run"), limit)


def prediction_steps(setting: Setting) -> list[Step]:
    """The part `prediction`: a calibration, three sweeps that use it, and the trial of the latency gate."""
    same = (
        "engine=cuda",
        *setting.device,
        f"cost.cache_dir={setting.out / 'calibration'}",
        *_MODEL,
    )
    calibrate = _calibration(same, CALIBRATION_S)
    return [
        step("calibration", calibrate, (*calibrate, *REHEARSED, "--dry-run"), 100),
        _sweep(setting, "default", (*same, "experiment=default", "replay.repeats=2"), 150),
        _sweep(setting, "azure", (*_azure(setting.trace), *same), 75),
        _sweep(setting, "contiguous", (*_equal_memory(), *same), 70),
        _gate(setting),
    ]


def _sweep(setting: Setting, name: str, overrides: tuple[str, ...], limit: float) -> Step:
    command = (*HARNESS, "sweep", *overrides, f"out={setting.out / name}")
    return step(name, command, (*command, *REHEARSED, "--dry-run"), limit)


def _azure(trace: str | None) -> tuple[str, ...]:
    """Overrides: the first requests of the recorded conversation trace, or of one calibrated on it.

    Lengths are unchanged. Arrivals keep their pattern and come six times as fast, because one model of this size would
    be idle most of the time.
    """
    source = ("trace=azure", f"trace.path={trace}") if trace else ("trace=azure_conv",)
    load = ("workload=window", "workload.num_requests=100", "workload.request_rate=30")
    sizes = ("cache.max_model_len=4096", "cache.pool_tokens=65536")
    return ("experiment=azure_window", *source, *load, *sizes, "replay.repeats=2")


def _equal_memory() -> tuple[str, ...]:
    """Overrides: the ShareGPT lengths of the PagedAttention paper, all at once, on a pool that few of them fill."""
    load = ("trace=sosp23_sharegpt", "replay=offline", "workload=window", "workload.num_requests=96")
    return (_POLICIES, *load, "cache.pool_tokens=16384", "cache.max_model_len=2048", "replay.repeats=1")


def _gate(setting: Setting) -> Step:
    command = (*program("gate_trial"), "--out", str(setting.out / "gate.json"))
    return step("gate", command, (*command, "--dry-run"), 175)
