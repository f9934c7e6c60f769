"""Advice: answers with their evidence, warnings where a cache finds nothing or admission thrashes, and flags."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.core.options import GroupPages
from harness.capacity import parse_slo
from harness.capacity.advice import Advice, advise
from harness.cli.main import main
from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.metrics.record import PointRecord
from harness.store.reading import StoreContent
from harness.workload.point import resolve
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
    return advise(config, resolve(config).trace, parse_slo(slo), lambda what: None)


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
    assert "is the observed peak of these 12 requests" in pool
    assert int(pool.partition("max_num_seqs: ")[2].split()[0]) <= 12


def test_the_flags_are_those_that_were_simulated(tmp_path: Path) -> None:
    """A limit at the observed peak would hold back any larger load; the pool's flag says nothing of a pool by hand."""
    file = write(tmp_path, 0, 200, 20, 3, 1.0)
    assert "--max-num-seqs 256" in advice_of(file).flags
    by_hand = advice_of(file, "cache.pool_tokens=20000").flags
    assert not [flag for flag in by_hand if flag.startswith("--gpu-memory-utilization")]


def test_the_best_eviction_is_called_a_bound(tmp_path: Path) -> None:
    assert "Belady's optimum, a bound" in advice_of(write(tmp_path, 100, 20, 20, 3, 1.0)).floor


def test_sharing_that_is_recorded_in_larger_blocks_is_warned_of(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row | {"timestamp": 1000 * i}) + "\n" for i in range(3)))
    warnings = advice_of(file, "trace=mooncake", f"trace.path={file}").warnings
    assert any(text.startswith("the trace records sharing in blocks of 512 tokens") for text in warnings)


@pytest.mark.parametrize(("interval", "warned"), [("0", False), ("null", True)])
def test_groups_are_warned_of_where_vllm_keeps_less(tmp_path: Path, interval: str, warned: bool) -> None:
    file = write(tmp_path, 0, 1500, 4, 2, 1.0)
    settings = "model=gemma3_12b", "cache.groups=uniform", f"cache.retention_interval={interval}"
    advice = advice_of(file, *settings)
    assert warned == any("documents asked twice hit 0.458 here" in text for text in advice.warnings)
    assert warned == ("--prefix-cache-retention-interval None" in advice.flags)


def test_requests_that_are_left_out_are_said_first_with_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": i, "prompt_tokens": 9000 if i == 2 else 500, "output_tokens": 4} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0] == (
        "Left out: 1 of 3 requests with 90 % of the prompt tokens, because 1 are longer than 8,192 tokens "
        "(cache.max_model_len). All advice is for the others."
    )
    assert lines[-1] == "No flags: 2 requests are too few to advise from; give 30 or more."


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
    file = write(tmp_path, 100, 20, 20, 30, 1.0)
    assert main(["advise", str(file), "--model", "llama3_8b", "--device", "h100", "--slo", SLO]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("Block size: ")
    assert lines[-2].endswith("vLLM's own default is 0.92")
    assert lines[-1].startswith("vllm serve <hub id of llama-3-8b> --block-size 16 ")


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
    assert main(["advise", str(store)]) == 2  # a file outside of the store is read where it is typed
    assert "names a file outside of it" in capsys.readouterr().err
    assert main(["advise", str(store), f"trace.path={file}"]) == 0
    shown = capsys.readouterr().out
    assert "Keep 32." in shown
    assert "simulated 6 requests on h100 with llama-3-8b" in shown


def test_a_class_that_a_record_names_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    word = "scheduler.order=stranger:Order"
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    trace = f"trace.path={write(tmp_path, 100, 20, 20, 6, 1.0)}"
    record = PointRecord(overrides=[trace, "trace=file", word])
    content = StoreContent({"point": record})
    (tmp_path / "store" / "points").mkdir(parents=True)
    monkeypatch.setattr("harness.store.reading.read_store", lambda root: content)
    assert main(["advise", "store"]) == 2
    said = capsys.readouterr().err
    assert "scheduler.order: the record of point in store names code to run, 'stranger:Order'" in said


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
    write_jsonl(resolve(config).trace, folder / "workload.jsonl")
    assert main(["advise", str(folder), "--model", "llama3_8b", "--device", "h100"]) == 0
    assert "simulated 6 requests on h100 with llama-3-8b" in capsys.readouterr().out


def test_no_command_is_given_for_a_toy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(write(tmp_path, 100, 20, 20, 30, 1.0))]) == 0
    shown = capsys.readouterr().out
    assert "tiny-llama is a toy with random weights" in shown
    assert "vllm serve" not in shown


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
