"""The running totals from which slot states follow, kept so that reading them costs nothing."""

from engine.core.request import Request


class SlotBooks:
    """Written slots, table entries, and the slots of last blocks that their owner will never fill.

    `written` counts a shared slot once and is ahead of the tensors by the step under way. The final length of every
    sequence is known in replay, so an unfillable slot is known when its block is taken.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.written = 0
        self.entries = 0
        self.internal = 0
        self._unfillable: dict[int, int] = {}

    def block_taken(self, request: Request, block: int, index: int) -> None:
        """`block` stands at position `index` of a table of `request`."""
        unfillable = (index + 1) * self.block_size - request.final_kv_tokens
        if unfillable > 0:
            self._unfillable[block] = unfillable
            self.internal += unfillable

    def block_dropped(self, block: int) -> None:
        """The last reference to a table's last block is gone."""
        self.internal -= self._unfillable.pop(block, 0)

    def unfillable_blocks(self) -> set[int]:
        """Blocks with slots that will never be filled."""
        return set(self._unfillable)

    def totals(self) -> tuple[int, int, int]:
        """Written slots, table entries, and the unfillable slots summed anew: what `check()` compares."""
        return self.written, self.entries, sum(self._unfillable.values())
