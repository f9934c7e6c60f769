"""lm-eval asks the server what it asks a vLLM server, and finds what it finds with transformers alone.

lm-eval is a program of another environment; the test runs where `lm_eval` is on the PATH.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from serve_cases import build_engine, served, tokenizer

pytestmark = [
    pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not installed"),
]
ROWS = (
    {"q": "the cat sat on", "choices": [" a mat", " naïve café"], "gold": 0},
    {"q": "the quick", "choices": [" brown fox", " lazy dog", " again"], "gold": 0},
    {"q": "over that", "choices": [" lazy dog", " cat"], "gold": 0},
)
TASK = """\
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
target_delimiter: ""
"""
KINDS = {
    "tiny_choice": 'output_type: multiple_choice\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\n'
    "metric_list: [{metric: acc}]",
    "tiny_text": 'output_type: generate_until\ndoc_to_target: "{{q}}"\nmetric_list: [{metric: exact_match}]\n'
    "generation_kwargs: {until: ['|'], max_gen_toks: 10, do_sample: false, temperature: 0.0}",
    "tiny_rolling": 'output_type: loglikelihood_rolling\ndoc_to_target: "{{q}}"\n'
    "metric_list: [{metric: word_perplexity}]",
}


@pytest.fixture(name="checkpoint", scope="module")
def checkpoint_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder, words = tmp_path_factory.mktemp("checkpoint"), tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **shape, **heads, **ends)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def answers(tasks: Path, out: Path, client: str, **arguments: str) -> dict[str, list[object]]:
    """What lm-eval got for each row, by task."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = ["lm_eval", "run", "--model", client, "--model_args", given, "--tasks", *KINDS]
    command += ["--include_path", str(tasks), "--output_path", str(out), "--log_samples", "--device", "cpu"]
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "HF_HOME": str(out / "cache")}
    settings.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return {
        name: [
            json.loads(line)["resps"]
            for line in next(out.rglob(f"samples_{name}_*")).read_text().splitlines()
        ]
        for name in KINDS
    }


def flat(found: object) -> list[object]:
    """The answers in one row, log-probabilities rounded to what float32 decides."""
    if isinstance(found, list):
        return [each for one in found for each in flat(one)]
    try:
        return [round(float(str(found)), 3)]
    except ValueError:
        return [found]


def test_lm_eval_gets_the_answers_that_transformers_gives(checkpoint: Path, tmp_path: Path) -> None:
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, kind in KINDS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{TASK.format(rows=rows)}{kind}\n")
    expected = answers(
        tmp_path, tmp_path / "theirs", "hf", pretrained=str(checkpoint), dtype="float32", max_length="128"
    )
    with served(build_engine(load_model(ModelSpec(path=str(checkpoint), dtype="float32")))) as address:
        found = answers(
            *(tmp_path, tmp_path / "ours", "local-completions"),
            model="tiny",
            base_url=f"{address}/v1/completions",
            tokenizer=str(checkpoint),
            tokenizer_backend="huggingface",
            max_length="128",
        )
    for name in KINDS:
        assert len(found[name]) == len(ROWS)
        assert flat(found[name]) == pytest.approx(flat(expected[name]), abs=2e-3)
