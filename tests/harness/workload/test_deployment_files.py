"""The file of a deployment: written from a configuration, and read back by `deployment=FILE` in every command."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import cases

from harness.cli.main import main
from harness.config.compose import compose_config, normalise
from harness.config.errors import UserError
from harness.config.schema import RunConfig
from harness.report.verdict_text import verdict_lines
from harness.sweep.plan import in_its_own_place, one_configuration, run_request, sweep_request
from harness.twin.configured import configured
from harness.twin.reading import read_engine_log
from harness.workload.deployment import deployment_of, settings_text

LOGS = Path(__file__).resolve().parents[2] / "data" / "deployments"
SERVERS = [
    [],
    ["device=h100", "model=llama3_8b", "measure=false", "cost=roofline", "device.tensor_parallel=2"],
    ["cache=contiguous_max", "scheduler.max_running=7", "model.tied_embeddings=null"],
    ["cache.groups=uniform", "model.window=64", "model.windowed_layers=2", "measure=false"],
    [
        "decoding.beam_width=4",
        "scheduler.async_scheduling=true",
        "device.fitted_from='a log, first 3 = half'",
    ],
]


def composed(words: list[str]) -> RunConfig:
    return normalise(compose_config(axis.settings[0] for axis in run_request(words).axes))


@pytest.fixture
def server(tmp_path: Path) -> Path:
    file = tmp_path / "server.yaml"
    file.write_text(settings_text(composed(SERVERS[1])))
    return file


@cases("words", SERVERS, day=2)
def test_a_deployment_is_read_back_equal(words: list[str], tmp_path: Path) -> None:
    before = composed(words)
    file = tmp_path / "server.yaml"
    file.write_text(settings_text(before))
    after = composed([f"deployment={file}", f"measure={str(before.measure).lower()}"])
    assert deployment_of(after) == deployment_of(before)


@cases(
    "name",
    ["true", "null", "1e5", "1_000", "a\\b", "a\\", 'say "x"', 'a\\"b', "x,y=z", " a", "a\nb", "#c", "("],
    day=6,
)
def test_a_text_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    config = composed(SERVERS[1])
    file = tmp_path / "server.yaml"
    file.write_text(settings_text(replace(config, device=replace(config.device, name=name))))
    assert one_configuration([f"deployment={file}"], "").device.name == name


def test_a_section_that_an_experiment_replaces_is_said(server: Path, tmp_path: Path, capsys: Any) -> None:
    experiment = tmp_path / "sizes.yaml"
    experiment.write_text("- cache=paged\n- measure=false\n- workload.num_requests=5\n")
    words = [f"deployment={server}", f"experiment={experiment}", f"out={tmp_path / 'out'}"]
    assert main(["sweep", "--dry-run", *words, "cache.block_size=8,16"]) == 0
    assert f"not used of {server}: cache; the run names these groups" in capsys.readouterr().err


def test_a_sweep_on_a_deployment_needs_an_axis(server: Path) -> None:
    with pytest.raises(UserError, match=r"needs an axis: write several values of a setting"):
        sweep_request([f"deployment={server}", "measure=false"])


def test_the_settings_of_the_file_are_said_to_be_known(server: Path, tmp_path: Path) -> None:
    """A fitted device alone has no settings of its engine; a deployment has."""
    words = ["measure=false", "cost=roofline", "workload.num_requests=5", "report.figures=none"]
    device = "device.fitted_from=a log"
    file = tmp_path / "fitted.yaml"
    whole = composed([*SERVERS[1], device, "cache.pool_tokens=65536"])
    file.write_text(settings_text(whole))
    said = []
    for number, first in enumerate([[f"deployment={file}"], ["device=h100", "model=llama3_8b", device]]):
        out = tmp_path / str(number)
        assert main(["run", *first, *words, f"out={out}"]) == 0
        said.append(" ".join(verdict_lines(out)))
    assert ["has no settings of that engine" in each for each in said] == [False, True]


@pytest.mark.nightly
def test_advice_for_a_store_on_another_deployment_is_for_that(
    server: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ["measure=false", "cost=roofline", "workload.num_requests=5", "report.figures=none"]
    assert main(["run", f"deployment={server}", *words, f"out={tmp_path / 'store'}"]) == 0
    other = tmp_path / "other.yaml"
    other.write_text(settings_text(composed(["device=l40s", "model=qwen3_8b", "measure=false"])))
    capsys.readouterr()
    assert main(["advise", str(tmp_path / "store"), f"deployment={other}"]) == 0
    assert "on l40s with qwen3-8b" in capsys.readouterr().out.lower()


def test_a_log_is_simulated_on_the_deployment_that_the_user_names(tmp_path: Path) -> None:
    words = ["device=h100", "model=llama3_8b", "device.tensor_parallel=2", "scheduler.max_running=13"]
    file = tmp_path / "server.yaml"
    file.write_text(settings_text(composed([*words, "measure=false", "cost.block_sizes=true"])))
    log = read_engine_log(LOGS / "guidellm")
    found = configured(log, [f"deployment={file}"])
    assert found.config.device.tensor_parallel == 2
    assert (found.config.scheduler.max_running, found.config.cost.block_sizes) == (13, True)
    assert "max_running" not in " ".join(found.warnings)


def test_the_users_word_replaces_that_of_the_file(server: Path) -> None:
    found = one_configuration([f"deployment={server}", "device.tensor_parallel=4"], "")
    assert (found.device.name, found.device.tensor_parallel) == ("h100", 4)


def test_a_group_of_the_user_replaces_the_section_whole(server: Path) -> None:
    asked = one_configuration([f"deployment={server}", "device=a100_80gb"], "").device
    assert asked == one_configuration(["device=a100_80gb"], "").device


def test_off_needs_no_quotes(tmp_path: Path) -> None:
    """YAML reads the word as false."""
    file, cache = tmp_path / "server.yaml", tmp_path / "cache.yaml"
    file.write_text("cache:\n  groups: off\nengine:\n  audit: off\n")
    cache.write_text("groups: off\n")
    found = one_configuration([f"deployment={file}"], "")
    assert (found.cache.groups, found.engine.audit) == ("off", "off")
    assert one_configuration([f"cache={cache}"], "").cache.groups == "off"


def test_a_number_out_of_range_is_refused_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("cache:\n  block_size: 0\n")
    with pytest.raises(UserError, match=r"cache.block_size: .*server.yaml: found 0, must be 1 or"):
        one_configuration([f"deployment={file}"], "")
    assert one_configuration([f"deployment={file}", "cache.block_size=8"], "").cache.block_size == 8


def test_a_section_may_start_from_an_option(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("device:\n  base: h100\n  tensor_parallel: 2\nmodel: llama3_8b\n")
    found = one_configuration([f"deployment={file}"], "")
    asked = one_configuration(["device=h100", "device.tensor_parallel=2", "model=llama3_8b"], "")
    assert (found.device, found.model) == (asked.device, asked.model)


def test_a_checkpoint_of_the_user_brings_its_own_dtype(server: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "float16"}')
    assert one_configuration([f"deployment={server}", f"model.path={tmp_path}"], "").model.dtype == "float16"


def test_one_size_of_the_pool_replaces_the_other(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("cache:\n  pool_blocks: 64\n")
    cache = one_configuration([f"deployment={file}", "cache.pool_tokens=512"], "").cache
    assert (cache.pool_blocks, cache.pool_tokens) == (None, 512)


def test_a_run_on_a_deployment_is_named_after_its_file(server: Path) -> None:
    request = in_its_own_place(run_request([f"deployment={server}", "cache.block_size=32"]))
    assert request.axes[-1].text.startswith("out=results/run_deployment=server-")
    assert request.axes[-1].text.endswith("_cache.block_size=32")


def test_an_edited_deployment_is_run_in_a_folder_of_its_own(server: Path) -> None:
    before = in_its_own_place(run_request([f"deployment={server}"])).axes[-1].text
    assert in_its_own_place(run_request([f"deployment={server}"])).axes[-1].text == before
    server.write_text(settings_text(composed([*SERVERS[1], "scheduler.max_running=99"])))
    assert in_its_own_place(run_request([f"deployment={server}"])).axes[-1].text != before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model", "must be sections: model, device"),
        ("cache:\n", "cache must be 'key: value' lines, or name an option"),
        ("device:\n  name: h100\n  tflops: 989.0\n", "device lacks memory_gb"),
        ("device: h101\n", "no option 'h101'"),
        ("workload:\n  seed: 1\n", "no section 'workload' in a deployment; allowed: model, device"),
        ("cache:\n  blok_size: 16\n", "did you mean 'cache.block_size'"),
        ("cache:\n  eviction: os:remove\n", "names code to run"),
        ("cache:\n  block_size: ${oc.env:HOME}\n", "holds an interpolation"),
        ("cache:\n  block_size: 16,32\n", "found '16,32', must be a whole number"),
        ("cache: [1\n", "cannot read"),
        ('device: "\\ud800"\n', "half a character"),
        ("cache:\n  block_size: 16\n  block_size: 32\n", "key 'block_size' stands twice"),
        ("cache:\n  block_size: [16, 32]\n", "must be a whole number"),
        ("model:\n  path:\n    - a\n", "must be text"),
    ],
)
def test_a_file_that_is_no_deployment_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        one_configuration([f"deployment={file}"], "")


def test_an_experiment_may_name_the_deployment(server: Path, tmp_path: Path) -> None:
    experiment = tmp_path / "sizes.yaml"
    experiment.write_text(f"- deployment={server}\n- cache.block_size=16,32\n")
    request = run_request([f"experiment={experiment}", "device.tensor_parallel=4"])
    assert request.varying == ("cache.block_size",)
    assert [axis.text for axis in request.named] == ["cache.block_size=16,32", "device.tensor_parallel=4"]


def test_several_deployments_are_refused(server: Path) -> None:
    with pytest.raises(UserError, match=r"must be one file that ends in \.yaml"):
        run_request([f"deployment={server},{server}"])
