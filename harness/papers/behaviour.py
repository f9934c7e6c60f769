"""What claims say a block manager does: hits, references, copies, evictions, preemptions; run on the policy core.

Each function is named by rows of `claims.yaml` and returns named values.
"""

import random
from collections.abc import Sequence

import numpy as np

from engine.core.errors import OutOfBlocksError
from engine.core.identity import TokenIdentity
from engine.core.memory.block_manager import BlockManager
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, Retention, SchedulerLimits, SpeculationMode
from engine.core.plan import StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow
from harness.papers.sizes import (
    Found,
    admitted,
    branches,
    first_step,
    forked,
    peak,
    requests_of,
    run,
    scheduler,
)


def allocation_failures(blocks: int, tries: int) -> Found:
    """Random sequences come and go: requests refused though enough blocks were free, and the other way round."""
    draw, manager = random.Random(0), BlockManager(blocks, 16)
    wrong, refused, names = 0, 0, list[int]()
    for name in range(tries):
        if names and draw.random() < 0.5:
            manager.free(names.pop(draw.randrange(len(names))))
            continue
        tokens = draw.randint(1, 16 * blocks // 3)
        enough = -(-tokens // 16) <= manager.free_blocks
        try:
            manager.allocate(name, tokens)
            names.append(name)
            wrong += not enough
        except OutOfBlocksError:
            refused += 1
            wrong += enough
    return {"refused_for_the_shape_of_holes": wrong, "some_were_refused": refused > 0}


def preemption() -> Found:
    """Two growing sequences in a pool that holds one and a half: what the victim has when it comes back."""
    served = scheduler(PagedManager(9, 16, prefix_caching=False))
    for rid in range(2):
        served.submit(Request(rid, 48, 48))
    victims, contexts = list[int](), list[int]()
    while served.has_work:
        plan = served.schedule()
        contexts += [row.context_len for row in plan.rows if row.request_id in victims[-1:]][: not contexts]
        victims += plan.preempted
        served.commit(plan, StepResult())
    return {"preempted": len(victims), "tokens_the_victim_keeps": contexts[0]}


def contiguous_copies(prompt: int, width: int) -> Found:
    """Slots that contiguous branches copy at their fork, and how often the prompt is then stored."""
    request = Request(0, prompt, 4, width, Decoding.sample)
    steps = run(scheduler(ContiguousManager(width * 256, 256)), [request])
    copied = sum(step.copies for step in steps)
    return {
        "slots_copied": copied,
        "prompts_stored": 1 + copied / prompt,
        "blocks_copied_paged": sum(step.copies for step in branches(prompt, width, 3)),
    }


def fork_with_partial_tail(prompt: int, width: int, own: int, block_size: int) -> Found:
    """Copies and blocks of a correct fork, beside the count if every branch wrote into the shared tail unchecked."""
    steps = branches(prompt, width, own, block_size)
    return {
        "copies": sum(step.copies for step in steps),
        "blocks": peak(steps).physical_blocks,
        "blocks_unchecked": -(-(prompt + own) // block_size),
    }


def fork_cost(prompt: int, width: int) -> Found:
    """What the fork itself takes, and the references of each block afterwards."""
    manager, group = forked(prompt, width)
    table = group.sequences[-1].table
    return {
        "blocks_taken": manager.num_blocks - manager.pool.free_blocks - len(table),
        "copies": len(manager.drain_copies()),
        "references": [manager.pool.references(block) for block in table],
    }


def copies_by_prompt(width: int, prompts: list[int], own: int) -> Found:
    """Blocks copied on write when branches go on behind prompts of these lengths."""
    return {
        "copies": [sum(step.copies for step in branches(prompt, width, own)) for prompt in prompts],
        "new_blocks_of_the_next_step": [branches(prompt, width, own)[1].new_blocks for prompt in prompts],
    }


def fork_against_cache(prompt: int, width: int) -> Found:
    """Blocks of a prompt for `width` samples: forked, and as independent requests that meet in the prefix cache."""
    manager, _ = forked(prompt, width)
    cached = first_step(PagedManager(100, 16), requests_of([range(prompt)] * width)).usage
    return {"forked": manager.pool.live_blocks, "cached": cached.physical_blocks}


def prompt_saving(prompt: int, width: int, own: int) -> Found:
    """Table entries, blocks, and the share saved at the end of `width` samples."""
    usage = peak(branches(prompt, width, own))
    return {
        "logical_blocks": usage.logical_blocks,
        "physical_blocks": usage.physical_blocks,
        "saved_percent": 100 * (1 - usage.physical_blocks / usage.logical_blocks),
    }


def shared_prompt(prompt: int, width: int) -> Found:
    """Of the blocks of a prompt for `width` answers, the share that a fork saves before anything is written."""
    manager, _ = forked(prompt, width)
    own = -(-prompt // 16)
    return {"saved_percent": 100 * (1 - manager.pool.live_blocks / (width * own))}


def cow_step() -> Found:
    """Three sequences share a partial block and one writes: references of the old block, and blocks in use."""
    blocks = BlockManager(12, 16)
    blocks.allocate("a", 20)
    blocks.share("a", "b")
    blocks.share("a", "c")
    tail = blocks.table("a")[-1]
    before = (blocks.references(tail), blocks.usage().physical_blocks)
    blocks.cow("b")
    return {
        "references": [before[0], blocks.references(tail)],
        "blocks": [before[1], blocks.usage().physical_blocks],
    }


def growth(block_size: int, prompt: int, appended: int) -> Found:
    """Blocks held after a prompt and after each appended token, and the offset of the last slot."""
    blocks = BlockManager(64, block_size)
    counts = [len(blocks.allocate("a", prompt))]
    counts += [len(blocks.allocate("a", 1)) for _ in range(appended)]
    (slot,) = blocks.get_slot_mapping("a", [prompt + appended - 1])
    return {"blocks": counts, "last_offset": slot % block_size}


def four_operations() -> Found:
    """allocate, share, cow, free: what frees while another sequence still reads, and after it."""
    blocks = BlockManager(12, 16)
    table = blocks.allocate("a", 32)
    blocks.share("a", "b")
    return {
        "freed_at_first": len(blocks.free("a")),
        "freed_at_last": len(blocks.free("b")),
        "had": len(table),
    }


def slots(table: list[int], block_size: int, positions: list[int], tokens: int) -> Found:
    """Slots of token positions behind this block table; and whether shift and mask give the same."""
    blocks = BlockManager(max(table), block_size)
    for block in range(1, max(table) + 1):
        blocks.allocate(block, 1)
    for block in reversed(table):
        blocks.free(block)
    blocks.allocate("a", tokens)
    found = blocks.get_slot_mapping("a", positions)
    shift, mask = block_size.bit_length() - 1, block_size - 1
    masked = [(table[p >> shift] << shift) | (p & mask) for p in positions]
    return {"table": blocks.table("a"), "slots": found, "shift_and_mask": masked == found}


def addresses(block_size: int, heads: int, head_dim: int, tokens: int) -> Found:
    """Whether base + block x size x row + offset x row is where a token's elements lie, for two layouts of a tensor."""
    row = heads * head_dim
    token_major = np.arange(4 * block_size * row).reshape(4, block_size, heads, head_dim)
    head_major = np.arange(4 * block_size * row).reshape(4, heads, block_size, head_dim)
    wanted = [
        (t // block_size * block_size + t % block_size) * row + np.arange(row).reshape(heads, head_dim)
        for t in range(tokens)
    ]
    where = [divmod(t, block_size) for t in range(tokens)]
    return {
        "token_major": all((token_major[b, o] == w).all() for (b, o), w in zip(where, wanted, strict=True)),
        "head_major": all((head_major[b, :, o] == w).all() for (b, o), w in zip(where, wanted, strict=True)),
    }


# -- the prefix cache ------------------------------------------------------------------------------------


def hits(lengths: list[int], block_size: int) -> Found:
    """Hit tokens of a second request with the same prompt, for prompts of these lengths."""
    found = []
    for length in lengths:
        plan = first_step(PagedManager(100, block_size), requests_of([range(length)] * 2, 2))
        found.append(plan.hit_tokens)
    return {"hit_tokens": found, "hit_blocks": [tokens // block_size for tokens in found]}


def shared_prefix(prefix: int, own: int, requests: int) -> Found:
    """Requests with a common prefix and text of their own, admitted in one step."""
    prompts = [[*range(prefix), *range(1000 * rid, 1000 * rid + own)] for rid in range(1, requests + 1)]
    usage = first_step(PagedManager(1000, 16), requests_of(prompts, 2)).usage
    saved = usage.logical_blocks - usage.physical_blocks
    of_prefix = requests * (prefix // 16)
    steps = run(scheduler(PagedManager(1000, 16)), requests_of(prompts, 40))
    return {
        "logical_blocks": usage.logical_blocks,
        "physical_blocks": usage.physical_blocks,
        "prefix_saved_percent": 100 * saved / of_prefix,
        "all_saved_percent": 100 * saved / usage.logical_blocks,
        "copies": sum(step.copies for step in steps),
    }


def equal_block_behind_other_prefix() -> Found:
    """Two prompts with equal second and third blocks and different first ones: blocks that are shared."""
    prompts = [[rid] * 16 + list(range(32)) for rid in range(2)]
    plan = first_step(PagedManager(100, 16), requests_of(prompts, 2))
    chains = [set(TokenIdentity(0, np.array(prompt)).prompt_hashes(16)) for prompt in prompts]
    alone = [set(TokenIdentity(0, np.array(prompt[16:])).prompt_hashes(16)) for prompt in prompts]
    return {
        "hit_tokens": plan.hit_tokens,
        "equal_hashes_of_the_chain": len(chains[0] & chains[1]),
        "equal_hashes_without_it": len(alone[0] & alone[1]),
    }


def lookup_after_a_miss() -> Found:
    """Blocks that a lookup finds when the second of three cached blocks is gone."""
    manager = PagedManager(10, 4)
    first, again = (Group(request) for request in requests_of([range(13)] * 2))
    admitted(manager, first, 13)
    whole = len(manager.lookup(again))
    manager.pool.uncache([first.sequences[0].table[1]])
    return {"all_cached": whole, "second_gone": len(manager.lookup(again))}


def references_after_lookup() -> Found:
    """References of the hit blocks after a lookup by a request that is then refused."""
    manager = PagedManager(8, 4)
    first, other = (Group(request) for request in requests_of([range(9), range(30)], 2))
    admitted(manager, first, 9)
    found = manager.lookup(other)
    return {
        "admitted": manager.can_admit(other, found, 0),
        "references": [manager.pool.references(block) for block in found],
    }


def reference_timeline() -> Found:
    """Two requests with three common blocks and one of their own each; the first ends one step earlier."""
    manager = PagedManager(100, 16)
    prompts = [[*range(48), *range(1000 * rid, 1000 * rid + 10)] for rid in (1, 2)]
    groups = [Group(request) for request in requests_of(prompts, 4)]
    shared, seen = [], []
    for group in groups:
        admitted(manager, group, 58)
        shared = list(group.sequences[0].table[:3])
        seen.append(manager.pool.references(shared[0]))
    blocks = manager.usage(None)
    for group in groups:
        manager.release(group.sequences[0])
        seen.append(manager.pool.references(shared[0]))
    return {
        "references": seen,
        "physical_blocks": blocks.physical_blocks,
        "logical_blocks": blocks.logical_blocks,
    }


def hits_after_release() -> Found:
    """Hit tokens of a request that comes after an equal one has ended, by how long hashes are kept."""
    found: Found = {}
    for retention in Retention:
        served = scheduler(PagedManager(100, 16, retention=retention))
        run(served, requests_of([range(48)]))
        found[retention.value] = run(served, requests_of([range(48)], first=1))[0].hit_tokens
    return found


def eviction_order() -> Found:
    """Two cached requests of three blocks each: whether eviction takes the older first, and its tail first."""
    manager, tables = PagedManager(6, 4), []
    for request in requests_of([range(100 * rid, 100 * rid + 12) for rid in range(2)]):
        group = Group(request)
        admitted(manager, group, 12)
        tables.append(list(group.sequences[0].table))
        manager.release(group.sequences[0])
    taken = manager.pool.take(6)
    return {
        "oldest_request_first": set(taken[:3]) == set(tables[0]),
        "tail_first": taken[:3] == tables[0][::-1],
    }


def partial_block() -> Found:
    """Block size 4: A has 8 tokens, B the first 6 of them."""
    manager = PagedManager(100, 4)
    requests = requests_of([range(8), range(6)], 2)
    found = scheduler(manager)
    for request in requests:
        found.submit(request)
    plan = found.schedule()
    one, other = (group.sequences[0].table for group in found.running)
    return {
        "blocks_of_a": len(one),
        "hit_tokens_of_b": plan.hit_tokens,
        "skipped_percent_of_b": 100 * plan.hit_tokens / 6,
        "second_block_of_b_has_a_hash": manager.pool.hash_of(other[1]) is not None,
    }


def computed_tokens(prompt: int, requests: int) -> Found:
    """Tokens that one step computes for equal prompts, without and with the prefix cache."""
    found = {}
    for caching in (False, True):
        manager = PagedManager(100, 16, prefix_caching=caching)
        plan = first_step(manager, requests_of([range(prompt)] * requests))
        found[caching] = (int(plan.query_len.sum()), plan.hit_tokens)
    return {
        "without": found[False][0],
        "with": found[True][0],
        "computed_and_hit": found[True][0] + found[True][1],
    }


# -- the scheduler ---------------------------------------------------------------------------------------


def steps_by_block_size(block_sizes: list[int]) -> Found:
    """Steps, and rows of all steps, that the same requests take: what attention launches are proportional to."""
    counts = []
    for size in block_sizes:
        requests = [Request(rid, 40 + 13 * rid, 30) for rid in range(8)]
        steps = run(scheduler(PagedManager(4000, size)), requests)
        counts.append([len(steps), sum(len(step.queries) for step in steps)])
    return {"steps_and_rows": counts, "equal": all(count == counts[0] for count in counts)}


def prefill_steps(prompt: int, budgets: list[int]) -> Found:
    """Steps until the whole prompt is computed, by the token budget of a step."""
    found = []
    for budget in budgets:
        served = scheduler(PagedManager(1000, 16), budget=budget)
        found.append(sum(step.queries[0] > 1 for step in run(served, [Request(0, prompt, 3)])))
    return {"steps": found}


def decode_queries(prompt: int, output: int) -> Found:
    """Query tokens of each step of one request."""
    steps = run(scheduler(PagedManager(1000, 16)), [Request(0, prompt, output)])
    return {"first_step": steps[0].queries[0], "most_later": max(step.queries[0] for step in steps[1:])}


def rejected_drafts() -> Found:
    """Six drafts that are all rejected: whether the target keeps its blocks, and what remains at the end."""
    kept, left = [], []
    for mode in SpeculationMode:
        manager = PagedManager(100, 4)
        served = Scheduler(manager, SchedulerLimits(1 << 20, 64))
        identity = TokenIdentity(0, np.arange(8))
        served.submit(Request(0, 8, 3, identity=identity, speculation=Speculation(6, mode)))
        tables: list[Sequence[int]] = []
        while served.has_work:
            plan = served.schedule()
            drafted = {row.request_id: 0 for row in plan.rows if row.drafts}
            served.commit(plan, StepResult(accepted=drafted))
            tables += [list(group.sequences[0].table) for group in served.running]
        kept.append(all(table[:2] == tables[0][:2] for table in tables))
        left.append(manager.usage(None).physical_blocks)
    return {"target_keeps_its_blocks": all(kept), "blocks_at_the_end": sum(left)}


def pool_at_start(num_blocks: int) -> Found:
    """Slots of the pool before any request, and trailing slots of one that runs."""
    manager = PagedManager(num_blocks, 16)
    before = manager.usage(None).capacity
    group = Group(Request(0, 33, 1))
    manager.admit(group, ())
    manager.extend(ScheduledRow(group.sequences[0], 33, True))
    usage = manager.usage(None)
    return {"slots_before_any_request": before, "trailing_slots": usage.reserved + usage.internal}
