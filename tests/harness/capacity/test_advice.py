"""Advice: answers with their evidence, warnings where a cache finds nothing or admission thrashes, and flags."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.options import GroupPages
from harness.capacity.advice import Advice, advise
from harness.capacity.trials import parse_slo
from harness.cli.main import main
from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.workload.workload import build_workload
from traces.formats.pagetwin import write_jsonl

SLO = "ttft_p99<5,tpot_mean<0.1"


def write(folder: Path, shared: int, unique: int, output: int, count: int, gap_s: float) -> Path:
    """A trace of prompts that share a prefix, a request every `gap_s` seconds."""
    file = folder / "trace.jsonl"
    rows = [
        {
            "arrival_s": index * gap_s,
            "prompt_tokens": shared + unique,
            "output_tokens": output,
            **({"prefix": "one", "prefix_tokens": shared} if shared else {}),
        }
        for index in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def advice_of(file: Path, *overrides: str, slo: str = SLO) -> Advice:
    words = (
        "measure=false",
        "trace=file",
        f"trace.path={file}",
        "model=llama3_8b",
        "device=h100",
        *overrides,
    )
    config = compose_config(axis.settings[0] for axis in parse_overrides(words))
    return advise(config, build_workload(config).trace, parse_slo(slo), lambda what: None)


def test_a_block_size_that_changes_nothing_is_said_not_to_matter(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 200, 20, 12, 1.0))
    assert advice.answers[0].startswith("Block size: it does not matter here, because")
    assert "no request is preempted at any of them" in advice.answers[0]
    assert len({row.preemptions for row in advice.rows}) == 1


def test_larger_blocks_waste_more_and_hit_no_more(tmp_path: Path) -> None:
    rows = advice_of(write(tmp_path, 100, 20, 20, 12, 1.0)).rows
    assert [row.block_size for row in rows] == [16, 32, 64, 128]
    assert [row.waste for row in rows] == sorted(row.waste for row in rows)
    assert [row.most_hits for row in rows] == sorted((row.most_hits for row in rows), reverse=True)
    assert all(row.hits <= row.most_hits + 1e-9 for row in rows)


def test_prompts_below_the_match_unit_are_warned_of(tmp_path: Path) -> None:
    """vllm#54607: prompts of 240 tokens, blocks of 784, no hit and no warning."""
    file = write(tmp_path, 200, 40, 20, 12, 1.0)
    advice = advice_of(file, "cache.block_size=784", "cache.pool_tokens=400000")
    size = next(row for row in advice.rows if row.block_size == 784)
    assert (size.hits, size.most_hits) == (0, 0)
    words = [text for text in advice.warnings if "match unit 784" in text]
    assert words
    assert words[0].startswith("0 % hits: prompts of 240 tokens that share 200 (medians), match unit 784")


def test_prompts_above_the_match_unit_are_not_warned_of(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 200, 40, 20, 12, 1.0))
    assert not [text for text in advice.warnings if "match unit" in text]


def test_a_cliff_of_first_chunk_admission_is_found(tmp_path: Path) -> None:
    """vllm#37307: first chunks are admitted, and then there is no room for the rest of the prompts."""
    file = write(tmp_path, 0, 4000, 600, 20, 4.0)
    advice = advice_of(
        file, "cache.pool_tokens=20000", "scheduler.max_batched_tokens=512", slo="ttft_p99<500"
    )
    (cliff,) = [text for text in advice.warnings if text.startswith("admission cliff at")]
    assert "under first-chunk admission" in cliff


def test_pool_and_sequences_are_no_larger_than_what_is_there(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 200, 20, 12, 0.05), "cache.pool_tokens=20000")
    (pool,) = [text for text in advice.answers if text.startswith("Pool: ")]
    assert "this device holds 20,000" in pool
    assert int(pool.split()[1].replace(",", "")) < 20_000
    (sequences,) = [flag for flag in advice.flags if flag.startswith("--max-num-seqs")]
    assert 1 <= int(sequences.split()[1]) <= 12


def test_an_slo_that_is_not_met_is_said_with_what_breaks_it(tmp_path: Path) -> None:
    advice = advice_of(write(tmp_path, 0, 200, 20, 6, 1.0), slo="ttft_p99<0.000001")
    assert advice.answers[1].startswith("The SLO (ttft_p99 ≤ 1e-06 s) is not met: ttft_p99 is ")


def test_windowed_layers_without_groups_are_warned_of(tmp_path: Path) -> None:
    file = write(tmp_path, 0, 3000, 20, 3, 1.0)
    advice = advice_of(file, "model=gemma3_12b", "cache.groups=off")
    assert any(
        "of the KV of a request of 3,020 tokens is never read again" in text for text in advice.warnings
    )
    assert "--disable-hybrid-kv-cache-manager" in advice.flags


def test_the_command_prints_answers_first_and_flags_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 100, 20, 20, 6, 1.0)
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100", "--slo", SLO]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("Block size: ")
    assert lines[-1].startswith("vllm serve llama-3-8b --block-size 16 ")


def test_a_model_with_windows_is_advised_with_groups(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    import harness.capacity.advice as module

    real = module.advise
    monkeypatch.setattr(
        module, "advise", lambda config, *more: seen.append(config) or real(replace(config), *more)
    )
    file = write(tmp_path, 0, 1500, 10, 2, 1.0)
    assert main(["advise", str(file), "--model", "gemma3_12b", "--device", "h100"]) == 0
    assert [config.cache.groups for config in seen] == [GroupPages.uniform]
    assert "--disable-hybrid-kv-cache-manager" not in capsys.readouterr().out


def test_a_store_gives_its_trace_and_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = write(tmp_path, 100, 20, 20, 6, 1.0), tmp_path / "store"
    settings = [
        f"trace.path={file}",
        "trace=file",
        "workload=as_recorded",
        "replay.mode=trace",
        "model=llama3_8b",
    ]
    run = [
        "run",
        "measure=false",
        "device=h100",
        "cache.block_size=32",
        "report.figures=none",
        f"out={store}",
    ]
    assert main([*run, *settings]) == 0
    capsys.readouterr()
    assert main(["advise", str(store)]) == 0
    shown = capsys.readouterr().out
    assert "Keep 32." in shown
    assert "simulated 6 requests on h100 with llama-3-8b" in shown


def test_the_log_of_a_deployment_gives_its_requests_and_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"]
    lines += [f"{index},200,20,{index + 0.1},{index + 0.5}" for index in range(5)]
    (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "serve.sh").write_text(
        "vllm serve meta-llama/Llama-3.1-8B --block-size 32 --max-num-seqs 8\n"
    )
    assert main(["advise", str(tmp_path), "--model", "llama31_8b", "--device", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "simulated 5 requests on h100 with llama-3.1-8b" in shown
    assert "Keep 32." in shown


def test_the_folder_of_a_twin_gives_its_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = compose_config(
        axis.settings[0]
        for axis in parse_overrides(("trace=file", f"trace.path={write(tmp_path, 100, 20, 20, 6, 1.0)}"))
    )
    folder = tmp_path / "twin"
    folder.mkdir()
    write_jsonl(build_workload(config).trace, folder / "workload.jsonl")
    assert main(["advise", str(folder), "--model", "llama3_8b", "--device", "h100"]) == 0
    assert "simulated 6 requests on h100 with llama-3-8b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.jsonl"], "no such file or folder: 'nowhere.jsonl'"),
        (["{file}", "--requests", "0"], "--requests: must be at least 1"),
        (["{file}", "--slo", "fast"], "'fast' is no goal"),
        (["{file}", "cache.block_size=16,32"], "advice is for one configuration"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, 0, 20, 2, 2, 1.0)
    assert main(["advise", *(word.format(file=file) for word in words)]) == 2
    assert message in capsys.readouterr().err
