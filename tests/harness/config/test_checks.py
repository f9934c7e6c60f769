"""Ranges and rules: each message names the key, the value and what is allowed."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.config.checks import RANGES, check_config, value_of
from harness.config.compose import compose_config, normalise
from harness.config.overrides import parse_overrides
from harness.config.schema import DecodingMode, RunConfig, config_keys


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


def messages(*texts: str) -> list[str]:
    return [str(error) for error in check_config(composed(*texts))]


def test_the_default_run_is_fine() -> None:
    assert messages() == []


def test_a_value_below_its_range_is_refused_by_its_key() -> None:
    said = {key: messages(f"{key}=-1") for key in RANGES}
    starts = {key: any(line.startswith(f"{key}: found -1") for line in lines) for key, lines in said.items()}
    assert [key for key, named in starts.items() if not named] == []


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = {name for name, key in config_keys().items() if key.kind in (int, float)}
    assert numbers == set(RANGES)


def test_every_range_has_an_end_that_64_bits_hold() -> None:
    assert [key for key, allowed in RANGES.items() if not allowed.high < 2**63] == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["cache.block_size=0"], "cache.block_size: found 0, must be 1 or greater"),
        (
            ["workload.prefix_share=1.5"],
            "workload.prefix_share: found 1.5, must be 0 or greater and at most 1",
        ),
        (
            ["model.seed=18446744073709551616"],
            "model.seed: found 18446744073709551616, must be 0 or greater and at most 9,223,372,036,854,775,807",
        ),
        (["cache.host_tokens=99999999999999999999999"], "must be 0 or greater and at most 1,000,000,000"),
        (["replay.duration_s=1e300"], "replay.duration_s: found 1e+300, must be greater than 0 and at most"),
        (["decoding=sample", "decoding.temperature=1e-300"], "found 1e-300, must be 1e-05 or greater"),
        (["decoding.temperature=0"], "decoding.temperature: found 0.0, must be greater than 0"),
        (
            ["workload.request_rate=nan"],
            "workload.request_rate: found nan, must be 1e-06 or greater and at most",
        ),
        (
            ["workload.length_scale=inf"],
            "workload.length_scale: found inf, must be 1e-06 or greater and at most",
        ),
        (["workload.request_rate=1e-300"], "workload.request_rate: found 1e-300, must be 1e-06 or greater"),
        (["workload.num_requests=100000000000"], "must be 1 or greater and at most 10,000,000"),
        (["measure=false", "model.chunked_windows=true"], "model.window is null"),
        (["scheduler.long_prefill_adaptive=true"], "there is no cap to raise"),
        (["cache.pool_tokens=1000000000000"], "must be 1 or greater and at most 1,000,000,000"),
        (
            ["scheduler.max_batched_tokens=100000000000000000000"],
            "must be 1 or greater and at most 1,000,000,000",
        ),
        (
            ["engine.backend=native", "model.kv_dtype=fp8_e4m3"],
            "engine.backend: found native, whose attention reads",
        ),
        (["device.tflops=1e-12"], "device.tflops: found 1e-12, must be 1e-06 or greater"),
        (["engine.threads=100000"], "engine.threads: found 100000, must be 1 or greater and at most 256"),
        (
            ["model.vocab=8", "decoding.beam_width=9"],
            "found 9, more than the tokens there are (model.vocab=8)",
        ),
        (["cost.cache_dir=/dev/null"], "cost.cache_dir: cannot use '/dev/null': /dev/null is not a folder"),
        (["out=" + 300 * "a"], "out: cannot use 'aaa"),
        (["trace.format=azure", "trace.path=" + 300 * "a"], "trace.path: cannot use 'aaa"),
        (["scheduler.watermark=1"], "scheduler.watermark: found 1.0, must be 0 or greater and less than 1"),
        (["decoding.beam_width=65"], "decoding.beam_width: found 65, more than scheduler.max_running=64"),
        (
            ["decoding.beam_width=8", "scheduler.max_batched_tokens=4"],
            "decoding.beam_width: found 8, more than scheduler.max_batched_tokens=4",
        ),
        (["decoding=sample", "decoding.n=65"], "decoding.n: found 65, more than scheduler.max_running=64"),
        (["decoding.n=2"], "decoding.n: found 2, but greedy decoding has one sequence"),
        (["cache.pool_tokens=15"], "cache.pool_tokens: found 15, less than one block (cache.block_size=16)"),
        (
            ["cache=contiguous_max", "cache.pool_tokens=1000"],
            "cache.pool_tokens: found 1000, but contiguous_max reserves cache.max_model_len=1024",
        ),
        (["model.heads=6"], "model.kv_heads: found 4, must divide model.heads=6"),
        (["cache.max_model_len=4096"], "cache.max_model_len: found 4096, more than model.max_position=2048"),
        (["trace.format=azure"], "trace.path: missing: trace.format=azure reads a file"),
        (["trace.path=x.csv"], "trace.path: found 'x.csv', but trace.format=generated reads no file"),
        (["trace.format=azure", "trace.path=no/x.csv"], "trace.path: no such file: 'no/x.csv' (looked for /"),
        (["name=a/b"], "name: found 'a/b', must be letters, digits"),
        (["out=''"], "out: is empty"),
        (["out=/dev/null/results"], "out: cannot use '/dev/null/results': /dev/null is not a folder"),
    ],
)
def test_the_message_names_key_value_and_what_is_allowed(texts: list[str], message: str) -> None:
    assert any(message in found for found in messages(*texts)), messages(*texts)


def test_a_folder_is_no_trace_file(tmp_path: Path) -> None:
    assert "is not a file" in messages("trace.format=azure", f"trace.path='{tmp_path}'")[0]


def test_a_folder_without_a_trace_is_refused_and_nothing_below_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "large.bin").write_text("x\n")
    opened: list[Path] = []

    def count(file: Path, *stamp: int) -> int:
        opened.append(file)
        return 0

    monkeypatch.setattr("harness.config.memory._rows", count)
    assert "is a folder without files of a trace" in messages("trace=file", f"trace.path='{tmp_path}'")[0]
    assert opened == []


def test_a_trace_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.csv"
    file.touch()
    monkeypatch.setattr("harness.config.paths.os.access", lambda path, mode: Path(path) != file)
    assert "cannot be read" in messages("trace.format=azure", f"trace.path='{file}'")[0]


def test_a_results_folder_without_permission_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.config.paths.os.access", lambda path, mode: False)
    assert messages(f"out='{tmp_path}/a/b'") == [
        f"out: cannot write to '{tmp_path}/a/b': no permission in {tmp_path}"
    ]


def test_several_mistakes_are_all_found() -> None:
    assert len(messages("cache.block_size=0", "decoding.beam_width=0", "engine.threads=0")) == 3


def test_block_size_and_prefix_caching_mean_nothing_to_a_contiguous_cache() -> None:
    variants = [composed("cache=contiguous_max", f"cache.block_size={size}") for size in (8, 32)]
    variants.append(composed("cache=contiguous_max", "cache.prefix_caching=true"))
    assert len({repr(normalise(config)) for config in variants}) == 1


def test_mode_and_n_mean_nothing_to_beam_search() -> None:
    config = normalise(composed("decoding=sample", "decoding.beam_width=2"))
    assert (config.decoding.mode, config.decoding.n) == (DecodingMode.greedy, 1)


def test_what_applies_is_left_alone() -> None:
    config = composed("cache.block_size=8", "decoding=sample", "decoding.temperature=0.5")
    assert normalise(config) == replace(config)


def test_a_value_is_found_by_its_dotted_key() -> None:
    assert value_of(composed("cache.block_size=8"), "cache.block_size") == 8
