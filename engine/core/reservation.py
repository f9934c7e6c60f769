"""How many slots the contiguous baselines reserve for a sequence, and where: the Orca variants of the SOSP'23 paper."""

from enum import StrEnum
from typing import Protocol

from engine.core.buddy import BuddyRuns
from engine.core.request import Request
from engine.core.runs import FreeRuns


class Reservation(StrEnum):
    """What is reserved when a request is admitted."""

    MAX = "max"  # the longest sequence that the model allows
    POW2 = "pow2"  # the prompt and the next power of two of the output: at most twice what it needs
    ORACLE = "oracle"  # what the sequence will write, known in advance: an upper bound for contiguous memory


class Placement(StrEnum):
    """Where a reservation goes."""

    FIRST_FIT = "first_fit"  # the lowest hole that is long enough
    BUDDY = "buddy"  # a chunk of the next power of two


class Runs(Protocol):
    """Free runs of a pool with slots 1 … n."""

    free: int

    def chunk(self, length: int) -> int:
        """Slots that a run of `length` takes away."""
        ...

    def holes(self) -> list[range]:
        """Free runs in address order."""
        ...

    def runs_of(self, length: int) -> int:
        """How many runs of `length` could be taken one after the other."""
        ...

    def free_below(self, length: int) -> int:
        """Free slots where no run of `length` could be."""
        ...

    def take(self, length: int) -> range:
        """A run of `length`; raises OutOfBlocksError, with nothing changed, when there is none."""
        ...

    def give(self, run: range) -> None:
        """Give a taken run back."""
        ...


def reserved_slots(request: Request, reservation: Reservation, max_model_len: int) -> int:
    """Slots reserved for each sequence of `request`, at most `max_model_len` where its KV fits that."""
    if reservation is Reservation.MAX:
        return max_model_len
    if reservation is Reservation.ORACLE:
        return request.final_kv_tokens
    outputs = 1 << (request.output_tokens - 1).bit_length()
    return max(request.final_kv_tokens, min(max_model_len, request.prompt_tokens + outputs))


def runs_for(placement: Placement, num_slots: int) -> Runs:
    """An empty pool of `num_slots` slots."""
    return BuddyRuns(num_slots) if placement is Placement.BUDDY else FreeRuns(num_slots)
