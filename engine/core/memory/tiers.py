"""Tiers below the pool: host memory and disk that keep content by hash, for prefixes that the pool has evicted.

A tier is filled when a table is released (`TierStore.written`) or when the pool evicts a block (`TierStore.evicted`).
What the host evicts goes to the disk. A look-up finds the longest prefix over the pool and then the tiers; what is
loaded becomes a block of the pool again and stays in its tier. A unit (a block, or a chunk of blocks as in LMCache) is
stored, found and read as a whole. Tiers have rules of eviction of their own.

Reading delays the step that admits a request, or runs beside it. Writing has a direction and a stream of its own, so it
takes no time of a step; its seconds are counted. Where the engine itself copies (`HostBlocks`), the plan has the copies
of both directions among those of swapped blocks, and the step waits for them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from engine.core.errors import CoreError, InvariantError
from engine.core.identity import BlockHash
from engine.core.memory.eviction import EvictionPolicy, PoolFacts, Released
from engine.core.options import TierLoad, TierStore
from engine.core.plan import Loads, SwapList
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of `units` units. A unit has a latency, and each of its blocks a time to read and to write, in seconds."""

    name: str
    units: int
    read_s: float = 0.0
    write_s: float = 0.0
    latency_s: float = 0.0


class Unit(NamedTuple):
    """What a rule of eviction is told of a unit: its place in its prefix, in units, and whose it was last."""

    key: BlockHash
    place: int
    request: Request | None


class Tier:
    """Content by key, the hash of a unit's last block. `policy` says which unit leaves a full tier."""

    def __init__(self, spec: TierSpec, policy: EvictionPolicy) -> None:
        if spec.units < 1:
            raise CoreError(f"tier {spec.name} has {spec.units} units, must have at least 1")
        self.spec = spec
        self.written = self.read = self.evicted = 0  # units
        self._policy = policy
        self.slots: dict[BlockHash, int] = {}  # of what is here
        self._units: list[Unit | None] = []  # by slot
        self._free: list[int] = []
        self._reading: dict[int, bool] = {}  # slots that the step under way reads: whether they are evicted
        policy.facts.num_blocks, policy.facts.hash_of = spec.units, self._key

    def _key(self, slot: int) -> BlockHash | None:
        unit = self._units[slot]
        return None if unit is None else unit.key

    def __contains__(self, key: BlockHash) -> bool:
        return key in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def hold(self, slots: Iterable[int]) -> None:
        """The step under way reads `slots`: until `settle`, nothing else comes there."""
        self._reading.update(dict.fromkeys(slots, False))

    def settle(self) -> None:
        """The step under way is planned."""
        self._free += (slot for slot, evicted in self._reading.items() if evicted)
        self._reading.clear()

    def touch(self, units: Iterable[Unit]) -> None:
        """The units, in the order of a prefix, are of use again, as far as they are here."""
        here = [unit for unit in units if unit.key in self.slots]
        slots = [self.slots[unit.key] for unit in here]
        self._policy.reuse(slots, slots)
        self._push(slots, here)

    def store(self, units: Sequence[Unit]) -> list[Unit]:
        """Keep the units, in the order of a prefix, as many as fit; returns those evicted for them.

        Units that are here already are of use again, and not written.
        """
        units = list({unit.key: unit for unit in units}.values())[: self.spec.units]
        known = [self.slots[unit.key] for unit in units if unit.key in self.slots]
        self._policy.reuse(known, known)
        room = self.spec.units - len(self.slots)
        lost = self._evict(max(0, len(units) - len(known) - room))
        slots = [self.slots[unit.key] if unit.key in self.slots else self._enter(unit) for unit in units]
        self._push(slots, units)
        return lost

    def _push(self, slots: Sequence[int], units: Sequence[Unit]) -> None:
        """Tell the rule: units of one request without a gap at once, and of several such runs the last one first."""
        end = len(units)
        for start in range(end - 1, -1, -1):
            self._units[slots[start]] = unit = units[start]
            before = units[start - 1] if start else None
            if before is None or (before.place + 1, before.request) != unit[1:]:
                self._policy.push(slots[start:end], Released(slots[start:end], unit.place, unit.request))
                end = start

    def _enter(self, unit: Unit) -> int:
        if self._free:
            slot = self._free.pop()
            self._units[slot] = unit
        else:
            slot = len(self._units)
            self._units.append(unit)
        self.slots[unit.key] = slot
        self.written += 1
        return slot

    def _evict(self, count: int) -> list[Unit]:
        lost: list[Unit] = []
        for slot in self._policy.pop(count):
            unit = self._units[slot]
            assert unit is not None, "a unit that can be evicted is here"
            del self.slots[unit.key]
            lost.append(unit)
            self._units[slot] = None
            if slot in self._reading:
                self._reading[slot] = True
            else:
                self._free.append(slot)
        self.evicted += len(lost)
        return lost

    def empty(self) -> None:
        """Evict all."""
        self._evict(len(self))

    def check(self) -> None:
        """Raise InvariantError unless keys, slots, the order of eviction and the counters agree."""
        stored = {slot: unit.key for slot, unit in enumerate(self._units) if unit is not None}
        if stored != {slot: key for key, slot in self.slots.items()}:
            raise InvariantError(f"tier {self.spec.name}: keys and slots do not agree")
        if sorted(self._policy.blocks()) != sorted(stored) or len(self._policy) != len(stored):
            raise InvariantError(f"tier {self.spec.name}: its order of eviction has other units")
        unused = len(self._free) + sum(self._reading.values())
        if len(stored) + unused != len(self._units) or len(stored) > self.spec.units:
            raise InvariantError(f"tier {self.spec.name}: {len(stored)} units of {self.spec.units}")
        if self.written - self.evicted != len(stored):
            raise InvariantError(f"tier {self.spec.name}: {self.written} written, {self.evicted} evicted")


class Part(NamedTuple):
    """Blocks that one tier has behind a prefix: how many are of use, and the units that are read for them."""

    tier: int
    blocks: int
    keys: list[BlockHash]


class TierHit(Sequence[int]):
    """A prefix whose first blocks are in the pool (`pool`), and the others in tiers (`parts`, in order).

    As a sequence it has a number for each block; `keys` has the hash of each.
    """

    def __init__(self, pool: list[int], parts: Sequence[Part], keys: Sequence[BlockHash]) -> None:
        self.pool, self.parts, self.keys = pool, parts, keys
        self.loaded = sum(part.blocks for part in parts)

    def __len__(self) -> int:
        return len(self.pool) + self.loaded

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:  # type: ignore[override]
        return range(len(self))[index]


@dataclass(slots=True)
class TierCounts:
    """What tiers did in a run: blocks, and seconds."""

    hit_blocks: list[int]  # of use, by tier
    load_s: float = 0.0  # reading
    saved_s: float = 0.0  # computing that reading has spared
    write_s: float = 0.0


class HostBlocks:
    """The copies of an engine between its pool and the units of the first tier, in host blocks from `first` on.

    A step saves blocks before it brings others back. So what it reads keeps its place until the next one, and there
    are `spare` more units than the tier holds.
    """

    def __init__(self, first: int, spare: int) -> None:
        self.first, self.spare = first, spare
        # host block: device block; of several for one place the last one counts
        self._out: dict[int, int] = {}
        self._in: SwapList = []

    def save(self, slot: int, blocks: Sequence[int]) -> None:
        """Save the blocks of a unit."""
        start = self.first + slot * len(blocks)
        self._out.update(zip(range(start, start + len(blocks)), blocks, strict=True))

    def bring(self, hosts: Iterable[int], blocks: Sequence[int]) -> None:
        """Bring blocks back; `hosts` count from the first of the tier."""
        self._in += zip((self.first + host for host in hosts), blocks, strict=True)

    def drain(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks to save before the next step, and (host, device) blocks to bring back."""
        found = [(block, host) for host, block in self._out.items()], self._in
        self._out, self._in = {}, []
        return found


class Tiers:
    """The tiers below one pool, the fastest first. `facts` prices what is computed again.

    `copies`: an engine fills and reads the first tier; None: seconds of reading are in the plan alone.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        facts: PoolFacts,
        *,
        chunk: int = 1,
        store: TierStore = TierStore.written,
        load: TierLoad = TierLoad.always,
        overlaps: bool = False,
        copies: HostBlocks | None = None,
    ) -> None:
        if chunk < 1 or (chunk > 1 and store is TierStore.evicted):
            raise CoreError(
                f"chunks of {chunk} blocks: must be 1 or more, and 1 where evicted blocks are stored"
            )
        self.tiers, self.chunk, self.overlaps = tiers, chunk, overlaps
        self.counts = TierCounts([0] * len(tiers))
        self.facts, self.store, self.rule = facts, store, load
        self._loaded, self._load_s = 0, 0.0
        self._copies = copies

    @property
    def host_blocks(self) -> int:
        """Host memory of the first tier's copies, in blocks."""
        copies = self._copies
        return 0 if copies is None else (self.tiers[0].spec.units + copies.spare) * self.chunk

    def _units(self, keys: Sequence[BlockHash], request: Request) -> list[Unit]:
        """The whole units of a prefix."""
        last = range(self.chunk - 1, len(keys), self.chunk)
        return [Unit(keys[block], place, request) for place, block in enumerate(last)]

    def _place(self, key: BlockHash) -> int | None:
        """The first tier that has a unit."""
        return next((index for index, each in enumerate(self.tiers) if key in each), None)

    def named(self, hashes: Sequence[BlockHash], private: Sequence[int], asked: int) -> Sequence[BlockHash]:
        """`hashes` and, for blocks behind them that a preempted request alone knows, their numbers, from `private` on.

        They go to the end of the unit in which `asked` blocks end. A unit has the numbers that its last block has.
        """
        names, first = list(hashes), len(hashes) // self.chunk
        for last in range((first + 1) * self.chunk - 1, asked + self.chunk - 1, self.chunk):
            found = (base for base in private if self._place(base + last) is not None)
            base = next(found, private[-1])
            names += range(base + len(names), base + last + 1)
        return names

    def find(self, hashes: Sequence[BlockHash], hits: list[int], asked: int) -> TierHit:
        """The longest prefix of at most `asked` blocks of which the pool has `hits`. Changes nothing."""
        place, parts = len(hits), list[Part]()
        while place < asked:
            number = place // self.chunk
            end = (number + 1) * self.chunk
            if end > len(hashes):
                break
            key = hashes[end - 1]
            tier = self._place(key)
            if tier is None:
                break
            blocks = min(end, asked) - place
            if parts and parts[-1].tier == tier:
                parts[-1] = Part(tier, parts[-1].blocks + blocks, [*parts[-1].keys, key])
            else:
                parts.append(Part(tier, blocks, [key]))
            place += blocks
        if self.rule is TierLoad.cheaper:
            parts = self._worth(len(hits), parts)
        return TierHit(hits, parts, hashes[: len(hits) + sum(part.blocks for part in parts)])

    def _worth(self, hits: int, parts: list[Part]) -> list[Part]:
        """The leading parts whose reading saves most beside computing them."""
        saved = [0.0]
        for count in range(1, len(parts) + 1):
            blocks = sum(part.blocks for part in parts[:count])
            saved.append(self._computing_s(hits, blocks) - sum(map(self._reading_s, parts[:count])))
        return parts[: saved.index(max(saved))]

    def _computing_s(self, hits: int, blocks: int) -> float:
        size, seconds = self.facts.block_size, self.facts.seconds
        return seconds((hits + blocks) * size) - seconds(hits * size)

    def unit_s(self, tier: Tier) -> tuple[float, float]:
        """Seconds to read and to write a unit of `tier`."""
        spec = tier.spec
        return spec.latency_s + self.chunk * spec.read_s, spec.latency_s + self.chunk * spec.write_s

    def _reading_s(self, part: Part) -> float:
        return len(part.keys) * self.unit_s(self.tiers[part.tier])[0]

    def load(self, hit: TierHit, request: Request, take: Callable[[], list[int]]) -> list[int]:
        """Read what `hit` found in tiers, for a request that is admitted, into blocks of the pool that `take` gives.

        Taking blocks can evict others, which are written to a tier. So the places that are read are held before.
        """
        hosts, tier = self._hosts(hit), self.tiers[0]
        tier.hold(host // self.chunk for host in hosts.values())
        for part in hit.parts:
            self.tiers[part.tier].read += len(part.keys)
            self.counts.hit_blocks[part.tier] += part.blocks
            read_s = self._reading_s(part)
            self.counts.load_s += read_s
            if self._copies is None or part.tier:
                self._load_s += read_s
        self._loaded += hit.loaded
        if hit.parts:
            self.counts.saved_s += self._computing_s(len(hit.pool), hit.loaded)
        for tier in self.tiers:
            tier.touch(self._units(hit.keys, request))
        blocks = take()
        if self._copies is not None:
            self._copies.bring(hosts.values(), [blocks[place] for place in hosts])
        return blocks

    def _hosts(self, hit: TierHit) -> dict[int, int]:
        """By place among the loaded blocks the host blocks of those in the first tier; none without copies."""
        hosts, place = dict[int, int](), 0
        for part in hit.parts if self._copies is not None else ():
            if part.tier == 0:
                start = (len(hit.pool) + place) % self.chunk
                units = [self.tiers[0].slots[key] * self.chunk for key in part.keys]
                lying = [unit + block for unit in units for block in range(self.chunk)]
                hosts.update(enumerate(lying[start : start + part.blocks], place))
            place += part.blocks
        return hosts

    def released(self, hashes: Sequence[BlockHash], blocks: Sequence[int], request: Request) -> None:
        """A table with these leading cached blocks, and their hashes, is about to be released."""
        if self.store is TierStore.written:
            self._write(self._units(hashes, request), blocks)

    def spilled(self, units: Sequence[Unit], blocks: Sequence[int]) -> None:
        """The pool evicts `blocks`, which hold these units, in this order."""
        if self.store is TierStore.evicted:
            self._write(units[::-1], blocks[::-1])

    def _write(self, units: Sequence[Unit], blocks: Sequence[int]) -> None:
        """Store units in the first tier, and in each next one what the one before it has evicted.

        `blocks` are those of the pool, for each unit as many as a chunk has.
        """
        first, size, copies, lost = self.tiers[0], self.chunk, self._copies, units
        fresh = [] if copies is None else [place for place, unit in enumerate(units) if unit.key not in first]
        for tier in self.tiers:
            if not lost:
                break
            before = tier.written
            lost = tier.store(lost)[::-1]
            self.counts.write_s += (tier.written - before) * self.unit_s(tier)[1]
        for place in fresh:
            if copies is not None and units[place].key in first:
                copies.save(first.slots[units[place].key], blocks[place * size : (place + 1) * size])

    def drain_loads(self) -> Loads:
        """What was read since the last call, for the step that is being planned."""
        loads = Loads(self._loaded, self._load_s, self.overlaps)
        self._loaded, self._load_s = 0, 0.0
        self.tiers[0].settle()
        return loads

    def drain_copies(self) -> tuple[SwapList, SwapList]:
        """(device, host) blocks that were written since the last call, and (host, device) blocks that were read."""
        return ([], []) if self._copies is None else self._copies.drain()

    def reset(self) -> None:
        """Forget all content."""
        for tier in self.tiers:
            tier.empty()

    def check(self) -> None:
        """Verify every tier. Raises InvariantError."""
        for tier, hits in zip(self.tiers, self.counts.hit_blocks, strict=True):
            tier.check()
            if hits > tier.read * self.chunk:
                raise InvariantError(
                    f"tier {tier.spec.name}: {hits} blocks were hit, {tier.read} units of {self.chunk} blocks read"
                )


class SpillingQueue(EvictionPolicy):
    """A pool's policy of eviction, which tells tiers what leaves the pool."""

    def __init__(self, policy: EvictionPolicy, tiers: Tiers) -> None:
        self.facts, self.reads_clock = policy.facts, policy.reads_clock
        self._policy, self._tiers = policy, tiers
        # of a cached block: its place, and its last request
        self._told: dict[int, tuple[int, Request | None]] = {}
        self.reuse, self.forget = policy.reuse, policy.forget  # type: ignore[method-assign]
        self.blocks = policy.blocks  # type: ignore[method-assign]

    def __len__(self) -> int:
        return len(self._policy)

    def push(self, blocks: Sequence[int], table: Released) -> None:
        """Note what a tier is told of the blocks when they leave."""
        self._told.update(zip(blocks, zip(table.places(blocks), repeat(table.request)), strict=True))
        self._policy.push(blocks, table)

    def pop(self, count: int) -> list[int]:
        """Evict, and tell."""
        victims = self._policy.pop(count)
        keys = map(self.facts.hash_of, victims)
        units = [Unit(key, *self._told[block]) for key, block in zip(keys, victims, strict=True)]
        self._tiers.spilled(units, victims)
        return victims
