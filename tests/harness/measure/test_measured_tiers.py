"""Measured points with a host tier: as predicted, and with copies that are slower than computing."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from engine.runtime.kv_pool import KVPool
from harness.cli.main import main

WORDS = (
    *("experiment=default", "cache=paged", "workload.num_requests=64", "workload.num_prefixes=8"),
    *("decoding.beam_width=1", "cache.pool_tokens=1024"),
)


Record = dict[str, Any]


def sweep(folder: Path, *words: str) -> list[Record]:
    """The records of a sweep, which calibrates first."""
    assert main(["sweep", *WORDS, f"out={folder}", "report.figures=none", *words]) == 0
    records = [json.loads(file.read_text()) for file in folder.glob("points/*/record.json")]
    for record in records:
        assert record["levels"]["counts"]["identical"]
        record["comparison"] = {each["metric"]: each for each in record["comparison"]}
    return records


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    """75 seconds of calibration, and about twice as many of runs."""
    words = ("cache.block_size=8,16,32", "workload.prefix_share=0.3,0.55", "cache.tier_store=written,evicted")
    return sweep(tmp_path_factory.mktemp("tiers") / "out", "cache.tier_tokens=0,8192", *words)


def error(record: Record, metric: str) -> tuple[float, float]:
    """The error of a prediction, and the noise of the measured repeats."""
    found = record["comparison"][metric]
    return found["error"], found["spread"]


def setting(record: Record) -> tuple[int, float]:
    """What a point with a tier and its control have in common."""
    return record["config"]["cache"]["block_size"], record["config"]["workload"]["prefix_share"]


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["ttft_mean", "ttft_p50"])
def test_a_tier_is_predicted_as_well_as_the_same_point_without_one(
    metric: str, swept: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twelve points beside six controls of one sitting: whatever the machine does besides, both feel. The errors
    themselves, which a loaded machine changes, are printed.
    """
    alone = {
        setting(each): error(each, metric) for each in swept if not each["config"]["cache"]["tier_tokens"]
    }
    tiered = [each for each in swept if each["config"]["cache"]["tier_tokens"]]
    assert (len(alone), len(tiered)) == (6, 12)
    apart = []
    for record in tiered:
        (found, noise), (control, beside) = error(record, metric), alone[setting(record)]
        apart.append((1 + found) / (1 + control) - 1)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{record['label']}: {metric} {found:+.1%} ± {noise:.1%}, without a tier {control:+.1%}"
            )
        assert abs(apart[-1]) <= 0.08 + noise + beside, record["label"]
    assert abs(median(apart)) <= 0.04


@pytest.mark.nightly
def test_counts_with_a_tier_are_identical(swept: list[Record]) -> None:
    for record in swept:
        found = record["simulated"].get("host_hit_tokens", 0)
        assert found == (record["comparison"]["host_hit_tokens"]["measured"] if found else 0), record["label"]
        assert bool(found) == bool(record["config"]["cache"]["tier_tokens"])


@pytest.mark.nightly
def test_copies_slower_than_computing_are_predicted_to_make_a_tier_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is done 200 times, in the calibration too."""
    for name in ("swap_in", "swap_out"):
        plain = getattr(KVPool, name)

        def slow(pool: KVPool, pairs: object, plain=plain) -> None:
            for _ in range(200):
                plain(pool, pairs)

        monkeypatch.setattr(KVPool, name, slow)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("cache.block_size=16", "workload.prefix_share=0.55", "cache.tier_store=evicted")
    without, tiered = sorted(
        sweep(tmp_path / "out", *words, "cache.tier_tokens=0,8192"),
        key=lambda record: record["config"]["cache"]["tier_tokens"],
    )
    for side in ("simulated", "measured"):
        figures = [record["comparison"]["ttft_mean"][side] for record in (without, tiered)]
        assert figures[1] > 1.3 * figures[0], (side, figures)
    (found, noise), (control, beside) = error(tiered, "ttft_mean"), error(without, "ttft_mean")
    assert abs((1 + found) / (1 + control) - 1) <= 0.08 + noise + beside, tiered["comparison"]["ttft_mean"]
