"""The gate's margins: in `conf/gate`, changed by overrides, checked before measuring, named where changed."""

from dataclasses import replace
from pathlib import Path

import pytest

import harness.gate as running
from harness.cli.main import main
from harness.config.errors import ConfigError, UnknownKeyError, UserError
from harness.config.groups import GATE, groups, options
from harness.gate import latency, settings
from harness.gate.findings import GateVerdict, Measured, new_baseline
from harness.gate.resource import Resources, compare_kernel
from harness.gate.settings import Margins, default_settings, gate_settings

ROUNDS = 30


def run_of(layer: str, case: str, level: float) -> Measured:
    ratios = [level * (1 + 0.001 * (round % 3 - 1)) for round in range(ROUNDS)]
    return Measured(layer, f"{layer}-here", {"device": "d", "python": "3"}, None, {case: {"ratios": ratios}})


def test_the_defaults_are_those_of_the_file() -> None:
    found = default_settings()
    assert found.latency == Margins(0.02, 0.05, 0.10)
    assert found.policy == found.cpu == Margins(0.05, 0.15, 0.20)
    assert found.resource.more_instructions == 0.10
    assert found.changed == ()


def test_an_override_changes_one_margin_and_is_named() -> None:
    found = gate_settings(["gate.latency.material=0.2"])
    assert found.latency == Margins(0.02, 0.2, 0.10)
    assert found.policy == default_settings().policy
    assert found.changed == ("gate.latency.material=0.2 (default 0.05)",)


@pytest.mark.parametrize("option", options(GATE))
def test_every_file_can_be_chosen(option: str) -> None:
    assert gate_settings([f"gate={option}"]).latency.material > 0


def test_an_override_stands_above_the_chosen_file() -> None:
    found = gate_settings(["gate.policy.material=0.3", "gate=quiet"])
    assert found.policy == Margins(0.02, 0.3, 0.10)


def test_the_gate_is_no_part_of_a_run() -> None:
    assert "gate" not in groups()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gate.latency.materail=0.05", "did you mean 'gate.latency.material'"),
        ("gate.latency", "is not an override (key=value)"),
        ("cache.block_size=8", "no such key of the gate; there are gate, gate.latency.negligible"),
        ("+gate.latency.material=0.1", "no such key of the gate"),
        ("gate=lenient", "no option 'lenient'; the options are default, quiet"),
        ("gate.latency.material=much", "found 'much', must be a number, as 0.05 for 5 %"),
        ("gate.latency.material=0.05,0.1", "must be a number"),
        ("gate.latency.material=", "must be a number"),
        ("gate.latency.material=nan", "found nan, must be 0 or greater"),
        ("gate.latency.material=-0.1", "must be 0 or greater"),
        ("gate.latency.material=5%", "must be a number"),
        ("gate.latency.material=50", "at most 10; 0.05 is 5 %"),
        ("gate.latency.material=0.01", "must be greater than gate.latency.negligible=0.02"),
        ("gate.latency.widest=0", "must be greater than 0"),
    ],
)
def test_a_mistake_is_named_before_anything_is_measured(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", text]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("latency: {negligible: 0.1}", "missing"),
        ("- 1", "no margins of a gate"),
        ("latency: [", "no margins of a gate"),
        ("latency: {negligible: 0, material: x, widest: 1}", "must be a number"),
    ],
)
def test_a_file_that_is_incomplete_is_refused(
    content: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text(content)
    monkeypatch.setattr(settings, "option_file", lambda group, option: tmp_path / f"{option}.yaml")
    with pytest.raises((UserError, ConfigError, UnknownKeyError), match=message):
        settings._read("mine")


@pytest.mark.parametrize(
    ("material", "verdict"), [(0.05, GateVerdict.inconclusive), (0.2, GateVerdict.passed)]
)
def test_the_latency_layer_judges_by_its_margins(material: float, verdict: GateVerdict) -> None:
    chosen = gate_settings([f"gate.latency.material={material}", "gate.latency.negligible=0.049"])
    before, now = run_of("latency", "a", 1.0), run_of("latency", "a", 1.05)
    assert latency.judge(now, new_baseline(before, "test"), chosen).verdict is verdict


def test_instructions_may_grow_by_the_margin() -> None:
    before = Resources(
        registers=32, stack_bytes=0, shared_bytes=1024, depth=2, instructions=1000,
        wide_loads=8, narrow_loads=0, local=0, hmma=16, hgmma=0,
    )  # fmt: skip
    now = replace(before, instructions=1200)
    assert compare_kernel("case", 90, now, before, 0.10).verdict is GateVerdict.regressed
    assert compare_kernel("case", 90, now, before, 0.25).verdict is GateVerdict.passed


def test_changed_margins_are_named_in_the_answer(tmp_path: Path) -> None:
    before = run_of("latency", "a", 1.0)
    running.accept(before, tmp_path, "test")
    changed = running.judge_layer(before, tmp_path, gate_settings(["gate.latency.material=0.5"]))
    assert "margins changed: gate.latency.material=0.5 (default 0.05)" in changed.remarks
    plain = running.judge_layer(before, tmp_path, gate_settings([]))
    assert not any("margins" in remark for remark in plain.remarks)


def test_a_dry_run_prints_every_margin(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gate", "--layer", "latency", "--dry-run", "gate.latency.material=0.03"]) == 0
    out = capsys.readouterr().out
    assert "gate.latency.negligible=0.02 gate.latency.material=0.03 gate.latency.widest=0.1\n" in out
    assert "gate.resource.more_instructions=0.1\n" in out
