"""The queue of requests that wait, in the order in which they will be served."""

from heapq import heappop, heappush

from engine.core.sequence import Group


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
