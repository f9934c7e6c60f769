"""What must hold of a block pool at any time (after the list in vLLM's tests): recounted from scratch."""

from collections.abc import Mapping, Sequence

from engine.core.errors import InvariantError
from engine.core.eviction import EvictionQueue
from engine.core.names import BlockName, NameIndex


def check_pool(
    refs: Sequence[int],
    unnamed: Sequence[int],
    evictable: EvictionQueue,
    name_of: Sequence[BlockName | None],
    index: NameIndex,
    references: Mapping[int, int],
) -> None:
    """Counts equal table entries; free means count 0; named and free means evictable; names and index agree."""
    everyone = range(1, len(refs))
    wrong = next((block for block in everyone if refs[block] != references.get(block, 0)), None)
    if wrong is not None:
        raise InvariantError(f"block {wrong}: count {refs[wrong]}, tables {references.get(wrong, 0)}")
    cached = evictable.blocks()
    free = sorted([*unnamed, *cached])
    if free != [block for block in everyone if not refs[block]] or len(cached) != len(evictable):
        raise InvariantError(
            f"the free queue holds {len(free)} blocks, unreferenced or doubled ones differ from it"
        )
    named = {block for block in everyone if name_of[block] is not None}
    if not named >= set(cached) or not named.isdisjoint(unnamed):
        raise InvariantError("a free block is in the wrong half of the free queue")
    public = [(block, name_of[block]) for block in sorted(named) if type(name_of[block]) is not int]
    if index.pairs() != public:
        raise InvariantError(f"{len(public)} blocks have a name, the index disagrees with them")
