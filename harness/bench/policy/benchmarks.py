"""The benchmarks of `bench policy`. pytest-benchmark runs this file, with the CPU time of the process as its clock."""

# ruff: noqa: D103 - the names of the benchmarks say it

from collections.abc import Callable
from typing import Any

from harness.bench.policy.work import (
    YARDSTICK,
    Allocation,
    BeamChurn,
    Decoding256,
    Prompts,
    Scheduling,
    Yardstick,
)

Settings = dict[str, Any]
Benchmark = Any  # pytest-benchmark's fixture


def _time(
    benchmark: Benchmark,
    settings: Settings,
    line: str,
    count: int,
    run: Callable[..., object],
    fresh: Callable[[], object] | None = None,
) -> None:
    """Time `run` on what `fresh` prepares for each round; `count` units of work are done in one."""
    benchmark.group = "policy"
    benchmark.extra_info.update(line=line, count=count)
    benchmark.pedantic(run, setup=fresh, rounds=settings["rounds"], warmup_rounds=1)


def test_yardstick(benchmark: Benchmark, settings: Settings) -> None:
    work = Yardstick()
    _time(benchmark, settings, YARDSTICK, work.operations, work.run)


def test_allocate(benchmark: Benchmark, settings: Settings) -> None:
    work = Allocation(settings["sequences"], settings["tokens"], evicting=False)
    _time(benchmark, settings, "allocate", work.blocks, work.run, work.fresh)


def test_allocate_evicting(benchmark: Benchmark, settings: Settings) -> None:
    work = Allocation(settings["sequences"], settings["tokens"], evicting=True)
    _time(benchmark, settings, "allocate_evicting", work.blocks, work.run, work.fresh)


def test_prompt(benchmark: Benchmark, settings: Settings) -> None:
    work = Prompts(settings["prompts"], settings["tokens"], evicting=False)
    _time(benchmark, settings, "prompt", work.count, work.run, work.fresh)


def test_prompt_evicting(benchmark: Benchmark, settings: Settings) -> None:
    work = Prompts(settings["prompts"], settings["tokens"], evicting=True)
    _time(benchmark, settings, "prompt_evicting", work.count, work.run, work.fresh)


def test_prompt_list(benchmark: Benchmark, settings: Settings) -> None:
    work = Prompts(settings["prompts"], settings["tokens"], evicting=False)
    _time(benchmark, settings, "prompt_list", work.count, work.run_lists, work.fresh_lists)


def test_decode(benchmark: Benchmark, settings: Settings) -> None:
    work = Decoding256(settings["running"], settings["steps"], hashed=False)
    _time(benchmark, settings, "decode", work.steps, work.run, work.fresh)


def test_decode_hashed(benchmark: Benchmark, settings: Settings) -> None:
    work = Decoding256(settings["running"], settings["steps"], hashed=True)
    _time(benchmark, settings, "decode_hashed", work.steps, work.run, work.fresh)


def test_schedule(benchmark: Benchmark, settings: Settings) -> None:
    work = Scheduling(settings["running"], settings["steps"], rows=False)
    _time(benchmark, settings, "schedule", work.steps, work.run, work.fresh)


def test_schedule_rows(benchmark: Benchmark, settings: Settings) -> None:
    work = Scheduling(settings["running"], settings["steps"], rows=True)
    _time(benchmark, settings, "schedule_rows", work.steps, work.run, work.fresh)


def test_schedule_hashed(benchmark: Benchmark, settings: Settings) -> None:
    work = Scheduling(settings["running"], settings["steps"], rows=True, hashed=True)
    _time(benchmark, settings, "schedule_hashed", work.steps, work.run, work.fresh)


def test_beams(benchmark: Benchmark, settings: Settings) -> None:
    work = BeamChurn(4, 512, settings["beam_steps"])
    _time(benchmark, settings, "beams", work.width * work.steps, work.run, work.fresh)
