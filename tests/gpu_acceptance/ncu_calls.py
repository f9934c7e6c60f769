"""Program: a few attention calls whose hardware counters ncu reads. Each call is compiled first, then profiled once.

ncu is started with `--profile-from-start off`. Only the calls in `cases.json` are profiled, in that order. `attend` is
our decode kernel, with a block id read for every key at every block size. By default a tile inside one block reads one
block id, so a sweep over block sizes would show a change of code and not of the block size.
`gpu_acceptance.counters` reads the result.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from harness.bench.calls import build
from harness.bench.cases import KernelCase
from harness.console import say
from harness.cost.timings import ALWAYS, OURS
from harness.store.atomic import write_files
from paged_kernels import Workspace
from paged_kernels.providers import Case, Run, UnsupportedCaseError, find_providers

Watch = Callable[[str], AbstractContextManager[None]]
VECTOR = "vector"
WIDE = KernelCase(batch=32, context=4096)
NAMED: tuple[tuple[KernelCase, str], ...] = (
    *((replace(WIDE, block_size=size), VECTOR) for size in (1, 16, 64, 256)),
    (replace(WIDE, block_size=64), OURS),
    (KernelCase(batch=1, context=32_768), OURS),
    (replace(WIDE, kv_heads=32), OURS),
    (KernelCase(batch=4, context=4096, queries=2048), OURS),
    (KernelCase(batch=16, context=8320, shared_prefix=8192), ALWAYS),
)
"""The profiled calls: block-size curve, one block id for each tile, one long sequence, MHA, a prefill, a cascade."""
TINY = (KernelCase(batch=2, context=64, heads=4, kv_heads=2, head_dim=16, dtype="fp32"), OURS)


def attend(case: Case) -> torch.Tensor:
    """The attention of a case. `bench kernels` calls `prepare` instead."""
    return prepare(case)()


def prepare(case: Case) -> Run:
    """Prepare the call as our provider does, with fixed addressing. Raises UnsupportedCaseError for others."""
    if case.device.type != "cuda" or not case.decode:
        raise UnsupportedCaseError(f"{case.name}: the addressing of the Triton decode alone can be fixed")
    from paged_kernels.providers import splits_of
    from paged_kernels.triton.decode import PartsOfStep, run_decode

    out = case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])
    splits = splits_of(case)
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    run = partial(
        run_decode,
        *inputs,
        case.scoring,
        out,
        None,
        splits,
        workspace=Workspace(),
        path="vector",
        parts=PartsOfStep(),
    )

    def call() -> torch.Tensor:
        run()
        return out

    return call


attend.prepare = prepare  # type: ignore[attr-defined]
attend.capturable = True  # type: ignore[attr-defined]


def main(words: Sequence[str] | None = None) -> int:
    """Run the calls; returns the exit code."""
    parser = argparse.ArgumentParser(description="Attention calls for ncu to look at.")
    parser.add_argument("--out", required=True, metavar="DIR", help="takes cases.json")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the cases, and call a tiny one on the CPU"
    )
    flags = parser.parse_args(words)
    for spec, provider in NAMED:
        say(f"{spec.name} by {provider}")
    if flags.dry_run:
        return _rehearse()
    names = [{"case": spec.name, "provider": provider} for spec, provider in NAMED]
    write_files(Path(flags.out), {"cases.json": (json.dumps(names, indent=1) + "\n").encode()})
    for spec, provider in NAMED:
        profile(spec, provider, torch.device("cuda"), _profiled)
    return 0


def profile(spec: KernelCase, provider: str, device: torch.device, watched: Watch) -> torch.Tensor:
    """Call the case twice, the second time inside `watched`; returns its output."""
    run = _prepared(provider, build(spec, device, seed=0))
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    with watched(spec.name):
        return run()


def _prepared(provider: str, case: Case) -> Run:
    return prepare(case) if provider == VECTOR else find_providers()[provider].prepare(case)


@contextmanager
def _profiled(name: str) -> Iterator[None]:
    """A range that ncu profiles."""
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    try:
        yield
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


@contextmanager
def _unwatched(name: str) -> Iterator[None]:
    yield


def _rehearse() -> int:
    profile(*TINY, torch.device("cpu"), _unwatched)
    say("nothing was measured")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
