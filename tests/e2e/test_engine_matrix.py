"""The matrix beside vLLM: engines in processes of their own, rounds in turns, groups that are kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import engine_matrix as matrix
from benchmarks.engine_matrix import (
    Cell,
    Load,
    Shape,
    geometric_mean,
    main,
    requests_of,
    started,
    unmeasured,
)
from benchmarks.engine_process import tree_seconds
from harness.workers import PeerError

SMALL = Shape(
    "llama",
    {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "max_position_embeddings": 2048,
    },
    {
        "prefill": Load(8, (200, 300), (8, 12)),
        "decode": Load(8, (2, 4), (40, 60)),
    },  # more than a tick of 10 ms
)
VLLM = """\
import os, time
class SamplingParams:
    def __init__(self, **values): self.values = values
class LLM:
    def __init__(self, model, **values):
        open(LOG, "a").write(f"start eager={values['enforce_eager']} threads={os.environ['OMP_NUM_THREADS']}\\n")
        if os.path.exists(LOG + ".broken"): raise RuntimeError("no kernels")
    def generate(self, prompts, params, use_tqdm):
        began = time.process_time()
        while time.process_time() - began < 0.02: pass
        open(LOG, "a").write(f"serve {len(prompts)}\\n")
        return [Output([7] * one.values["max_tokens"]) for one in params]
class Output:
    def __init__(self, ids): self.outputs, self.token_ids = [self], ids
"""
TORCH = (
    "class cpu: _is_amx_tile_supported = staticmethod(lambda: False)"  # the real one takes seconds to import
)


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A made-up vLLM that says what it was asked; its log. It takes our interpreter's place in the command line."""
    log = tmp_path / "log"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "vllm.py").write_text(f"LOG = {str(log)!r}\n{VLLM}")
    (tmp_path / "lib" / "torch.py").write_text(TORCH)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={tmp_path / "lib"}\nexec {sys.executable} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    monkeypatch.setattr(matrix, "vllm_version", lambda python: "0.0")
    monkeypatch.setattr(matrix, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(matrix, "DTYPES", ("float32",))
    monkeypatch.setattr(matrix, "THREADS", (1,))
    monkeypatch.setattr(matrix, "cpu_flags", lambda: {"avx2"})
    return python, log


@pytest.fixture
def without_ours(tmp_path, monkeypatch):
    """The made-up engine in the place of ours too: what is tested here is the order of things, not our engine."""
    real = matrix._engines

    def engines(python, longest):
        found = real(python, longest)
        return found | {matrix.OURS: found["eager"]}

    monkeypatch.setattr(matrix, "_engines", engines)
    monkeypatch.setattr(matrix, "_checkpoint", lambda *rest: tmp_path)


def _words(python, out, *more):
    return [str(python), "--out", str(out), "--rounds", "2", *more]


@pytest.mark.nightly
def test_our_engine_is_compared_in_a_process_of_its_own(peer, tmp_path):
    out = tmp_path / "matrix.json"
    assert main([*_words(peer[0], out)[:-1], "1"]) == 1  # the made-up engine's tokens differ in float32
    decode = json.loads(out.read_text())["groups"]["small float32 1t"]["decode"]
    assert decode["equal"] == {"eager": 0, "compiled": 0}
    assert min(decode["seconds"]["pagetwin"][0]) > 0
    assert "attention" in decode["kernels"]["pagetwin"]


@pytest.mark.nightly
def test_a_group_has_rounds_of_every_engine_and_is_not_run_again(peer, without_ours, tmp_path, capsys):
    python, log = peer
    out = tmp_path / "matrix.json"
    assert main(_words(python, out)) == 0
    group = json.loads(out.read_text())["groups"]["small float32 1t"]
    assert {key: len(found) for key, found in group["decode"]["seconds"].items()} == {
        "pagetwin": 2,
        "eager": 2,
        "compiled": 2,
    }
    assert group["decode"]["equal"] == {"eager": 16, "compiled": 16}  # of two rounds
    asked = log.read_text().splitlines()
    assert asked[1:3] == ["start eager=True threads=1", "start eager=False threads=1"]
    assert len(asked) == 3 + 3 * 2 * 3  # three engines, two workloads, a warm-up and two rounds
    assert "4 cells: geometric mean" in capsys.readouterr().out
    table = out.with_suffix(".txt").read_text()
    assert "small float32 1t prefill compiled" in table
    assert "eager attention without amx" in table
    main(_words(python, out))
    assert len(log.read_text().splitlines()) == len(asked)


@pytest.mark.nightly
def test_an_engine_that_does_not_start_is_named_and_tried_again(peer, without_ours, tmp_path, capsys):
    python, _ = peer
    out = tmp_path / "matrix.json"
    broken = tmp_path / "log.broken"
    broken.touch()
    assert main(_words(python, out)) == 1
    assert "RuntimeError: no kernels" in capsys.readouterr().err
    broken.unlink()
    main(_words(python, out))
    assert "error" not in json.loads(out.read_text())["groups"]["small float32 1t"]


@pytest.mark.nightly
def test_figures_of_other_rounds_are_not_mixed(peer, without_ours, tmp_path, capsys):
    python, _ = peer
    out = tmp_path / "matrix.json"
    main(_words(python, out))
    assert main([*_words(python, out)[:-1], "3"]) == 2
    assert "was taken with another rounds: 2" in capsys.readouterr().err


@pytest.mark.parametrize("shape", matrix.SHAPES.values(), ids=matrix.SHAPES.keys())
def test_no_engine_is_asked_for_longer_sequences_than_its_model_has_and_all_loads_fit(shape):
    _, (_, vllm), _ = matrix._engines("python", matrix.model_len(shape)).values()
    longest = vllm["options"]["max_model_len"]
    assert longest <= shape.config["max_position_embeddings"]
    for load in shape.loads.values():
        assert load.shared + load.prompt[1] + load.output[1] <= longest


def test_an_interpreter_without_vllm_is_refused(tmp_path, capsys):
    assert main(_words(sys.executable, tmp_path / "matrix.json")) == 2
    assert "has no vLLM; on a CPU: pip install" in capsys.readouterr().err


def test_a_group_that_does_not_exist_is_refused(peer, tmp_path, capsys):
    assert main(_words(peer[0], tmp_path / "matrix.json", "--only", "int8")) == 2
    assert "groups: small float32 1t" in capsys.readouterr().err


@pytest.mark.nightly
def test_only_the_cells_that_are_asked_for_run_and_others_are_added_later(peer, without_ours, tmp_path):
    python, log = peer
    out = tmp_path / "matrix.json"
    main(_words(python, out, "--only", "eager", "prefill"))
    assert list(json.loads(out.read_text())["groups"]["small float32 1t"]) == ["prefill"]
    assert "eager=False" not in log.read_text()
    main(_words(python, out))
    group = json.loads(out.read_text())["groups"]["small float32 1t"]
    assert {load: len(found["equal"]) for load, found in group.items()} == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize(
    ("flags", "groups", "expected"),
    [
        (["avx2"], ["a"], ["AMX", "avx512_bf16", "AVX-512 but not avx512_bf16"]),
        (["avx2", "avx512f", "avx512_bf16"], ["a"], ["AMX", "AVX-512 but not avx512_bf16", "AVX2 alone"]),
        (["amx_bf16"], ["a no-amx"], ["AMX", "AVX-512 but not avx512_bf16", "AVX2 alone"]),
    ],
)
def test_a_kind_of_cpu_that_was_not_measured_is_named(flags, groups, expected):
    kinds = ["Intel CPUs", "Arm CPUs", *(f"CPUs with {kind}" for kind in expected)]
    assert unmeasured("AMD EPYC", flags, groups) == ", ".join(kinds)


def test_requests_that_share_a_beginning_differ_behind_it():
    prompts, _ = requests_of(Load(3, (4, 4), (1, 1), shared=10), 1000, 0)
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_no_round_repeats_the_prompts_of_another(peer, without_ours, tmp_path, monkeypatch):
    seeds, drawn = [], matrix.requests_of
    monkeypatch.setattr(
        matrix, "requests_of", lambda load, vocab, seed: seeds.append(seed) or drawn(load, vocab, seed)
    )
    main(_words(peer[0], tmp_path / "matrix.json", "--only", "eager", "prefill"))
    assert len({abs(seed) for seed in seeds}) == 3  # a warm-up and two rounds; Random(-1) draws as Random(1)


def test_the_ratio_is_of_median_rounds_and_the_spread_of_single_ones():
    cell = Cell("a", 10, [[0, 1.0], [0, 2.0], [0, 4.0]], [[0, 2.0]] * 3, 1, 1)
    assert (cell.ratio, cell.spread) == (1.0, (0.5, 2.0))
    faster = cell._replace(vllm=[[0, 8.0]] * 3)
    assert geometric_mean([cell, faster]) == pytest.approx(2.0)


def test_the_processes_of_an_engine_end_with_it(peer, tmp_path):
    python, _ = peer
    child = tmp_path / "child"
    library = tmp_path / "lib" / "vllm.py"
    spawn = (
        "\nimport subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
    )
    library.write_text(library.read_text() + spawn)
    settings = {"engine": "vllm", "threads": 1, "model": "", "dtype": "float32", "amx": True}
    settings |= {"options": {"enforce_eager": True}}
    with started(str(python), settings) as (engine, _), pytest.raises(PeerError, match="KeyError: 'outputs'"):
        engine.ask({"prompts": []})
    pid = int(child.read_text())
    for _ in range(100):  # a killed process stays until its new parent has read its status
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        os.kill(pid, 9)
        pytest.fail("the child of an engine outlived it")


def test_work_in_a_child_process_is_counted_while_the_child_runs_and_after_it():
    burn = (
        "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"
    )
    tick = 0.01  # what the kernel counts in; a running process and an ended one are rounded apart
    began = tree_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"\n"
        running = tree_seconds() - began
    assert running >= 0.4 - 3 * tick
    assert tree_seconds() - began >= running - 3 * tick
