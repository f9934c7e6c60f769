"""The contiguous KV cache manager: one run of consecutive slots per sequence, reserved at admission.

Serving systems did this before paging (the Orca variants of the PagedAttention paper). A reservation is a block table
of consecutive blocks with one slot each. So the same scheduler, runner and kernels serve it, and any difference in
throughput comes from the allocator.

Placement says which free run a reservation takes. First fit takes the lowest hole that is long enough, and merges
neighbours when a run is given back. Buddy gives every run a chunk of the next power of two, as the SOSP'23 paper
assumes for its baselines. The paper does not say how a pool is cut that is no power of two, nor which chunk is the
smallest. Here such a pool is cut into descending powers of two, one for each binary digit, and the smallest chunk is
one slot.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

from engine.core.errors import CoreError, InvariantError, OutOfBlocksError, UnknownSequenceError
from engine.core.memory.manager import FastForwardColumns, KVCacheManager, beyond_end, check_parents
from engine.core.options import Placement, Reservation
from engine.core.plan import CopyList, SlotUsage, StaleList
from engine.core.request import Request
from engine.core.sequence import DecodeCalendar, Group, ScheduledRow, SequenceState


class FreeRuns:
    """Holes of a pool with slots 1 … `num_slots`, in address order."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CoreError(f"a pool needs at least 1 slot, found {num_slots}")
        self._starts = [1]
        self._ends = [num_slots + 1]
        self.free = num_slots

    def holes(self) -> list[range]:
        """The holes in address order."""
        return [range(start, end) for start, end in zip(self._starts, self._ends, strict=True)]

    @staticmethod
    def chunk(length: int) -> int:
        """How many slots are allocated for a run of `length`: exactly `length`."""
        return length

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        return sum((end - start) // length for start, end in zip(self._starts, self._ends, strict=True))

    def free_below(self, length: int) -> int:
        """Free slots in holes that are too short for a run of `length`."""
        return sum(len(hole) for hole in self.holes() if len(hole) < length)

    def take(self, length: int) -> range:
        """The start of the first hole that is long enough. Raises OutOfBlocksError, and changes nothing, if none is."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= length:
                self._starts[index] += length
                if self._starts[index] == end:
                    del self._starts[index], self._ends[index]
                self.free -= length
                return range(start, start + length)
        raise OutOfBlocksError(f"no hole of {length} slots; {self.free} free in {len(self._starts)} holes")

    def give(self, run: range) -> None:
        """Free a run. Raises CoreError if a part of it is free already."""
        at = bisect_left(self._starts, run.start)
        if (at < len(self._starts) and self._starts[at] < run.stop) or (
            at and self._ends[at - 1] > run.start
        ):
            raise CoreError(f"slots {run.start}..{run.stop - 1} are free already")
        self._starts.insert(at, run.start)
        self._ends.insert(at, run.stop)
        self.free += len(run)
        for left in (at, at - 1):
            if 0 <= left < len(self._starts) - 1 and self._ends[left] == self._starts[left + 1]:
                del self._ends[left], self._starts[left + 1]


class BuddyRuns:
    """Free chunks by size, lowest address first. A freed chunk is merged with its buddy if that is free too."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CoreError(f"a pool needs at least 1 slot, found {num_slots}")
        self.free = num_slots
        self._free: dict[int, list[int]] = {}
        self._taken: dict[int, int] = {}  # first slot -> chunk size
        offset = 0
        for digit in reversed(range(num_slots.bit_length())):
            self._free[1 << digit] = [offset] if num_slots >> digit & 1 else []
            offset += num_slots & 1 << digit

    @staticmethod
    def chunk(length: int) -> int:
        """How many slots are allocated for a run of `length`: the next power of two."""
        return 1 << (length - 1).bit_length()

    def holes(self) -> list[range]:
        """The free chunks in address order."""
        found = [(start, size) for size, starts in self._free.items() for start in starts]
        return [range(start + 1, start + 1 + size) for start, size in sorted(found)]

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        chunk = self.chunk(length)
        return sum(len(starts) * (size // chunk) for size, starts in self._free.items() if size >= chunk)

    def free_below(self, length: int) -> int:
        """Free slots in chunks that are too small for a run of `length`."""
        chunk = self.chunk(length)
        return sum(len(starts) * size for size, starts in self._free.items() if size < chunk)

    def take(self, length: int) -> range:
        """The lowest chunk of the smallest fitting size. Raises OutOfBlocksError, and changes nothing, if none fits."""
        chunk = self.chunk(length)
        fitting = [size for size, starts in self._free.items() if size >= chunk and starts]
        if not fitting:
            raise OutOfBlocksError(f"no chunk of {chunk} slots for {length}; {self.free} are free")
        size = min(fitting)
        start = self._free[size].pop(0)
        while size > chunk:
            size //= 2
            insort(self._free[size], start + size)
        self._taken[start] = chunk
        self.free -= chunk
        return range(start + 1, start + 1 + length)

    def give(self, run: range) -> None:
        """Free a run. Raises CoreError, and changes nothing, if the run is not allocated."""
        start = run.start - 1
        if start not in self._taken or self.chunk(len(run)) != self._taken[start]:
            raise CoreError(f"slots {run.start}..{run.stop - 1} are not an allocated run")
        size = self._taken.pop(start)
        self.free += size
        while self._remove(size, start ^ size):
            start &= ~size
            size *= 2
        insort(self._free[size], start)

    def _remove(self, size: int, start: int) -> bool:
        """Remove the free chunk at `start`; False if there is none of this size."""
        starts = self._free.get(size, [])
        at = bisect_left(starts, start)
        if at == len(starts) or starts[at] != start:
            return False
        del starts[at]
        return True


Runs = FreeRuns | BuddyRuns


def runs_for(placement: Placement, num_slots: int) -> Runs:
    """An empty pool of `num_slots` slots."""
    return BuddyRuns(num_slots) if placement is Placement.buddy else FreeRuns(num_slots)


class ContiguousManager(KVCacheManager):
    """The KV cache manager with contiguous memory. See `KVCacheManager` for the methods.

    Each sequence has one run of slots: `reservation` says how long, `placement` says where. `max_model_len` is in
    tokens. Blocks have one slot, so block ids are slot ids. No slot is shared: a fork copies the prompt, and a
    re-parented beam copies what its new parent generated. No group is ever preempted, because everything that a
    sequence will write is reserved before it starts.
    """

    block_size = 1
    growth: int | None = None

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        reservation: Reservation = Reservation.max,
        placement: Placement = Placement.first_fit,
    ) -> None:
        if max_model_len < 1:
            raise CoreError(f"max_model_len is {max_model_len} tokens, must be at least 1")
        self.num_blocks = num_slots
        self.max_model_len = max_model_len
        self.reservation = reservation
        if placement is Placement.auto:
            placement = Placement.first_fit if reservation is Reservation.max else Placement.buddy
        self._runs = runs_for(placement, num_slots)
        self._empty = runs_for(placement, num_slots)
        self._spare: dict[int, list[range]] = {}  # request id: runs of branches that do not exist yet
        self._live: dict[SequenceState, range] = {}
        self._copies: CopyList = []  # (source, target) slots; they always cover whole parts of runs
        self._voided: list[int] = []
        self._stale: StaleList = []
        self._written = 0
        self._reserved = 0  # slots in runs
        self._never_filled = 0

    def _length(self, request: Request) -> int:
        """Slots to reserve for each sequence of `request`: at most `max_model_len`, unless its KV needs more."""
        if self.reservation is Reservation.max:
            return self.max_model_len
        if self.reservation is Reservation.oracle:
            return request.final_kv_tokens
        outputs = 1 << (request.output_tokens - 1).bit_length()
        return max(request.final_kv_tokens, min(self.max_model_len, request.prompt_tokens + outputs))

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`, or None: its reservations, one per branch, exceed the pool."""
        length = self._length(request)
        if request.final_kv_tokens > self.max_model_len:
            return f"needs {request.final_kv_tokens} slots, a reservation has {self.max_model_len}"
        if request.speculation is not None and request.speculation.mode != "lookahead":
            return "has drafts in forked children or past its end, which contiguous memory does not hold; use lookahead"
        if request.width > self._empty.runs_of(length):
            slots = request.width * self._empty.chunk(length)
            return f"reserves {slots} slots ({request.width} x {length}), the pool has {self.num_blocks}"
        return None

    def lookup(self, group: Group) -> list[int]:
        """Always empty: no prefix is shared."""
        return []

    def can_admit(
        self,
        group: Group,
        hits: Sequence[int],
        spare_blocks: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        """Whether every branch gets a run of its own."""
        length = self._length(group.request)
        fits = self._runs.runs_of(length) >= group.width
        return fits and self._runs.free - group.width * self._runs.chunk(length) >= spare_blocks

    def admit(self, group: Group, hits: Sequence[int]) -> None:
        """Reserve one run per branch."""
        request, (root,), length = group.request, group.sequences, self._length(group.request)
        if self._runs.runs_of(length) < group.width:
            raise OutOfBlocksError(
                f"request {request.request_id} reserves {group.width} x {length} slots; {self._runs.free} are free"
            )
        runs = [self._runs.take(length) for _ in range(group.width)]
        self._spare[request.request_id] = runs[1:]
        self._own(root, runs[0])
        self._reserved += group.width * length
        self._never_filled += group.width * (length - request.final_kv_tokens)

    def _own(self, sequence: SequenceState, run: range) -> None:
        self._live[sequence] = run
        sequence.table = run

    def can_extend(self, rows: Sequence[ScheduledRow]) -> bool:
        """Always: the slots were reserved at admission."""
        return True

    def extend(self, row: ScheduledRow) -> int:
        """Count the row's tokens. The slots are reserved, so no new blocks are needed: always 0.

        Raises CoreError, and changes nothing, beyond the last token that the sequence computes.
        """
        self._run(row.sequence)
        end = row.sequence.computed + row.query_len
        if end > row.sequence.request.final_kv_tokens:
            raise beyond_end(row.sequence, end)
        self._written += row.query_len
        return 0

    def can_append(self, group: Group) -> bool:
        """Always: the slots were reserved at admission."""
        return True

    def append(self, group: Group) -> int:
        """Always 0: no new block is needed."""
        return 0

    def advance(self, calendar: DecodeCalendar) -> None:
        """Count the tokens that steady groups write in the step that is being scheduled."""
        self._written += calendar.rows

    # -- sharing -------------------------------------------------------------------------------------------

    def fork(self, parent: SequenceState, children: Sequence[SequenceState]) -> None:
        """Copy the prompt into each child's own reservation."""
        source = self._run(parent)
        for child, run in zip(children, self._spare.pop(parent.request.request_id, []), strict=True):
            self._own(child, run)
            self._copies += zip(source[: parent.computed], run[: parent.computed], strict=True)
            self._written += parent.computed

    def reparent(self, branches: Sequence[SequenceState], parents: Sequence[int]) -> None:
        """The first child of a parent takes over its run. Other children copy the generated part into a dropped run."""
        check_parents(branches, parents)
        runs = [self._run(branch) for branch in branches]
        dropped = [run for index, run in enumerate(runs) if index not in set(parents)]
        prompt, end = branches[0].request.prompt_tokens, branches[0].computed
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            run = dropped.pop() if parent in taken_over else runs[parent]
            if parent in taken_over:
                self._copies += zip(runs[parent][prompt:end], run[prompt:end], strict=True)
            taken_over.add(parent)
            self._own(branch, run)

    def promote(self, sequence: SequenceState, child: SequenceState) -> None:
        """Raises CoreError: requests with forked draft children are never accepted."""
        raise CoreError(f"{child} was never forked: contiguous memory has no forked drafts")

    def truncate(self, sequence: SequenceState, tokens: int) -> int:
        """Keep the first `tokens` computed tokens; the reservation stays."""
        run, computed = self._run(sequence), sequence.computed
        if not 0 <= tokens <= computed:
            raise CoreError(f"{sequence}: cut to {tokens} tokens, it has {computed}")
        self._stale.extend((slot, 0, 1) for slot in run[tokens:computed])
        self._written -= computed - tokens
        sequence.computed = tokens
        return tokens

    # -- release -------------------------------------------------------------------------------------------

    def release(self, sequence: SequenceState) -> None:
        """Release the reservation, and the reservations of branches that were never forked."""
        run, request = self._run(sequence), sequence.request
        del self._live[sequence]
        if self._copies:
            run = self._without_copies(run)
        for hole in (run, *self._spare.pop(request.request_id, [])):
            self._runs.give(hole)
            self._reserved -= len(hole)
            self._never_filled -= len(hole) - request.final_kv_tokens
        self._voided.extend(run[: sequence.computed])
        self._written -= sequence.computed
        sequence.table = ()

    def _without_copies(self, run: range) -> range:
        """The run to release for a branch that ends before the copies of its fork were made.

        Copies into `run` are cancelled. If another branch would copy from `run`, the first such branch takes over `run`
        itself, and its own run is released instead.
        """
        self._copies = [pair for pair in self._copies if pair[1] not in run]
        start = next((target for source, target in self._copies if source == run.start), None)
        if start is None:
            return run
        taker, own = next(pair for pair in self._live.items() if pair[1].start == start)
        self._copies = [pair for pair in self._copies if pair[1] not in own]
        self._own(taker, run)
        return own

    def preempt(self, group: Group, unseen: int = 0) -> None:
        """Release all reservations of the group."""
        for sequence in reversed(group.holders):
            self.release(sequence)

    # -- fast-forward, counters -------------------------------------------------------------------------------

    def fast_forward_limit(self, calendar: DecodeCalendar, steps: int) -> int:
        """Always `steps`: the slots were reserved at admission."""
        return steps

    def fast_forward(self, calendar: DecodeCalendar, steps: int, first: SlotUsage) -> FastForwardColumns:
        """Count the tokens of the steps after the first. No block is allocated."""
        columns = FastForwardColumns.of(first, steps - 1, self.block_size, ())
        self._written += (steps - 1) * calendar.rows
        return columns

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state. Slots lost to rounding up, and holes too short for the request `head`, are external."""
        rounded_up = self.num_blocks - self._runs.free - self._reserved
        too_short = self._runs.free_below(self._length(head)) if head is not None else 0
        return SlotUsage(
            token=self._written,
            cached=0,
            reserved=self._reserved - self._written - self._never_filled,
            internal=self._never_filled,
            external=rounded_up + too_short,
            free=self._runs.free - too_short,
            logical_blocks=self._reserved,
            physical_blocks=self._reserved,
        )

    def drain_copies(self) -> CopyList:
        """Slot copies of forks and re-parented beams."""
        copies, self._copies = self._copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Slots of released reservations that held tokens."""
        voided, self._voided = self._voided, []
        return voided

    def drain_stale(self) -> StaleList:
        """Slots of rejected drafts."""
        stale, self._stale = self._stale, []
        return stale

    def check(self) -> None:
        """Raise InvariantError unless reservations and holes cover the pool exactly and the counters are right."""
        runs = [*self._live.values(), *(run for spare in self._spare.values() for run in spare)]
        taken = [range(run.start, run.start + self._runs.chunk(len(run))) for run in runs]
        slots = sorted(slot for run in (*taken, *self._runs.holes()) for slot in run)
        if slots != list(range(1, self.num_blocks + 1)) or self._reserved != sum(map(len, runs)):
            raise InvariantError(f"{len(slots)} slots are reserved or free, the pool has {self.num_blocks}")
        written = sum(sequence.computed for sequence in self._live)
        if written != self._written or any(len(s.table) < s.computed for s in self._live):
            raise InvariantError(f"written slots: counters {self._written}, sequences {written}")
        usage = self.usage(None)
        if min(usage.reserved, usage.free) < 0 or usage.capacity != self.num_blocks:
            raise InvariantError(f"slot states do not add up: {usage}")

    def _run(self, sequence: SequenceState) -> range:
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} has no reservation: never admitted, or released before")
        return self._live[sequence]
