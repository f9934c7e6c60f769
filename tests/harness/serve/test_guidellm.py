"""guidellm's load generator, end to end against the server, with the counts that the server keeps.

guidellm is in an environment of its own; the test runs where PAGETWIN_GUIDELLM=PATH/bin/guidellm names its command.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest
from serve_cases import build_engine, served, tokenizer

COMMAND = os.environ.get("PAGETWIN_GUIDELLM")
REQUESTS, CLIENTS, INPUT, OUTPUT = 12, 4, 10, 7


@pytest.fixture(name="engine")
def engine_fixture():
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    if not COMMAND:
        pytest.skip(
            "PAGETWIN_GUIDELLM=PATH/bin/guidellm names the command of an environment that has guidellm"
        )
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    return build_engine(load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape)))


@pytest.mark.nightly
def test_every_request_of_guidellm_is_served_and_counted(engine, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "words")
    report = tmp_path / "report.json"
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with served(engine) as address:
        backend = f"kind=openai_http,target={address},model=tiny,request_format=/v1/completions,http2=false"
        words = ["--backend", backend, "--profile", f"kind=concurrent,streams={CLIENTS}"]
        words += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
        words += ["--tokenizer", f"kind=huggingface_auto,model={tmp_path / 'words'}"]
        words += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
        words += ["--output", f"kind=json,path={report}", "--disable-console"]
        done = subprocess.run(
            [str(COMMAND), "run", *words],
            env=settings | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
        metrics = httpx.get(f"{address}/metrics").text
    (found,) = json.loads(report.read_text())["benchmarks"]
    requests = found["requests"]
    served_whole, cut = requests["successful"], requests["incomplete"]  # guidellm may leave its last one
    assert not requests["errored"]
    assert REQUESTS - CLIENTS < len(served_whole) <= len(served_whole) + len(cut) == REQUESTS
    assert {one["output_tokens"] for one in served_whole} == {OUTPUT}
    generated = next(line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total"))
    assert float(generated.split()[-1]) >= len(served_whole) * OUTPUT
