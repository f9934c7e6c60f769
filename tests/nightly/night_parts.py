"""The night in parts, each of about ten minutes on two cores, that of Triton's interpreter of half an hour. One part
after the other, each in processes of its own.

    python tests/nightly/night_parts.py                  # all; `make nightly`
    python tests/nightly/night_parts.py 3/10 fuzz        # these; `make nightly NIGHT="3/10 fuzz"`
    python tests/nightly/night_parts.py --kept           # which parts passed on this commit, and which are left

The tests are split by file, so that what the tests of a file share is made once: the files that take long (SECONDS)
one after the other to the part with the least, then all others by their number of lines. Each part that ends leaves a
line in `build/nights.tsv`: when it began, commit, part, passed or failed, CPU-seconds, and the seed of the day, which
brings the same draws back (`PAGETWIN_SEED`). Of a test with many cases the seed also chooses the third that runs, so
that three dates, or three seeds in a row, run every case; `PAGETWIN_NIGHTLY=1 pytest` runs all at once. A test that
hangs ends its part after two hours, with its name and stack.
"""

import os
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from harness.console import say

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "nights.tsv"
SEED = os.environ.get("PAGETWIN_SEED", str(datetime.now(UTC).toordinal()))  # as in tests/support/tiers.py
PARTS = 10  # of the tests
LINES_A_SECOND = 40  # of a file that is not among SECONDS
SECONDS = {  # CPU-seconds of a night, where they were measured and are many
    "test_triton.py": 1900,  # Triton's interpreter, one test of 1,550
    "test_ptx_kernels.py": 1000,
    "test_families.py": 660,
    "test_measured_tiers.py": 500,
    "test_tiers.py": 450,
    "test_beam_grid.py": 300,
    "test_groups.py": 250,
    "test_eviction_rules.py": 250,
    "test_compiled_groups.py": 220,
    "test_compiled.py": 150,
    "test_plan.py": 130,
    "test_random_walks.py": 120,
    "test_fit.py": 110,
    "test_compose.py": 100,
    "test_point.py": 60,
    "test_figures.py": 60,
    "test_fuzz.py": 50,
    "test_many_clients.py": 40,
    "test_compiled_tiers.py": 40,
    "test_compiled_choice.py": 40,
    "test_determinism.py": 40,
    "test_chosen_figure.py": 40,
    "test_gate_cpu.py": 40,
    "test_reuse.py": 30,
    "test_odd_requests.py": 30,
    "test_kernel_runs.py": 30,
    "test_fast_forward.py": 30,
}
HANGS = "--max-worker-restart 0 -o faulthandler_timeout=7200 -o faulthandler_exit_on_timeout=true"
OTHERS = {
    "gate": "-m harness gate --layer resource",
    "fuzz": "tests/nightly/fuzz_traces.py -max_total_time=600 -rss_limit_mb=4000",
    "kills": "tests/nightly/kill_drill.py local 50",
    "kills-measured": "tests/nightly/kill_drill.py local 20 --measured --repeats 3 --points 12",
    "planted": "tests/nightly/planted_logs.py --seeds 3 --drawn 5",
    "newest": "tests/nightly/newest_transformers.py -n auto tests/engine/runtime",
}
ALL = (*OTHERS, *(f"{part}/{PARTS}" for part in range(1, PARTS + 1)))


def files_of(part: int, parts: int) -> list[str]:
    """The files of tests of one part."""
    weights = {
        str(file.relative_to(ROOT)): SECONDS.get(
            file.name, file.read_text("utf-8").count("\n") / LINES_A_SECOND
        )
        for file in (ROOT / "tests").rglob("test_*.py")
    }
    packed: list[list[str]] = [[] for _ in range(parts)]
    for file in sorted(weights, key=lambda file: (-weights[file], file)):
        min(packed, key=lambda files: sum(weights[each] for each in files)).append(file)
    return packed[part - 1]


def run(part: str) -> bool:
    """Run a part and keep its line; did it pass?"""
    began, before = datetime.now(UTC), resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PAGETWIN_SEED": SEED}
    if part in OTHERS:
        words = OTHERS[part].split()
    else:
        draws = f"--hypothesis-seed={SEED}"
        words = ["-m", "pytest", "-n", "auto", draws, *HANGS.split(), *files_of(*map(int, part.split("/")))]
        environment |= {"PAGETWIN_NIGHTLY": "1", "PAGETWIN_THIRD": str(int(SEED) % 3)}
    clock = time.monotonic()
    code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, check=False).returncode
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = "failed" if code else "passed"
    facts = (
        f"{began:%F %T}",
        commit(),
        part,
        result,
        f"{seconds:.0f}",
        f"{time.monotonic() - clock:.0f}",
        SEED,
    )
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a", encoding="utf-8") as kept:
        kept.write("\t".join(map(str, facts)) + "\n")
    say(f"{part}: {result}, {seconds:.0f} CPU-seconds")
    return code == 0


def commit() -> str:
    """The commit that is checked out, and whether anything was changed on it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--match="]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def say_kept() -> bool:
    """Print what is kept of this commit; did every part pass?"""
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    last = {facts[2]: facts for facts in (line.split("\t") for line in lines) if facts[1] == commit()}
    for part in ALL:
        say("  ".join(last.get(part, [f"{part}: not run on {commit()}"])))
    return all(part in last and last[part][3] == "passed" for part in ALL)


def main(words: list[str]) -> int:
    """Run what is asked; 1 where a part failed, or with --kept where one is left."""
    if words == ["--kept"]:
        return int(not say_kept())
    if unknown := [word for word in words if word not in OTHERS and word.count("/") != 1]:
        say(f"no such part: {' '.join(unknown)}; there are {' '.join(ALL)}")
        return 2
    passed = [run(part) for part in words or ALL]  # all of them, also after one that failed
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
