"""What `advise` costs, in replays of its requests, and block references of a hit curve a CPU-second.

`pytest benchmarks/test_advice.py -s` prints both, as ratios of CPU-seconds of one process. A replay is one of the
requests as they come: by compiled code, and as `run` chooses (replay.compiled=auto), which is the policy core where
requests are few. Compiled code is loaded before anything is timed. Traces are made here; published ones are taken too
where they lie in ../shared/traces beside the clone.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from harness.capacity.advice import advise
from harness.capacity.case import LoadCase
from harness.capacity.slo import parse_slo
from harness.cli.workload import case_of
from harness.config.schema import Compiled
from harness.console import say
from harness.point.cost import cost_model
from harness.workload.simulate import obstacle, predict
from traces.analysis.reuse import PrefixPaths, reuse_profile
from traces.reading import read_trace

PUBLISHED = Path(__file__).parents[2] / "shared" / "traces"
ROUNDS, POOLS = 3, (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
MOST_REPLAYS = 15
H100 = ("model=llama3_8b", "device=h100")
PUBLISHED_CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "Azure conversations": ("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", H100),
    "Azure code": ("azure-llm-2023/AzureLLMInferenceTrace_code.first4000.csv", H100),
    "Mooncake, 8,192 tokens": ("mooncake-fast25/conversation_trace.jsonl", H100),
    "Azure, in groups": (
        "azure-llm-2023/AzureLLMInferenceTrace_conv.csv",
        ("model=gemma3_12b", "device=h100"),
    ),
    "Mooncake, in groups": ("mooncake-fast25/conversation_trace.jsonl", ("model=gemma3_12b", "device=h100")),
    "Mooncake, long": ("mooncake-fast25/conversation_trace.jsonl", ("model=llama31_8b", "device=h100")),
}
MADE_CASES: dict[str, tuple[str, ...]] = {
    "a burst": H100,
    "a closed loop": (*H100, "replay.mode=closed", "replay.users=8"),
    "two replicas": (*H100, "device.data_parallel=2"),
    "groups, few requests": ("model=gemma3_12b", "device=h100"),
}


def cpu_s(run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The median CPU-seconds of some runs."""
    took = []
    for _ in range(rounds):
        began = time.process_time()
        run()
        took.append(time.process_time() - began)
    return median(took)


def replay_s(case: LoadCase, way: Compiled) -> float:
    """CPU-seconds of one replay of the case's requests, as they come."""
    assert case.served is not None
    point = case.served.of_trace(case.trace)
    point, cost = replace(point, replay=replace(point.replay, compiled=way)), cost_model(point.deployment)
    return cpu_s(lambda: predict(point, cost, rows=True))


@pytest.mark.parametrize("name", [*MADE_CASES, *PUBLISHED_CASES])
def test_advise_takes_some_replays_of_its_requests(name: str, small: bool, tmp_path: Path) -> None:
    """At most fifteen of those that `run` makes; the compiled ones are printed beside."""
    if name in PUBLISHED_CASES:
        file, words = PUBLISHED / PUBLISHED_CASES[name][0], PUBLISHED_CASES[name][1]
        if small or not file.exists():
            pytest.skip(f"needs {file.name}, looked for in ../shared/traces beside the clone")
    else:
        file, words = tmp_path / "trace.jsonl", MADE_CASES[name]
        rows = [
            {"arrival_s": at * 0.5 if at < 400 else 200 + at * 0.01, "prompt_tokens": 1000 + at % 7,
             "output_tokens": 100}
            for at in range(60 if small else 600)
        ]  # fmt: skip
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def made() -> LoadCase:
        return case_of(file, list(words), parse_slo("ttft_p99<2,tpot_mean<0.1")).case

    case = made()
    advise(case, lambda _: None)  # loads what is compiled
    assert case.served is not None
    ways = [Compiled.auto]
    if obstacle(case.served, cost_model(case.served.deployment)) is None:
        ways.append(Compiled.always)
    units = {str(way): replay_s(case, way) for way in ways}
    took_s = cpu_s(lambda: advise(made(), lambda _: None), 1 if small else ROUNDS)
    shown = ", ".join(f"{took_s / each:.1f} replays ({way}, {each:.3f} CPU-s)" for way, each in units.items())
    say(f"\n{name}: advise on {len(case.trace.requests):,} requests {took_s:.2f} CPU-s: {shown}")
    assert small or took_s < MOST_REPLAYS * units["auto"]


@pytest.mark.parametrize("size", [16, 512])
@pytest.mark.parametrize(
    "name", ["made", "conversation_trace", "mini/conversation.head400", "synthetic_trace.first1900"]
)
def test_a_hit_curve_takes_a_second_for_a_million_references(
    name: str, size: int, small: bool, tmp_path: Path
) -> None:
    """From the trace in memory to the hit ratios of ten pools. In the made one every text is left at every length, the
    most work there can be: it is printed, and not held to the million.
    """
    file = PUBLISHED / "mooncake-fast25" / f"{name}.jsonl"
    if name == "made":
        file, draw = tmp_path / "trace.jsonl", np.random.default_rng(3)
        rows = [
            {"timestamp": 1000 * at, "input_length": 512 * count, "output_length": 1,
             "hash_ids": [*(int(text) * 1000 + place for place in range(count - 1)), 10**9 + at]}
            for at, (text, count) in enumerate(
                zip(draw.zipf(1.3, 2000) % 97, draw.integers(2, 60, 2000).tolist(), strict=True)
            )
        ]  # fmt: skip
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif small or not file.exists():
        pytest.skip(f"needs {file.name}, looked for in ../shared/traces beside the clone")
    trace = read_trace(file)

    def curve() -> list[float]:
        profile = reuse_profile(PrefixPaths(trace), size, spare_last_token=True)
        return [profile.hit_ratio(blocks) for blocks in POOLS]

    references, took_s = int((trace.columns.prompt_tokens // size).sum()), cpu_s(curve)
    say(
        f"\n{name}: {references:,} references to blocks of {size} at {references / took_s / 1e6:.2f} M a CPU-second"
    )
    assert small or name == "made" or references / took_s > 1e6
