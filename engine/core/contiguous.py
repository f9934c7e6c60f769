"""The contiguous baseline: one run of slots per sequence, as long as the model allows, reserved at admission.

What serving systems did before paging (Orca (Max) of the PagedAttention paper): a reservation is a block table that
happens to be a run of one-slot blocks, so that the same scheduler, runner and kernels serve it and any difference in
throughput belongs to the allocator.
"""

from collections.abc import Sequence as Values

from engine.core.errors import CoreError, InvariantError, UnknownSequenceError
from engine.core.manager import CopyList, LeapColumns
from engine.core.plan import IntArray, SlotUsage
from engine.core.request import Request
from engine.core.runs import FreeRuns
from engine.core.sequence import Group, ScheduledRow, Sequence


class ContiguousMaxManager:
    """First-fit placement of runs of `max_model_len` slots; every branch of a group reserves its own.

    Nothing is shared: a fork copies the prompt, a re-parented beam copies what its new parent generated.
    """

    block_size = 1

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        if max_model_len < 1:
            raise CoreError(f"max_model_len is {max_model_len} tokens, must be at least 1")
        self.num_blocks = num_slots
        self.max_model_len = max_model_len
        self._runs = FreeRuns(num_slots)
        self._spare: dict[
            int, list[range]
        ] = {}  # request id: runs reserved for branches that do not exist yet
        self._live: dict[Sequence, range] = {}
        self._copies: CopyList = []
        self._voided: list[int] = []
        self._written = 0
        self._never_filled = 0

    def never_fits(self, request: Request) -> str | None:
        """Why no schedule can serve `request`: its reservations, one per branch, exceed the pool."""
        slots = request.width * self.max_model_len
        if request.final_kv_tokens > self.max_model_len:
            return f"needs {request.final_kv_tokens} slots, a reservation has {self.max_model_len}"
        if request.width > self.num_blocks // self.max_model_len:
            return f"reserves {slots} slots ({request.width} x {self.max_model_len}), the pool has {self.num_blocks}"
        return None

    def lookup(self, group: Group) -> list[int]:
        """No prefix is shared."""
        return []

    def can_admit(self, group: Group, hits: Values[int], spare_blocks: int) -> bool:
        """Whether every branch finds a hole of its own."""
        fits = self._runs.holes_of(self.max_model_len) >= group.request.width
        return fits and self._runs.free - group.request.width * self.max_model_len >= spare_blocks

    def admit(self, group: Group, hits: Values[int]) -> None:
        """Reserve one run per branch."""
        request, (root,) = group.request, group.sequences
        runs = [self._runs.take(self.max_model_len) for _ in range(request.width)]
        self._spare[request.request_id] = runs[1:]
        self._own(root, runs[0])
        self._never_filled += request.width * (self.max_model_len - request.final_kv_tokens)

    def _own(self, sequence: Sequence, run: range) -> None:
        self._live[sequence] = run
        sequence.table = run[: sequence.computed]

    def can_extend(self, rows: Values[ScheduledRow]) -> bool:
        """Always: the slots were reserved at admission."""
        return True

    def extend(self, row: ScheduledRow) -> int:
        """Show the executor as much of the reservation as the row writes and reads."""
        run = self._run(row.sequence)
        row.sequence.table = run[: row.sequence.computed + row.query_len]
        self._written += row.query_len
        return 0

    def fork(self, parent: Sequence, children: Values[Sequence]) -> None:
        """Copy the prompt into each child's own reservation."""
        source = self._run(parent)
        for child, run in zip(children, self._spare.pop(parent.request.request_id, []), strict=True):
            self._own(child, run)
            self._copies.extend(zip(source[: parent.computed], run[: parent.computed], strict=True))
            self._written += parent.computed

    def reparent(self, branches: Values[Sequence], parents: Values[int]) -> None:
        """The first child of a parent takes its run over; further ones copy the generated part into a dropped run."""
        runs = [self._run(branch) for branch in branches]
        dropped = [run for index, run in enumerate(runs) if index not in set(parents)]
        prompt, end = branches[0].request.prompt_tokens, branches[0].computed
        taken_over: set[int] = set()
        for branch, parent in zip(branches, parents, strict=True):
            run = dropped.pop() if parent in taken_over else runs[parent]
            if parent in taken_over:
                self._copies.extend(zip(runs[parent][prompt:end], run[prompt:end], strict=True))
            taken_over.add(parent)
            self._own(branch, run)

    def release(self, sequence: Sequence) -> None:
        """Give the reservation back, with those of branches that never came to be."""
        run, request = self._run(sequence), sequence.request
        del self._live[sequence]
        spare = self._spare.pop(request.request_id, [])
        for hole in (run, *spare):
            self._runs.give(hole)
            self._never_filled -= self.max_model_len - request.final_kv_tokens
        self._voided.extend(run[: sequence.computed])
        self._written -= sequence.computed
        sequence.table = ()

    def leap_limit(self, context: IntArray, steps: int) -> int:
        """All of them: the slots were reserved at admission."""
        return steps

    def leap(self, sequences: Values[Sequence], steps: int) -> LeapColumns:
        """Nothing is taken, tokens only fill the reservations."""
        columns = LeapColumns.of(self.usage(None), steps - 1, self.block_size, ())
        for sequence in sequences:
            sequence.table = self._run(sequence)[: sequence.computed + steps]
        self._written += (steps - 1) * len(sequences)
        return columns

    def usage(self, head: Request | None) -> SlotUsage:
        """Slots by state: holes too short for the waiting request are external."""
        reserved = self.num_blocks - self._runs.free
        external = self._runs.free_below(self.max_model_len) if head is not None else 0
        return SlotUsage(
            token=self._written,
            cached=0,
            reserved=reserved - self._written - self._never_filled,
            internal=self._never_filled,
            external=external,
            free=self._runs.free - external,
            logical_blocks=reserved,
            physical_blocks=reserved,
        )

    def drain_copies(self) -> CopyList:
        """Slot copies of forks and re-parented beams."""
        copies, self._copies = self._copies, []
        return copies

    def drain_frees(self) -> list[int]:
        """Slots of released reservations that held tokens."""
        voided, self._voided = self._voided, []
        return voided

    def check(self) -> None:
        """Reservations and holes cover the pool without overlap, and the counters agree with the sequences."""
        runs = [*self._live.values(), *(run for spare in self._spare.values() for run in spare)]
        slots = sorted(slot for run in (*runs, *self._runs.holes()) for slot in run)
        if slots != list(range(1, self.num_blocks + 1)):
            raise InvariantError(f"{len(slots)} slots are reserved or free, the pool has {self.num_blocks}")
        written = sum(sequence.computed for sequence in self._live)
        if written != self._written or any(len(s.table) != s.computed for s in self._live):
            raise InvariantError(f"written slots: books {self._written}, sequences {written}")
        usage = self.usage(None)
        if min(usage.reserved, usage.free) < 0 or usage.capacity != self.num_blocks:
            raise InvariantError(f"slot states do not add up: {usage}")

    def _run(self, sequence: Sequence) -> range:
        if sequence not in self._live:
            raise UnknownSequenceError(f"{sequence} has no reservation: never admitted, or released before")
        return self._live[sequence]
