"""Run the Triton checks, each kind in its own process: interpreted on the CPU, and compiled without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")
HERE = Path(__file__).parent
ENGINE = HERE.parent / "engine" / "runtime" / "attention" / "interpreted_engine_checks.py"


def run_checks(*files, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        command,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def test_interpreted_kernels_equal_the_reference_and_the_engine_on_them_is_that_on_torch():
    done = run_checks(HERE / "interpreted_checks.py", ENGINE, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["interpreted_extremes.py", "interpreted_mistakes.py"])
def test_interpreted_kernels_bear_extremes_and_their_checks_see_mistakes(name):
    done = run_checks(HERE / name, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.nightly
def test_kernels_compile_without_a_gpu(tmp_path):
    done = run_checks(HERE / "compile_checks.py", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
