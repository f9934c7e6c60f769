"""The gate as a plugin of pytest: a stranger's function and kernel, in a repository of their own."""

import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path

import numpy  # noqa: F401  imported before the runs in this process, which drop what they import
import pytest
import scipy.stats  # noqa: F401
import torch  # noqa: F401
import triton  # noqa: F401

import harness.gate.plugin
import harness.gate.resource  # noqa: F401
import paged_kernels.triton.configurations  # noqa: F401

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_kernel"
LOADED = [one.name for one in entry_points(group="pytest11")]
PLUGIN = () if "pagetwin_gate" in LOADED else ("-p", "harness.pytest_gate")
FUNCTION = """
def work(count):
    return sum(range(count))
"""
TEST = """
from mine import work

def test_work(gated):
    gated(work, 2000)
"""
pytest_plugins = ("pytester",)


def run(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:randomly", "-p", "no:cacheprovider", *words)


@pytest.fixture
def accepted(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository whose function was accepted as it is."""
    pytester.makepyfile(mine=FUNCTION, test_mine=TEST)
    assert run(pytester, "--gate-update", "--gate-reason", "first").ret == 0
    return pytester


def slower_by(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    monkeypatch.setattr("harness.gate.plugin.ratios_of", lambda *_, **__: [1 + share] * 20)


def test_without_its_option_the_gate_times_nothing(pytester):
    pytester.makepyfile(mine=FUNCTION, test_mine=TEST)
    result = run(pytester)
    result.assert_outcomes(skipped=1)
    assert result.ret == 0


def test_a_case_without_a_baseline_is_not_decided(pytester):
    pytester.makepyfile(mine=FUNCTION, test_mine=TEST)
    result = run(pytester, "--gate")
    assert result.ret == 3
    result.stdout.fnmatch_lines(["*test_work: not in *latency.json*--gate-update*"])


def test_an_update_without_a_reason_is_refused(pytester):
    pytester.makepyfile(mine=FUNCTION, test_mine=TEST)
    result = run(pytester, "--gate-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gate-reason*"])


def test_a_baseline_keeps_the_accepted_file_and_the_reason(accepted):
    kept = json.loads((accepted.path / "gate-baselines" / "latency.json").read_text())
    assert kept["reason"] == "first"
    assert kept["cases"]["test_work"]["sources"] == {"mine": (accepted.path / "mine.py").read_text()}


@pytest.mark.parametrize(("share", "code"), [(0.0, 0), (0.2, 1)])
def test_a_slower_function_fails_and_an_equal_one_passes(accepted, monkeypatch, share, code):
    slower_by(monkeypatch, share)
    assert run(accepted, "--gate").ret == code


def test_the_accepted_version_is_the_one_that_is_timed_beside_todays(accepted, monkeypatch):
    (accepted.path / "mine.py").write_text(FUNCTION.replace("sum(range(count))", "'today'"))
    seen = []
    monkeypatch.setattr(
        "harness.gate.plugin.ratios_of",
        lambda sides, cuda: seen.append([side() for side in sides()]) or [1.0] * 20,
    )
    assert run(accepted, "--gate").ret == 0
    assert seen == [["today", sum(range(2000))]]


def test_only_changed_files_are_timed_where_that_is_asked(accepted, monkeypatch):
    slower_by(monkeypatch, 1.0)
    assert run(accepted, "--gate", "--gate-changed").ret == 0
    (accepted.path / "mine.py").write_text(f"{FUNCTION}# changed\n")
    assert run(accepted, "--gate", "--gate-changed").ret == 1


@pytest.mark.nightly
def test_a_case_that_no_longer_runs_is_a_regression_of_a_whole_run_alone(accepted, monkeypatch):
    slower_by(monkeypatch, 0.0)
    test = accepted.path / "test_mine.py"
    test.write_text(TEST.replace("test_work", "test_renamed") + "\ndef test_other():\n    pass\n")
    assert run(accepted, "--gate", "-k", "other").ret == 0
    result = run(accepted, "--gate")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*test_work: in the baseline, but not run*"])


def test_a_function_that_is_no_part_of_a_file_is_refused(pytester):
    pytester.makepyfile(test_mine="def test_work(gated):\n    gated(lambda: 1)\n")
    result = run(pytester, "--gate")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["*no function of a module's top level*"])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("gated(None)", "gated: None is no function of a module's top level"),
        ("gated(len, 'abc')", "gated: <built-in function len> is no function"),
        ("kernel_resources(3)", "kernel_resources: 3 is no kernel"),
        (
            "kernel_resources(scale, signature={'x': '*fp32'})",
            "signature: count: it must have a type for each of x",
        ),
    ],
)
def test_what_is_no_function_or_kernel_is_refused_in_a_sentence(pytester, call, said):
    kernel = "import triton\n@triton.jit\ndef scale(x, count):\n    pass\n"
    pytester.makepyfile(test_mine=f"{kernel}def test_work(gated, kernel_resources):\n    {call}\n")
    result = run(pytester, "--gate")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{said.replace('[', '[[]')}*"])
    assert "Traceback" not in result.stdout.str()
    assert "plugin.py" not in result.stdout.str()


def test_a_function_that_raises_is_never_accepted(pytester):
    pytester.makepyfile(mine="def work(count):\n    raise ValueError(count)\n", test_mine=TEST)
    result = run(pytester, "--gate-update", "--gate-reason", "first")
    result.assert_outcomes(failed=1)
    assert not (pytester.path / "gate-baselines").exists()


def test_the_answer_is_appended_for_a_page_of_github(accepted, monkeypatch, tmp_path):
    slower_by(monkeypatch, 0.0)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "page.md"))
    run(accepted, "--gate")
    assert "## Regression gate: pass" in (tmp_path / "page.md").read_text()


@pytest.mark.nightly
def test_the_example_passes_with_the_baselines_beside_it(pytester, monkeypatch):
    slower_by(monkeypatch, 0.0)
    shutil.copytree(EXAMPLE, pytester.path, dirs_exist_ok=True)
    assert run(pytester, "--gate").ret == 0


@pytest.mark.nightly
def test_accepting_one_file_keeps_what_was_accepted_of_the_others(accepted, monkeypatch):
    other = accepted.makepyfile(test_other=TEST.replace("test_work", "test_more"))
    assert run(accepted, str(other), "--gate-update", "--gate-reason", "one more").ret == 0
    kept = json.loads((accepted.path / "gate-baselines" / "latency.json").read_text())
    assert sorted(kept["cases"]) == ["test_more", "test_work"]
    slower_by(monkeypatch, 0.2)
    assert run(accepted, "--gate").ret == 1
