"""KV cache events of a deployment as chains of blocks: what entered the cache, behind which block, when."""

from dataclasses import dataclass, field
from pathlib import Path

from traces.errors import TraceError
from traces.formats.kv_events import DEVICE, AllBlocksCleared, BlockStored, EventHash, read_batches


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that entered the cache together at `at_s`: `depth` blocks of their chain come before them."""

    at_s: float
    depth: int
    hashes: tuple[EventHash, ...]
    parent: EventHash | None

    @property
    def end(self) -> int:
        """The blocks of the chain up to the last one of these."""
        return self.depth + len(self.hashes)


@dataclass
class BlockEvents:
    """The stored blocks of a file. Chains whose first blocks are older than the file hang on a hash in `older`."""

    file: str
    block_size: int
    stored: list[Stored] = field(default_factory=list)
    parents: dict[EventHash, EventHash | None] = field(default_factory=dict)
    older: dict[EventHash, list[int]] = field(default_factory=dict)  # events (places in `stored`) below each
    cleared: int = 0
    offloaded: int = 0

    def chain(self, last: EventHash | None) -> list[EventHash]:
        """The blocks up to `last`, from the first one of the chain that the file shows, or from its older root."""
        found: list[EventHash] = []
        while last is not None:
            found.append(last)
            last = self.parents.get(last)
        return found[::-1]


def read_block_events(path: Path) -> BlockEvents:
    """The stored blocks of a file of events. Raises TraceError."""
    found: BlockEvents | None = None
    places: dict[EventHash, tuple[EventHash | None, int]] = {}  # older root, and depth below it
    for batch in read_batches(path):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared) and found is not None:
                found.cleared += 1
            if not isinstance(event, BlockStored) or not event.block_hashes:
                continue
            if found is None:
                found = BlockEvents(path.name, event.block_size)
            if event.block_size != found.block_size:
                sizes = f"{found.block_size} and of {event.block_size}"
                raise TraceError(str(path), None, "block_size", f"blocks of {sizes} tokens in one file")
            if event.medium not in (None, DEVICE) or event.group_idx not in (None, 0):
                found.offloaded += 1
                continue
            _add(found, places, event, batch.ts)
    if found is None or not found.stored:
        raise TraceError(str(path), None, None, "no event in it stores a block on the device")
    return found


def _add(
    found: BlockEvents,
    places: dict[EventHash, tuple[EventHash | None, int]],
    event: BlockStored,
    at_s: float,
) -> None:
    parent = event.parent_block_hash
    if parent is None:
        root, depth = None, 0
    elif parent in places:
        root, depth = places[parent]
    else:
        root, depth = parent, 0  # blocks that were stored before the file begins
        places[parent] = root, depth
        found.older[parent] = []
    hashes = tuple(event.block_hashes)
    for index, (own, before) in enumerate(zip(hashes, (parent, *hashes), strict=False)):
        if own not in places:
            places[own] = root, depth + index + 1
            found.parents[own] = before
    if root is not None:
        found.older[root].append(len(found.stored))
    found.stored.append(Stored(at_s, depth, hashes, parent))
