"""What a file of somebody else may set: numbers, choices and names; no code, no place, no file outside."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.main import main
from harness.config.errors import ConfigError, UserError
from harness.config.foreign import Foreign
from harness.config.overrides import parse_override
from harness.config.schema import config_keys
from harness.store.commit import finished_point, sealed

ROOT = Path(__file__).resolve().parents[3]
REFUSED = (
    *("cache.eviction=a:B", "scheduler.order=a:B", "scheduler.victim=a:B", "scheduler.admission=a:B"),
    *("oracle.python=./python", "out=elsewhere", "cost.cache_dir=here", "execute=ray", "execute.gpus=1"),
    *("execute.setup=x", "execute.python=x", "execute.address=x:1", "execute.options=--x", "execute.srun=--x"),
    *("execute.folder=x", "execute.partition=x", "name='${oc.env:HOME}'", "cache.block_size=${cache.pool_tokens}"),
    *("trace.path=/etc/passwd", "trace.path=../../x", "model.path=~/x", "device=/tmp/x.yaml"),
)  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_a_text_of_a_store_that_does_more_than_choose_a_simulation_is_refused(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").touch()
    with pytest.raises(UserError):
        parse_override(Foreign(text, "theirs", tmp_path))


def test_the_same_text_typed_is_taken_after_it_was_refused() -> None:
    text = "scheduler.order=a:B"
    with pytest.raises(ConfigError, match="theirs names code to run, 'a:B', and no file may"):
        parse_override(Foreign(text, "theirs"))
    assert parse_override(text).settings[0].value == "a:B"


def test_a_file_may_name_a_shipped_rule_of_eviction_and_no_class() -> None:
    assert parse_override(Foreign("cache.eviction=sieve", "theirs")).settings[0].value == "sieve"
    with pytest.raises(ConfigError, match="theirs names code to run, 'a:B', and no file may"):
        parse_override(Foreign("cache.eviction=lru,a:B", "theirs"))


def test_every_key_with_text_was_looked_at() -> None:
    """A new key with text may be given by no file, until somebody adds it to the lists of `foreign`."""
    texts = [each.key for each in config_keys().values() if each.kind is str]
    taken = []
    for key in texts:
        try:
            parse_override(Foreign(f"{key}=word", "theirs"))
        except ConfigError:
            continue
        taken.append(key)
    assert taken == [
        *("name", "trace.name", "trace.path", "trace.tokenizer", "decoding.beam_parents"),
        *("decoding.draft_path", "model.name", "model.family", "model.path", "device.name"),
        *(
            "device.fitted_from",
            "device.fits",
            "device.seen",
            "cost.operators",
            "cost.kernels",
            "report.kernels",
        ),
    ]


def test_a_foreign_text_is_one_in_another_process_too() -> None:
    text = pickle.loads(pickle.dumps(Foreign("a=b", "theirs", Path("x"))))
    assert (text, type(text), text.where, text.folder) == ("a=b", Foreign, "theirs", Path("x"))


def test_the_overrides_of_a_record_are_foreign(tmp_path: Path) -> None:
    file = tmp_path / "points" / "p" / "record.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(sealed({"schema": 1, "fingerprint": "p", "config": {}, "overrides": ["a=b"]}))
    assert type(finished_point(file).overrides[0]) is Foreign


@pytest.mark.parametrize("line", ["execute.setup=touch x", "execute=ray", "execute.address=evil:1", "out=/"])
def test_an_experiment_of_somebody_starts_no_cluster_and_no_shell(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(f"- cache.block_size=8,16\n- {line}\n")
    assert main(["sweep", f"experiment={file}", "--dry-run"]) == 2
    assert "and no file may" in capsys.readouterr().err


def test_a_module_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('imported')")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    words = [sys.executable, "-m", "harness", "show", "measure=false"]
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "imported" not in done.stderr
