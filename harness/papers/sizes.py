"""Sizes that claims state: bytes of KV, entries of block tables, blocks that fit, shares that are wasted.

Each function is named by rows of `claims.yaml` and returns named values. Bytes come from the model shapes of the
simulator, blocks and slots from the managers of the policy core.
"""

import json
import math
import resource
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import NamedTuple

import numpy as np
import yaml

from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager, runs_for
from engine.core.memory.manager import KVCacheManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, Placement, Reservation, SchedulerLimits
from engine.core.plan import SlotUsage, StepPlan, StepResult
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler
from engine.core.sequence import Group, ScheduledRow
from harness.config.checks import RANGES
from harness.config.groups import conf_dir
from harness.cost.model_shape import ModelShape
from harness.metrics.analytic import expected_tail_waste

# Token ids of each prompt.
Prompts = Sequence[Sequence[int]]


class StepUsage(NamedTuple):
    """What one step did: its usage of slots, query tokens of its rows, copies, new blocks and hit tokens."""

    usage: SlotUsage
    queries: tuple[int, ...]
    copies: int
    new_blocks: int
    hit_tokens: int
    preempted: int


def scheduler(manager: KVCacheManager, *, running: int = 4096, budget: int = 1 << 20) -> Scheduler:
    """A scheduler whose limits never bind, unless they are given."""
    return Scheduler(manager, SchedulerLimits(budget, running))


def requests_of(prompts: Prompts, output: int = 1, first: int = 0) -> list[Request]:
    """Requests with these prompts, so that equal beginnings can be shared."""
    return [
        Request(rid, len(tokens), output, identity=TokenIdentity(rid, np.asarray(tokens)))
        for rid, tokens in enumerate(prompts, first)
    ]


def first_step(manager: KVCacheManager, requests: Iterable[Request]) -> StepPlan:
    """Plan the step that admits all that fit, prompts whole."""
    found = scheduler(manager)
    for request in requests:
        found.submit(request)
    return found.schedule()


def lengths_of(*lengths: int) -> list[Request]:
    """Requests with these prompt lengths that share nothing and generate one token."""
    return [Request(rid, length, 1) for rid, length in enumerate(lengths)]


def blocks_at(size: int, lengths: Sequence[int]) -> SlotUsage:
    """Slots while paged sequences of these lengths, just prefilled, are running."""
    blocks = sum(-(-length // size) for length in lengths)
    return first_step(PagedManager(blocks, size, prefix_caching=False), lengths_of(*lengths)).usage


def run(found: Scheduler, requests: Iterable[Request]) -> list[StepUsage]:
    """Submit the requests and serve them to their end; branches keep their parents."""
    widths = {}
    for request in requests:
        found.submit(request)
        widths[request.request_id] = request.width
    steps = []
    while found.has_work:
        plan = found.schedule()
        queries = tuple(int(tokens) for tokens in plan.query_len)
        moved = len(plan.copies), plan.new_blocks, plan.hit_tokens, len(plan.preempted)
        steps.append(StepUsage(plan.usage, queries, *moved))
        found.commit(plan, StepResult(parents=_parents(plan, widths)))
    return steps


def _parents(plan: StepPlan, widths: dict[int, int]) -> dict[int, Sequence[int]]:
    rows: defaultdict[int, int] = defaultdict(int)
    for row in plan.rows:
        rows[row.request_id] += row.samples
    return {
        rid: [0] * widths[rid] if count == 1 else range(count)
        for rid, count in rows.items()
        if count and widths[rid] > 1
    }


def branches(
    prompt: int, width: int, own: int, size: int = 16, *, copy_at_fork: bool = False
) -> list[StepUsage]:
    """A group that writes `own` tokens in each of `width` branches behind its prompt, run to its end."""
    request = Request(0, prompt, own + 1, width, Decoding.sample)
    blocks = width * -(-(prompt + own) // size)
    return run(scheduler(PagedManager(blocks, size, copy_at_fork=copy_at_fork)), [request])


def peak(steps: Sequence[StepUsage]) -> SlotUsage:
    """The usage of the step with the most blocks."""
    return max((step.usage for step in steps), key=lambda usage: usage.physical_blocks)


def forked(prompt: int, width: int, own: int = 64, size: int = 16) -> tuple[PagedManager, Group]:
    """A group whose prompt is computed and which has just forked; nothing of its own is written."""
    manager = PagedManager(width * -(-(prompt + own) // size), size)
    group = Group(Request(0, prompt, own, width, Decoding.sample))
    admitted(manager, group, prompt)
    manager.fork(group.sequences[0], group.fork())
    return manager, group


def admitted(manager: PagedManager, group: Group, tokens: int) -> None:
    """Admit the group with its hits, and write its prompt's first `tokens` tokens."""
    manager.admit(group, manager.lookup(group))
    root = group.sequences[0]
    manager.extend(ScheduledRow(root, tokens - root.computed, True))
    root.computed = tokens


GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10
# Named values: numbers, truths, or lists of them.
Found = dict[str, object]


def shape_of(model: str) -> ModelShape:
    """The shape of a model of `conf/model`, 2 bytes an element."""
    conf = yaml.safe_load((conf_dir() / "model" / f"{model}.yaml").read_text(encoding="utf-8"))
    keys = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    return ModelShape(**{key: conf[key] for key in keys}, bytes_per_element=2)


def kv(model: str, tokens: int = 1, sequences: int = 1) -> Found:
    """KV bytes of `sequences` sequences of `tokens` tokens that share nothing."""
    size = shape_of(model).kv_bytes_per_token * tokens
    return {
        "bytes": size,
        "mb": size / 1e6,
        "gb": size / 1e9,
        "gib": size / GIB,
        "mib": size / MIB,
        "all_gb": size * sequences / 1e9,
        "all_gib": size * sequences / GIB,
    }


def kv_of_models(models: list[str]) -> Found:
    """KV megabytes (10^6 bytes) of one token of each model."""
    return {"mb": [shape_of(model).kv_bytes_per_token / 1e6 for model in models]}


def cache_tensor(layers: int, kv_heads: int, head_dim: int, blocks: int, block_size: int) -> Found:
    """MiB of K or V of one layer, and of K and V of all layers, at 2 bytes an element."""
    shape = ModelShape(layers, 1024, 16, kv_heads, head_dim, 3072, 151_936, bytes_per_element=2)
    slots = blocks * block_size
    return {
        "head_dim": head_dim,
        "tensor_mib": shape.layer_kv_bytes * slots / 2 / MIB,
        "all_mib": shape.kv_bytes_per_token * slots / MIB,
    }


def pool_blocks(model: str, mib: int, block_size: int) -> Found:
    """Blocks that a pool of so many MiB holds."""
    return {"blocks": mib * MIB // (shape_of(model).kv_bytes_per_token * block_size)}


def reserved_dead(used: list[int], reserved: int) -> Found:
    """Contiguous slots of the same length for each request, of which `used` are written and no more will be."""
    manager = ContiguousManager(len(used) * reserved, reserved)
    usage = first_step(manager, lengths_of(*used)).usage
    dead = usage.reserved + usage.internal
    return {
        "used_slots": usage.token,
        "capacity": usage.capacity,
        "dead_slots": dead,
        "used_percent": 100 * usage.token / usage.capacity,
        "dead_percent": 100 * dead / usage.capacity,
    }


def waste_formula(reserved: int, prompt: int, output: int) -> Found:
    """(reserved - written), beside what the manager calls reserved and internal at the same instant."""
    usage = first_step(ContiguousManager(reserved, reserved), [Request(0, prompt, output)]).usage
    return {
        "formula": reserved - prompt,
        "at_one_instant": usage.reserved + usage.internal,
        "never_filled": usage.internal,
    }


def paged_blocks(block_size: int, lengths: list[int]) -> Found:
    """Blocks of paged sequences, each of its own, and the slots that stay empty."""
    usage = blocks_at(block_size, lengths)
    slots = usage.physical_blocks * block_size
    empty = usage.reserved + usage.internal
    return {
        "blocks": usage.physical_blocks,
        "by_sequence": [blocks_at(block_size, [length]).physical_blocks for length in lengths],
        "slots": slots,
        "tokens": usage.token,
        "wasted_slots": empty,
        "waste_percent": 100 * empty / slots,
        "external_slots": usage.external,
    }


def last_block(block_size: int, length: int) -> Found:
    """The empty slots of one sequence, against one block and against the sequence."""
    usage = blocks_at(block_size, [length])
    empty = usage.reserved + usage.internal
    return {
        "wasted_slots": empty,
        "percent_of_block": 100 * empty / block_size,
        "percent_of_request": 100 * empty / length,
    }


def tails(block_size: int, longest: int) -> Found:
    """Empty slots of sequences of every length up to `longest`: the largest, the mean, and what is external."""
    usages = [blocks_at(block_size, [length]) for length in range(1, longest + 1)]
    empty = [usage.reserved + usage.internal for usage in usages]
    return {
        "largest": max(empty),
        "mean": sum(empty) / len(empty),
        "external": sum(usage.external for usage in usages),
    }


def mean_tails(block_sizes: list[int]) -> Found:
    """Mean empty slots over lengths of every remainder, counted, and by the closed form (size - 1) / 2."""
    counted = [tails(size, 2 * size)["mean"] for size in block_sizes]
    return {"mean_slots": counted, "closed_form": [expected_tail_waste(size) for size in block_sizes]}


def block_table(tokens: int, block_size: int, model: str) -> Found:
    """Entries and bytes of the block table of one sequence, against its KV."""
    entries = blocks_at(block_size, [tokens]).logical_blocks
    size = shape_of(model).kv_bytes_per_token * tokens
    return {
        "entries": entries,
        "int32_bytes": 4 * entries,
        "int64_bytes": 8 * entries,
        "kv_gib": size / GIB,
        "percent_of_kv": 100 * 4 * entries / size,
        "over_one_percent": 4 * entries > size / 100,
    }


def table_read(model: str, block_sizes: list[int]) -> Found:
    """A table entry of 4 bytes against the K and V that a program of one KV head reads for it in one layer."""
    shape = shape_of(model)
    head = shape.layer_kv_bytes // shape.kv_heads
    return {
        "block_bytes": [size * head for size in block_sizes],
        "percent": [100 * 4 / (size * head) for size in block_sizes],
        "row_bytes": head // 2,
    }


def table_entries(tokens: int, block_sizes: list[int]) -> Found:
    """Block table entries of one sequence."""
    return {"entries": [blocks_at(size, [tokens]).logical_blocks for size in block_sizes]}


def block_scope(model: str, block_size: int) -> Found:
    """Bytes behind one block id of ours: all layers and heads; and of one head in one layer."""
    shape = shape_of(model)
    return {
        "block_mib": block_size * shape.kv_bytes_per_token / MIB,
        "one_head_kib": block_size * shape.layer_kv_bytes / shape.kv_heads / KIB,
    }


def beams(prompt: int, width: int, own: int, block_size: int) -> Found:
    """Blocks of `width` branches with `own` tokens each behind a common prompt: copied at the fork, and shared."""
    copied = branches(prompt, width, own, block_size, copy_at_fork=True)
    shared = branches(prompt, width, own, block_size)
    return {
        "copied_blocks": peak(copied).physical_blocks,
        "paged_blocks": peak(shared).physical_blocks,
        "ratio": peak(copied).physical_blocks / peak(shared).physical_blocks,
        "prompt_blocks": shared[0].usage.physical_blocks,
        "prompt_blocks_copied": width * shared[0].usage.physical_blocks,
        "copies": sum(step.copies for step in shared),
    }


def beam_ratios(width: int, prompt_blocks: list[int]) -> Found:
    """Copied against shared blocks with one block of own tokens; and the shortest prompt that gives 95 % of `width`."""
    ratios = [beams(16 * blocks, width, 16, 16)["ratio"] for blocks in prompt_blocks]
    needed = next(p for p in range(1, 10_000) if width * (p + 1) / (p + width) >= 0.95 * width)
    return {"ratios": ratios, "blocks_for_95_percent": needed}


def fits(model: str, gb: float, reserved: int, length: int) -> Found:
    """Requests of `length` tokens at once in so many GB of KV: reserved contiguously, and paged."""
    shape = shape_of(model)
    slots = int(gb * 1e9) // shape.kv_bytes_per_token
    many = lengths_of(*[length] * (slots // length + 2))
    return {
        "contiguous": first_step(ContiguousManager(slots, reserved), many).running,
        "paged": first_step(PagedManager(slots // 16, 16), many).running,
        "weights_gb": shape.weight_bytes / 1e9,
    }


def batches(slots: int, reserved: int, lengths: list[int]) -> Found:
    """Requests that fit a pool at once: paged / reserved, for each length."""
    ratios = []
    for length in lengths:
        many = lengths_of(*[length] * (slots // length + 2))
        contiguous = first_step(ContiguousManager(slots, reserved), many).running
        ratios.append(first_step(PagedManager(slots // 16, 16), many).running / contiguous)
    return {"ratios": ratios, "grows_with_length": ratios == sorted(ratios)}


def best_block_size(models: list[str], tokens: int) -> Found:
    """The block size with the fewest bytes of mean tail and table (4 bytes an entry), searched over 1 to 256."""
    found = []
    for model in models:
        per_token = shape_of(model).kv_bytes_per_token
        sizes = range(1, 257)
        costs = [expected_tail_waste(b) * per_token + 4 * math.ceil(tokens / b) for b in sizes]
        found.append(sizes[costs.index(min(costs))])
    return {"best": found}


def printed_waste(tokens_percent: list[float]) -> Found:
    """100 minus the printed share of token states (Fig. 2)."""
    return {"waste_percent": [100 - percent for percent in tokens_percent]}


def unused_hbm(pool_gb: float, memory_gb: float, pool_waste_percent: float) -> Found:
    """The share of a GPU's memory that is wasted when so much of its KV pool is."""
    percent = pool_gb / memory_gb * pool_waste_percent
    return {"pool_percent": 100 * pool_gb / memory_gb, "unused_percent": percent, "most": percent > 50}


def workload_tails(workloads: list[str], block_size: int) -> Found:
    """Mean tail against the mean length over a request's life (prompt + half the output), from the published means."""
    found = []
    for workload in workloads:
        text = files("traces").joinpath("data", f"{workload}.json").read_text(encoding="utf-8")
        table = json.loads(text)
        length = table["prompt_tokens"]["mean"] + table["output_tokens"]["mean"] / 2
        tail = expected_tail_waste(block_size)
        found.append(100 * tail / (tail + length))
    return {"percent": found}


def growth_by_copying(model: str, tokens: int, gb_per_s: float) -> Found:
    """A buffer that grows by one token through concatenation: bytes that are moved in all, and the seconds of it."""
    moved = shape_of(model).kv_bytes_per_token * tokens * (tokens - 1) / 2
    return {"moved_tb": moved / 1e12, "read_and_write_s": 2 * moved / (gb_per_s * 1e9)}


def collision(bits: int, blocks: list[int]) -> Found:
    """The birthday bound: the chance that any two of so many blocks get the same hash."""
    return {"chance": [-math.expm1(-n * (n - 1) / 2 / 2**bits) for n in blocks]}


def holes(slots_per_gb: int, holes_gb: list[float], ask_gb: float) -> Found:
    """First fit over holes between requests: free memory, the largest hole, and whether the request fits."""
    sizes = [int(gb * slots_per_gb) for gb in holes_gb]
    runs = runs_for(Placement.first_fit, sum(sizes) + len(sizes))
    taken = []
    for size in sizes:
        taken.append(runs.take(size))
        runs.take(1)  # a request between two holes
    for run in taken:
        runs.give(run)
    free, largest = sum(map(len, runs.holes())), max(map(len, runs.holes()))
    return {
        "free_gb": free / slots_per_gb,
        "largest_gb": largest / slots_per_gb,
        "fits": runs.runs_of(int(ask_gb * slots_per_gb)) > 0,
        "external_percent": 100 * (1 - largest / free),
    }


def gaps(slots: dict[str, int]) -> Found:
    """External slots of requests of 30, 36, 36 and 36: each reserves the maximum of 36, or what it needs."""
    many = lengths_of(30, 36, 36, 36)
    return {
        name: first_step(ContiguousManager(size, 36, Reservation(name)), many).usage.external
        for name, size in slots.items()
    }


def page_size() -> Found:
    """The page size of the operating system of this machine, bytes."""
    return {"bytes": resource.getpagesize()}


def accepted_block_sizes(sizes: list[int]) -> Found:
    """Which block sizes the check of a configuration accepts."""
    return {"accepted": [RANGES["cache.block_size"].holds(size) for size in sizes]}


def pages(models: Mapping[str, Sequence[int]], page_kib: Sequence[int]) -> dict[str, float]:
    """Page tables of the GPU driver in place of block tables (vAttention): tokens of a page, and the worst waste.

    A model is layers, KV heads and devices, with heads of 128 and 2 bytes an element. K and V of each layer have pages
    of their own on each device, so in the worst case 2 x layers x devices pages of a request are nearly empty.
    """
    found: dict[str, float] = {}
    for size in page_kib:
        tokens = [size * KIB / (heads / devices * 128 * 2) for _, heads, devices in models.values()]
        waste = [2 * layers * devices * size / KIB for layers, _, devices in models.values()]
        found |= {
            f"fewest_tokens_{size}": min(tokens),
            f"most_tokens_{size}": max(tokens),
            f"least_mib_{size}": min(waste),
            f"most_mib_{size}": max(waste),
        }
    return found


def memory(pools_gib: Mapping[str, float], model: str, memory_gb: float) -> dict[str, float]:
    """KV slots of each model's pool (GiB), and the shares of weights and KV in a GPU of `memory_gb` with `model`.

    OPT has no gate in its MLP and one matrix for both embeddings.
    """
    shape = replace(shape_of(model), mlp_matrices=2, tied_embeddings=True)
    slots = {f"slots_{one}": gib * GIB // shape_of(one).kv_bytes_per_token for one, gib in pools_gib.items()}
    return {
        **slots,
        "weights_percent": 100 * shape.weight_bytes / (memory_gb * 1e9),
        "kv_percent": 100 * pools_gib[model] * GIB / (memory_gb * 1e9),
    }
