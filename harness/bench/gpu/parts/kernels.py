"""Part `kernels`: every kernel at full size, against the memory's speed and against every other provider.

`bench kernels` begins no case after its seconds are over and keeps what it has; what is left out is spread evenly over
the grid (`harness.bench.kernels.full_presets`), and `--only` gives a step the whole call.
"""

from harness.bench.gpu.counters import HITS, INSTRUCTIONS, READ
from harness.bench.gpu.parts import Setting
from harness.bench.gpu.parts.words import HARNESS, PYTEST, program, step, workers
from harness.bench.gpu.step import SECONDS, Step

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
VECTOR = "harness.bench.gpu.programs.vector_path:attend"
"""Our decode with one way of finding blocks at every block size, so that the curve crosses no second variant."""

SETS: tuple[tuple[str, str, int], ...] = (  # name, providers, seconds
    ("decode", "contiguous,sdpa,flashinfer", 150),
    ("blocks", "contiguous,flashinfer", 35),
    ("prefill", "sdpa,flashinfer", 50),
    ("cascade", "cascade,cascade-always", 75),
    ("flex", "flex", 45),
)


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
