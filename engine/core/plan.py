"""The step plan and its result: the whole interface between the scheduler and an executor.

`StepPlan` is what vLLM calls `SchedulerOutput`, `StepResult` is its `ModelRunnerOutput`.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
CopyList = list[tuple[int, int]]  # (source, destination) blocks
StaleList = list[tuple[int, int, int]]  # (block, first, end): slots of a block in use that became void
SwapList = list[tuple[int, int]]  # (device, host) or (host, device) blocks


class SlotUsage(NamedTuple):
    """The KV slots of the pool by state while a step runs, and how many blocks are shared.

    The six states sum to the capacity:

    * `token`: written, in a block that a sequence refers to.
    * `cached`: in a free block of the prefix cache.
    * `reserved`: allocated, and will be written later.
    * `internal`: allocated, and will never be written (internal fragmentation).
    * `external`: free, but lost to rounding up or in holes that are too small (external fragmentation).
    * `free`: all other slots.

    `logical_blocks` counts a shared block once for each sequence that refers to it, `physical_blocks` counts it once.
    Sharing saves `1 - physical_blocks / logical_blocks`.
    """

    token: int
    cached: int
    reserved: int
    internal: int
    external: int
    free: int
    logical_blocks: int
    physical_blocks: int

    @property
    def capacity(self) -> int:
        """All slots of the pool."""
        return self.token + self.cached + self.reserved + self.internal + self.external + self.free


class Loads(NamedTuple):
    """Blocks of admitted requests that are read from tiers below the pool, and the seconds that this takes.

    With `overlaps` they are read while the step computes, else before it.
    """

    blocks: int = 0
    seconds: float = 0.0
    overlaps: bool = False


NO_LOADS = Loads()


class StepCounts(NamedTuple):
    """What a plan counts of its step. To count more, add it here and in `StepPlan.counts`: it is in every log then."""

    new_blocks: int  # blocks taken from the pool
    copies: int  # blocks copied on write
    frees: int  # blocks whose content became void
    preempted: int  # requests that lost their blocks
    admitted: int  # requests that entered the batch
    hit_tokens: int  # prompt tokens of the admitted requests that were found in the cache
    running: int  # requests in the batch
    waiting: int  # requests in the queue


class Row(NamedTuple):
    """What one sequence computes in a step: `query_len` tokens from position `context_len` on.

    `table` says in which blocks their K and V are stored.
    """

    request_id: int
    branch: int  # which of the request's sequences; the prompt is computed as branch 0
    context_len: int  # tokens whose K and V are in the pool before this step
    query_len: int
    samples: bool  # the logits of the last position give the next token
    table: Sequence[int]  # blocks of at least context_len + query_len tokens; live: do not keep or change it
    drafts: int = 0  # so many query tokens, at the end, are drafts; the logits before each one verify it


@dataclass(frozen=True)
class StepPlan:
    """What one engine step does. An executor must do it in this order:

    1. Set the slots of `stale` to NaN: (block, first, end) in blocks that are in use, void after rejected draft tokens
       or truncation.
    2. Copy the blocks of `swap_out`, (device, host), to host memory: of swapped groups, and for a host tier.
    3. Set the blocks of `frees` to NaN: their content became void since the last plan, because they were released
       without a hash or evicted. They may already belong to another sequence in this plan, so this comes first.
    4. Copy the blocks of `swap_in`, (host, device), back to the device.
    5. Copy the blocks of `copies`, (source, destination): read every source before any destination is written.
    6. Run the forward pass of `rows`.

    Fast-forward: `num_steps` identical decode steps may be taken at once, because nothing can change in between. In
    each step after the first, every row has one more token of context. A measured engine always gets `num_steps == 1`.

    The first `steady` rows only decode; they belong to the requests `steady_ids`. As long as this is the same object
    as in the last plan, the steady rows are the same too.
    """

    step: int
    rows: Sequence[Row]
    copies: Sequence[tuple[int, int]] = ()
    frees: Sequence[int] = ()
    num_steps: int = 1
    admitted: Sequence[int] = ()  # request ids that enter the running batch in this plan
    preempted: Sequence[int] = ()  # request ids that lose their blocks in this plan
    new_blocks: int = 0
    hit_tokens: int = 0  # prompt tokens of admitted requests that were found in the prefix cache
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests in the queue, swapped ones included
    usage: SlotUsage = field(default_factory=lambda: SlotUsage(0, 0, 0, 0, 0, 0, 0, 0))
    swap_out: Sequence[tuple[int, int]] = ()
    swap_in: Sequence[tuple[int, int]] = ()
    stale: Sequence[tuple[int, int, int]] = ()
    resumed: Sequence[int] = ()  # request ids that come back from host memory in this plan
    padded: Sequence[int] = ()  # request ids whose drafts only fill their row, and are never accepted
    steady: int = 0  # leading rows that are steady decoders
    steady_ids: Sequence[int] = ()  # their requests
    loads: Loads = NO_LOADS

    @property
    def counts(self) -> StepCounts:
        """What is counted of the step, or of the first one of a fast-forward."""
        return StepCounts(
            self.new_blocks,
            len(self.copies),
            len(self.frees),
            len(self.preempted),
            len(self.admitted),
            self.hit_tokens,
            self.running,
            self.waiting,
        )

    @cached_property
    def query_len(self) -> IntArray:
        """Query tokens of each row, int64 `[rows]`."""
        if isinstance(self.rows, ArrayRows):
            return self.rows.query_len
        return np.array([row.query_len for row in self.rows], dtype=np.int64)

    @cached_property
    def context_len(self) -> IntArray:
        """Context tokens of each row before the step, int64 `[rows]`."""
        if isinstance(self.rows, ArrayRows):
            return self.rows.context_len
        return np.array([row.context_len for row in self.rows], dtype=np.int64)

    @property
    def other_rows(self) -> Sequence[Row]:
        """The rows after the steady ones: chunks of prompts, beams, branches that catch up, speculation."""
        return self.rows.others if isinstance(self.rows, ArrayRows) else self.rows[self.steady :]

    def digest(self) -> str:
        """A hash of everything that this plan decides, block ids included. It compares two replays step by step."""
        digest = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            digest.update(
                b"r%d.%d.%d.%d.%d.%d:"
                % (row.request_id, row.branch, row.context_len, row.query_len, row.samples, row.drafts)
            )
            digest.update(np.fromiter(row.table, dtype=np.int64, count=len(row.table)).tobytes())
        work = (
            self.copies,
            self.frees,
            self.admitted,
            self.preempted,
            self.swap_out,
            self.swap_in,
            self.stale,
        )
        for tag, values in zip("cfapois", work, strict=True):
            digest.update(f"{tag}{list(values)}".encode())
        return digest.hexdigest()


class ArrayRows(Sequence[Row]):
    """Rows whose lengths are stored as arrays. Single `Row` objects are made only on access.

    The scheduler's implementation is `engine.core.scheduling.batch.BatchRows`.
    """

    others: Sequence[Row]

    @property
    @abstractmethod
    def query_len(self) -> IntArray:
        """Query tokens of each row, int64 `[rows]`."""

    @property
    @abstractmethod
    def context_len(self) -> IntArray:
        """Context tokens of each row, int64 `[rows]`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor reports about a step.

    * `num_steps`: how many of the plan's steps were taken, at least 1.
    * `parents`: for each beam request that sampled, which branch each new beam continues: `parents[request_id][i]` is
      the parent of beam i. In the step that finishes the prompt every parent is 0.
    * `finished`: requests that ended early, by an EOS token.
    * `ended`: for sampled requests, the branches that ended early.
    * `accepted`: for each request with draft tokens in the plan, how many were accepted; a missing request means 0.
    """

    num_steps: int = 1
    parents: Mapping[int, Sequence[int]] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    ended: Mapping[int, Collection[int]] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)
