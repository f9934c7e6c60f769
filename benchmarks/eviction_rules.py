"""Speed of each rule of eviction beside that of LRU: `python benchmarks/eviction_rules.py [REQUESTS [ROUNDS]]`.

Generated turns of chats, which share many blocks, in a pool that holds an eighth of what they ask for. Three loads:
whole replays through the policy core, the pool alone with the tables of these requests, and the pool alone with their
blocks one by one. In each round every rule follows on LRU, so that both see the same machine; a ratio is the median
over the rounds, in CPU-seconds. More than 1 is faster than LRU.
"""

# ruff: noqa: T201  # what a program of its own prints

import gc
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from engine.core.identity import BlockHash
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction_rules import new_policy
from engine.core.options import Eviction
from engine.core.request import Request
from harness.config.compose import compose_config
from harness.point.cost import cost_model
from harness.sweep.plan import run_request
from harness.workload.point import Point, resolve
from harness.workload.simulate import predict

BLOCK_SIZE = 16
RUNNING = 16  # tables in use at a time
SETTINGS = (
    *("measure=false", "cost=roofline", "model=llama3_8b", "device=h100", "trace=chat"),
    *("replay.compiled=never", f"cache.block_size={BLOCK_SIZE}", "cache.max_model_len=null"),
    *("scheduler.max_batched_tokens=8192", f"scheduler.max_running={RUNNING}", "workload.request_rate=4"),
    *("workload=as_recorded", "workload.oversize=drop", "cache.ttl_s=30"),
)
Table = tuple[Request, Sequence[BlockHash]]
Load = Callable[[Eviction], int]  # replays with a rule; returns the blocks that were found


def point_of(requests: int, *more: str) -> Point:
    """The requests, and what serves them."""
    words = (*SETTINGS, f"workload.num_requests={requests}", *more)
    return resolve(compose_config(axis.settings[0] for axis in run_request(words).axes))


def replays(requests: int, pool_tokens: int) -> Load:
    """The whole policy core: scheduler, tables, pool."""

    def load(rule: Eviction) -> int:
        point = point_of(requests, f"cache.pool_tokens={pool_tokens}", f"cache.eviction={rule}")
        cost = cost_model(point.deployment)
        return timed(lambda: int(predict(point, cost, rows=False).metrics["hit_tokens"]))

    return load


def pool_alone(tables: Sequence[Table], blocks: int, running: int) -> Load:
    """Tables that are found as far as they are there, filled, and released when `running` others are in use."""

    def serve(pool: BlockPool) -> int:
        found, in_use = 0, list[tuple[list[int], Request]]()
        for owner, hashes in tables:
            if len(in_use) == running:
                table, done = in_use.pop(0)
                pool.release(table, 0, done)
            hits = pool.find(hashes)
            pool.share(hits)
            fresh = pool.take(len(hashes) - len(hits))
            pool.cache_full_blocks(fresh, hashes[len(hits) :])
            in_use.append(([*hits, *fresh], owner))
            found += len(hits)
        return found

    return lambda rule: timed(
        lambda: serve(BlockPool(blocks, eviction=new_policy(rule, ttl_s=30.0, pinned=4)))
    )


SECONDS: list[float] = []


def timed(work: Callable[[], int]) -> int:
    """Do the work, and note its CPU-seconds."""
    gc.collect()
    began = time.process_time()
    found = work()
    SECONDS.append(time.process_time() - began)
    return found


def ratios(load: Load, rounds: int) -> dict[Eviction, tuple[float, int]]:
    """By rule: LRU's seconds over its own, and the blocks or tokens that it finds."""
    found: dict[Eviction, list[float]] = {}
    hits = {}
    load(Eviction.lru)
    for _ in range(rounds):
        for rule in Eviction:
            SECONDS.clear()
            load(Eviction.lru)
            hits[rule] = load(rule)
            found.setdefault(rule, []).append(SECONDS[0] / SECONDS[1])
    return {rule: (median(values), hits[rule]) for rule, values in found.items()}


def main(requests: int = 300, rounds: int = 3) -> None:
    """Print the table."""
    rows = list[Table]()
    for each in point_of(requests).requests():
        assert each.request.identity is not None
        rows.append((each.request, each.request.identity.prompt_hashes(BLOCK_SIZE)))
    asked = len({each for _, hashes in rows for each in hashes})
    blocks = max(asked // 8, 2 * max(len(hashes) for _, hashes in rows))
    singles = [(owner, (each,)) for owner, hashes in rows for each in hashes]
    loads = {
        "replay": replays(requests, blocks * BLOCK_SIZE),
        "pool, tables": pool_alone(rows, blocks, 4),
        "pool, single blocks": pool_alone(singles, blocks, 1),
    }
    print(f"{requests} requests, {asked} blocks asked for, a pool of {blocks}; times LRU's speed (found)")
    tables = {name: ratios(load, rounds) for name, load in loads.items()}
    print(f"{'':12}" + "".join(f"{name:>28}" for name in tables))
    for rule in Eviction:
        print(f"{rule:12}" + "".join(f"{t[rule][0]:>16.2f} ({t[rule][1]:>9})" for t in tables.values()))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
