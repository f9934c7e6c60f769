"""`bench engine`: peers in turn, equal outputs, honest failures."""

import json

import pytest

from harness.cli.main import main


def test_ours_and_transformers_say_the_same(tmp_path, capsys):
    out = tmp_path / "figures.json"
    words = [
        "--requests",
        "2",
        "--layers",
        "1",
        "--repeats",
        "1",
        "--peers",
        "transformers,vllm",
        "--out",
        str(out),
    ]
    assert main(["bench", "engine", *words]) == 1  # vllm is not installed here
    said = capsys.readouterr()
    figures = {one["name"]: one for one in json.loads(out.read_text())["engines"]}
    assert figures["transformers"]["equal"] == figures["pagetwin"]["equal"] == 2
    assert figures["vllm"]["error"] == "PeerError: vllm is not installed"
    assert "KV pool: 2,560 blocks of 16 = 40,960 tokens" in said.out
    assert "output tokens / CPU-second" in said.out
    assert "vllm is not installed" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--peers", "sglang"], "there is no peer 'sglang'; choose of transformers, transformers_cb, vllm"),
        (["--requests", "0"], "--requests is 0, must be at least 1"),
        (["--device", "tpu"], "--device tpu does not exist; choose cpu, cuda"),
        (["--dtype", "int8"], "--dtype int8 does not exist; choose float32"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_loaded(words, message, capsys):
    assert main(["bench", "engine", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_differs_is_counted_and_one_that_fails_is_named():
    from harness.bench.engine.runner import compare
    from harness.bench.engine.workload import bench_requests

    requests = bench_requests(3, 50, seed=1)
    assert requests == bench_requests(3, 50, seed=1) != bench_requests(3, 50, seed=2)

    def broken(_):
        raise RuntimeError("no kernels")

    engines = {
        "ours": lambda asked: [[1]] * len(asked),
        "other": lambda asked: [[1], *[[2]] * (len(asked) - 1)],
        "broken": broken,
    }
    ticks = iter(range(100))
    ours, other, failed = compare(engines, requests, 2, dict.fromkeys(engines, lambda: float(next(ticks))))
    assert (ours.equal, other.equal) == (3, 1)
    assert ours.seconds == [1.0, 1.0]
    assert ours.rate(30) == 30.0
    assert failed.error == "RuntimeError: no kernels"


def test_the_default_requests_are_the_reference_workload():
    from harness.bench.engine.workload import bench_requests

    requests = bench_requests(64, 32_000, seed=0)
    assert sum(len(request.prompt) for request in requests) == 20_202
    assert sum(request.output_tokens for request in requests) == 4_583


def test_continuous_batching_of_transformers_gives_our_tokens(capsys):
    words = ["--requests", "2", "--layers", "1", "--repeats", "1", "--peers", "transformers_cb"]
    assert main(["bench", "engine", *words]) == 0
    assert "transformers_cb" in capsys.readouterr().out


def test_a_peer_without_its_memory_reader_says_what_to_install(monkeypatch):
    from types import SimpleNamespace

    import torch

    from harness.bench.engine import runner as peers

    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    here = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(peers.PeerError, match="pip install psutil"):
        peers.transformers_cb(here, block_size=16, pool_tokens=64)
    with pytest.raises(peers.PeerError, match="vllm is not installed"):
        peers.vllm_offline(here, block_size=16)


BURN = "import time\nwhile time.process_time() < 0.4: pass\nprint(flush=True)\nimport sys; sys.stdin.read()"


def test_work_in_a_child_process_is_counted_while_the_child_runs_and_after_it():
    import subprocess
    import sys

    from harness.bench.engine.process_time import tree_seconds

    began = tree_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"\n"
        running = tree_seconds() - began
    ended = tree_seconds() - began
    assert 0.35 <= running <= ended < running + 5  # seconds are counted in ticks of 10 ms


def test_a_child_of_a_child_is_counted():
    import subprocess
    import sys

    from harness.bench.engine.process_time import tree_seconds

    began = tree_seconds()
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], stdin=0)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"\n"
        assert tree_seconds() - began >= 0.35


def test_each_engine_is_timed_by_its_own_clock():
    from harness.bench.engine.runner import compare
    from harness.bench.engine.workload import bench_requests

    slow, fast = iter(range(0, 100, 7)), iter(range(100))
    engines = dict.fromkeys(("ours", "vllm"), lambda asked: [[1]] * len(asked))
    clocks = {"ours": lambda: float(next(fast)), "vllm": lambda: float(next(slow))}
    ours, vllm = compare(engines, bench_requests(2, 50, seed=1), 1, clocks)
    assert (ours.seconds, vllm.seconds) == ([1.0], [7.0])


def test_vllm_is_timed_with_its_processes_and_the_others_without(monkeypatch):
    import time
    from types import SimpleNamespace

    from harness.bench.engine import runner
    from harness.bench.engine.process_time import tree_seconds

    seen = {}
    monkeypatch.setattr(runner, "_load", lambda flags: SimpleNamespace(vocab_size=50))
    monkeypatch.setattr(runner, "ours", lambda *rest, **sizes: (None, ""))
    monkeypatch.setattr(runner, "compare", lambda engines, asked, repeats, clocks: seen.update(clocks) or [])
    monkeypatch.setattr(runner, "_print", lambda *rest: None)
    main(["bench", "engine", "--peers", "transformers,vllm", "--requests", "2"])
    assert seen == {"pagetwin": time.process_time, "transformers": time.process_time, "vllm": tree_seconds}
