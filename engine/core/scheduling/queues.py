"""The running batch and the queue of waiting requests.

Steady decoders of the batch are on the decode calendar. The other groups follow, in order of admission.
"""

from heapq import heappop, heappush

from engine.core.calendar import DecodeCalendar
from engine.core.sequence import Group, Sequence


class RunningBatch:
    """Groups in order of admission. The leading steady ones are on the calendar, the others are looked at every step.

    `limit` bounds the calendar's rows: those always run, so they must fit the token budget of a step.
    """

    def __init__(self, growth: int | None, limit: int) -> None:
        self.calendar = DecodeCalendar(growth)
        self.others: list[Group] = []
        self.sequences = 0  # branches of running groups, counted at full width
        self._limit = limit

    def __len__(self) -> int:
        return len(self.calendar.groups) + len(self.others)

    def __contains__(self, group: Group) -> bool:
        return group in self.calendar.groups or group in self.others

    def groups(self) -> list[Group]:
        """All groups in order of admission."""
        return [*self.calendar.groups, *self.others]

    def add(self, group: Group) -> None:
        """`group` was admitted last."""
        self.others.append(group)
        self.sequences += group.width

    def remove(self, group: Group) -> None:
        """`group` ended, was aborted or preempted."""
        if group in self.calendar.groups:
            self.calendar.leave(group)
        else:
            self.others.remove(group)
        self.sequences -= group.width

    def drop(self, group: Group, branch: int) -> Sequence:
        """A branch of `group` has ended; returns its sequence, whose blocks the caller releases."""
        self.sequences -= 1
        return self.calendar.drop(group, branch) if group in self.calendar.groups else group.drop(branch)

    def settle(self) -> None:
        """Put the leading groups that only decode from now on on the calendar."""
        steady = 0
        for group in self.others:
            if not _is_steady(group) or self.calendar.rows + group.width > self._limit:
                break
            self.calendar.join(group)
            steady += 1
        if steady:
            del self.others[:steady]


def _is_steady(group: Group) -> bool:
    """Whether each sequence lacks one token and writes into blocks of its own from now on.

    Branches have copied a shared tail once they are past the prompt. Beams change their parents, and drafts their
    length, at every step.
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
    """Groups by key, lowest first; a preempted group returns to its old place. O(log n), removal included."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[object, ...], Group]] = []
        self._members: set[Group] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, group: Group) -> bool:
        return group in self._members

    def push(self, group: Group) -> None:
        """`group` waits; its key must differ from all others'."""
        heappush(self._heap, (group.key, group))
        self._members.add(group)

    @property
    def head(self) -> Group | None:
        """Who is served next, or None."""
        while self._heap and self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Group:
        """Take the head out."""
        group = self.head
        assert group is not None
        heappop(self._heap)
        self._members.remove(group)
        return group

    def remove(self, group: Group) -> None:
        """Take a waiting group out of the middle."""
        self._members.remove(group)
