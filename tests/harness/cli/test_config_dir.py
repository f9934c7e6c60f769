"""Options of groups and experiments in a folder of the user's own: `--config-dir`."""

import shlex
from pathlib import Path

import pytest

from harness.cli.main import main, parse_arguments
from harness.config.errors import UserError


@pytest.fixture(name="folder")
def folder_fixture(tmp_path: Path) -> Path:
    folder = tmp_path / "my conf"
    for name, text in (
        ("device/mine.yaml", "base: h100\nbandwidth_gbs: 2000\n"),
        ("experiment/wide.yaml", "- cache.block_size=8,16\n- measure=false\n- cost=roofline\n"),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    return folder


def test_an_option_of_ones_own_is_chosen_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--config-dir", str(folder), "device=mine", "measure=false", "model=llama3_8b"]) == 0
    assert "bandwidth_gbs: 2000.0" in capsys.readouterr().out


def test_it_may_stand_in_a_list_beside_shipped_ones(folder: Path) -> None:
    words = parse_arguments(["sweep", "--config-dir", str(folder), "device=h100,mine"]).overrides
    assert words == (f'device=h100,"{folder}/device/mine.yaml"',)


def test_an_experiment_of_ones_own_makes_the_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "sweep",
                "--dry-run",
                "--config-dir",
                str(folder),
                "experiment=wide",
                "device=mine",
                "model=llama3_8b",
            ]
        )
        == 0
    )
    assert "2 points" in capsys.readouterr().out


def test_a_recorded_command_needs_no_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = parse_arguments(["sweep", "--config-dir", str(folder), "experiment=wide"]).overrides
    assert main(["sweep", "--dry-run", *shlex.split(shlex.join(words))]) == 0


def test_words_of_other_keys_stay(folder: Path) -> None:
    words = ("cache.block_size=8,16", "name=mine")
    assert parse_arguments(["sweep", "--config-dir", str(folder), *words]).overrides == words


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("device/h100.yaml", "'h100' is the name of a shipped option"),
        ("devices/mine.yaml", "'devices' is no group; the groups are"),
    ],
)
def test_a_file_that_cannot_be_an_option_is_named(tmp_path: Path, made: str, message: str) -> None:
    (tmp_path / made).parent.mkdir()
    (tmp_path / made).write_text("base: h100\n")
    with pytest.raises(UserError, match=message):
        parse_arguments(["sweep", "--config-dir", str(tmp_path)])


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--config-dir: no such folder"):
        parse_arguments(["sweep", "--config-dir", str(tmp_path / "none")])


@pytest.mark.parametrize("text", ["a: [", "- 5", "- experiment=default"])
def test_an_experiment_that_is_no_list_of_overrides_is_refused(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "experiment/wide.yaml").write_text(text)
    assert main(["sweep", "--dry-run", "--config-dir", str(folder), "experiment=wide"]) == 2
    assert "wide.yaml" in capsys.readouterr().err
