"""Options of vLLM and SGLang become our keys, with their origin; what has no key is listed, never left out."""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.capacity.flags import serve_line
from harness.config.compose import compose_config
from harness.config.overrides import parse_overrides
from harness.twin.printed import read_server_log
from harness.twin.reading import EngineLogError, read_engine_log
from harness.twin.settings import SGLANG, VLLM, EngineSettings, with_vllm_defaults
from traces.errors import RowError
from traces.formats.files import open_source

DATA = Path(__file__).resolve().parents[2] / "data" / "deployments"
CSV = "arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n0,5,2,1,2\n"


def settings(folder: Path, name: str, text: str) -> EngineSettings:
    """The settings of a deployment that has one file of settings beside a log of one request."""
    (folder / "requests.csv").write_text(CSV)
    (folder / name).write_text(text)
    return read_engine_log(folder).settings


def refusal(folder: Path, name: str, text: str) -> str:
    with pytest.raises(EngineLogError) as caught:
        settings(folder, name, text)
    return str(caught.value)


COMMAND = """\
#!/bin/sh
# the server of the shop
vllm serve meta-llama/Llama-3.1-8B \\
    --max-num-seqs 200 --max-num-batched-tokens=4k \\
    --no-enable-prefix-caching -tp 2 --kv-cache-dtype fp8 \\
    --api-key s3cret --port 9000 --enforce-eager
"""


def test_a_command_line_of_vllm_is_mapped(tmp_path: Path) -> None:
    found = settings(tmp_path, "serve.sh", COMMAND)
    assert (found.engine, found.model) == ("vllm", "meta-llama/Llama-3.1-8B")
    assert (found.max_running, found.max_batched_tokens) == (200, 4000)
    assert (found.prefix_caching, found.tensor_parallel, found.kv_dtype) == (False, 2, "fp8_e4m3")


def test_what_stands_behind_the_server_s_command_is_not_its_settings(tmp_path: Path) -> None:
    """Its output, a second command, a client: --dtype of `vllm bench serve` was taken for the server's."""
    client = "> log 2>&1 &\nvllm bench serve --model other --dtype float16 --max-num-seqs 3\n"
    found = settings(tmp_path, "serve.sh", f"{COMMAND.rstrip()} --enable-prefix-caching {client}")
    assert (found.model, found.max_running, found.dtype) == ("meta-llama/Llama-3.1-8B", 200, None)
    assert found.prefix_caching is True


@pytest.mark.parametrize(
    "line",
    [
        'nohup bash -c "vllm serve m --max-num-seqs 8" &\n',
        "docker run image sh -lc 'export A=1 && exec vllm serve m \\\n --max-num-seqs 8'\n",
        "taskset -c 0-3 vllm serve m --max-num-seqs 8\n",
        "echo 'now vllm serve m'; vllm serve m --max-num-seqs 8\n",
    ],
)
def test_a_command_that_a_shell_is_given_is_read(tmp_path: Path, line: str) -> None:
    found = settings(tmp_path, "serve.sh", line)
    assert (found.model, found.max_running) == ("m", 8)


def test_two_servers_in_one_file_are_refused(tmp_path: Path) -> None:
    """The model of the first had the limits of the second."""
    said = refusal(
        tmp_path, "serve.sh", "vllm serve one --max-num-seqs 8 &\nvllm serve other --max-num-seqs 9\n"
    )
    assert "the commands of 2 servers; keep that of the server of this log" in said


def test_an_option_without_a_key_is_listed(tmp_path: Path) -> None:
    assert settings(tmp_path, "serve.sh", COMMAND).unmapped == {"api_key": "given", "enforce_eager": "True"}


def test_the_value_of_a_secret_is_never_kept(tmp_path: Path) -> None:
    assert "s3cret" not in repr(settings(tmp_path, "serve.sh", COMMAND))


def test_the_tag_of_an_image_gives_the_version(tmp_path: Path) -> None:
    text = "docker run --gpus all vllm/vllm-openai:v0.10.2 --model m  # as vllm serve m\n"
    assert settings(tmp_path, "run.sh", text).version == "0.10.2"


def test_overrides_have_our_keys(tmp_path: Path) -> None:
    found = settings(tmp_path, "serve.sh", COMMAND)
    assert set(found.overrides()) >= {
        "scheduler.max_running=200",
        "scheduler.max_batched_tokens=4000",
        "cache.prefix_caching=false",
        "model.kv_dtype=fp8_e4m3",
    }


@pytest.mark.parametrize("key", ["watermark=0.05", "admit_whole_prompt=false", "watermark=0.0"])
def test_what_a_line_of_advise_asks_of_admission_is_read_back(tmp_path: Path, key: str) -> None:
    words = ("measure=false", "device=h100", "model=llama3_8b", f"scheduler.{key}")
    line = serve_line(compose_config([axis.settings[0] for axis in parse_overrides(words)]))
    found = settings(tmp_path, "serve.sh", line)
    asked = [word for word in found.overrides() if "watermark" in word or "admit" in word]
    assert asked == [f"scheduler.{key}"] * (key != "watermark=0.0")
    assert not found.unmapped


@pytest.mark.parametrize("words", ["--max-num-active-seqs 16", "--max-num-seqs 64 --max-num-active-seqs=16"])
def test_the_requests_that_may_run_are_the_lower_of_two_limits(tmp_path: Path, words: str) -> None:
    assert settings(tmp_path, "serve.sh", f"vllm serve m {words}").max_running == 16
    assert (
        settings(tmp_path, "serve.sh", "vllm serve m --max-num-active-seqs 16 --max-num-seqs 8").max_running
        == 8
    )


def test_other_names_and_short_flags_of_vllm_are_read(tmp_path: Path) -> None:
    words = "-q fp8 -ep -dp 2 --max-num-scheduled-tokens 512 --max-num-batched-tokens 2048"
    found = settings(tmp_path, "serve.sh", f"vllm serve m {words} --device-memory-utilization 0.8")
    assert (found.quantization, found.expert_parallel, found.data_parallel) == ("fp8", True, 2)
    assert (found.max_batched_tokens, found.memory_utilization) == (512, 0.8)
    assert not found.unmapped


def test_what_changes_the_schedule_and_is_not_simulated_is_told_apart(tmp_path: Path) -> None:
    found = settings(tmp_path, "serve.sh", "vllm serve m --prefill-schedule-interval 4")
    assert found.unmodelled == {"prefill_schedule_interval": "4"}
    drafts = (
        "--spec-tokens 3",
        "-sc.num_speculative_tokens=3",
        "--speculative-config.method ngram",
        "-dcp 2",
    )
    assert all(settings(tmp_path, "serve.sh", f"vllm serve m {words}").unmodelled for words in drafts)
    assert not settings(tmp_path, "serve.sh", "vllm serve m --prefill-schedule-interval 1").unmodelled


def test_the_blocks_of_a_line_that_advise_prints_are_read_back(tmp_path: Path) -> None:
    """vLLM counts its null block among them."""
    words = ("measure=false", "device=h100", "model=llama3_8b", "cache.pool_tokens=1600")
    line = serve_line(compose_config([axis.settings[0] for axis in parse_overrides(words)]))
    assert "--num-gpu-blocks-override 101" in line
    groups = ("model=gpt_oss_20b", "cache.groups=uniform")  # of half of the layers each
    both = compose_config([axis.settings[0] for axis in parse_overrides((*words, *groups))])
    assert "--num-gpu-blocks-override 201" in serve_line(both)
    assert settings(tmp_path, "serve.sh", line).pool_blocks == 100


def test_a_yaml_for_vllm_is_mapped(tmp_path: Path) -> None:
    text = "model: org/name\nmax-num-seqs: 64\ngpu-memory-utilization: 0.8\nscheduling-policy: priority\n"
    found = settings(tmp_path, "config.yaml", text)
    assert (found.max_running, found.memory_utilization, found.policy) == (64, 0.8, "priority")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "model: m\nmax-num-seqs: lots\n",
            "config.yaml:2: max-num-seqs: whole number of at least 1 expected",
        ),
        (
            "model: m\nmax-num-seqs: .inf\n",
            "config.yaml:2: max-num-seqs: whole number of at least 1 expected",
        ),
        ("model: m\nmax-num-seqs: 1" + 40 * "0" + "\n", "config.yaml:2: max-num-seqs: whole number"),
        ("model: m\ngpu-memory-utilization: 90\n", "config.yaml:2: gpu-memory-utilization: number above 0"),
        ("model: m\nkv-cache-dtype: int3\n", "config.yaml:2: kv-cache-dtype: int3 is not known here"),
        ("- a\n- b\n", "config.yaml:1: names and values expected, found list"),
        ("a: [1\n", "no YAML"),
        ("1: a\n", "config.yaml:1: 1: the name of an option expected"),
        ("null: a\n", "config.yaml: None: the name of an option expected"),
        ("model: !!python/name:os.system x\n", "config.yaml:1: no YAML: could not determine"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "no YAML: line 2: an alias"),
        ("model: " + "[" * 20_000, "no YAML: line 1: nesting too deep"),
    ],
)
def test_a_wrong_option_in_a_yaml_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, "config.yaml", text)


def test_a_wrong_option_of_a_command_is_named_by_its_line(tmp_path: Path) -> None:
    said = refusal(tmp_path, "serve.sh", "vllm serve m \\\n --block-size none\n")
    assert "serve.sh:2: block_size: whole number of at least 1 expected, found none" in said


def test_what_is_not_simulated_is_listed_apart(tmp_path: Path) -> None:
    text = "vllm serve m --pipeline-parallel-size 2 --cpu-offload-gb 0 --prefix-match-unit 32\n"
    found = settings(tmp_path, "serve.sh", text)
    assert found.unmodelled == {"pipeline_parallel_size": "2"}
    assert "cache.prefix_match_unit=32" in found.overrides()


def test_a_dump_of_the_arguments_has_what_the_engine_found_out(tmp_path: Path) -> None:
    """The form that newer versions of LLMServingSim's recorder write."""
    record = json.loads((DATA / "servingsim-recorder" / "engine.json").read_text())
    record["kv_cache"] = {"num_gpu_blocks": 2588, "block_size": 16, "num_kv_tokens": 41408}
    record["hardware"] = {"device_name": "NVIDIA GeForce RTX 4090"}
    found = settings(tmp_path, "meta.json", json.dumps(record, indent=2))
    assert (found.pool_blocks, found.tokens_of_pool) == (2587, 41392)  # without vLLM's null block
    assert found.device == "NVIDIA GeForce RTX 4090"
    del record["kv_cache"]["num_gpu_blocks"]
    assert settings(tmp_path, "meta.json", json.dumps(record)).tokens_of_pool == 41392
    assert "cache.pool_tokens=41392" in found.overrides()


def test_a_wrong_value_in_a_dump_is_named_by_line_and_path(tmp_path: Path) -> None:
    record = json.loads((DATA / "servingsim-recorder" / "engine.json").read_text())
    record["engine_kwargs"]["max_num_seqs"] = "all"
    said = refusal(tmp_path, "engine.json", json.dumps(record, indent=2))
    assert "engine.json:10: engine_kwargs.max_num_seqs: whole number of at least 1 expected" in said


def test_a_version_that_is_no_text_is_refused(tmp_path: Path) -> None:
    record = json.loads((DATA / "servingsim-recorder" / "engine.json").read_text()) | {"vllm_version": 0.19}
    said = refusal(tmp_path, "engine.json", json.dumps(record, indent=2))
    assert "engine.json:4: vllm_version: string expected, found 0.19" in said


# -- the log of a server ------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Path:
    (tmp_path / "requests.csv").write_text(CSV)
    shutil.copy(DATA / "vllm-server" / "server.log", tmp_path)
    return tmp_path


def test_a_server_log_gives_options_version_and_pool(served: Path) -> None:
    found = read_engine_log(served).settings
    assert (found.version, found.model) == ("0.19.0", "meta-llama/Llama-3.1-8B")
    assert (found.max_running, found.max_batched_tokens) == (200, 4096)
    assert (found.tensor_parallel, found.dtype, found.max_model_len) == (2, "bfloat16", 16384)
    assert found.tokens_of_pool == 1_066_416 - 16  # without vLLM's null block
    assert found.async_scheduling is True


@pytest.mark.parametrize(("longest", "blocks"), [(1000, 5000), (100, 5000), (4096, 5000), (4097, 601)])
def test_the_room_for_longest_requests_gives_the_pool(served: Path, longest: int, blocks: int) -> None:
    """vLLM 0.33 prints blocks / ceil(longest / 16) * longest, so fewer tokens than the blocks hold."""
    tokens = int(blocks / -(-longest // 16) * longest)
    with (served / "server.log").open("a") as log:
        log.write(f"INFO 11-20 14:03:00 [kv_cache_utils.py:1148] GPU KV cache size: {tokens:,} tokens, ")
        log.write(f"Maximum concurrency for {longest:,} tokens per request: {tokens / longest:.2f}x\n")
    found = read_engine_log(served).settings
    assert (found.max_model_len, found.tokens_of_pool) == (longest, 16 * (blocks - 1))


def test_drafts_in_the_whole_configuration_are_told_apart(served: Path) -> None:
    """An offline engine prints no line of its arguments."""
    with (served / "server.log").open("a") as log:
        log.write(
            "INFO 11-20 14:03:00 [core.py:106] Initializing a V1 LLM engine (v0.19.0) with config: model='m', "
        )
        log.write(
            "speculative_config=SpeculativeConfig(method='mtp', model='draft', num_spec_tokens=3), dtype=auto\n"
        )
    found = read_engine_log(served).settings
    assert (found.model, found.unmodelled) == ("m", {"speculative_config": "SpeculativeConfig"})


def test_blocks_in_a_log_give_the_pool(served: Path) -> None:
    with (served / "server.log").open("a") as log:
        log.write("INFO 11-20 14:03:00 [executor_base.py:112] # cuda blocks: 2588, # CPU blocks: 2048\n")
    found = read_engine_log(served).settings
    assert (found.pool_blocks, found.tokens_of_pool) == (2588, 2588 * 16)


def test_the_lines_on_the_state_become_a_series(served: Path) -> None:
    series = read_engine_log(served).series
    assert series is not None
    assert series.running.tolist() == [7, 12]
    assert series.waiting.tolist() == [1, 0]
    assert series.kv_use is not None
    assert series.kv_use.tolist() == pytest.approx([0.034, 0.061])
    assert series.at_s[1] - series.at_s[0] == pytest.approx(10)


def test_a_series_of_its_own_wins_over_the_printed_one(served: Path) -> None:
    shutil.copy(DATA / "servingsim-recorder" / "timeseries.csv", served)
    series = read_engine_log(served).series
    assert series is not None
    assert series.running.tolist() == [9, 19]


def test_replicas_that_print_their_state_are_added_up(served: Path) -> None:
    text = (served / "server.log").read_text()
    state = text.splitlines()[-1]
    second = (
        state.replace("Engine 000", "Engine 001").replace("14:03:50", "14:03:51").replace("12 reqs", "8 reqs")
    )
    (served / "server.log").write_text(text + second + "\n")
    series = read_engine_log(served).series
    assert series is not None
    assert series.running.tolist() == [20]


def test_a_cut_line_of_arguments_is_named(served: Path) -> None:
    lines = (served / "server.log").read_text().splitlines()
    lines[2] = lines[2].partition("{")[0]
    (served / "server.log").write_text("\n".join(lines) + "\n")
    with pytest.raises(EngineLogError, match=r"server\.log:3: non-default args: no readable dictionary"):
        read_engine_log(served)


def test_files_that_contradict_each_other_are_refused(served: Path) -> None:
    (served / "zz.sh").write_text("vllm serve m --max-num-seqs 99\n")
    with pytest.raises(EngineLogError, match=r"zz\.sh: max_running: 99, but server\.log says 200"):
        read_engine_log(served)


# -- defaults -----------------------------------------------------------------------------------------------------


def defaults(version: str, memory_gb: float, device: str) -> EngineSettings:
    given = EngineSettings(engine="vllm", version=version)
    return with_vllm_defaults(given, memory_gb=memory_gb, device=device)


@pytest.mark.parametrize(
    ("version", "memory_gb", "device", "tokens", "sequences"),
    [
        ("0.19.0", 80.0, "h100", 8192, 1024),
        ("0.19.0", 24.0, "rtx4090", 2048, 256),
        ("0.19.0", 80.0, "a100_80gb", 2048, 256),
        ("0.8.5", 85.9, "a100_80gb", 8192, 1024),
    ],
)
def test_the_batch_of_a_version_depends_on_the_device(
    version: str, memory_gb: float, device: str, tokens: int, sequences: int
) -> None:
    """`get_batch_defaults` of vLLM: an A100 has the smaller ones since 0.9."""
    found = defaults(version, memory_gb, device)
    assert (found.max_batched_tokens, found.max_running) == (tokens, sequences)


@pytest.mark.parametrize(
    ("given", "memory_gb", "tokens", "running"),
    [
        ({}, 191.5, 16_384, 1024),  # from 160 GiB on
        ({}, 143.8, 8192, 1024),
        ({"unmapped": {"performance_mode": "throughput"}}, 85.9, 16_384, 2048),
        ({"unmapped": {"performance_mode": "throughput"}, "max_running": 64}, 24.0, 4096, 64),
        ({"chunked_prefill": False, "max_model_len": 32_768}, 24.0, 32_768, 256),
        ({"max_model_len": 512, "max_running": 2}, 24.0, 1024, 2),
        ({"chunked_prefill": False, "max_model_len": 32_768, "max_batched_tokens": 100}, 24.0, 100, 100),
    ],
)
def test_defaults_follow_what_else_is_set(
    given: dict[str, Any], memory_gb: float, tokens: int, running: int
) -> None:
    """`_set_default_max_num_seqs_and_batched_tokens_args` of vLLM 0.33."""
    found = with_vllm_defaults(EngineSettings("vllm", "0.33.0", **given), memory_gb=memory_gb, device="b200")
    assert (found.max_batched_tokens, found.max_running) == (tokens, running)


def test_a_default_says_that_it_is_one() -> None:
    assert defaults("0.19.0", 24.0, "x").origin["block_size"] == "default of vLLM 0.19.0"


@pytest.mark.parametrize(
    ("version", "share", "asynchronous"),
    [("0.10.2", 0.9, False), ("0.19.0", 0.9, True), ("0.25.1", 0.92, True)],
)
def test_defaults_change_with_the_version(version: str, share: float, asynchronous: bool) -> None:
    found = defaults(version, 24.0, "x")
    assert (found.memory_utilization, found.async_scheduling) == (share, asynchronous)


def test_what_is_not_known_of_a_version_stays_unknown() -> None:
    found = defaults("0.22.0", 24.0, "x")
    assert found.memory_utilization is None


def test_the_old_scheduler_of_vllm_has_no_defaults_here() -> None:
    assert defaults("0.6.3", 24.0, "x").block_size is None


def test_without_a_device_the_batch_stays_unknown() -> None:
    assert with_vllm_defaults(EngineSettings(engine="vllm", version="0.19.0")).max_running is None


def test_a_given_value_is_no_default() -> None:
    given = EngineSettings(engine="vllm", version="0.19.0", max_batched_tokens=512)
    found = with_vllm_defaults(given, memory_gb=80.0, device="h100")
    assert (found.max_batched_tokens, found.max_running) == (512, 512)


# -- SGLang -------------------------------------------------------------------------------------------------------


def test_a_command_line_of_sglang_is_mapped(tmp_path: Path) -> None:
    text = "python -m sglang.launch_server --model-path m --tp 2 --max-running-requests 48 --disable-radix-cache\n"
    found = settings(tmp_path, "serve.sh", text)
    assert (found.engine, found.model, found.tensor_parallel) == ("sglang", "m", 2)
    assert (found.max_running, found.prefix_caching, found.block_size) == (48, False, 1)


def test_what_differs_in_the_scheduler_of_sglang_is_said(tmp_path: Path) -> None:
    found = settings(tmp_path, "serve.sh", "python -m sglang.launch_server --model-path m\n")
    assert found.mixed_steps is False
    assert "simulated as fcfs" in found.unmapped["schedule_policy"]


def test_the_steps_of_sglang_are_as_it_was_told(tmp_path: Path) -> None:
    words = "--enable-mixed-chunk --disable-overlap-schedule"
    found = settings(tmp_path, "serve.sh", f"python -m sglang.launch_server --model-path m {words}\n")
    assert (found.mixed_steps, found.async_scheduling) == (True, False)
    assert "scheduler.mixed_steps=true" in found.overrides()


def test_the_pool_in_the_log_of_sglang_keeps_what_was_given(tmp_path: Path) -> None:
    text = (
        "[2026-11-20 14:02:09] server_args=ServerArgs(model_path='m', page_size=16, disable_radix_cache=True)\n"
        "[2026-11-20 14:02:30 TP0] max_total_num_tokens=55000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=512, context_len=8192, available_gpu_mem=4.20 GB\n"
        "[2026-11-20 14:03:00 TP0] Decode batch, #running-req: 5, #token: 900, token usage: 0.02, cuda graph: True, "
        "gen throughput (token/s): 101.50, #queue-req: 1\n"
    )
    (tmp_path / "requests.csv").write_text(CSV)
    (tmp_path / "server.log").write_text(text)
    found = read_engine_log(tmp_path)
    assert (found.settings.block_size, found.settings.prefix_caching) == (16, False)
    assert (found.settings.tokens_of_pool, found.settings.max_batched_tokens) == (55000, 8192)
    assert found.series is not None
    assert (found.series.running.tolist(), found.series.waiting.tolist()) == ([5], [1])


@pytest.mark.parametrize("value", ["nan", -1, True])
def test_host_memory_that_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(RowError, match="number of GiB of at least 0"):
        VLLM.read({"kv_offloading_size": value}, "engine.json")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_secret_is_kept_nowhere(engine: str) -> None:
    options = {"hf_token": "s3cret", "ssl-keyfile-password": "s3cret"}
    found = (VLLM if engine == "vllm" else SGLANG).read(options, "file")
    assert found.unmapped.get("hf_token") == "given"
    assert "s3cret" not in repr(found)


def test_a_pool_in_blocks_of_an_unknown_size_is_not_lost() -> None:
    assert "cache.pool_blocks=4096" in EngineSettings(pool_blocks=4096).overrides()
    both = EngineSettings(pool_blocks=4096, block_size=32).overrides()
    assert "cache.pool_tokens=131072" in both
    assert not any(word.startswith("cache.pool_blocks") for word in both)


STATE = "INFO {} [loggers.py:259] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 1.0 "
STATE += (
    "tokens/s, Running: {} reqs, Waiting: 0 reqs, GPU KV cache usage: 3.0%, Prefix cache hit rate: 0.0%\n"
)


@pytest.mark.parametrize(
    ("arrival", "seconds", "running"),
    [("2025-12-31 23:59:55", 20, [0, 0, 1, 1, 0]), ("2026-01-01 00:00:05", 10, [0, 0, 0, 1, 0])],
)
def test_a_log_over_the_end_of_a_year_keeps_its_order(
    tmp_path: Path, arrival: str, seconds: int, running: list[int]
) -> None:
    """vLLM's clock names no year: the first minute of January is behind the last one of December."""
    times = ["12-31 23:59:40", "12-31 23:59:50", "01-01 00:00:00", "01-01 00:00:10", "01-01 00:00:20"]
    states = zip(times, running, strict=True)
    (tmp_path / "server.log").write_text("".join(STATE.format(*each) for each in states))
    start = datetime.fromisoformat(f"{arrival}+00:00").timestamp()
    row = f"{start},5,20,{start + 0.5},{start + seconds}\n"
    (tmp_path / "requests.csv").write_text(CSV.splitlines()[0] + "\n" + row)
    log = read_engine_log(tmp_path)
    assert log.series is not None, log.notes
    assert log.series.running.tolist() == running
    assert np.diff(log.series.at_s).tolist() == pytest.approx([10] * 4)


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        (["02-28 23:59:50", "03-01 00:00:00", "03-01 00:00:10"], [10, 10]),
        (["02-28 23:59:50", "02-29 00:00:00", "03-01 00:00:10"], [10, 86_410]),
        (["03-01 23:59:50", "03-02 00:00:00"], [10]),
    ],
)
def test_a_log_over_the_end_of_february_has_the_29th_only_where_a_line_has_it(
    tmp_path: Path, times: list[str], gaps: list[int]
) -> None:
    (tmp_path / "server.log").write_text("".join(STATE.format(time, 1) for time in times))
    _, series, notes = read_server_log(open_source(tmp_path / "server.log"))
    assert series is not None
    assert np.diff(series.at_s).tolist() == gaps
    assert (series.began_s is None) == (gaps == [10, 10]) == ("no leap year" in " ".join(notes))


def test_the_ranks_of_sglangs_data_parallelism_are_added_up(tmp_path: Path) -> None:
    line = "[2026-11-20 14:03:0{} DP{} TP{}] Decode batch. #running-req: {}, token usage: {}, #queue-req: 1\n"
    states = [(0, 0, 0, 5, 0.2), (0, 1, 1, 7, 0.4), (4, 0, 0, 6, 0.2), (4, 1, 1, 8, 0.4)]
    (tmp_path / "server.log").write_text("".join(line.format(*each) for each in states))
    (tmp_path / "requests.csv").write_text(CSV)
    series = read_engine_log(tmp_path).series
    assert series is not None
    assert (series.running.tolist(), series.waiting.tolist()) == ([12, 14], [2, 2])
    assert series.kv_use is not None
    assert series.kv_use.tolist() == pytest.approx([0.3, 0.3])
