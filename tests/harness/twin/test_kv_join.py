"""KV events joined with a log: the rebuilt workload has the prefix hits of the deployment that wrote both.

The deployment is a replay whose workload is known. The log has only times and lengths of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from harness.config.schema import CostKind, DeviceConfig, RunConfig
from harness.metrics.log import RunLog
from harness.point.cost import cost_model
from harness.twin.log import EngineLog
from harness.twin.prediction import predictor
from harness.twin.reading import EngineLogError, read_engine_log
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve
from harness.workload.simulate import simulate
from traces.formats.kv_events import AllBlocksCleared, EventBatch, encode, read_batches
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest

pytest.importorskip("msgpack", reason="KV events need pagetwin[events]")

CLOCK_S = 1.7e9  # of the events: wall time, while the log counts from its start
SYSTEM = (120, 237, 274, 311)  # tokens of texts that prompts begin with


def config(pool_tokens: int = 65_536, max_batched_tokens: int = 2048) -> RunConfig:
    found = RunConfig(measure=False, device=DeviceConfig(name="some_gpu", bandwidth_gbs=2000.0, tflops=300.0))
    found.cost.kind = CostKind.roofline
    model = found.model
    model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim = 32, 4096, 32, 8, 128
    model.intermediate, model.vocab, model.max_position = 14_336, 32_000, 32_768
    found.scheduler.max_running, found.scheduler.max_batched_tokens = 64, max_batched_tokens
    found.cache.pool_tokens, found.cache.block_size = pool_tokens, 16
    return found


def trace(requests: Sequence[TraceRequest]) -> Trace:
    count = len(requests)
    return Trace(
        TraceHeader("planted", "simple", "drawn", CHAINED, None, 1, "0" * 64, count, count), tuple(requests)
    )


def with_system_prompts(count: int = 80, rate: float = 10.0) -> Trace:
    """Prompts that begin with one of four texts."""
    draw = np.random.default_rng(3)
    at = np.cumsum(draw.exponential(1e6 / rate, count)).astype(int)
    rows = []
    for i in range(count):
        text = int(draw.integers(0, len(SYSTEM)))
        parts = (Segment(text, SYSTEM[text]), Segment(1000 + i, int(draw.integers(10, 500))))
        rows.append(
            TraceRequest(i, int(at[i]), sum(one.tokens for one in parts), int(draw.integers(8, 120)), parts)
        )
    return trace(rows)


def chats(count: int = 12, turns: int = 4) -> Trace:
    """Conversations behind one system prompt, in which every prompt has all that was said before."""
    draw, rows = np.random.default_rng(5), []
    for chat in range(count):
        said: tuple[Segment, ...] = (Segment(1, SYSTEM[0]),)
        for turn in range(turns):
            name, output = 100 * chat + turn, int(draw.integers(20, 100))
            said = (*said, Segment(10_000 + name, int(draw.integers(10, 200))))
            at = int(1e6 * (0.37 * chat + 6 * turn + draw.random()))
            length = sum(one.tokens for one in said)
            rows.append(TraceRequest(name, at, length, output, said, output_key=20_000 + name))
            said = (*said, Segment(20_000 + name, output))
    rows.sort(key=lambda row: row.arrival_us)
    return trace([replace(row, request_id=i) for i, row in enumerate(rows)])


@dataclass
class Run:
    """A replay, and the folder with its log and its events."""

    config: RunConfig
    log: RunLog
    folder: Path

    @property
    def hits(self) -> list[int]:
        return hits_of(self.log)

    def rebuilt(self) -> EngineLog:
        return read_engine_log(self.folder)

    def predicted(self) -> list[int]:
        return hits_of(predictor(self.config, self.rebuilt().workload)(self.config.device).log)

    def keep(self, batches: Sequence[EventBatch]) -> None:
        (self.folder / "kv.events").write_bytes(b"".join(map(encode, batches)))

    def batches(self) -> list[EventBatch]:
        return list(read_batches(self.folder / "kv.events"))


def hits_of(log: RunLog) -> list[int]:
    order = np.argsort(log.requests["request_id"])
    return [int(one) for one in np.asarray(log.requests["hit_tokens"])[order]]


def deployed(folder: Path, workload: Trace, found: RunConfig | None = None, cached: bool = False) -> Run:
    """Replay a workload; keep a log of times and lengths, and the events on another clock."""
    found = found or config()
    found = replace(
        found, cache=replace(found.cache, answers=True), replay=replace(found.replay, kv_events=True)
    )
    built = resolve(found, workload)
    log = simulate(built, cost_model(deployment_of(found)))
    rows = log.requests
    lines = [
        "request_id,arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s"
        + (",cached_tokens" if cached else "")
    ]
    for i in np.argsort(rows["request_id"]):
        lengths = f"{int(rows['prompt_tokens'][i])},{int(rows['output_tokens'][i])}"
        times = f"{rows['first_token_s'][i]:.6f},{rows['finish_s'][i]:.6f}"
        more = f",{int(rows['hit_tokens'][i])}" if cached else ""
        lines.append(f"{int(rows['request_id'][i])},{rows['arrival_s'][i]:.6f},{lengths},{times}{more}")
    (folder / "requests.csv").write_text("\n".join(lines) + "\n")
    run = Run(found, log, folder)
    (folder / "kv.events").write_bytes(log.kv_events or b"")
    run.keep([batch._replace(ts=batch.ts + CLOCK_S) for batch in run.batches()])
    return run


@pytest.fixture
def systems(tmp_path: Path) -> Run:
    return deployed(tmp_path, with_system_prompts())


def said(log: EngineLog, text: str) -> list[str]:
    return [note for note in log.notes if text in note]


def test_prompts_with_system_prompts_have_the_hits_of_the_deployment(systems: Run) -> None:
    assert sum(systems.hits) > 10_000
    assert systems.predicted() == systems.hits


def test_later_turns_of_chats_hit_answers_as_in_the_deployment(tmp_path: Path) -> None:
    run = deployed(tmp_path, chats())
    assert sum(run.hits) > 5_000
    assert run.predicted() == run.hits


def test_a_later_turn_hits_more_than_the_prompts_before_it(tmp_path: Path) -> None:
    """The rest of the hits are blocks of answers."""
    run = deployed(tmp_path, chats())
    workload = run.rebuilt().workload
    without = trace([replace(row, output_key=None) for row in workload.requests])
    assert sum(hits_of(predictor(run.config, without)(run.config.device).log)) < sum(run.hits)


def test_prompts_in_chunks_have_the_hits_of_the_deployment(tmp_path: Path) -> None:
    run = deployed(tmp_path, with_system_prompts(), config(max_batched_tokens=256))
    assert sum(run.predicted()) == pytest.approx(sum(run.hits), rel=0.01)


def test_a_deployment_that_evicts_has_its_hits(tmp_path: Path) -> None:
    run = deployed(tmp_path, with_system_prompts(rate=20), config(pool_tokens=12_000))
    assert sum(run.predicted()) == pytest.approx(sum(run.hits), rel=0.02)


def test_the_join_says_how_many_requests_have_their_blocks(systems: Run) -> None:
    assert said(systems.rebuilt(), "joined with the log") == [
        note for note in systems.rebuilt().notes if "80 of 80 requests have their prompt's blocks" in note
    ]


def test_requests_before_the_first_message_are_counted(systems: Run) -> None:
    batches = systems.batches()
    systems.keep(batches[8:])
    found = systems.rebuilt()
    joined = sum(row.segments[0].key is not None for row in found.workload.requests)
    assert 60 < joined < 80
    assert said(found, f"{80 - joined} requests fit no stored blocks; they are taken to share nothing")


def test_a_beginning_that_was_cached_before_the_file_keeps_its_length(systems: Run) -> None:
    """Every block of the four texts was stored before the first message that is left."""
    systems.keep(systems.batches()[8:])
    first = {row.segments[0].tokens for row in systems.rebuilt().workload.requests if row.segments[0].key}
    assert {length // 16 * 16 for length in SYSTEM} & first
    assert said(systems.rebuilt(), "were cached before the file begins")


def test_events_of_another_run_are_not_joined(systems: Run, tmp_path: Path) -> None:
    lengths = {row: 3000 + 16 * row.request_id for row in with_system_prompts().requests}
    rows = tuple(
        replace(row, prompt_tokens=length, segments=(Segment(row.request_id, length),))
        for row, length in lengths.items()
    )
    (tmp_path / "other").mkdir()
    systems.keep(deployed(tmp_path / "other", trace(rows)).batches())
    found = systems.rebuilt()
    assert said(found, "KV events, not joined")
    assert all(row.segments == (Segment(None, row.prompt_tokens),) for row in found.workload.requests)


def test_an_emptied_cache_is_said(systems: Run) -> None:
    systems.keep([*systems.batches(), EventBatch(CLOCK_S + 60, [AllBlocksCleared()])])
    assert said(systems.rebuilt(), "the cache was emptied 1 times, which is not simulated")


def test_events_without_a_stored_block_are_refused(systems: Run) -> None:
    systems.keep([EventBatch(CLOCK_S, [AllBlocksCleared()])])
    with pytest.raises(EngineLogError, match="no event in it stores a block"):
        systems.rebuilt()


def test_the_counts_of_a_log_alone_give_its_hits(tmp_path: Path) -> None:
    run = deployed(tmp_path, chats(), cached=True)
    (tmp_path / "kv.events").unlink()
    assert run.predicted() == run.hits
    assert said(run.rebuilt(), "not which earlier request it came from")


def test_events_are_used_before_counts(tmp_path: Path) -> None:
    run = deployed(tmp_path, chats(), cached=True)
    assert said(run.rebuilt(), "joined with the log")
    assert run.predicted() == run.hits


def test_events_say_the_block_size_and_that_prefixes_are_cached(systems: Run) -> None:
    (systems.folder / "engine.json").write_text('{"max_num_seqs": 64, "vllm_version": "0.19.0"}')
    settings = systems.rebuilt().settings
    assert (settings.block_size, settings.prefix_caching) == (16, True)
    assert settings.origin["block_size"] == "kv.events"


def test_a_block_size_that_a_file_gives_is_kept(systems: Run) -> None:
    (systems.folder / "engine.json").write_text('{"max_num_seqs": 64, "block_size": 32}')
    assert systems.rebuilt().settings.block_size == 32
