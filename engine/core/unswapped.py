"""The part of a cache manager that swaps, for one that has nothing to swap."""

from engine.core.errors import CoreError
from engine.core.manager import SwapList
from engine.core.sequence import Group


class NeverSwaps:
    """Refuses what nobody asks who looks at `can_swap_out` first."""

    def can_swap_out(self, group: Group) -> bool:
        """Never: there is no need to, and no host memory."""
        return False

    def swap_out(self, group: Group) -> None:
        """Refused."""
        raise CoreError(f"request {group.request.request_id}: contiguous memory is not swapped")

    def can_swap_in(self, group: Group, spare_blocks: int) -> bool:
        """Never: nothing was swapped out."""
        return False

    def swap_in(self, group: Group) -> None:
        """Refused."""
        raise CoreError(f"request {group.request.request_id}: contiguous memory is not swapped")

    def forget_swapped(self, group: Group) -> None:
        """Refused."""
        raise CoreError(f"request {group.request.request_id}: contiguous memory is not swapped")

    def drain_swaps(self) -> tuple[SwapList, SwapList]:
        """None."""
        return [], []
