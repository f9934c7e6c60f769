"""The step plan and its result: all that an executor gets from the policy, and all that it gives back."""

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


class SlotUsage(NamedTuple):
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
    ]  # block ids in order, covering at least context_len + query_len tokens; live: do not keep or change
    drafts: int = 0  # the last so many query tokens are speculative: the logits before each verify it


@dataclass(frozen=True)
class StepPlan:
    """What one engine step does, in this order:

    `stale` slots are poisoned; `swap_out` saves (device, host) blocks; `frees` are poisoned; `swap_in` brings (host,
    device) blocks back; `copies` of (source, destination) blocks happen at once, every source being read before any
    destination is written; then the rows' forward pass. `frees` are the blocks whose content became void since the
    last plan (released without a name, or evicted); they may already belong to someone else in this plan, which is why
    they come first. `stale` are slots (block, first, end) of blocks in use that became void: rejected drafts, cuts.

    `repeat` is the number of identical decode steps that may be taken at once because nothing can change in between;
    a measured executor is always handed `repeat == 1`. In the steps after the first every row has one more token of
    context. Of the rows, `steady` ones come first: those of `steady_ids` that decode and nothing else, of whom a
    reader that remembers the last plan's `steady_ids` object need not look again.
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
    waiting: int = 0  # requests in the queue, swapped ones included
    usage: SlotUsage = field(default_factory=lambda: SlotUsage(0, 0, 0, 0, 0, 0, 0, 0))
    swap_out: Sequence[tuple[int, int]] = ()
    swap_in: Sequence[tuple[int, int]] = ()
    stale: Sequence[tuple[int, int, int]] = ()
    resumed: Sequence[int] = ()  # request ids that came back from the host in this plan
    steady: int = 0  # leading rows that are steady decoders
    steady_ids: Sequence[int] = ()  # their requests

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
        """A name for everything that this plan decides, block ids included, to compare two replays step by step."""
        book = hashlib.blake2b(digest_size=16)
        for row in self.rows:
            book.update(
                b"r%d.%d.%d.%d.%d.%d:"
                % (row.request_id, row.branch, row.context_len, row.query_len, row.samples, row.drafts)
            )
            book.update(np.fromiter(row.table, dtype=np.int64, count=len(row.table)).tobytes())
        for tag, values in (
            ("c", self.copies),
            ("f", self.frees),
            ("a", self.admitted),
            ("p", self.preempted),
            ("o", self.swap_out),
            ("i", self.swap_in),
            ("s", self.stale),
        ):
            book.update(f"{tag}{list(values)}".encode())
        return book.hexdigest()


class ArrayRows(Sequence[Row]):
    """Rows whose lengths are at hand as arrays and which are laid out one by one only if somebody asks.

    What the scheduler makes is `engine.core.scheduling.step.BatchRows`.
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
    """What the executor found out.

    `repeat` of the plan's steps were taken (at least 1). `parents` gives, for each beam request that sampled, the
    branch index that each of its new hypotheses continues: `parents[request_id][i]` is the parent of hypothesis i; on
    the step that finishes the prompt every parent is 0. `finished` are requests that ended early (an EOS token),
    `ended` branches of sampled requests that did. `accepted` gives, for each request with draft tokens in the plan,
    how many of them were right (0 when it is not named).
    """

    repeat: int = 1
    parents: Mapping[int, Sequence[int]] = field(default_factory=dict)
    finished: frozenset[int] = frozenset()
    ended: Mapping[int, Collection[int]] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)
