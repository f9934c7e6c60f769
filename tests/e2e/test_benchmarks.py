"""The benchmarks run, and their fixed workload is the one of the documentation. What they time is nobody's test."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engines import reference_requests

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
def test_every_benchmark_that_needs_no_other_program_runs() -> None:
    words = ["-q", "--small", "--benchmark-disable", "-p", "no:cacheprovider", "-m", ""]
    chosen = ["-k", "not compiled and not transformers and not test_vllm"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", *words, *chosen],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "failed" not in done.stdout


def test_the_reference_workload_has_the_tokens_that_the_documentation_names() -> None:
    requests = reference_requests(64, 32_000)
    assert sum(len(request.prompt) for request in requests) == 20_202
    assert sum(request.output_tokens for request in requests) == 4_583
