"""The policy core beside vLLM's scheduler, live. Needs an interpreter with vLLM: PAGETWIN_VLLM=PATH/bin/python.

By night 60 random workloads of each family are compared, drawn by the date (PAGETWIN_SEED names another day), and the
excerpts of two public traces.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from oracle_cases import FAMILIES, FIRST_SEED, PYTHON, checked, random_case, tight_case
from tiers import tier

from engine.core.memory.group_layout import KVGroup
from engine.core.options import Scheduling
from harness.cli.main import main
from harness.config.errors import ConfigError
from harness.config.schema import AllowedDifference
from harness.oracle.check import OracleError, VllmProcess, vllm_version
from harness.store.commit import read_store

TRACES = Path(__file__).parents[2] / "data" / "traces"
SEEDS = tier(4, 60)


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmProcess]:
    try:
        vllm_version(PYTHON)
    except ConfigError:
        pytest.skip("vLLM is not installed; PAGETWIN_VLLM=PATH/bin/python names an environment that has it")
    with VllmProcess(PYTHON) as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
def test_random_workloads_are_scheduled_alike(vllm: VllmProcess, family: str) -> None:
    """To the numbers of the blocks, in the order in which they are given out."""
    found = Counter[str]()
    drawn = (random_case(seed, Scheduling.fcfs, family) for seed in count(FIRST_SEED))
    for case in islice((case for case in drawn if case.rows), SEEDS):
        report = checked(case, vllm.step, version=vllm.begin(case.settings))
        assert report.compared == report.steps
        found += Counter(report.counts, steps=report.steps)
    assert min(found["preempted"], found["evicted"], found["hit_tokens"]) > 0


def test_what_comes_back_into_a_tight_pool_is_scheduled_alike(vllm: VllmProcess) -> None:
    """In 44 a request is preempted again after one step, of a token that it had before: its block stays cached."""
    for seed in (44, *range(FIRST_SEED, FIRST_SEED + SEEDS)):
        case = tight_case(seed)
        report = checked(case, vllm.step, version=vllm.begin(case.settings))
        assert report.compared == report.steps


def test_a_priority_victim_of_the_same_step_is_known_and_ends_the_comparison(vllm: VllmProcess) -> None:
    case = random_case(14)
    vllm.begin(case.settings)
    with pytest.raises(OracleError, match=r"victim.*oracle\.allow=scheduled_victim"):
        checked(case, vllm.step)
    vllm.begin(case.settings)
    report = checked(case, vllm.step, AllowedDifference.scheduled_victim)
    assert 0 < report.compared < report.steps
    assert report.stopped is not None


@pytest.mark.parametrize(
    "layers",
    [
        ("model.window=64", "model.windowed_layers=2"),
        (
            "model.window=128",
            "model.windowed_layers=3",
            "model.chunked_windows=true",
            "cache.retention_interval=null",
        ),
        ("model.state_layers=2", "model.state_bytes=65536"),
    ],
)
def test_a_point_with_layers_in_groups_is_compared(
    vllm: VllmProcess, layers: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = ("measure=false", "cost=roofline", "cache=paged", "cache.groups=uniform", "cache.block_size=16")
    load = (
        "workload.num_requests=30",
        "workload.prefix_share=0.4",
        "decoding.beam_width=1",
        "model.layers=4",
    )
    python = [f"oracle.python={PYTHON}"] if PYTHON else []
    assert main(["run", *point, *load, *layers, "oracle=vllm", *python, f"out={tmp_path}"]) == 0
    (record,) = read_store(tmp_path).records.values()
    assert record.oracle["compared"] == record.oracle["steps"] > 20
    assert "free pages are counted, not named" in capsys.readouterr().out


def test_a_point_whose_windows_are_left_too_late_fails_beside_vllm(
    vllm: VllmProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = KVGroup.skipped
    monkeypatch.setattr(KVGroup, "skipped", lambda group, computed: real(group, max(0, computed - 1)))
    point = ("measure=false", "cost=roofline", "cache=paged", "cache.groups=uniform", "cache.block_size=16")
    layers = ("workload.num_requests=30", "model.layers=4", "model.window=64", "model.windowed_layers=2")
    python = [f"oracle.python={PYTHON}"] if PYTHON else []
    words = [*point, *layers, "decoding.beam_width=1", "workers=1", "oracle=vllm", *python, f"out={tmp_path}"]
    assert main(["run", *words]) == 1
    assert "vLLM decides differently" in capsys.readouterr().err


def test_a_point_records_the_comparison(
    vllm: VllmProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = ("measure=false", "cost=roofline", "workload.num_requests=20", "cache=paged", "workers=1")
    python = [f"oracle.python={PYTHON}"] if PYTHON else []
    assert main(["sweep", *point, "decoding.beam_width=1,2", "oracle=vllm", *python, f"out={tmp_path}"]) == 0
    sections = [record.oracle for record in read_store(tmp_path).records.values()]
    assert any(one["compared"] == one["steps"] > 0 for one in sections)
    assert any("beams" in (one["not_compared"] or "") for one in sections)
    assert f"the same decisions as vLLM {vllm_version(PYTHON)} in" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trace", "path"),
    [
        ("azure", TRACES / "azure-llm-2023" / "conv.head400.csv"),
        ("mooncake", TRACES / "mooncake-fast25" / "conversation.head250.jsonl"),
    ],
)
@pytest.mark.parametrize("tokens", [40_000, 200_000])
def test_a_public_trace_is_scheduled_alike(
    vllm: VllmProcess, trace: str, path: Path, tokens: int, tmp_path: Path
) -> None:
    settings = (
        "measure=false",
        "cost=roofline",
        "device=h100",
        "model=llama31_8b",
        "cache=paged",
        "workers=1",
    )
    sizes = ("cache.block_size=16", f"cache.pool_tokens={tokens}", "workload.oversize=drop")
    load = ("workload.length_scale=1", "workload.num_requests=250", "decoding.beam_width=1")
    python = [f"oracle.python={PYTHON}"] if PYTHON else []
    trace_of = (f"trace={trace}", f"trace.path={path}")
    overrides = [*settings, *sizes, *load, *trace_of, "oracle=vllm", *python, f"out={tmp_path}"]
    assert main(["run", *overrides]) == 0
    (record,) = read_store(tmp_path).records.values()
    assert record.oracle["compared"] == record.oracle["steps"] > 100


# vLLM itself is another's; that its driver keeps what it made of the settings shows without it
DRIVEN = """
import sys, types
sys.modules["vllm"] = types.SimpleNamespace(__version__="a version")
import harness.oracle.vllm_driver as driver

class Made:
    def __init__(self, settings, folder):
        self.asked, self.submitted = {"asked": settings}, []
    def submit(self, request):
        self.submitted.append(request)
    def step(self, accepted, idle):
        return {"of": self.asked["asked"], "submitted": self.submitted, "accepted": accepted, "idle": idle}

driver.Driver, driver._use_platform, driver._register_layers = Made, lambda: None, lambda: None
sys.exit(driver.main())
"""


def test_the_driver_answers_the_steps_behind_its_settings() -> None:
    told = [{"settings": 1}, {"submit": ["a"]}, {"submit": [], "idle": True}, {"settings": 2}, {"submit": []}]
    asked = "".join(json.dumps(one) + "\n" for one in told)
    done = subprocess.run([sys.executable, "-c", DRIVEN], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"vllm": "a version", "asked": 1},
        {"of": 1, "submitted": ["a"], "accepted": {}, "idle": False},
        {"of": 1, "submitted": ["a"], "accepted": {}, "idle": True},
        {"vllm": "a version", "asked": 2},
        {"of": 2, "submitted": [], "accepted": {}, "idle": False},
    ]


def test_an_interpreter_without_vllm_is_refused_with_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o755)
    assert main(["sweep", "measure=false", "oracle=vllm", f"oracle.python={empty}", f"out={tmp_path}/s"]) == 2
    message = capsys.readouterr().err
    assert "oracle.python: " in message
    assert "pip install vllm==0.33.0" in message


def test_a_path_that_is_no_interpreter_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "python"
    assert (
        main(["sweep", "measure=false", "oracle=vllm", f"oracle.python={missing}", f"out={tmp_path}/s"]) == 2
    )
    assert "cannot be started: No such file" in capsys.readouterr().err
