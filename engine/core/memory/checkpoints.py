"""Which blocks of windows and states enter the prefix cache: the retention rule of vLLM 0.33.

A hit on a window's layers needs the blocks before its end alone, one on a state's layers the last state. Kept are the
blocks that a hit at a checkpoint needs. A checkpoint is a position at which a later prompt may resume: one token before
the prompt's end, where a request found that other layers know more of its prefix (a shared junction, so it is kept
after the second request missed there), and, if asked, every so many tokens.
"""

from collections.abc import Sequence

from engine.core.errors import CoreError
from engine.core.memory.group_layout import KVGroup
from engine.core.options import GroupKind


class CheckpointRule:
    """`interval` in tokens: 0 keeps the checkpoints of a request alone, None one at every match unit.

    `unit` is the match unit in tokens, of which a positive interval must be a multiple: else CoreError. Source:
    `reachable_block_mask` of `SlidingWindowManager` and `MambaManager`, and `replay_boundaries`, in vllm/v1/core.
    """

    def __init__(self, interval: int | None, unit: int) -> None:
        if interval is not None and (interval < 0 or interval % unit):
            raise CoreError(f"retention interval {interval}: must be 0 or a multiple of {unit} tokens")
        self._interval, self._unit = interval, unit

    def kept(
        self, group: KVGroup, needed: int | None, first: int, end: int, checkpoints: Sequence[int]
    ) -> Sequence[int]:
        """The blocks of `group` to keep, of those from `first` to before `end`, in order.

        `needed`: how many blocks before its end a hit needs; None: all, so all are kept. `checkpoints` in tokens.
        """
        dense = self._interval is None
        if needed is None or (dense and group.kind is GroupKind.state):
            return range(first, end)
        kept: set[int] = set()
        segment = (self._unit if self._interval is None else self._interval) // group.block_size
        if segment:
            if needed >= segment:
                return range(first, end)
            kept.update(block for block in range(first, end) if block % segment >= segment - needed)
        for tokens in () if dense else checkpoints:
            behind = tokens // self._unit * self._unit // group.block_size
            kept.update(range(max(first, behind - needed), min(end, behind)))
        return sorted(kept)
