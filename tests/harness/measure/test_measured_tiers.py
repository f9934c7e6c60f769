"""Measured points with a host tier: as predicted, and with copies that are slower than computing."""

import json
from pathlib import Path
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


def is_near(record: Record, metric: str, within: float = 0.08) -> bool:
    """Whether a prediction is within a share of what was measured, and the noise of its repeats."""
    found = record["comparison"][metric]
    return abs(found["error"]) <= within + found["spread"]


@pytest.mark.nightly
def test_points_with_a_tier_are_as_predicted(tmp_path: Path) -> None:
    """Twelve points; 75 seconds of calibration and about as many of runs."""
    words = ("cache.block_size=8,16,32", "workload.prefix_share=0.3,0.55", "cache.tier_store=written,evicted")
    records = sweep(tmp_path / "out", "cache.tier_tokens=8192", *words)
    assert len(records) == 12
    for record in records:
        assert (
            record["simulated"]["host_hit_tokens"] == record["comparison"]["host_hit_tokens"]["measured"] > 0
        )
        assert is_near(record, "ttft_mean"), record["label"]
        assert is_near(record, "ttft_p50"), record["label"]


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
    assert is_near(tiered, "ttft_mean"), tiered["comparison"]["ttft_mean"]
