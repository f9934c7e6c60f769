"""`bench kernels` from the command line, on the CPU: what it times, refuses, and says about others' functions."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.bench.results import ProblemKind, read_problems, shortened
from harness.bench.runner import legend
from harness.cli.main import main

USERS = "user_attention:sometimes_right"
TINY = ("bench", "kernels", "--device", "cpu", "--batch", "2", "--context", "40", "--rounds", "3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run over two block sizes, with a user's function beside ours."""
    pytest.importorskip("torch")
    out = tmp_path_factory.mktemp("run")
    options = ("--block-size", "8,16", "--provider", "sdpa", "--function", USERS)
    assert main([*TINY, *options, "--out", str(out)]) == 0
    return out


def benchmarks(out: Path) -> list[dict[str, Any]]:
    found = json.loads((out / "kernels.json").read_text())["benchmarks"]
    return [one for one in found if one["group"] != "ceiling"]


@pytest.mark.nightly
def test_every_case_is_timed_by_every_provider_with_all_samples(run: Path) -> None:
    found = {
        (one["extra_info"]["case"]["block_size"], one["extra_info"]["provider"]) for one in benchmarks(run)
    }
    assert found == {(8, "paged"), (8, "sdpa"), (16, "paged"), (16, "sdpa"), (16, USERS)}
    assert all(len(one["stats"]["data"]) == 3 for one in benchmarks(run))


@pytest.mark.nightly
def test_a_cpu_run_says_that_it_is_cpu_time(run: Path) -> None:
    assert {one["extra_info"]["how"] for one in benchmarks(run)} == {"CPU time"}
    assert "It says nothing about the kernels' speed on a GPU" in " ".join(
        (run / "index.html").read_text().replace("&#39;", "'").split()
    )


@pytest.mark.nightly
def test_times_are_per_call_and_plausible(run: Path) -> None:
    assert all(1e-6 < one["stats"]["median"] < 1 for one in benchmarks(run))


@pytest.mark.nightly
def test_a_wrong_function_is_not_timed_but_named(run: Path) -> None:
    problems = read_problems(run / "problems.jsonl")
    assert [(one.provider, one.kind.value) for one in problems] == [(USERS, "wrong")]
    assert "relative error 0.005" in problems[0].reason


@pytest.mark.nightly
def test_the_table_has_a_row_for_each(run: Path) -> None:
    import pandas as pd

    table = pd.read_parquet(run / "kernels.parquet")
    assert sorted(table["provider"]) == ["paged", "paged", "sdpa", "sdpa", USERS]
    assert (table.loc[table["provider"] == "paged", "against_ours"] == 1.0).all()
    assert (table["error"] < 1e-5).all()


def test_a_provider_that_fails_twice_is_given_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from harness.bench.benchmarks import _noting, _skip_if_hopeless

    file = tmp_path / "problems.jsonl"
    for case in ("first", "second"):
        _skip_if_hopeless(case, "broken", file)
        with (
            pytest.raises(pytest.skip.Exception, match="failed: no such device function"),
            _noting(case, "broken", file),
        ):
            raise RuntimeError("no such device function")
    with pytest.raises(pytest.skip.Exception, match="not tried, since it failed 2 times"):
        _skip_if_hopeless("third", "broken", file)
    _skip_if_hopeless("third", "another", file)
    last = read_problems(file)[-1]  # a missing figure is explained
    assert (last.case, last.provider, last.kind) == ("third", "broken", ProblemKind.unsupported)


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    text = shortened("compiling\n" + "x " * 2000 + "fatal: no header")
    assert text.startswith("compiling x")
    assert text.endswith("fatal: no header")
    assert len(text) < 620


def test_a_dry_run_lists_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--heads", "8/2,4", "--ragged", "both", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("decode/b2/ctx40/bs16/h8-2/d64/fp32")
    assert lines[-1] == "4 cases; nothing was timed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--provider", "flsh"), "no such provider; there are paged, "),
        (("--function", "nowhere:f"), "module 'nowhere' cannot be imported"),
        (("--block-size", "sixteen"), "--block-size sixteen: "),
        (("--ragged", "maybe"), "'maybe' is none of no, yes, both"),
        (("--preset", "gate"), "--preset gate is a whole grid"),
        (("--rounds", "0"), "--rounds is 0, must be at least 1"),
        (("--device", "cuda"), "torch sees no CUDA device here"),
    ],
)
def test_a_mistake_is_named_before_anything_is_timed(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([*TINY, *options, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_engines_compiled_kernels_are_timed_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from paged_kernels.native import why_unavailable

    if why_unavailable():
        pytest.skip("no C compiler on this machine")
    options = ("--block-size", "8", "--ragged", "both", "--queries", "1,4", "--provider", "native")
    assert main([*TINY, *options, "--out", str(tmp_path)]) == 0
    found = {
        (one["extra_info"]["case"]["queries"], one["extra_info"]["provider"]) for one in benchmarks(tmp_path)
    }
    assert found == {(1, "paged"), (1, "native"), (4, "paged"), (4, "native")}


def test_a_file_in_the_place_of_the_folder_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("")
    assert (
        main(["bench", "kernels", "--device", "cpu", "--batch", "1", "--out", str(tmp_path / "there")]) == 2
    )
    assert "is not a folder" in capsys.readouterr().err


def test_the_columns_and_the_engines_own_path_are_explained() -> None:
    text = " ".join(legend("cpu", ["paged", "native", "sdpa"]))
    assert "0.50× twice as fast" in text
    assert "the engine decodes with 'native'" in text
    assert "native'" not in " ".join(legend("cuda", ["paged", "sdpa"]))
