"""What the parts of `make gpu` run beside the commands: tried without a GPU, on small or made-up inputs."""

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_acceptance import decoding as decode_steps
from gpu_acceptance.decoding import (
    MODELS,
    Load,
    decode_engine,
    made_model,
    measured_steps,
    union_s,
    weight_bytes,
)
from gpu_acceptance.gate_trial import slowed, trial
from gpu_acceptance.parts import SMALL_TESTS, Setting, steps_of
from harness.bench.calls import copies_past_cache
from harness.bench.cases import MOST_KV_BYTES, KernelCase, preset, presets
from harness.cli.main import main
from harness.gate.findings import Measured

ROOT = Path(__file__).resolve().parents[2]


def run_of_the_gate(seed: int, noise: float = 0.01, slower: float = 1.0) -> Measured:
    draw = np.random.default_rng(seed)
    cases = {
        name: {"ratios": (slower * (1 + noise * draw.standard_normal(60))).tolist()}
        for name in ("decode / copy", "decode / contiguous", "prefill / matmul")
    }
    return Measured("latency", "latency-test", {"device": "test"}, "digest", cases)


def test_the_same_code_twice_raises_no_alarm_and_every_planted_slowdown_is_caught() -> None:
    found = trial(run_of_the_gate(1), run_of_the_gate(2))
    assert (found["alarms"], found["caught"], found["planted"]) == ([], 3, 3)


def test_an_alarm_at_the_same_code_is_told() -> None:
    found = trial(run_of_the_gate(1), run_of_the_gate(2, slower=1.2))
    assert len(found["alarms"]) == 3


def test_noise_that_hides_a_slowdown_is_told() -> None:
    found = trial(run_of_the_gate(1, noise=0.2), run_of_the_gate(2, noise=0.2))
    assert found["caught"] < found["planted"]
    assert found["missed"]


def test_a_planted_run_says_so_and_has_the_name_of_no_baseline() -> None:
    planted = slowed(run_of_the_gate(1), "decode / copy")
    assert planted.name != run_of_the_gate(1).name
    assert any("planted: decode / copy" in remark for remark in planted.remarks)


def test_the_gate_itself_has_nothing_that_plants() -> None:
    for file in (ROOT / "harness" / "gate").rglob("*.py"):
        assert "plant" not in file.read_text(encoding="utf-8").lower(), file


def test_device_time_that_overlaps_counts_once() -> None:
    assert union_s([(10.0, 30.0), (0.0, 20.0), (50.0, 60.0), (52.0, 55.0)]) == pytest.approx(40e-6)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return made_model(MODELS["tiny"], "cpu")


def test_a_decode_step_is_timed_when_the_whole_batch_decodes(tiny: Any) -> None:
    load = Load(batches=(1, 5), prompt=12, budget=16)  # prompts enter one after the other
    rows = list(measured_steps(decode_engine(tiny, load, graphs=False), load, graphs=False))
    assert [(row["batch"], len(row["steps_s"])) for row in rows] == [
        (5, decode_steps.TIMED),
        (1, decode_steps.TIMED),
    ]
    assert rows[0]["tokens_s"] == pytest.approx(5 / rows[0]["step_s"])
    assert rows[0]["host_share"] is None  # nobody measured a device


def test_a_step_that_decodes_less_than_the_batch_gives_no_figure(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Load, "output", decode_steps.WARM_UP + 2)
    load = Load(batches=(2,), prompt=12, budget=64)
    with pytest.raises(RuntimeError, match=r"decoded \d of 2"):
        list(measured_steps(decode_engine(tiny, load, graphs=False), load, graphs=False))


def test_an_untied_input_embedding_is_not_read_by_a_step(tiny: Any) -> None:
    spec, total = MODELS["tiny"], sum(parameter.nbytes for parameter in tiny.model.parameters())
    assert weight_bytes(tiny.model) == total - 4 * spec.vocab * spec.hidden


@pytest.mark.parametrize(("name", "billions"), [("1b", (1.2, 1.6)), ("8b", (7.9, 8.2))])
def test_the_models_have_the_size_of_their_class(name: str, billions: tuple[float, float]) -> None:
    spec = MODELS[name]
    attention = spec.hidden * spec.head_dim * 2 * (spec.heads + spec.kv_heads)
    layer = attention + 3 * spec.hidden * spec.intermediate
    parameters = spec.layers * layer + 2 * spec.vocab * spec.hidden
    assert billions[0] <= parameters / 1e9 <= billions[1]


def test_the_full_grid_spans_what_the_goals_speak_of_and_fits_a_gpu() -> None:
    decode = preset("full-decode")
    assert {case.heads // case.kv_heads for case in decode} == {1, 4, 8}
    assert (min(case.batch for case in decode), max(case.batch for case in decode)) == (1, 256)
    assert {1024, 131_072} <= {case.context for case in decode}
    assert sorted(case.block_size for case in preset("full-blocks")) == sorted(
        [1, 8, 16, 32, 64, 128, 256] * 2
    )
    shared = {(case.batch, case.shared_prefix) for case in preset("full-cascade")}
    assert {(2, 128), (16, 8192), (256, 32_768), (8, 256)} <= shared
    for name in (name for name in presets() if name.startswith("full-")):
        assert all(case.distinct_kv_bytes <= MOST_KV_BYTES for case in preset(name))


def test_what_a_full_grid_leaves_out_when_time_ends_is_spread_over_its_axes() -> None:
    decode = preset("full-decode")
    half = decode[: len(decode) // 2]
    assert {case.batch for case in half} >= {1, 8, 32}
    assert {case.heads // case.kv_heads for case in half} == {1, 4, 8}
    assert decode == preset("full-decode")


def test_the_full_grids_stand_beside_the_other_presets() -> None:
    assert {"cpu", "gpu", "gate"} == {name for name in presets() if not name.startswith("full-")}


def test_a_shared_prefix_is_rotated_past_the_cache_by_its_own_bytes() -> None:
    case = KernelCase(batch=64, context=1152, shared_prefix=1024)
    assert case.distinct_kv_bytes == 4096 * (1024 + 64 * 128)
    assert copies_past_cache(case.distinct_kv_bytes, 60 << 20) > copies_past_cache(case.kv_bytes, 60 << 20)


@pytest.mark.nightly
def test_a_bench_whose_time_is_over_keeps_what_it_has_and_says_what_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--device",
        "cpu",
        "--provider",
        "sdpa",
        "--context",
        "64",
        "--rounds",
        "1",
        "--seconds",
        "0.001",
    ]
    assert main(["bench", "kernels", *words, "--out", str(tmp_path)]) == 0
    assert "the time was over (--seconds)" in capsys.readouterr().err
    assert main(["bench", "kernels", *words[:-1], "0"]) == 2
    assert "--seconds is 0" in capsys.readouterr().err


def kernel_words(name: str) -> tuple[str, ...]:
    return next(
        one.words for one in steps_of("kernels", Setting(Path("out"), ("device=h200",))) if one.name == name
    )


def test_every_test_that_the_memory_checker_is_given_exists() -> None:
    source = (ROOT / "tests" / "paged_kernels" / "test_on_gpu.py").read_text(encoding="utf-8")
    there = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    assert set(re.split(r" or ", SMALL_TESTS)) <= there


def test_the_memory_checker_sees_every_tensor_as_an_allocation_of_its_own() -> None:
    memcheck = next(
        one for one in steps_of("kernels", Setting(Path("out"), ("device=h200",))) if one.name == "memcheck"
    )
    assert ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1") in memcheck.environment


def test_counters_are_read_without_touching_the_clocks() -> None:
    words = kernel_words("counters")
    assert words[words.index("--clock-control") + 1] == "none"
