"""Peak memory of a large pool in full use and a long queue, measured in a process of its own."""

import resource
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

QUEUED = 100_000
LIMIT_MB = 1_000
PROMPT_TOKENS = 2048  # of the sequences that hold the blocks
QUEUED_TOKENS = 512  # of every queued prompt, whose token ids are kept until it is served
_BLOCK_SIZE = 16
_MB = 1e6


@dataclass(frozen=True)
class Footprint:
    """Peak resident memory of the process, and what a live block and a queued request add to it."""

    blocks: int
    queued: int
    imports_mb: float
    peak_mb: float
    block_bytes: float
    request_bytes: float


def footprint(blocks: int, queued: int) -> Footprint:
    """Fill a pool of `blocks` with named blocks in use and queue `queued` requests, in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measure, blocks, queued).result()


def _measure(blocks: int, queued: int) -> Footprint:
    from engine.core.memory.paged import PagedManager
    from engine.core.options import SchedulerLimits
    from engine.core.plan import StepResult
    from engine.core.scheduling.scheduler import Scheduler
    from harness.bench.policy.work import token_request

    imports = _resident_bytes()
    manager = PagedManager(blocks, _BLOCK_SIZE)
    sequences = blocks // (PROMPT_TOKENS // _BLOCK_SIZE)
    scheduler = Scheduler(manager, SchedulerLimits(PROMPT_TOKENS * (sequences + 1), max(1, sequences)))
    for number in range(sequences):
        scheduler.submit(token_request(number, PROMPT_TOKENS - 8))
    scheduler.commit(scheduler.schedule(), StepResult())
    live = manager.pool.live_blocks
    full = _resident_bytes()
    for number in range(queued):
        scheduler.submit(token_request(sequences + number, QUEUED_TOKENS))
    scheduler.commit(scheduler.schedule(), StepResult())
    if len(scheduler.waiting) < queued or manager.pool.live_blocks < live:
        raise RuntimeError(f"{len(scheduler.waiting)} requests wait and {live} blocks are in use")
    end = _resident_bytes()
    return Footprint(
        blocks=live,
        queued=len(scheduler.waiting),
        imports_mb=imports / _MB,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB,
        block_bytes=(full - imports) / max(1, live),
        request_bytes=(end - full) / max(1, queued),
    )


def _resident_bytes() -> int:
    """Resident memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
