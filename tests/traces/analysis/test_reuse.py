"""Hit ratios by cache size and block size: the published integers, the real prefix cache, and a plain LRU."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import cases

from engine.core.identity import KeyIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import SchedulerLimits
from engine.core.plan import StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from traces.analysis.reuse import PrefixPaths, joined, prompt_paths, reuse_profile, shared_prefix_tokens
from traces.analysis.statistics import trace_distributions
from traces.arrivals import ArrivalProcess
from traces.reading import read_trace
from traces.synth.generator import PrefixSharing, generate_trace
from traces.tokens import token_ids
from traces.trace import Segment, Trace, TraceHeader, TraceRequest

Find = Callable[[str], Path]
UNLIMITED = float("inf")
pieces = st.tuples(st.none() | st.integers(0, 2), st.integers(1, 9))
prompts = st.lists(st.lists(pieces, min_size=1, max_size=4), min_size=1, max_size=12)
# hit tokens of full blocks: unlimited, 1,000 and 10,000 blocks of 512 (statistics.json, file_anchors)
MOONCAKE = {
    "mooncake-fast25/synthetic_trace.first1900.jsonl": (7_368_192, 435_200, 3_913_728),
}


def make(rows: list[list[tuple[int | None, int]]]) -> Trace:
    requests = []
    for number, row in enumerate(rows):
        segments = tuple(Segment(*piece) for piece in row)
        requests.append(TraceRequest(number, number * 1000, sum(s.tokens for s in segments), 1, segments))
    return Trace(
        TraceHeader("made", "made", "test", "content", None, 1, "00", len(rows), len(rows)), tuple(requests)
    )


@given(prompts)
def test_texts_that_only_occur_together_count_as_one(rows: list[list[tuple[int | None, int]]]) -> None:
    """Joined or not, the same tokens are shared and the same prompts are equal."""
    columns = make(rows).columns.segments
    both = joined(columns)
    assert len(both.key) <= len(columns.key)
    parts = [
        (one.first.tolist(), np.add.reduceat(one.tokens, one.first[:-1]).tolist()) for one in (columns, both)
    ]
    assert parts[0][1] == parts[1][1]
    seen, path = prompt_paths(columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("traces.analysis.reuse.joined", lambda prompts: prompts)
        apart, path_apart = prompt_paths(columns)
    assert seen.tolist() == apart.tolist()
    assert (path[:, None] == path).tolist() == (path_apart[:, None] == path_apart).tolist()


def test_a_chain_of_texts_is_one_segment() -> None:
    chain = [(key, 512) for key in range(40)]
    found = joined(make([[*chain, (100, 7)], [*chain, (101, 9)], chain[:1]]).columns.segments)
    assert np.diff(found.first).tolist() == [3, 3, 1]
    found = joined(make([[*chain, (100, 7)], [*chain, (101, 9)]]).columns.segments)
    assert found.tokens.tolist() == [40 * 512, 7, 40 * 512, 9]


def blocks_of(request: TraceRequest, size: int) -> list[bytes]:
    """Names of full blocks: all tokens of the prompt up to and including the block."""
    ids = token_ids(request, seed=3, vocab_size=2**32, first_id=0)
    return [ids[: end + size].tobytes() for end in range(0, len(ids) - size + 1, size)]


def ideal_hit_tokens(
    trace: Trace, block_size: int, blocks: int | None = None, *, deduplicate: bool = False
) -> int:
    """Prompt tokens that the real prefix cache hits: full blocks, and never a prompt's last token.

    The prompts of the trace are served one after another in a pool of `blocks` (None: unlimited), by the keys of the
    trace. Each generates one token and ends before the next begins, so nothing but prompts is cached.
    """
    if blocks is None:
        blocks = sum(-(-request.prompt_tokens // block_size) for request in trace.requests) + 1
    longest = max(request.prompt_tokens for request in trace.requests) + 1
    limits = SchedulerLimits(
        max_batched_tokens=longest, max_running=1, max_model_len=longest, chunked_prefill=False, watermark=0.0
    )
    scheduler = Scheduler(PagedManager(blocks, block_size, deduplicate=deduplicate), limits)
    hits = 0
    for row in trace.requests:
        identity = KeyIdentity(row.request_id, row.segments, row.salt)
        scheduler.submit(Request(row.request_id, row.prompt_tokens, 1, identity=identity))
        while scheduler.has_work:
            plan = scheduler.schedule()
            hits += plan.hit_tokens
            scheduler.commit(plan, StepResult())
    return hits


def plain_lru(trace: Trace, size: int, capacity: int) -> int:
    """Hit tokens, by the definition."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        blocks = blocks_of(request, size)
        run = next((n for n, block in enumerate(blocks) if block not in cache), len(blocks))
        hits += run * size
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def apart(rows: list[list[tuple[int | None, int]]]) -> bool:
    """No key twice in a row: two such segments are one text that begins again, which no trace has."""
    return all(a[0] is None or a[0] != b[0] for row in rows for a, b in pairwise(row))


@given(prompts.filter(apart), st.integers(1, 4), st.integers(1, 40))
def test_every_cache_size_hits_what_a_plain_lru_hits(rows, size: int, capacity: int) -> None:
    trace = make(rows)
    assert reuse_profile(trace, size).hit_tokens(capacity) == plain_lru(trace, size, capacity)


@given(prompts.filter(apart))
def test_an_unlimited_cache_of_single_tokens_hits_what_the_keys_share(rows) -> None:
    trace = make(rows)
    assert reuse_profile(trace, 1).hit_tokens(UNLIMITED) == sum(shared_prefix_tokens(trace))


@given(
    prompts.filter(apart),
    st.integers(1, 5),
    st.lists(st.sampled_from(["", "a", "b"]), min_size=12, max_size=12),
)
def test_the_engine_s_prefix_cache_hits_what_the_keys_say(rows, size: int, salts: list[str]) -> None:
    trace = make(rows)
    salted = tuple(replace(row, salt=salt) for row, salt in zip(trace.requests, salts, strict=False))
    trace = Trace(trace.header, salted)
    expected = reuse_profile(trace, size, spare_last_token=True).hit_tokens(UNLIMITED)
    assert ideal_hit_tokens(trace, size) == expected


# The last prompt but one stands whole in larger pools, and takes a block beside it there, in which it is computed
# again. In one of 18 blocks it had been evicted.
EVICTED_FIRST = [[(0, 1)], [(1, 9), (None, 5)], [(2, 3), (0, 2)], [(None, 14)], [(0, 1)], [(2, 5), (0, 4)]]


@pytest.mark.nightly
@given(prompts.filter(apart), st.integers(1, 5), st.integers(0, 12))
@example(EVICTED_FIRST, 1, 4)
def test_one_pass_finds_the_hits_of_an_engine_at_any_pool_that_holds_the_longest(
    rows, size: int, more: int
) -> None:
    trace = make(rows)
    blocks = more + max(-(-row.prompt_tokens // size) for row in trace.requests)
    found = reuse_profile(trace, size, spare_last_token=True).hit_tokens(blocks)
    assert found == ideal_hit_tokens(trace, size, blocks, deduplicate=True)
    if all(row.prompt_tokens % size for row in trace.requests):  # else a last block may be kept twice
        assert found == ideal_hit_tokens(trace, size, blocks)


@pytest.mark.parametrize("model", ["system", "few_shot", "tree", "passages"])
@cases("size", [1, 16, 48], day=1)
def test_generated_sharing_is_found_by_the_engine_s_prefix_cache(model: str, size: int) -> None:
    trace = generate_trace("azure_conv", num_requests=60, seed=1, sharing=PrefixSharing(model, 0.6, 4))
    expected = reuse_profile(trace, size, spare_last_token=True).hit_tokens(UNLIMITED)
    assert ideal_hit_tokens(trace, size) == expected > 0


def test_conversations_share_their_history_at_any_block_size() -> None:
    trace = generate_trace("chat", num_requests=80, seed=1)
    ratios = [reuse_profile(trace, size).hit_ratio(UNLIMITED) for size in (1, 16, 256)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 0.3


@pytest.mark.parametrize("name", MOONCAKE)
def test_published_lru_hits_are_met_exactly(name: str, published: Find) -> None:
    profile = reuse_profile(read_trace(published(name)), 512, partial_blocks=True)
    assert tuple(profile.hit_tokens(size) for size in (UNLIMITED, 1_000, 10_000)) == MOONCAKE[name]


@pytest.mark.nightly
def test_mooncake_conversation_hits_0_374_through_the_real_cache_and_from_its_ids(published: Find) -> None:
    trace = read_trace(published("mooncake-fast25/conversation_trace.jsonl"))
    total = sum(request.prompt_tokens for request in trace.requests)
    paths = PrefixPaths(trace)
    full = reuse_profile(paths, 512, partial_blocks=True)
    assert [full.hit_tokens(size) for size in (UNLIMITED, 1_000, 10_000)] == [
        54_063_104,
        6_572_544,
        31_217_664,
    ]
    assert sum(shared_prefix_tokens(trace)) / total == pytest.approx(0.374, abs=5e-4)  # with the partial tail
    assert ideal_hit_tokens(trace, 512) == 54_063_104
    coarser = {size: round(reuse_profile(paths, size).hit_ratio(UNLIMITED), 6) for size in (1024, 4096)}
    assert coarser == {1024: 0.339611, 4096: 0.29123}


@pytest.mark.nightly
def test_ragpulse_hits_0_314_of_its_prompts_and_0_315_of_its_segments(published: Find) -> None:
    trace = read_trace(published("ragpulse/0_trace.jsonl"))
    hits = sum(shared_prefix_tokens(trace))
    segments = sum(s.tokens for r in trace.requests for s in r.segments if s.key is not None)
    assert (hits, segments) == (6_574_248, 20_851_449)
    assert hits / segments == pytest.approx(0.31529, abs=1e-5)
    paths = PrefixPaths(trace)
    found = {size: round(reuse_profile(paths, size).hit_ratio(UNLIMITED), 6) for size in (16, 64, 512)}
    assert found == {16: 0.314288, 64: 0.314191, 512: 0.313411}
    assert ideal_hit_tokens(trace, 256) == reuse_profile(paths, 256, spare_last_token=True).hit_tokens(
        UNLIMITED
    )


@pytest.mark.nightly
def test_agentic_conversations_hit_what_their_statistics_say(published: Find) -> None:
    trace = read_trace(published("kv-cache-tester-agentic/traces"))
    dropped = (
        129_365  # the one request without output: all but the beginning of its prompt had been sent before
    )
    assert trace.header.dropped == {"output_zero": 1}
    assert trace.header.rows_read == 315 + 44
    profile = reuse_profile(trace, 64)
    assert 20_836_672 - profile.hit_tokens(UNLIMITED) == pytest.approx(dropped, abs=64)
    assert ideal_hit_tokens(trace, 64) == profile.hit_tokens(UNLIMITED)


@pytest.mark.nightly
def test_sharegpt_turns_hit_as_published_at_every_block_size(published: Find) -> None:
    name = "etalon-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    trace = read_trace(published(name), "lengths_chat", arrivals=ArrivalProcess("poisson", 1.0))
    paths = PrefixPaths(trace)
    found = {
        s: round(reuse_profile(paths, s, spare_last_token=True).hit_ratio(UNLIMITED), 6) for s in (1, 16, 512)
    }
    assert found == {1: 0.786408, 16: 0.783807, 512: 0.706923}


def test_a_profile_is_json_and_has_every_picture_s_data() -> None:
    import json

    profile = trace_distributions(generate_trace("chat", num_requests=40, seed=0))
    assert json.loads(json.dumps(profile)) == profile
    assert profile["sessions"]["turns_max"] > 1
    assert max(profile["reuse"]["lru_hit_ratio"]["16"]) == pytest.approx(
        profile["reuse"]["ideal_hit_ratio"]["16"]
    )


def test_a_profile_finds_what_an_engine_does_that_computes_the_last_token_of_every_prompt() -> None:
    """Of equal prompts of 64 tokens `trace inspect` found three quarters in blocks of 64, where no engine finds any."""
    header = TraceHeader("equal", "test", "", "content", None, 1, "", 4, 4)
    rows = tuple(TraceRequest(i, i * 10**6, 64, 2, (Segment(7, 64),)) for i in range(4))
    found = trace_distributions(Trace(header, rows), [16, 64])["reuse"]
    assert found["ideal_hit_ratio"] == {"16": 3 * 48 / 256, "64": 0.0}
    assert max(found["lru_hit_ratio"]["16"]) == 3 * 48 / 256
