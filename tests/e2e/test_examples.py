"""The examples run as the README says, and print what they promise."""

import os
import subprocess
import sys
from pathlib import Path

from tiers import cases

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTS = {
    "block_manager.py": "slots [80, 95, 192, 207, 48, 50]",
    "engine_as_a_library.py": "prompt tokens from the cache: 32",
    "own_eviction.py": "DeepestFirst",
    "own_policy.py": "CheapestToRepeat",
    "own_trace.py": "60 requests",
    "read_the_store.py": "TTFT p99",
    "simulate_from_python.py": "block size",
}


def output_of(name: str, folder: Path) -> str:
    """What the example prints. It runs in an empty folder, as from anywhere."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run() -> None:
    assert sorted(PRINTS) == sorted(file.name for file in EXAMPLES.glob("*.py"))


@cases("name", PRINTS, day=("block_manager.py",))
def test_an_example_runs_and_prints(name: str, tmp_path: Path) -> None:
    assert PRINTS[name] in output_of(name, tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing is left where the user stands
