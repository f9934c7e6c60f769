"""The decisions of a step, of ours and of another scheduler, and the first difference between the two.

Block ids are compared under a renaming. When both sides give a request a fresh block, the two ids stand for the same
block from then on: later hits and evictions must name it on both sides. So the order in which two fresh blocks are
numbered is free, and nothing else is. `Comparison` also counts the steps with equal ids.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

Blocks = list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class Step:
    """What a scheduler decides in one step. Requests and blocks are named by their ids.

    * `admitted`: (request, tokens found in the prefix cache), in order of admission.
    * `preempted`: requests that lose their blocks, sorted.
    * `rows`: (request, tokens with K and V before the step, tokens computed in it), in order. A row of one token that
      follows on the request's row of the last step is left out.
    * `paused`: running requests without a row.
    * `blocks`: (request, blocks added to its table), for an admitted request its hits first.
    * `evicted`: cached blocks that are allocated again, in order.
    * `finished`: requests that end with the step, in order.
    * `running`, `waiting`, `free`: requests and free blocks once the step is scheduled.
    * `robbed`: requests that are preempted although the step had given them tokens; never ours.
    """

    admitted: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    blocks: Blocks = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    running: int = 0
    waiting: int = 0
    free: int = 0
    robbed: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Step":
        """A step from unpacked JSON."""
        pairs = {name: [tuple(one) for one in value[name]] for name in ("admitted", "rows", "blocks")}
        return cls(**{**value, **pairs})

    def json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Cause(StrEnum):
    """Differences that are known, and are no faults of either side."""

    block_ids = "block_ids"  # numbers of blocks that stand for each other
    # vLLM preempts by priority a request that the step has given tokens
    scheduled_victim = "scheduled_victim"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs: in which step, which field of `Step`, and what each side decided."""

    step: int
    name: str
    ours: object
    theirs: object
    request: int | None = None
    cause: Cause | None = None

    def text(self, engine: str) -> str:
        """One sentence for a user."""
        about = "" if self.request is None else f", request {self.request}"
        return f"step {self.step}{about}, {self.name}: {self.ours} here, {self.theirs} in {engine}"


_BEFORE = ("preempted", "admitted", "rows", "paused")  # compared before the blocks
_AFTER = ("finished", "running", "waiting", "free")


class Comparison:
    """Compares the two sides step by step. `block_size` in tokens; None: of layers in groups, whose blocks are counted.

    With `ahead` steps are scheduled ahead. With `same_ids` the numbers of the blocks must be equal too. `equal_ids`
    counts the steps in which they are.
    `counts` sums what was compared.
    """

    def __init__(self, block_size: int | None, *, same_ids: bool = True, ahead: bool = False) -> None:
        self.steps = 0
        self._ahead = ahead
        self._same_ids = same_ids
        self.equal_ids = 0
        self.counts: Counter[str] = Counter()
        self._tables = None if block_size is None else _Tables(block_size)

    @property
    def names_blocks(self) -> bool:
        """Whether blocks are compared by their numbers."""
        return self._tables is not None

    def note(self, ours: Step, theirs: Step) -> Difference | None:
        """Compare the next step; returns the first difference, after which no further step can be compared."""
        if (found := next(self._differences(ours, theirs), None)) is not None:
            return found
        equal_ids = (ours.evicted, sorted(ours.blocks)) == (theirs.evicted, sorted(theirs.blocks))
        if self._tables is not None and self._same_ids and not equal_ids:
            wrong = _first_of(self.steps, "numbers of blocks", sorted(ours.blocks), sorted(theirs.blocks))
            return replace(wrong, cause=Cause.block_ids)
        if self._tables is not None:
            self._tables.close(ours.finished)
        self.steps += 1
        self.equal_ids += equal_ids
        self.counts["rows"] += ours.running - len(ours.paused)
        self.counts["hit_tokens"] += sum(hits for _, hits in ours.admitted)
        self.counts["blocks"] += sum(len(added) for _, added in ours.blocks)
        for name in ("admitted", "preempted", "evicted", "finished"):
            self.counts[name] += len(getattr(ours, name))
        return None

    def _differences(self, ours: Step, theirs: Step) -> Iterator[Difference]:
        if theirs.robbed:  # ours never preempts a request that the step has given tokens
            words = "not preempted once it has tokens of the step", "preempted after it was given tokens"
            yield Difference(self.steps, "victim", *words, theirs.robbed[0], Cause.scheduled_victim)
        yield from self._listed(ours, theirs, _BEFORE)
        if self._tables is not None and (wrong := self._blocks(self._tables, ours, theirs)) is not None:
            yield wrong
        yield from self._listed(ours, theirs, _AFTER)

    def _listed(self, ours: Step, theirs: Step, names: Sequence[str]) -> Iterator[Difference]:
        for name in names:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine != other:
                make = _first_of if name in ("admitted", "rows") else Difference
                yield make(self.steps, name, mine, other)

    def _blocks(self, tables: "_Tables", ours: Step, theirs: Step) -> Difference | None:
        tables.close(ours.preempted)
        if self._ahead:  # they ended with the step before
            tables.close(ours.finished)
        evicted = [tables.renamed(block) for block in theirs.evicted]
        if evicted != ours.evicted:
            return Difference(self.steps, "evicted blocks", ours.evicted, evicted)
        mine, admitted = dict(ours.blocks), dict(ours.admitted)
        if sorted(mine) != sorted(request for request, _ in theirs.blocks):
            return _first_of(self.steps, "blocks", sorted(ours.blocks), sorted(theirs.blocks))
        for request, added in theirs.blocks:
            wrong = tables.extend(request, mine[request], added, admitted.get(request))
            if wrong is not None:
                return Difference(self.steps, "blocks", *wrong, request=request)
        return None


def _first_of(
    step: int, name: str, ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]
) -> Difference:
    """The first entry that differs; each begins with its request."""
    at = next(
        (index for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)) if mine != other),
        min(len(ours), len(theirs)),
    )
    mine, other = (side[at] if at < len(side) else None for side in (ours, theirs))
    named = mine or other
    return Difference(step, name, mine or "none", other or "none", None if named is None else named[0])


class _Tables:
    """The block tables of both sides, and which block of theirs stands for which of ours."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._ours_of: dict[int, int] = {}
        self._theirs_of: dict[int, int] = {}
        self._tables: dict[int, list[int]] = {}
        self._holders: Counter[int] = Counter()  # tables that have a block, by our id

    def renamed(self, block: int) -> int | str:
        """Our id of a block of theirs."""
        return self._ours_of.get(block, f"their block {block}")

    def close(self, requests: Sequence[int]) -> None:
        """These requests lose their tables."""
        for request in requests:
            self._holders.subtract(self._tables.pop(request, ()))

    def extend(
        self, request: int, ours: list[int], theirs: list[int], hit_tokens: int | None
    ) -> tuple[object, object] | None:
        """Both sides give blocks to a request, an admitted one its hits first; returns both sides if they differ."""
        if len(ours) != len(theirs):
            return f"{len(ours)} blocks", f"{len(theirs)} blocks"
        hits = (hit_tokens or 0) // self._size
        renamed = [self.renamed(block) for block in theirs[:hits]]
        if renamed != ours[:hits]:
            return f"hits {ours[:hits]}", f"hits {renamed}"
        for mine, other in zip(ours[hits:], theirs[hits:], strict=True):
            if self._holders[mine] > 0:
                return f"block {mine}, which another request holds", "a free block"
            partner = self._theirs_of.pop(mine, None)
            if partner is not None and self._ours_of.get(partner) == mine:
                del self._ours_of[partner]
            before = self._ours_of.get(other)
            if before is not None:
                if self._holders[before] > 0:
                    return "a free block", f"the block that stands for our {before}, which a request holds"
                self._theirs_of.pop(before, None)
            self._ours_of[other], self._theirs_of[mine] = mine, other
        self._tables.setdefault(request, []).extend(ours)
        self._holders.update(ours)
        return None
