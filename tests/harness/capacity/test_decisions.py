"""One question, one answer: `advise`, `capacity`, `run` and `twin` agree, replays confirm, and vLLM takes the line."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.capacity import highest_rate
from harness.capacity.advice import PRECISION, advise
from harness.capacity.case import LoadCase, growth
from harness.capacity.flags import HUB_IDS, serve_line
from harness.capacity.slo import broken_goals, parse_slo
from harness.cli.main import main
from harness.cli.workload import case_of
from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.config.schema import Compiled, RunConfig
from harness.config.values import replaced
from harness.point import PointSession
from harness.point.cost import cost_model
from harness.sweep.plan import plan_sweep, run_request
from harness.twin.configured import configured
from harness.twin.fit import trace_bytes
from harness.twin.prediction import predictor
from harness.twin.reading import read_engine_log
from harness.twin.what_ifs import FIGURES, WhatIf, what_ifs
from harness.workload.deployment import settings_text
from harness.workload.point import resolve
from harness.workload.simulate import obstacle, predict
from traces.reshape import repeated, set_rate
from traces.trace import Trace

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT.parent / "shared" / "traces"
LOG = "../deployments/rtxpro6000-llama31-8b"
AZURE, MOONCAKE = "azure-llm-2023/AzureLLMInferenceTrace_conv.csv", "mooncake-fast25/conversation_trace.jsonl"
MOONCAKE_MINI = "mooncake-fast25/mini/conversation.head400.jsonl"
PYTHON = os.environ.get("PAGETWIN_VLLM")
PARSE = """\
import json, runpy, sys
runpy.run_path(sys.argv[1])["_use_platform"]()
from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
found = [vars(parser.parse_args(line.split()[2:])) for line in sys.stdin.read().splitlines()]
keys = "model_tag", "max_num_seqs", "enable_prefix_caching", "watermark", "dtype"
print(json.dumps([{key: one[key] for key in keys} for one in found]))
"""


@dataclass(frozen=True)
class Asked:
    """One case of the table: where its requests come from, the words of the user, and whether a rate is found."""

    source: "str | Callable[[Path], Path]"
    words: tuple[str, ...] = ("--model", "llama3_8b", "--device", "h100")
    slo: str = "ttft_p99<2,tpot_mean<0.1"
    finds_rate: bool = True
    requests: int | None = None


def rows(count: int, prompt: int = 1000, output: int = 100, gap_s: float = 0.5) -> list[dict[str, float]]:
    return [
        {"arrival_s": index * gap_s, "prompt_tokens": prompt + index % 7, "output_tokens": output}
        for index in range(count)
    ]


def written(made: list[dict[str, float]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        file = folder / "trace.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
        return file

    return write


BURST = rows(400) + [row | {"arrival_s": 200 + 0.01 * i} for i, row in enumerate(rows(200))]
LONG = [row | {"prompt_tokens": 20_000 if index % 30 else 500} for index, row in enumerate(rows(1500))]
CLOSED = ("replay.mode=closed", "replay.users=8")
H100 = ("--model", "llama3_8b", "--device", "h100")
LLAMA31 = ("--model", "llama31_8b", "--device", "h100")
TABLE = {
    "azure": Asked(AZURE),
    "mooncake, short context": Asked(MOONCAKE),
    "mooncake, long context": Asked(MOONCAKE, LLAMA31, "ttft_p99<60,tpot_mean<0.2"),
    "a burst at the end": Asked(written(BURST)),
    "three requests": Asked(written(rows(3)), finds_rate=False),
    "97 % oversize": Asked(written(LONG)),
    "an impossible SLO": Asked(written(rows(200)), slo="ttft_p99<0.001", finds_rate=False),
    "a deployment's log": Asked(LOG, ("device=rtx_pro_6000",)),
    "conversations": Asked(MOONCAKE_MINI, LLAMA31, "ttft_p99<30", requests=1200),
    "windows in groups": Asked(
        written(rows(100, 2000)), ("--model", "gemma3_12b", "--device", "h100"), requests=100
    ),
    "a closed loop": Asked(written(rows(200)), (*H100, *CLOSED), finds_rate=False),
    "two replicas": Asked(written(rows(600)), (*H100, "device.data_parallel=2")),
    "a tiny pool": Asked(written(rows(300)), (*H100, "cache.pool_tokens=8000")),
}


def asked_case(asked: Asked, folder: Path) -> LoadCase:
    source = Path(asked.source) if isinstance(asked.source, str) else asked.source(folder)
    if not source.is_absolute():
        source = PUBLISHED / source
        if not source.exists():
            pytest.skip(f"needs {source.name}, looked for in ../shared/traces beside the clone")
    flags = (
        dict(zip(asked.words[::2], asked.words[1::2], strict=False)) if asked.words[0] == "--model" else {}
    )
    names = [f"{name.removeprefix('--')}={value}" for name, value in flags.items() if name.startswith("--")]
    words = [*names, *(word for word in asked.words if "=" in word)]
    return case_of(source, words, parse_slo(asked.slo), asked.requests).case


def by_run(asked: Asked, case: LoadCase, trace: Trace, folder: Path) -> Mapping[str, float]:
    """The figures of `run` for the requests and the deployment of a case, each as a file that a user would have."""
    (folder / "load.jsonl").write_bytes(trace_bytes(trace))
    (folder / "deployment.yaml").write_text(settings_text(case.config))
    words = (
        f"deployment={folder / 'deployment.yaml'}",
        "trace=pagetwin",
        f"trace.path={folder / 'load.jsonl'}",
    )
    sent = (word for word in asked.words if word.startswith("replay."))
    session = PointSession()
    request = run_request((*words, "workload=as_recorded", "replay.mode=trace", "measure=false", *sent))
    (planned,) = plan_sweep(request, session).points
    return session.run_point(planned.config).record.simulated


def by_twin(asked: Asked, case: LoadCase, trace: Trace, folder: Path) -> WhatIf:
    """What `twin` predicts, without a fit, for the log that this deployment would have left."""
    folder.mkdir()
    point = resolve(case.config, case.recorded).of_trace(trace)
    requests = predict(point, cost_model(point.deployment), rows=True).log.requests
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "finish_s")
    order = np.lexsort((requests["request_id"], requests["arrival_s"]))
    rows = zip(*(requests[name][order].tolist() for name in columns), strict=True)
    lines = [",".join(map(repr, row)) for row in rows]
    head = ",".join(columns).replace("finish_s", "last_token_s")
    (folder / "requests.csv").write_text("\n".join([head, *lines]) + "\n")
    (folder / "workload.jsonl").write_bytes(trace_bytes(trace))
    log = read_engine_log(folder)
    sent = tuple(word for word in asked.words if word.startswith("replay."))
    config = configured(log, (f"deployment={folder.parent / 'deployment.yaml'}", *sent)).config
    return what_ifs(log, config, predictor(config, log.workload)(config.device), [])[0]


def holds(case: LoadCase, config: RunConfig, rate: float, copies: int) -> bool:
    """Whether the SLO holds in a replay of all requests with these settings, `copies` times one after the other."""
    point = resolve(config, case.recorded)
    kept = {row.request_id for row in case.trace.requests}
    assert kept <= {row.request_id for row in point.trace.requests}
    point = point.of_trace(repeated(set_rate(case.trace, rate), copies))
    cost = cost_model(point.deployment)
    if len(point.trace.requests) >= 5_000 and obstacle(point, cost) is None:
        point = replace(point, replay=replace(point.replay, compiled=Compiled.always))
    found = predict(point, cost, rows=True)
    return (
        not broken_goals(case.slo, found.metrics)
        and not growth(found.log, halves=copies % 2 == 0)
        and set(found.outcome.values())
        <= {
            0,
            len(point.trace.requests),
        }
    )


@pytest.mark.parametrize("name", TABLE)
def test_every_command_predicts_the_same_of_a_case(name: str, tmp_path: Path) -> None:
    """`run` the very figures of `advise`, `twin` the same within the bands that it states."""
    asked = TABLE[name]
    case = asked_case(asked, tmp_path)
    trial = case.run(copies=1)
    trace = case.trace
    swept = by_run(asked, case, trace, tmp_path)
    assert {each: swept[each] for each in FIGURES} == pytest.approx(
        {each: trial.metrics[each] for each in FIGURES}
    )
    twin = by_twin(asked, case, trace, tmp_path / "log")
    assert twin.bands
    assert [each for each, band in twin.bands.items() if not band.holds(swept[each])] == []


@pytest.mark.parametrize("name", TABLE)
def test_answers_agree_and_a_replay_confirms_them(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    asked = TABLE[name]
    case = asked_case(asked, tmp_path)
    began = time.process_time()
    advice = advise(case, lambda what: None)
    took_s = time.process_time() - began
    scope = case.scope
    assert scope.requests == scope.simulated + sum(count for count, _ in scope.left_out.values())
    assert (advice.answer is not None) == asked.finds_rate
    if advice.answer is None or advice.answer.value is None:
        return
    assert advice.config is not None
    rate = advice.answer.value.mean
    config = replaced(advice.config, {"device.data_parallel": case.config.device.data_parallel})
    again = highest_rate(replace(case, config=config, made=[]), 1, PRECISION, lambda _: None)
    assert again.value is not None
    assert again.value.mean == pytest.approx(rate, rel=PRECISION)
    assert advice.answer.good is not None
    copies = max(1, round(sum(advice.answer.good.outcome.values()) / len(case.trace.requests)))
    assert holds(case, config, rate, copies)
    began = time.process_time()
    assert not holds(case, config, 1.3 * rate, copies)
    replay_s = time.process_time() - began
    record_property("advise", f"{took_s:.1f} CPU-s, {took_s / replay_s:.1f} replays of {replay_s:.1f} CPU-s")


OF_A_TRACE = ("trace=file", "trace.on_error=skip", "workload=as_recorded")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "advise": ("advise", "{folder}/trace.jsonl", "trace.on_error=skip"),
    "run": ("run", *OF_A_TRACE, "trace.path={folder}/trace.jsonl", "workload.oversize=drop", "measure=false",
            "out={folder}/run"),
}  # fmt: skip
LONGEST = {"llama3_8b": 8192, "opt_13b": 2048, "llama31_8b": 131_072}


@pytest.mark.parametrize("command", COMMANDS)
@settings(max_examples=3)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12_000), st.integers(2, 50)), min_size=30, max_size=40),
    bad=st.integers(0, 3),
    model=st.sampled_from(sorted(LONGEST)),
)
def test_no_command_leaves_requests_out_before_it_has_named_them(
    command: str, lengths: list[tuple[int, int]], bad: int, model: str
) -> None:
    """Rows that cannot be read, and requests that are too long for the model: counted in the first line, or refused."""
    requests = [
        {"arrival_s": 0.5 * at, "prompt_tokens": prompt, "output_tokens": output}
        for at, (prompt, output) in enumerate(lengths)
    ]
    broken = [{"arrival_s": 100 + at, "prompt_tokens": -1, "output_tokens": 1} for at in range(bad)]
    too_long = sum(prompt + output > LONGEST[model] for prompt, output in lengths)
    kept, every = len(lengths) - too_long, len(lengths) + bad
    with TemporaryDirectory() as folder:
        rows = [*requests, *broken]
        (Path(folder) / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = [word.format(folder=folder) for word in COMMANDS[command]]
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as errors:
            code = main([*words, f"model={model}", "device=h100"])
    said, first = out.getvalue() + errors.getvalue(), out.getvalue().partition("\n")[0]
    if command == "run":
        assert (code == 0) == (kept > 0), said
        if kept and too_long + bad:
            assert f"{too_long + bad:,} dropped before the replay" in first
    else:
        assert (
            f"all {every:,} requests" in first
            if kept == every
            else f"{kept:,} of {every:,} requests" in first
        )
        assert all(f"Left out: {count:,} (" in first for count in (too_long, bad) if count)


def test_vllm_takes_every_line_that_is_printed() -> None:
    if PYTHON is None:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    words = (
        "model=llama3_8b",
        "model=opt_13b",
        "model=gemma2_9b cache.groups=off",
        "model=gemma3_12b cache.groups=uniform cache.retention_interval=null",
        "model=qwen3_30b_a3b device.tensor_parallel=2 device.expert_parallel=true",
        "model=llama31_8b cache.prefix_caching=false scheduler.admit_whole_prompt=false device.data_parallel=2",
        "model=llama31_8b model.weight_dtype=fp8 model.kv_dtype=fp8_e4m3 cache.pool_tokens=16000",
        "model=llama3_8b scheduler.policy=priority scheduler.long_prefill_tokens=512",
        "model=llama3_8b scheduler.watermark=0.05 model.dtype=float32",
    )
    configs = [
        compose_config(
            axis.settings[0] for axis in parse_overrides(("measure=false", "device=h100", *one.split()))
        )
        for one in words
    ]
    lines = "\n".join(serve_line(config) for config in configs)
    driver = str(ROOT / "harness" / "oracle" / "vllm_driver.py")
    command = (PYTHON, "-c", PARSE, driver)
    answer = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert [one["model_tag"] for one in found] == [HUB_IDS[config.model.name] for config in configs]
    assert [one["max_num_seqs"] for one in found] == [config.scheduler.max_running for config in configs]
    assert (found[-1]["watermark"], found[-1]["dtype"]) == (0.05, "float32")
    assert [one["enable_prefix_caching"] for one in found] == [
        config.cache.prefix_caching for config in configs
    ]
