"""The step plan: all that an executor sees of the policy, and all that it answers."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """KV slots of the pool by state while a step runs (states of design section 4), and what sharing saves.

    The six states sum to the capacity. `logical_blocks` counts a shared block once per sequence that refers to it,
    `physical_blocks` once; sharing savings are 1 - physical / logical.
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


class Row(NamedTuple):
    """One sequence's share of a step: `query_len` tokens at positions `context_len ...`, KV placed by `table`."""

    request_id: int
    branch: int  # which of the request's sequences; the prompt of a group runs as branch 0
    context_len: int  # tokens whose K and V are in the pool before this step
    query_len: int
    samples: bool  # the last position's logits choose the next token
    table: Sequence[
        int
    ]  # block ids in order, covering context_len + query_len tokens; live: do not keep or change


@dataclass(frozen=True)
class StepPlan:
    """What one engine step does, in the order: `frees` are poisoned, `copies` run, then the rows' forward pass.

    `copies` are (source, destination) blocks and happen at once: every source is read before any destination is
    written. `frees` are the blocks whose content became void since the last plan (released without a name, or
    evicted); they may already belong to someone else in this plan, which is why they come first. `repeat` is the
    number of identical decode steps that may be taken at once because nothing can change in between; a measured
    executor is always handed `repeat == 1`. In the steps after the first every row has one more token of context.
    """

    step: int
    rows: Sequence[Row]
    copies: Sequence[tuple[int, int]] = ()
    frees: Sequence[int] = ()
    repeat: int = 1
    admitted: Sequence[int] = ()  # request ids that entered the running batch in this plan
    preempted: Sequence[int] = ()  # request ids that lost their blocks in this plan
    new_blocks: int = 0
    hit_tokens: int = 0  # prompt tokens of the admitted requests that were found in the cache
    running: int = 0  # requests in the batch
    waiting: int = 0  # requests in the queue
    usage: SlotUsage = field(default_factory=lambda: SlotUsage(0, 0, 0, 0, 0, 0, 0, 0))

    @cached_property
    def query_len(self) -> IntArray:
        """Query tokens of each row, int64 `[rows]`."""
        return np.array([row.query_len for row in self.rows], dtype=np.int64)

    @cached_property
    def context_len(self) -> IntArray:
        """Context tokens of each row before the step, int64 `[rows]`."""
        return np.array([row.context_len for row in self.rows], dtype=np.int64)

    def digest(self) -> str:
        """A name for everything that this plan decides, block ids included, to compare two replays step by step."""
        book = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            book.update(
                b"r%d.%d.%d.%d.%d:"
                % (row.request_id, row.branch, row.context_len, row.query_len, row.samples)
            )
            book.update(np.fromiter(row.table, dtype=np.int64, count=len(row.table)).tobytes())
        for tag, values in (
            ("c", self.copies),
            ("f", self.frees),
            ("a", self.admitted),
            ("p", self.preempted),
        ):
            book.update(f"{tag}{list(values)}".encode())
        return book.hexdigest()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor found out.

    `repeat` of the plan's steps were taken (at least 1). `parents` gives, for each beam request that sampled, the
    branch index that each of its new hypotheses continues: `parents[request_id][i]` is the parent of hypothesis i; on
    the step that finishes the prompt every parent is 0. `finished` are requests that ended early (an EOS token).
    """

    repeat: int = 1
    parents: Mapping[int, Sequence[int]] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
