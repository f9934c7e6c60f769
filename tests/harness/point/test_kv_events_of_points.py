"""`replay.kv_events` and `replay.lookups`: what a point keeps of its prefix cache."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.cli.main import main
from traces.formats.kv_events import BlockStored, read_batches
from traces.reading import read_trace

pytest.importorskip("msgpack", reason="KV events need pagetwin[events]")
POINT = [
    *("measure=false", "workload.num_requests=12", "workload.prefix_share=0.5", "workload.num_prefixes=2"),
    *("cache=paged", "cache.block_size=16", "decoding.beam_width=1", "cache.pool_tokens=4096"),
    *("workload.length_scale=0.1", "cost=roofline", "report.figures=none"),
]


def sweep(folder: Path, *overrides: str) -> int:
    return main(["sweep", *POINT, f"out={folder}", *overrides])


def kept(folder: Path, name: str) -> Path:
    (found,) = (folder / "points").glob(f"*/{name}")
    return found


def test_a_simulated_point_keeps_its_events_as_a_file(tmp_path: Path) -> None:
    assert sweep(tmp_path, "replay.kv_events=true") == 0
    batches = list(read_batches(kept(tmp_path, "kv_events_simulated.msgpack")))
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    assert stored[0].parent_block_hash is None
    assert {event.block_size for event in stored} == {16}


def test_the_file_is_read_back_as_a_trace(tmp_path: Path) -> None:
    assert sweep(tmp_path, "replay.kv_events=true") == 0
    trace = read_trace(kept(tmp_path, "kv_events_simulated.msgpack"))
    assert trace.header.format == "kv_events"
    keys = {request.segments[0].key for request in trace.requests}
    assert 1 <= len(keys) <= 2


def test_a_point_keeps_its_lookups_as_a_table(tmp_path: Path) -> None:
    assert sweep(tmp_path, "replay.lookups=true") == 0
    table = pq.read_table(kept(tmp_path, "lookups.parquet")).to_pydict()
    requests = pq.read_table(kept(tmp_path, "requests.parquet")).to_pydict()
    assert sum(table["hit_blocks"]) * 16 == sum(requests["hit_tokens"]) + sum(requests["resumed_hit_tokens"])
    assert set(table["side"]) == {"simulated"}


def test_a_point_keeps_the_residency_of_sampled_blocks_as_a_table(tmp_path: Path) -> None:
    assert sweep(tmp_path, "replay.residency=1.0", "cache.pool_tokens=1024") == 0
    table = pq.read_table(kept(tmp_path, "residency.parquet")).to_pydict()
    assert table["lifetime_s"]
    pairs = zip(table["lifetime_s"], table["idle_s"], strict=True)
    assert all(0 <= idle <= lifetime for lifetime, idle in pairs)
    assert max(table["lifetime_s"]) > 0


@pytest.mark.parametrize("key", ["replay.kv_events", "replay.lookups"])
@pytest.mark.parametrize("other", ["cache.prefix_caching=false", "replay.records=false"])
def test_what_does_not_exist_cannot_be_kept(
    key: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, f"{key}=true", other) == 2
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("other", ["cache.prefix_caching=false", "replay.records=false"])
def test_residency_needs_a_prefix_cache_and_rows(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "replay.residency=0.5", other) == 2
    assert "replay.residency: found 0.5, not with" in capsys.readouterr().err
