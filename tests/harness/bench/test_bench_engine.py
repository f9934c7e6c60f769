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
    ours, other, failed = compare(engines, requests, 2, lambda: float(next(ticks)))
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
