"""The parts, and the steps of each: which command, how long it may take, how it is rehearsed without a GPU.

`quick` is a first look. `kernels` tests and times every kernel. `engine` times decode steps. `prediction` compares
prediction with measurement. A part fits into a call of ten minutes, starting and packing included.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from gpu_acceptance.counters import HITS, INSTRUCTIONS, READ
from harness.config.errors import UserError

SECONDS = "{seconds}"
"""Stands in a command for the seconds that it may work: its limit, less what starting and writing take."""

START_AND_WRITE_S = 12.0
_BESIDE_CUDA = (
    "/usr/local/cuda/bin",
    "/opt/nvidia/bin",
)  # where the toolkit's tools lie, often outside the PATH
PARTS = ("quick", "kernels", "engine", "prediction")
HARNESS = ("-m", "harness")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
_PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-m",
    "gpu",
    "--continue-on-collection-errors",
    "tests/paged_kernels",
    "tests/engine",
)
_HARNESS = ("-m", "harness")
QUICK_CALIBRATION_S = (
    45  # what it is asked for; its limit leaves room to start the engine and to compile its kernels
)
SMALL_TESTS = (
    "test_decode_at_any_block_size or test_prefill_at_any_block_size or test_heads_before_slots_in_memory "
    "or test_any_number_of_parts or test_a_cascade_equals_the_whole or test_tokens_are_written_as_torch_writes_them "
    "or test_copies_of_all_layers_are_simultaneous or test_partial_attentions_merge"
)
"""Each of our kernels in some forms: under a checker of memory accesses a test takes many times longer."""
# torch hands out pieces of large allocations, in which an access beyond a tensor's end hits another tensor and is seen
# by nobody: without its cache every tensor is an allocation of its own.
_NO_CACHING = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)
_MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "99")
# The device's clocks stay as they are. Sections, whose names outlive versions, and what the block-size curve asks for.
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
"""Our decode with one way of finding blocks at every block size, so that the curve crosses no second variant."""
SETS: tuple[tuple[str, str, int], ...] = (  # name, providers, seconds
    ("decode", "contiguous,sdpa,flashinfer", 150),
    ("blocks", "contiguous,flashinfer", 35),
    ("prefill", "sdpa,flashinfer", 50),
    ("cascade", "cascade,cascade-always", 75),
    ("flex", "flex", 45),
)
LIMITS = {"1b": 230, "8b": 335}
CALIBRATION_S = 65
_MODEL = ("model=small_llama", "model.dtype=bfloat16")
_POLICIES = "cache=paged,contiguous_max,contiguous_pow2,contiguous_oracle"


@dataclass(frozen=True)
class Step:
    """One command.

    `answers` are the exit codes that mean it did its work: a gate without a baseline answers 3, and that is an answer.
    `rehearsal` is the command of a dry run: the same words as far as they go without a GPU. `tool` is an optional
    program that starts the command: where it is not installed the step is left out, and that is no failure.
    """

    name: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit_s: float
    answers: tuple[int, ...] = (0,)
    tool: str | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def within(self, limit_s: float) -> "Step":
        """The same with another limit, its commands told how long they may work."""
        seconds = str(max(1, round(limit_s - START_AND_WRITE_S)))

        def filled(words: Sequence[str]) -> tuple[str, ...]:
            return tuple(word.replace(SECONDS, seconds) for word in words)

        return replace(self, limit_s=limit_s, command=filled(self.command), rehearsal=filled(self.rehearsal))

    @property
    def words(self) -> tuple[str, ...]:
        """What is started: the tool, where there is one, by its full path."""
        return (found_tool(self.tool) or self.tool, *self.command) if self.tool else self.command


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `done`, `failed`, `stopped` (out of time), `left out` (no time) or `not installed`."""

    step: Step
    state: str
    code: int | None
    seconds: float


def found_tool(name: str) -> str | None:
    """Where an optional program lies, or None."""
    beside = (str(Path(folder) / name) for folder in _BESIDE_CUDA)
    return shutil.which(name) or next((path for path in beside if shutil.which(path)), None)


@dataclass(frozen=True)
class Setting:
    """What a part's steps depend on.

    `out` takes everything that the part writes; `device` is the option of the group `device` that describes this
    machine; `trace` an Azure LLM inference CSV, None for the generated one.
    """

    out: Path
    device: str
    trace: str | None = None


def steps_of(part: str, setting: Setting) -> list[Step]:
    """The part's steps, those that others rest on first.

    Raises:
        UserError: there is no such part.
    """
    builders = _builders()
    if part not in builders:
        raise UserError(f"--part {part}: there is no such part; choose {', '.join(builders)}")
    return builders[part](setting)


def _builders() -> Mapping[str, Callable[[Setting], list[Step]]]:

    builders = (
        lambda setting: quick_steps(setting.out, setting.device),
        kernel_steps,
        engine_steps,
        prediction_steps,
    )
    return dict(zip(PARTS, builders, strict=True))


def workers() -> tuple[str, ...]:
    """Tests in a few processes where pytest-xdist is installed: most of their time is compiling on the host."""
    return ("-n", "4") if find_spec("xdist") else ()


def program(name: str) -> tuple[str, str]:
    """A program of this folder."""
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
    """A step of this Python; `tool` is an optional program with its options that starts the command."""
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


def quick_steps(out: Path, device: str) -> list[Step]:
    """All steps, the ones that others rest on first.

    Args:
        out: the folder that takes everything.
        device: option of the group `device` whose memory the simulated pool is sized by.
    """
    kernels = (
        *_HARNESS,
        "bench",
        "kernels",
        "--preset",
        "gpu",
        "--device",
        "cuda",
        "--seconds",
        SECONDS,
        "--out",
        str(out / "kernels"),
    )
    told = ("--save", str(out / "latency.json"), "--markdown", str(out / "gate.md"))
    gate = (*_HARNESS, "gate", "--layer", "latency", *told)
    same = ("experiment=gpu", f"device={device}", f"cost.cache_dir={out / 'calibration'}")
    sweep = (*_HARNESS, "sweep", *same, f"out={out / 'sweep'}")
    one = (
        "cache=paged",
        "cache.block_size=16",
        "decoding.beam_width=1",
    )  # a calibration is of one point, for all
    calibrate = (*_HARNESS, "calibrate", *same, *one, "--budget", str(QUICK_CALIBRATION_S), "--no-grid")
    dry = ("engine=auto", "--dry-run")
    return [  # ten minutes in all, starting and packing included
        _quick_step(
            "tests", (*_PYTEST, f"--junitxml={out / 'tests.xml'}"), (*_PYTEST, "--collect-only"), 140
        ),
        _quick_step("kernels", kernels, (*kernels, "--dry-run"), 195),
        _quick_step("gate", gate, (*gate, "--dry-run"), 75, (0, 1, 3)),
        _quick_step("calibration", calibrate, (*calibrate, *dry), 70),
        _quick_step("sweep", sweep, (*sweep, *dry), 90),
    ]


def _quick_step(
    name: str,
    command: tuple[str, ...],
    rehearsal: tuple[str, ...],
    limit_s: float,
    answers: tuple[int, ...] = (0,),
) -> Step:
    return Step(name, (sys.executable, *command), (sys.executable, *rehearsal), limit_s, answers)


def kernel_steps(setting: Setting) -> list[Step]:
    """Tests, memory checker, the grid in five sets, hardware counters."""
    return [_tests(setting), _memcheck(setting), *_sets(setting), _counters(setting)]


def _tests(setting: Setting) -> Step:
    command = (*PYTEST, *workers(), "--continue-on-collection-errors", "tests/paged_kernels", "tests/engine")
    return step(
        "tests", (*command, f"--junitxml={setting.out / 'tests.xml'}"), (*command, "--collect-only"), 110
    )


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
    return step(
        "counters", (*program("counters"), *out), (*program("counters"), *out, "--dry-run"), 45, tool=tool
    )


def engine_steps(setting: Setting) -> list[Step]:
    """A step a model: batch 1 to 256, graphs on and off, then the peer on the same weights."""
    return [_model_step(setting, model, limit) for model, limit in LIMITS.items()]


def _model_step(setting: Setting, model: str, limit: int) -> Step:
    out = ("--out", str(setting.out / f"{model}.json"))
    command = (*program("decoding"), "--model", model, *out, "--seconds", SECONDS)
    return step(model, command, (*program("decoding"), "--model", model, *out, "--dry-run"), limit)


def prediction_steps(setting: Setting) -> list[Step]:
    """A calibration, three sweeps that find it, and the trial of the latency gate."""
    same = (
        "engine=cuda",
        f"device={setting.device}",
        f"cost.cache_dir={setting.out / 'calibration'}",
        *_MODEL,
    )
    one = (*same, "cache=paged", "cache.block_size=16", "decoding.beam_width=1")
    calibrate = (*HARNESS, "calibrate", *one, "--budget", str(CALIBRATION_S))
    return [
        step("calibration", calibrate, (*calibrate, "engine=auto", "--dry-run"), 100),
        _sweep(setting, "default", (*same, "experiment=default", "replay.repeats=2"), 150),
        _sweep(setting, "azure", (*_azure(setting.trace), *same), 75),
        _sweep(setting, "contiguous", (*_equal_memory(), *same), 70),
        _gate(setting),
    ]


def _sweep(setting: Setting, name: str, overrides: tuple[str, ...], limit: float) -> Step:
    command = (*HARNESS, "sweep", *overrides, f"out={setting.out / name}")
    return step(name, command, (*command, "engine=auto", "--dry-run"), limit)


def _azure(trace: str | None) -> tuple[str, ...]:
    """The first requests of the recorded conversation trace, or of one calibrated on it, with lengths as they are.

    Arrivals keep their shape and come six times as fast: one model of this size would be idle most of the time.
    """
    source = ("trace=azure", f"trace.path={trace}") if trace else ("trace=azure_conv",)
    load = ("workload=window", "workload.num_requests=100", "workload.request_rate=30")
    sizes = ("cache.max_model_len=4096", "cache.pool_tokens=65536")
    return ("experiment=azure_window", *source, *load, *sizes, "replay.repeats=2")


def _equal_memory() -> tuple[str, ...]:
    """Lengths of the PagedAttention paper's ShareGPT workload, all there at once, on a pool that few of them fill."""
    load = ("trace=sosp23_sharegpt", "replay=offline", "workload=window", "workload.num_requests=96")
    return (_POLICIES, *load, "cache.pool_tokens=16384", "cache.max_model_len=2048", "replay.repeats=1")


def _gate(setting: Setting) -> Step:
    out = ("--out", str(setting.out / "gate.json"))
    return step("gate", (*program("gate_trial"), *out), (*program("gate_trial"), *out, "--dry-run"), 175)
