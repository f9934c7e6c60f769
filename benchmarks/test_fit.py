"""What a fit to a log of 6,000 requests and a first answer cost, in CPU-seconds.

`pytest benchmarks/test_fit.py -s` prints them. The log is written by the simulator, with other constants than those of
the preset: an open loop near the limit of running requests, behind a server's front end. Compiled code is loaded before
anything is timed.
"""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.cli.main import main
from harness.console import say
from harness.twin.configured import configured
from harness.twin.log import FloatArray
from harness.twin.prediction import predictor
from harness.twin.reading import read_engine_log

REQUESTS, RATE, MOST_CPU_S = 6000, 11.0, 60.0
WORDS = ("device=h100", "model=llama31_8b")
COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")


def write(folder: Path, *columns: FloatArray) -> None:
    """A log as CSV, whole numbers as such."""
    with (folder / "requests.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for sent, prompt, output, first, last in zip(*(each.tolist() for each in columns), strict=True):
            table.writerow((sent, int(prompt), int(output), first, last))


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log as a server would have left it, whose constants are known."""
    folder, draw = tmp_path_factory.mktemp("logs") / "planted", np.random.default_rng(5)
    folder.mkdir()
    settings = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "model": "meta-llama/Llama-3.1-8B"}
    (folder / "engine.json").write_text(json.dumps(settings))
    sent = np.cumsum(draw.exponential(1 / RATE, REQUESTS))
    sent -= sent[0]
    prompts = np.clip(draw.lognormal(5.5, 1.0, REQUESTS), 8, 4000).round()
    outputs = np.clip(draw.lognormal(5.2, 0.7, REQUESTS), 4, 1200).round()
    write(folder, sent, prompts, outputs, sent + 0.1, sent + 0.2)  # times that replace themselves below
    read = read_engine_log(folder)
    found = configured(read, WORDS).config
    true = replace(found.device, bandwidth_efficiency=0.74, compute_efficiency=0.5)
    run = predictor(found, read.workload)(replace(true, step_overhead_us=900.0, frontend_request_us=6500.0))
    spread = 1 + 0.005 * draw.standard_normal(REQUESTS)
    last = run.first_token_s + (run.last_token_s - run.first_token_s) * spread
    write(folder, sent, prompts, outputs, run.first_token_s, last)
    return folder


def test_a_fit_and_a_first_answer(log: Path, tmp_path: Path) -> None:
    """Both together take at most a minute."""
    out = ("--out", str(tmp_path))
    began = time.process_time()
    assert main(["twin", str(log), *WORDS, "--no-what-ifs", *out]) == 0
    fitted = time.process_time()
    assert main(["twin", str(log), *WORDS, "--what-if", "scheduler.max_running=128", *out]) == 0
    answered = time.process_time()
    say(f"fit and report {fitted - began:.1f} CPU-s, an answer by the kept fit {answered - fitted:.1f}")
    assert answered - began <= MOST_CPU_S
