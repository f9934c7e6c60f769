"""A device or a model from a file of the user's own: `device=./mine.yaml`."""

from pathlib import Path

import pytest

from engine.runtime.options import Dtype
from harness.config.compose import compose_config
from harness.config.errors import ConfigError, UserError
from harness.config.overrides import parse_overrides
from harness.config.schema import RunConfig
from harness.sweep.plan import run_request

CARD = "name: mine\nmemory_gb: 25.25\nbandwidth_gbs: 1008\ntflops: 165.2\n"


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


def written(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def test_a_device_comes_from_a_file(tmp_path: Path) -> None:
    device = composed(f"device={written(tmp_path, CARD)}").device
    assert (device.name, device.memory_gb, device.bandwidth_gbs, device.tflops) == (
        "mine",
        25.25,
        1008,
        165.2,
    )


def test_a_device_of_datasheet_figures_alone_has_the_assumptions_of_the_presets(tmp_path: Path) -> None:
    mine, preset = composed(f"device={written(tmp_path, CARD)}").device, composed("device=h200").device
    assumed = ("step_overhead_us", "layer_overhead_us", "attention_overhead_us", "row_overhead_us")
    shares = ("kv_efficiency", "compute_efficiency", "attention_efficiency")
    for name in (*assumed, *shares, "activation_gb", "other_memory_gb"):
        assert getattr(mine, name) == getattr(preset, name), name


def test_a_file_may_start_from_a_preset(tmp_path: Path) -> None:
    file = written(tmp_path, "base: llama3_8b\nname: long\nmax_position: 131072\n")
    model = composed(f"model={file}").model
    assert (model.name, model.max_position, model.hidden, model.dtype) == (
        "long",
        131072,
        4096,
        Dtype.bfloat16,
    )


def test_a_file_that_reads_the_environment_is_refused_and_its_value_is_not_shown(tmp_path: Path) -> None:
    file = written(tmp_path, "base: h100\nname: ${oc.env:HOME}\n")
    with pytest.raises(
        ConfigError, match=r"device.name: .*mine.yaml:2 holds an interpolation, '\$\{oc.env:HOME\}'"
    ):
        composed(f"device={file}")


def test_a_file_that_names_a_class_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "base: paged\neviction: stranger:Queue\n")
    with pytest.raises(ConfigError, match=r"cache.eviction: .*mine.yaml:2 names code to run"):
        composed(f"cache={file}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: !!python/name:os.system x\n", "could not determine a constructor"),
        ("name: " + "[" * 20_000, "nesting too deep"),
        ("a: &a x\nname: *a\n", "alias"),
        ("name: " + "x" * 300_000, "at most 262,144"),
        ("name: !!timestamp x\n", "cannot be read"),
        ("name: " + "1" * 5000, "cannot be read"),
        ("? [a]\n: 1\n", "a key that is no word"),
    ],
)
def test_a_file_that_is_no_plain_settings_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        composed(f"device={written(tmp_path, text)}")


def test_a_key_on_the_command_line_counts_more_than_the_file(tmp_path: Path) -> None:
    assert composed(f"device={written(tmp_path, CARD)}", "device.tflops=100").device.tflops == 100
    assert composed("device.tflops=100", f"device={written(tmp_path, CARD)}").device.tflops == 100


def test_files_and_presets_make_a_sweep(tmp_path: Path) -> None:
    [axis] = parse_overrides([f"device=h100,{written(tmp_path, CARD)}"])
    assert [compose_config([each]).device.name for each in axis.settings] == ["h100", "mine"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CARD + "bandwith: 3\n", "mine.yaml:5: no key 'bandwith'; the keys are base, "),
        (CARD + "tflops: 4\n", "mine.yaml:5: no YAML: key 'tflops' stands twice"),
        (CARD.replace("1008", "fast"), "device.bandwidth_gbs: {file}:3: found 'fast', must be a number"),
        ("name: mine\n", "mine.yaml: missing: memory_gb, bandwidth_gbs, tflops; or name a preset"),
        ("base: h101\n", "mine.yaml:1: base names no option ('h101'); the options are"),
        ("- a\n", "mine.yaml:1: must be 'key: value' lines"),
        ("name: [mine]\n", "mine.yaml:1: the value of 'name' must be one word or number"),
        ("name: mine\n  tflops: 3\n", "mine.yaml:2: no YAML"),
        ("", "mine.yaml:1: must be 'key: value' lines"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        composed(f"device={file}")
    assert message.format(file=file) in str(refused.value)


def test_a_word_that_is_none_of_the_choices_lists_them(tmp_path: Path) -> None:
    file = written(tmp_path, "base: llama3_8b\ndtype: bf16\n")
    with pytest.raises(
        ConfigError, match=r"model\.dtype: .*mine\.yaml:2: found 'bf16', must be one of float32, bf"
    ):
        composed(f"model={file}")


def test_a_missing_file_is_named_with_the_place_that_was_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"device: no such file: 'no/such\.yaml' \(looked for /"):
        composed("device=no/such.yaml")


def test_what_differs_from_a_preset_does_not_go_by_its_name(tmp_path: Path) -> None:
    assert composed(f"device={written(tmp_path, 'base: h100')}").device.name == "h100"
    assert (
        composed(f"device={written(tmp_path, 'base: h100' + chr(10) + 'tflops: 500')}").device.name == "mine"
    )
    kept = written(tmp_path, "base: h100\nname: h100\nstep_overhead_us: 300\n")
    assert composed(f"device={kept}").device.name == "h100"


@pytest.mark.parametrize("devices", ["", "tensor_parallel: 4\n"])
def test_a_file_whose_link_constant_meant_something_else_is_refused_and_says_what_to_do(
    tmp_path: Path, devices: str
) -> None:
    file = written(tmp_path, f"{CARD}{devices}fitted_from: my log\nlink_latency_us: 12.5\n")
    with pytest.raises(
        ConfigError, match=r"device.link_latency_us: .*mine.yaml:\d: was the time .* fit the log again"
    ):
        composed(f"device={file}")
    with pytest.raises(UserError, match="give the time of a round as"):
        composed("device=h100", "device.tensor_parallel=4", "device.link_latency_us=12.5")
    whole = tmp_path / "deployment.yaml"
    whole.write_text("device:\n  base: h100\n  link_latency_us: 12.5\n")
    with pytest.raises(ConfigError, match=r"device.link_latency_us: .*deployment.yaml: was the time"):
        run_request([f"deployment={whole}"])


def test_the_link_constant_of_a_fit_to_one_device_is_left_out(tmp_path: Path) -> None:
    file = written(tmp_path, f"{CARD}tensor_parallel: 1\nlink_latency_us: 12.5\n")
    assert composed(f"device={file}").device.link_round_us == RunConfig().device.link_round_us
