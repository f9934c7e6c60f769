"""Copies of slots that are owed: asked for when a step is committed, made with the next one."""

from collections.abc import Sequence as Values

from engine.core.manager import CopyList


class PendingCopies:
    """(source, target) pairs of whole runs of slots, until the executor takes them."""

    def __init__(self) -> None:
        self._pairs: CopyList = []

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def add(self, sources: Values[int], targets: Values[int]) -> None:
        """Copy each source to its target."""
        self._pairs.extend(zip(sources, targets, strict=True))

    def drop_into(self, run: range) -> None:
        """Nobody needs what would be copied into `run` any more."""
        self._pairs = [pair for pair in self._pairs if pair[1] not in run]

    def first_target(self, run: range) -> int | None:
        """The first slot to which the beginning of `run` is to be copied, None where nothing is."""
        return next((target for source, target in self._pairs if source == run.start), None)

    def drain(self) -> CopyList:
        """All of them, which are then forgotten."""
        pairs, self._pairs = self._pairs, []
        return pairs
