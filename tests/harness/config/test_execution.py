"""Settings of the place where points run: what applies, and what a batch script may hold."""

from dataclasses import replace
from pathlib import Path

import fake_point
import pytest

from harness.config.checks import check_config
from harness.config.compose import compose_config, normalise
from harness.config.overrides import parse_overrides
from harness.config.schema import ExecuteConfig, Place, RunConfig
from harness.sweep.plan import plan_sweep, sweep_request


def composed(*texts: str) -> RunConfig:
    return compose_config([axis.settings[0] for axis in parse_overrides(texts)])


def errors(*texts: str) -> list[str]:
    return [str(error) for error in check_config(composed("execute=slurm", *texts))]


def test_a_sweep_runs_here_unless_asked_otherwise() -> None:
    assert composed().execute == ExecuteConfig()
    assert composed("execute=ray").execute.place is Place.ray


def test_settings_of_another_place_do_not_apply() -> None:
    asked = composed("execute=ray", "execute.partition=gpu", "execute.cpus=4", "execute.address=auto")
    assert normalise(asked).execute == ExecuteConfig(Place.ray, cpus=4, address="auto")
    assert normalise(composed("execute.cpus=4")).execute == ExecuteConfig()


def test_where_a_point_runs_is_no_part_of_it() -> None:
    names = {
        plan_sweep(sweep_request(["workload.seed=1", "measure=false", *words]), fake_point)
        .points[0]
        .fingerprint
        for words in ([], ["execute=slurm", "execute.partition=gpu"], ["execute=ray"])
    }
    assert len(names) == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("execute.partition='a b'", "must be names"),
        ("execute.partition=--all", "must be names"),
        ("execute.options='-x'", "must be --name=value"),
        ("execute.options='--account=a; rm'", "must be --name=value"),
        ("execute.options='--account=\"a'", "cannot be read"),
        ("execute.options='--time=5'", "use execute.minutes"),
        ("execute.options='--array=1-9'", "is set by PageTwin"),
        ("execute.srun='--output=x'", "is set by PageTwin"),
        ("execute.setup=''", "one line"),
        ("execute.folder='a%j'", "replaces %"),
        ("execute.minutes=1", "3 or greater"),
        ("execute.jobs=100000", "at most"),
        ("execute.memory_gb=0", "0.1 or greater"),
        ("execute.address='a b'", "HOST:PORT"),
    ],
)
def test_a_value_that_means_something_else_to_slurm_is_refused(word: str, said: str) -> None:
    found = errors(word)
    assert len(found) >= 1
    assert found[0].startswith(word.partition("=")[0])
    assert said in found[0]


def test_measured_points_are_refused_where_other_tasks_share_the_node() -> None:
    found = [str(error) for error in check_config(composed("execute=ray", "measure=true"))]
    assert len(found) == 1
    assert "use measure=false, or execute=slurm" in found[0]
    assert check_config(composed("execute=ray", "measure=false")) == []


def test_a_line_break_cannot_be_put_into_a_batch_script() -> None:
    config = composed("execute=slurm")
    config = replace(config, execute=replace(config.execute, setup="module load x\n#SBATCH --exclusive"))
    assert [error.key for error in check_config(config)] == ["execute.setup"]


@pytest.mark.parametrize("folder", ["results/x", "results/x/jobs", "results"])
def test_job_files_and_store_do_not_overlap(folder: str) -> None:
    (error,) = errors("out=results/x", f"execute.folder={folder}")
    assert "overlaps the store" in error


def test_usual_options_of_a_cluster_are_taken() -> None:
    words = "execute.options='--account=me --qos=long --constraint=\"a100|h100\" --exclusive'"
    assert errors(words, "execute.partition='gpu,short'", "execute.srun='--container-image=/i/p.sqsh'") == []


def test_the_home_folder_is_named_in_full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    asked = composed("execute=slurm", "execute.folder='~/jobs'")
    assert normalise(asked).execute.folder == f"{tmp_path}/jobs"
