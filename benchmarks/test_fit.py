"""What a fit to a log of 6,000 requests and a first answer cost, in CPU-seconds.

`pytest benchmarks/test_fit.py -s` prints them. The logs are written by the simulator, with other constants than those
of the preset, behind a server's front end: an open loop, a capped client and a closed loop. Compiled code is loaded
before anything is timed.
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
from traces.trace import OPEN, Client, ClientKind

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


def write_log(folder: Path, client: Client) -> None:
    """A log as a server would have left it, whose constants are known."""
    draw = np.random.default_rng(5)
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
    true = replace(true, step_overhead_us=900.0, frontend_request_us=6500.0)
    rows = read.workload.requests
    if client.kind is ClientKind.closed:
        rows = tuple(replace(row, arrival_us=0) for row in rows)
    run = predictor(found, read.workload.changed(rows, "planted", client=client))(true)
    spread = 1 + 0.005 * draw.standard_normal(REQUESTS)
    first = run.arrival_s + (run.first_token_s - run.arrival_s) * spread
    write(folder, run.arrival_s, prompts, outputs, first, run.last_token_s)


@pytest.mark.parametrize(
    "client",
    [OPEN, Client(ClientKind.capped, 24, 1000), Client(ClientKind.closed, 128, 1000)],
    ids=lambda client: str(client.kind),
)
def test_a_fit_and_a_first_answer(client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both together take at most a minute."""
    log, out = tmp_path / "planted", ("--out", str(tmp_path))
    write_log(log, client)
    began = time.process_time()
    assert main(["twin", str(log), *WORDS, "--no-what-ifs", *out]) == 0
    fitted = time.process_time()
    assert f"The client is {client}" in capsys.readouterr().out
    assert main(["twin", str(log), *WORDS, "--what-if", "scheduler.max_running=128", *out]) == 0
    answered = time.process_time()
    with capsys.disabled():
        say(f"fit and report {fitted - began:.1f} CPU-s, an answer by the kept fit {answered - fitted:.1f}")
    assert answered - began <= MOST_CPU_S
