"""One attention call: its input tensors, its providers, the check of its output, and its timing.

On CUDA the calls of a round are captured in one graph and timed between two events, so the time contains neither
Python nor launches. A call that cannot be captured is launched between the same events, and its row says so. On a CPU
the time is the CPU time of this process. Each round uses several sets of inputs, together larger than the cache.
`seconds` is the clock that pytest-benchmark reads. `ceilings` has what the device can do at most: copy, read, multiply.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.bench.cases import KernelCase
from paged_kernels.private import sleep_on_device
from paged_kernels.providers import Case, Provider, Run

Call = Callable[[], object]

LAUNCHES = 20  # calls in a round on CUDA; with fewer, the events would dominate the time of short kernels
ENOUGH_S = 5e-3  # least CPU time of a round; the clock has a resolution of about a microsecond
MOST_CALLS = 200
HEAD_START_CYCLES = 2_000_000  # about a millisecond, in which the host queues a round

LARGE = {"cuda": 2**30, "cpu": 2**27}  # bytes of a buffer, much larger than any cache
SIDE = {"cuda": 8192, "cpu": 512}  # of the square matrices


class RoundClock:
    """A clock in seconds that advances only by the time per call of each round."""

    def __init__(self) -> None:
        self._elapsed_s = 0.0

    def read(self) -> float:
        """The seconds so far."""
        return self._elapsed_s

    def advance(self, per_call_s: float) -> None:
        """Advance by the time per call of one round."""
        self._elapsed_s += per_call_s


CLOCK = RoundClock()


def seconds() -> float:
    """The clock of pytest-benchmark, which finds a function by its name alone."""
    return CLOCK.read()


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of one call: `round()` runs one and returns seconds per call; `how` is what was timed."""

    round: Callable[[], float]
    how: str


def prepare_rounds(runs: Sequence[Call], device: torch.device, *, capturable: bool) -> Rounds:
    """Rounds over `runs`, the same call on different inputs. Each runs once first, to compile and allocate."""
    for run in runs:
        run()
    if device.type == "cpu":
        return Rounds(_cpu_round(runs), "CPU time")
    if capturable:
        return Rounds(_graph_round(runs), "CUDA graph")
    return Rounds(_event_round(runs), "events around launches")


def copies_past_cache(one_set_bytes: int, cache_bytes: int, most: int = 16) -> int:
    """Number of input sets, together three times the cache, so that a set is evicted before it is used again."""
    return max(1, min(most, -(-3 * cache_bytes // max(1, one_set_bytes)))) if cache_bytes else 1


def cache_bytes(device: torch.device) -> int:
    """Bytes of the last-level cache of a GPU; 0 on a CPU, where other work evicts the inputs anyway."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 * 2**20))


def _cpu_round(runs: Sequence[Call]) -> Callable[[], float]:
    start = time.process_time()
    runs[0]()
    calls = int(min(MOST_CALLS, max(len(runs), ENOUGH_S / max(1e-6, time.process_time() - start))))
    order = [runs[call % len(runs)] for call in range(calls)]

    def once() -> float:
        start = time.process_time()
        for run in order:
            run()
        return (time.process_time() - start) / calls

    return once


def _order(runs: Sequence[Call]) -> list[Call]:
    """The calls of a round: all input sets in turn, as often as needed for at least `LAUNCHES` calls."""
    return list(runs) * -(-LAUNCHES // len(runs))


def _graph_round(runs: Sequence[Call]) -> Callable[[], float]:
    order = _order(runs)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # capture needs a warm-up on a stream that is not the default one
        for run in order[: len(runs)]:
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in order]  # outputs stay alive, so that no two share memory
    replay: Any = graph.replay

    def once() -> float:
        seconds = _between_events(replay) / len(order)
        assert kept
        return seconds

    once()
    return once


def _event_round(runs: Sequence[Call]) -> Callable[[], float]:
    order = _order(runs)

    def all_of_them() -> None:
        for run in order:
            run()

    return lambda: _between_events(all_of_them) / len(order)


def _between_events(work: Callable[[], object]) -> float:
    """Device time of `work`. The device sleeps first, so that all work is queued before the first event passes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    sleep_on_device(HEAD_START_CYCLES)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def build(spec: KernelCase, device: torch.device, seed: int) -> Case:
    """The tensors of a case, with contents drawn from `seed`. Its name is that of the grid."""
    from paged_kernels.case import CaseSpec as TensorSpec
    from paged_kernels.case import build_case

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    names |= {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    element = getattr(torch, names[spec.dtype])
    narrow = spec.dtype.startswith("fp8")
    wanted = TensorSpec(
        lengths=spec.lengths, queries=(spec.queries,) * spec.batch, heads=spec.heads, kv_heads=spec.kv_heads,
        dk=spec.head_dim, block_size=spec.block_size, dtype=torch.bfloat16 if narrow else element,
        kv_dtype=element if narrow else None, layout=spec.layout, shared_tokens=spec.shared_prefix,
    )  # fmt: skip
    return replace(build_case(wanted, device=device, seed=seed), name=spec.name)


def checked_runs(
    provider: Provider, cases: Sequence[Case], exact: torch.Tensor | None = None
) -> tuple[list[Run], float]:
    """The provider's calls for all input sets, and the relative error of the first one's output.

    Args:
        provider: makes the calls.
        cases: the same case on different inputs.
        exact: the exact output of the first case; None computes it.

    Raises:
        DisagreementError: the provider's output is wrong.
        UnsupportedCaseError: the provider cannot serve the case.
    """
    from paged_kernels.case import exact_output, verify

    runs = [provider.prepare(case) for case in cases]
    wanted = exact_output(cases[0]) if exact is None else exact
    return runs, verify(runs[0](), wanted, provider.name, cases[0])


@dataclass(frozen=True)
class Ceiling:
    """One call that only moves `moved_bytes` (read and written), or only multiplies (`flops`)."""

    name: str
    run: Callable[[], object]
    moved_bytes: int
    flops: int


def ceilings(device: torch.device) -> list[Ceiling]:
    """The ceilings: copy, read (a sum, which writes almost nothing) and matrix product, on random contents."""
    generator = torch.Generator(device).manual_seed(0)
    size, side = LARGE[device.type], SIDE[device.type]
    source = torch.randn(size // 4, generator=generator, device=device)
    target = torch.empty_like(source)
    total = torch.empty((), device=device)
    return [
        Ceiling("copy", lambda: target.copy_(source), 2 * size, 0),
        Ceiling("read", lambda: torch.sum(source, dim=0, out=total), size, 0),
        Ceiling("matmul", _product(side, device, generator), 0, 2 * side**3),
    ]


def _product(side: int, device: torch.device, generator: torch.Generator) -> Call:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(side, side, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.matmul(a, b, out=product)


def copy_of(moved_bytes: int, device: torch.device) -> Callable[[], object]:
    """A copy that reads and writes `moved_bytes` in total: the yardstick of a call that reads as many bytes."""
    generator = torch.Generator(device).manual_seed(1)
    source = torch.randn(max(1, moved_bytes // 8), generator=generator, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def product_of(flops: int, device: torch.device) -> Callable[[], object]:
    """A square matrix product of about `flops` operations: the yardstick of a call that arithmetic limits."""
    side = max(64, round((flops / 2) ** (1 / 3) / 64) * 64)
    return _product(side, device, torch.Generator(device).manual_seed(1))
