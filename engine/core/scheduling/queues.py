"""The running batch and the queue of waiting requests.

Steady decoders of the batch are on the decode calendar. The other groups follow in order of admission.
"""

from heapq import heappop, heappush

from engine.core.calendar import DecodeCalendar
from engine.core.sequence import Group, SequenceState


class RunningBatch:
    """The running groups in order of admission; in vLLM this is the list `running`.

    The leading steady groups are on the calendar; each step iterates only over the `others`. `limit` is the largest
    number of rows on the calendar: they all run in every step, so they must fit the token budget of a step.
    """

    def __init__(self, growth: int | None, limit: int) -> None:
        self.calendar = DecodeCalendar(growth)
        self.others: list[Group] = []
        self.sequences = (
            0  # branches of running groups; a group that has not forked yet counts with its full width
        )
        self._limit = limit

    def __len__(self) -> int:
        return len(self.calendar.groups) + len(self.others)

    def __contains__(self, group: Group) -> bool:
        return group in self.calendar.groups or group in self.others

    def groups(self) -> list[Group]:
        """All groups in order of admission."""
        return [*self.calendar.groups, *self.others]

    def add(self, group: Group) -> None:
        """Add `group`, which was just admitted."""
        self.others.append(group)
        self.sequences += group.width

    def remove(self, group: Group) -> None:
        """Remove `group`, which has ended or was aborted or preempted."""
        if group in self.calendar.groups:
            self.calendar.leave(group)
        else:
            self.others.remove(group)
        self.sequences -= group.width

    def drop(self, group: Group, branch: int) -> SequenceState:
        """End a branch of `group`; returns its sequence. The caller must release its blocks."""
        self.sequences -= 1
        return self.calendar.drop(group, branch) if group in self.calendar.groups else group.drop(branch)

    def settle(self) -> None:
        """Move the leading groups of `others` to the calendar, as far as they only decode from now on."""
        steady = 0
        for group in self.others:
            if not _is_steady(group) or self.calendar.rows + group.width > self._limit:
                break
            self.calendar.join(group)
            steady += 1
        if steady:
            del self.others[:steady]


def _is_steady(group: Group) -> bool:
    """Whether each sequence computes one token per step from now on, and writes only into blocks of its own.

    Branches past the prompt have already copied a shared last block. Beams are never steady, because they get new
    parents in every step; nor are requests with draft tokens, because the number of accepted tokens changes.
    """
    request = group.request
    if group.is_beam or request.speculation is not None or not group.generated:
        return False
    if request.width == 1:
        return group.sequences[0].computed + 1 == group.tokens
    computed = group.tokens - 1
    return (
        group.forked
        and computed > request.prompt_tokens
        and all(sequence.computed == computed for sequence in group.sequences)
    )


class WaitingQueue:
    """Waiting groups by key, lowest first. A preempted group gets its old position again. Operations are O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[object, ...], Group]] = []
        self._members: set[Group] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: Group) -> bool:
        return group in self._members

    def push(self, group: Group) -> None:
        """Add `group`; its key must differ from all others."""
        heappush(self._heap, (group.key, group))
        self._members.add(group)

    @property
    def head(self) -> Group | None:
        """The group that is served next, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Group:
        """Remove and return the head; the queue must not be empty."""
        group = self.head
        assert group is not None
        heappop(self._heap)
        self._members.remove(group)
        return group

    def remove(self, group: Group) -> None:
        """Remove a waiting group from any position."""
        self._members.remove(group)
