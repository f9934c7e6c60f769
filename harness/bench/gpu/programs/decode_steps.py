"""Decode steps of our engine, batch by batch: how long one takes, and how much of that the device works.

A step is `Engine.step()`, news for every request included. The device's time is the sum of its kernels as the driver
reports them (torch's profiler), taken in other steps than the clock's, because the profiler costs host time. What is
left of a step is the host's: scheduling, building the batch, launching, sampling, telling.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from engine.core.options import SchedulerLimits
from engine.runtime.engine import Engine
from engine.runtime.models.load import LoadedModel
from engine.runtime.options import EngineOptions
from engine.runtime.params import OutputKind, SamplingParams
from harness.bench.gpu.programs.serving_models import weight_bytes

WARM_UP, TIMED, PROFILED = 4, 24, 6  # decode steps


@dataclass(frozen=True)
class Load:
    """What is decoded: so many sequences at once, each with a prompt of so many tokens."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    prompt: int = 512
    budget: int = 8192  # tokens of a step, while prompts are computed

    @property
    def output(self) -> int:
        """Tokens that each generates: those that come first wait, decoding, for the last prompt."""
        filling = -(-max(self.batches) * self.prompt // self.budget)
        return 2 * filling + 4 + WARM_UP + TIMED + PROFILED

    @property
    def longest(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


def decode_engine(loaded: LoadedModel, load: Load, *, graphs: bool) -> Engine:
    """An engine with room for the largest batch; its graphs are recorded here."""
    slots = max(load.batches) * (load.longest + 16)
    return Engine(
        loaded,
        EngineOptions(
            pool_tokens=slots,
            prefix_caching=False,
            audit="off",
            cuda_graphs=graphs,
            limits=SchedulerLimits(load.budget, max(load.batches), load.longest),
        ),
    )


def measured_steps(engine: Engine, load: Load, *, graphs: bool) -> Iterator[dict[str, Any]]:
    """A row a batch size; the largest batch first, whose buffers the others use."""
    weights = weight_bytes(engine.loaded.model)
    for batch in sorted(load.batches, reverse=True):
        _fill(engine, load, batch)
        _steps(engine, WARM_UP, batch)
        seconds = _timed(engine, TIMED, batch)
        device_s = _device_s(engine, PROFILED, batch)
        _drain(engine)
        context = (
            load.prompt + WARM_UP + TIMED // 2
        )  # of the last sequence that began; a few tokens more of others
        step_s = median(seconds)
        moved = weights + batch * context * engine.loaded.kv_bytes_per_token
        yield {
            "graphs": graphs,
            "batch": batch,
            "context": context,
            "step_s": step_s,
            "device_s": device_s,
            "host_share": None if device_s is None else 1 - device_s / step_s,
            "tokens_s": batch / step_s,
            "bytes_s": moved / step_s,
            "steps_s": seconds,
        }


def _fill(engine: Engine, load: Load, batch: int) -> None:
    """Compute every prompt; sequences are apart, so that no block is shared."""
    vocabulary = engine.loaded.vocab_size
    for number in range(batch):
        prompt = [(7 * number + place) % vocabulary for place in range(load.prompt)]
        engine.add_request(f"{number}", prompt, _params(load))
    while len(engine.step()) < batch:
        if not engine.has_unfinished_requests:
            raise RuntimeError(f"the first of {batch} sequences ended before the last had begun")


def _params(load: Load) -> SamplingParams:
    return SamplingParams(
        max_tokens=load.output, temperature=0, ignore_eos=True, output_kind=OutputKind.DELTA
    )


def _steps(engine: Engine, count: int, batch: int) -> None:
    for _ in range(count):
        _step(engine, batch)


def _step(engine: Engine, batch: int) -> None:
    """One decode step of the whole batch, or none that a figure may rest on."""
    told = len(engine.step())
    if told != batch:
        raise RuntimeError(f"a step decoded {told} of {batch} sequences")


def _timed(engine: Engine, count: int, batch: int) -> list[float]:
    """Wall seconds of each step; a step ends when its tokens are known, so the device has finished."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        _step(engine, batch)
        seconds.append(time.perf_counter() - start)
    return seconds


def _device_s(engine: Engine, count: int, batch: int) -> float | None:
    """Seconds a step that the device computed and copied; None without a CUDA device."""
    if engine.loaded.device.type != "cuda":
        _steps(engine, count, batch)
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        _steps(engine, count, batch)
        torch.cuda.synchronize()
    return union_s(_spans(watched.events() or ())) / count


def _spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    """(start, end) in µs of what ran on the device."""
    on_device = (one for one in events if "CUDA" in str(one.device_type))
    return [(float(one.time_range.start), float(one.time_range.end)) for one in on_device]


def union_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds that the spans (µs) cover together: what overlaps counts once."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / 1e6


def _drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()
