"""The block pool as numbers: how many blocks hold nothing, hold a prefix, or are held; after
`engine.core.memory.block_pool`.
"""

from harness.sim.compiled.cached import evict, keep
from harness.sim.compiled.compiling import part
from harness.sim.compiled.state import CACHED, INTERNAL, TAKEN, UNNAMED, VOIDED, WRITTEN, Run


@part
def free_blocks(run: Run) -> int:
    """Blocks that nobody holds, those with a reusable prefix included."""
    return int(run.at[UNNAMED] + run.at[CACHED])


@part
def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold `tokens` tokens."""
    return -(-tokens // block_size)


@part
def final_tokens(run: Run, request: int) -> int:
    """Slots that the finished request has written: the last token is never fed back."""
    return int(run.lengths.prompt[request] + run.lengths.output[request] - 1)


@part
def take(run: Run, row: int, count: int) -> None:
    """Give `row` so many free blocks: those that hold nothing first, then the least recently released."""
    at, batch, size = run.at, run.batch, run.rules.block_size
    evicted = max(0, count - at[UNNAMED])
    at[UNNAMED] -= count - evicted
    if evicted:
        evict(run, evicted)
    at[VOIDED] += evicted
    at[TAKEN] += count
    batch.blocks[row] += count
    at[INTERNAL] += max(0, batch.blocks[row] * size - final_tokens(run, batch.request[row]))


@part
def release(run: Run, row: int, owner: int) -> None:
    """Take back all blocks of `row`; where full ones are kept, `owner` (NEVER: nobody) may come back for them."""
    at, batch, size = run.at, run.batch, run.rules.block_size
    blocks, computed = batch.blocks[row], batch.computed[row]
    kept = computed // size if run.rules.keeps else 0
    keep(run, owner, kept)
    at[UNNAMED] += blocks - kept
    at[VOIDED] += blocks - kept
    at[WRITTEN] -= computed
    at[INTERNAL] -= max(0, blocks * size - final_tokens(run, batch.request[row]))
