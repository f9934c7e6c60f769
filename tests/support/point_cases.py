"""Small measured points for tests: a one-layer model, a few requests, files in the real formats."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from engine.runtime.options import Audit
from harness.config.schema import RunConfig, TraceFormat


def small_config(cache_dir: Path) -> RunConfig:
    """A point that the CPU engine runs in well under a second."""
    config = RunConfig(name="test")
    config.workload.num_requests = 16
    config.workload.length_scale = 0.05
    config.workload.request_rate = 100.0
    config.cache.pool_tokens = 2048
    config.cache.max_model_len = 512
    config.model.layers, config.model.hidden, config.model.intermediate = 1, 64, 128
    config.model.heads, config.model.kv_heads, config.model.head_dim, config.model.vocab = 4, 2, 16, 512
    config.engine.audit = Audit.full
    config.replay.repeats = 1
    config.cost.cache_dir = str(cache_dir)
    return config


class Ticks:
    """A clock that goes on by as much at each look: a busy machine gets as far in its budget as any other."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._now = seconds, 0.0

    def perf_counter(self) -> float:
        self._now += self._seconds
        return self._now


TICKS_S = 24  # a budget of a calibration whose clock ticks: every case once and some twice


def tick(patch: pytest.MonkeyPatch) -> None:
    """Let the budgets of calibrations be of ticks."""
    patch.setattr("harness.measure.cases.time", Ticks(0.5))
    patch.setattr("harness.measure.passes.time", Ticks(0.4))  # a lone request's time, which sizes the cases


def azure_file(folder: Path, rows: int = 16) -> Path:
    """An Azure LLM inference CSV with arrivals 10 ms apart."""
    draw = np.random.default_rng(5)
    start = datetime(2023, 11, 16, 18, 15, 46)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for row in range(rows):
        at = (start + timedelta(milliseconds=10 * row)).isoformat(sep=" ", timespec="microseconds")
        lines.append(f"{at}0,{draw.integers(5, 150)},{draw.integers(2, 24)}")
    path = folder / "azure.csv"
    path.write_text("\r\n".join(lines), encoding="utf-8")
    return path


def mooncake_file(folder: Path, rows: int = 16) -> Path:
    """A Mooncake JSONL whose prompts extend one another: chained 512-token ids."""
    draw = np.random.default_rng(6)
    lines, conversations, fresh = [], [[0], [0]], 1
    for row in range(rows):
        chain = conversations[row % 2]
        grown = int(draw.integers(1, 4))
        chain.extend(range(fresh, fresh + grown))
        fresh += grown + 1
        ids = [*chain, fresh - 1]  # the partial last block has an id of its own, which is never extended
        length = 512 * len(chain) + int(draw.integers(1, 512))
        facts = {"timestamp": 20 * row, "input_length": length, "output_length": int(draw.integers(40, 400))}
        lines.append(json.dumps({**facts, "hash_ids": ids}))
    path = folder / "mooncake.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def with_trace(config: RunConfig, format_: TraceFormat, path: Path) -> RunConfig:
    config.trace.format, config.trace.path, config.trace.name = format_, str(path), str(format_)
    return config
