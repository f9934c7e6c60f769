"""Points whose settings are drawn at random: both sides decide alike, whatever goes together."""

import random
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any

from point_cases import mooncake_file, small_config, with_trace
from tiers import tier

from engine.core.options import (
    CachePolicy,
    GroupPages,
    Preemption,
    Retention,
    Scheduling,
    Sharing,
    SpeculationMode,
    StateMode,
    TierLoad,
    TierStore,
    WindowHits,
)
from engine.runtime.options import KVDtype
from harness.config.checks import check_settings
from harness.config.errors import UserError
from harness.config.schema import CostKind, DecodingMode, Oversize, ReplayMode, RunConfig, TraceFormat
from harness.point import check_point, run_point

# key: values, and how often one of them is drawn
DRAWN: dict[str, tuple[tuple[Any, ...] | type[Enum], float]] = {
    "workload.prefix_share": ((0.2, 0.5), 0.3),
    "workload.request_rate": ((20.0, 1000.0, 5000.0), 0.8),
    "cache.policy": (CachePolicy, 0.15),
    "cache.block_size": ((4, 8, 16, 32), 0.8),
    "cache.pool_tokens": ((200, 300, 500, 1200), 0.9),
    "cache.prefix_caching": ((False,), 0.15),
    "cache.retention": (Retention, 0.2),
    "cache.deduplicate": ((True,), 0.15),
    "cache.copy_at_fork": ((True,), 0.1),
    "cache.host_tokens": ((500, 4000), 0.4),
    "cache.eviction": (("fifo", "lfu", "ttl", "pinned", "gdsf", "s3fifo", "sieve"), 0.3),
    "cache.tier_tokens": ((500, 4000), 0.3),
    "cache.tier_store": (TierStore, 0.3),
    "cache.tier_chunk": ((16, 32), 0.15),
    "cache.tier_load": (TierLoad, 0.2),
    "cache.window_hits": (WindowHits, 0.2),
    "cache.retention_interval": ((None, 16, 64), 0.3),
    "cache.behind_first": ((True,), 0.2),
    "cache.states": (StateMode, 0.3),
    "cache.prefix_match_unit": ((4, 8), 0.3),
    "cache.max_model_len": ((150, 224), 0.5),
    "scheduler.preemption": (Preemption, 0.5),
    "scheduler.max_running": ((4, 8), 0.4),
    "scheduler.max_batched_tokens": ((8, 16, 40, 100), 0.5),
    "scheduler.chunked_prefill": ((False,), 0.15),
    "scheduler.watermark": ((0.05, 0.2), 0.2),
    "scheduler.adaptive_watermark": ((True,), 0.2),
    "scheduler.policy": (Scheduling, 0.3),
    "scheduler.long_prefill_tokens": ((8, 16), 0.2),
    "scheduler.admit_whole_prompt": ((False,), 0.3),
    "scheduler.static_batch": ((True,), 0.1),
    "scheduler.mixed_steps": ((False,), 0.3),
    "scheduler.async_scheduling": ((True,), 0.4),
    "decoding.sharing": (Sharing, 0.2),
    "decoding.branch_hazard": ((0.05, 0.3), 0.1),
    "decoding.draft_place": (SpeculationMode, 0.3),
    "replay.mode": (ReplayMode, 0.4),
    "replay.users": ((2, 5), 0.3),
    "replay.max_in_flight": ((3,), 0.15),
    "model.kv_dtype": ((KVDtype.fp8_e4m3,), 0.1),
    "workload.seed": ((1, 2, 3), 0.6),
}


def put(config: RunConfig, key: str, value: Any) -> None:
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)


def drawn(draw: random.Random, folder: Path) -> RunConfig:
    """A model of one of three kinds, a way of decoding, and any other settings."""
    config = small_config(folder)
    config.cost.kind, config.workload.oversize = CostKind.roofline, Oversize.drop
    if draw.random() < 0.6:
        config = with_trace(config, TraceFormat.mooncake, mooncake_file(folder))
        config.workload.length_scale = draw.choice([0.01, 0.02])
    kind = draw.choice(["plain", "plain", "windows", "states"])
    if kind != "plain":
        config.model.layers = 4
        config.cache.groups = draw.choice([pages for pages in GroupPages if pages is not GroupPages.off])
    if kind == "windows":
        config.model.family, config.model.window, config.model.windowed_layers = "gemma2", 24, 2
    if kind == "states":
        config.model.family, config.model.state_layers = "qwen3_next", 2
        config.model.state_bytes = (128 * 4 + 4 * 16 * 16) * 4
    for key, (values, often) in DRAWN.items():
        if draw.random() < often:
            put(config, key, draw.choice(list(values)))
    if kind == "states":
        config.cache.pool_tokens = draw.choice([800, 1536, 3000])
    mode = draw.choice(["greedy", "greedy", "beams", "samples", "drafts"])
    if mode == "beams":
        config.decoding.beam_width = draw.choice([2, 3])
    if mode == "samples":
        config.decoding.mode, config.decoding.n = DecodingMode.sample, draw.choice([2, 4])
    if mode == "drafts":
        config.decoding.draft_tokens, config.decoding.acceptance = draw.choice([1, 3]), 0.6
    return config


def allowed(config: RunConfig, draw: random.Random) -> bool:
    """Take back each setting that is refused beside the others; False where that does not help."""
    usual = small_config(Path())
    for _ in range(15):
        refused = next(iter(check_settings(config)), None)
        try:
            if refused is None:
                check_point(config)
                return True
        except UserError as error:
            refused = error
        key = str(refused).split(":")[0]
        if key == "cache.groups":
            config.cache.groups = draw.choice(list(GroupPages))
        elif key in DRAWN or key == "decoding.draft_tokens":
            section, name = key.split(".")
            put(config, key, getattr(getattr(usual, section), name))
        else:
            return False
    return False


SEEDS = tier(3, 160)


def test_both_sides_decide_alike_whatever_goes_together(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        draw = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        config = drawn(draw, folder)
        if not allowed(config, draw):
            seen["refused"] += 1
            continue
        record = run_point(config).record
        assert record.levels["counts"]["identical"], (seed, record.levels["counts"])
        assert record.outcome["measured"] == record.outcome["simulated"], seed
        measured = record.measured["median"]
        seen.update(name for name in ("preemptions", "hit_tokens", "copies_per_token") if measured[name])
        seen["points"] += 1
    assert seen["points"] > SEEDS / 2, seen
    assert SEEDS < 100 or min(seen[name] for name in ("preemptions", "hit_tokens", "copies_per_token")) > 10
