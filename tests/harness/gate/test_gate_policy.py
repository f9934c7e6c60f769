"""The policy layer, and code beside its accepted version: what is loaded, what is timed, what the ratios say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import cases, tier

from harness.config.errors import UserError
from harness.gate import beside, policy, settings
from harness.gate.findings import GateVerdict, Measured, new_baseline, write_baseline
from harness.gate.loads import loads


class Clock:
    """CPU time as the work tells it, with noise; now and then a run is disturbed and takes half as long again."""

    def __init__(self) -> None:
        self.now, self._draw = 0.0, np.random.default_rng(0)

    def process_time(self) -> float:
        return self.now

    def work(self, amount: float) -> Callable[[], None]:
        def run() -> None:
            disturbed = 1.5 if self._draw.random() < 0.1 else 1.0
            self.now += amount * 1e-3 * disturbed * np.exp(0.01 * abs(self._draw.standard_normal()))

        return run


@pytest.fixture(name="work")
def work_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Callable[[], None]]:
    """Makes work of a given amount."""
    clock = Clock()
    monkeypatch.setattr("harness.gate.beside.time", clock)
    monkeypatch.setattr("harness.gate.settings.RESAMPLES", tier(1000, settings.RESAMPLES))
    return clock.work


def run_of(ratios: list[float]) -> Measured:
    return Measured(
        "policy", "policy", {}, None, {"loop": {"ratios": ratios}}, {"sources": {"engine.core": "accepted"}}
    )


@cases(("share", "verdict"), [(1.0, GateVerdict.passed), (1.15, GateVerdict.regressed)], day=1)
def test_equal_work_passes_and_a_seventh_more_is_found(work: Any, share: float, verdict: GateVerdict) -> None:
    now = run_of(beside.ratios_of(lambda: (work(20 * share), work(20))))
    assert policy.judge(now, new_baseline(run_of([1.0]), "test")).verdict is verdict


@pytest.mark.nightly
def test_what_looks_slower_is_made_and_timed_again(work: Any) -> None:
    sides = iter([(work(30), work(20)), (work(20), work(20))])
    assert max(beside.ratios_of(lambda: next(sides))) < 1.6
    assert next(sides, None) is None


@pytest.mark.parametrize("name", loads())
def test_a_load_takes_the_same_steps_every_time(name: str) -> None:
    load = loads()[name]
    assert load.run() == load.run() >= 10


def test_the_accepted_core_decides_what_todays_does_and_is_another_one(tmp_path: Path) -> None:
    accepted = beside.load(policy.sources(), tmp_path)
    theirs = accepted["harness.gate.loads"].loads()
    assert {name: load.run() for name, load in theirs.items()} == {
        name: load.run() for name, load in loads().items()
    }
    today = {name for name in policy.sources() if accepted[name].__name__ == name}
    assert today == set()


def test_a_changed_line_of_the_accepted_core_changes_the_accepted_side_alone(tmp_path: Path) -> None:
    changed = policy.sources()
    where = "engine.core.scheduling.scheduler"
    changed[where] += "\n\nScheduler.has_work = property(lambda self: False)\n"
    assert (
        beside.load(changed, tmp_path)["harness.gate.loads"].loads()["block manager: shared prefixes"].run()
        == 0
    )
    assert loads()["block manager: shared prefixes"].run() > 0


@pytest.mark.nightly
def test_the_core_of_the_baseline_is_the_one_that_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(policy, "ratios_of", lambda sides: [1.0] * 20)
    kept = policy.measure()
    kept.environment["sources"]["harness.gate.loads"] += "\n\nLoad.run = lambda self: -1\n"
    write_baseline(tmp_path / "policy.json", new_baseline(kept, "test"))
    monkeypatch.setattr(policy, "ratios_of", lambda sides: seen.append(sides()[1]()) or [1.0] * 20)
    policy.measure(tmp_path)
    assert seen == [-1] * len(policy.case_names())


def test_a_baseline_without_sources_is_refused_by_name(tmp_path: Path) -> None:
    write_baseline(
        tmp_path / "policy.json", new_baseline(Measured("policy", "policy", {}, None, {"a": {}}), "test")
    )
    with pytest.raises(UserError, match=r"policy\.json holds no sources; .*--layer policy --update"):
        policy.measure(tmp_path)


def test_relative_imports_of_an_accepted_file_find_todays_neighbours(tmp_path: Path) -> None:
    source = "from .findings import GateVerdict\nfrom . import settings\n"
    found = beside.load({"harness.gate.strange": source}, tmp_path)["harness.gate.strange"]
    assert found.GateVerdict is GateVerdict
    assert found.settings.__name__ == "harness.gate.settings"
