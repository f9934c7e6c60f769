"""Faults planted in the policy core: beside what vLLM decided, each is found. Without a fault nothing differs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from oracle_cases import RECORDED, checked, random_case, recording

from engine.core.errors import CoreError
from engine.core.memory.block_pool import BlockPool
from engine.core.memory.eviction import LruQueue
from engine.core.memory.paged import PagedManager
from engine.core.memory.prefix_cache import PrefixCache
from engine.core.policies import ByPriority, LastInQueue, Youngest
from engine.core.scheduling.batch import WaitingQueue
from engine.core.scheduling.scheduler import AdmissionRules, Scheduler
from engine.core.sequence import Group, SequenceState
from harness.oracle.check import OracleError

Patch = Callable[[pytest.MonkeyPatch], None]


def lru_order(patch: pytest.MonkeyPatch) -> None:
    """The head of a released table is evicted first, not its tail."""
    push = LruQueue.push
    patch.setattr(LruQueue, "push", lambda self, blocks, table=None: push(self, list(blocks)[::-1], table))


def last_token(patch: pytest.MonkeyPatch) -> None:
    """A hit may cover the last token, so that nothing is left to compute where the prompt fills its blocks."""

    def lookup(self: PagedManager, group: Group) -> list[int]:
        return self.prefix_cache.find(group, group.root_target // self.block_size)[0]

    patch.setattr(PagedManager, "lookup", lookup)


def watermark(patch: pytest.MonkeyPatch) -> None:
    """The watermark counts one block too few."""
    spare = AdmissionRules._spare_blocks
    patch.setattr(AdmissionRules, "_spare_blocks", lambda self: max(0, spare(self) - 1))


def priority_tie(patch: pytest.MonkeyPatch) -> None:
    """Of equal priorities the later request is first."""
    patch.setattr(ByPriority, "key", lambda self, request, rank: (request.priority, -rank))


def running_prompt(patch: pytest.MonkeyPatch) -> None:
    """Blocks enter the cache when they are computed, so a request of the same step does not hit them."""
    cache_full = PrefixCache.cache_full

    def late(self: PrefixCache, sequence: SequenceState, blocks: int) -> None:
        cache_full(self, sequence, min(blocks, sequence.computed // self._size))

    patch.setattr(PrefixCache, "cache_full", late)


def partial_block(patch: pytest.MonkeyPatch) -> None:
    """The partial last block enters the cache when its request ends."""

    def computed(self: PrefixCache, sequence: SequenceState, unseen: int = 0) -> None:
        self.cache_full(sequence, -(-sequence.computed // self._size))

    patch.setattr(PrefixCache, "cache_computed", computed)


def chunk_budget(patch: pytest.MonkeyPatch) -> None:
    """A long prompt takes the whole budget although others wait."""
    patch.setattr(Scheduler, "_prefill_cap", lambda self: None)


def place_in_queue(patch: pytest.MonkeyPatch) -> None:
    """A preempted request goes to the end of the queue."""
    push = WaitingQueue.push

    def last(self: WaitingQueue, group: Group) -> None:
        if group.lost:
            group.key = (10**9 + len(self), *group.key)
        push(self, group)

    patch.setattr(WaitingQueue, "push", last)


def shared_reference(patch: pytest.MonkeyPatch) -> None:
    """A hit on a block in use adds no reference."""
    share = BlockPool.share
    patch.setattr(
        BlockPool,
        "share",
        lambda self, blocks: share(self, [block for block in blocks if not self.references(block)]),
    )


def referenced_block(patch: pytest.MonkeyPatch) -> None:
    """A block that is hit stays in the eviction queue, and is given out while it is in use."""

    def reuse(self: LruQueue, blocks: Sequence[int], queued: Sequence[int]) -> None:
        return None

    patch.setattr(LruQueue, "reuse", reuse)


def victim(patch: pytest.MonkeyPatch) -> None:
    """The request that was admitted first is preempted."""
    for policy in (Youngest, LastInQueue):
        patch.setattr(policy, "choose", lambda self, candidates: 0)


def salt(patch: pytest.MonkeyPatch) -> None:
    """Tenants share blocks."""
    patch.setattr("engine.core.identity._root", lambda salt, adapter, epoch=0: b"one")


def whole_prompt(patch: pytest.MonkeyPatch) -> None:
    """A request enters as soon as one block of its prompt fits."""
    fits = PagedManager.can_admit

    def first(
        self: PagedManager,
        group: Group,
        hits: Sequence[int],
        spare: int,
        tokens: int | None = None,
        chunk_end: int | None = None,
    ) -> bool:
        return fits(self, group, hits, spare, len(hits) * self.block_size + 1)

    patch.setattr(PagedManager, "can_admit", first)


FAULTS: tuple[Patch, ...] = (
    *(lru_order, last_token, watermark, priority_tie, running_prompt, partial_block, chunk_budget),
    *(place_in_queue, shared_reference, referenced_block, victim, salt, whole_prompt),
)


@contextmanager
def planted(fault: Patch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        yield


def first_difference(fault: Patch) -> str | None:
    """What the comparison, or the core itself, says of a core with this fault, over all recordings."""
    cases = [(random_case(seed), recording(seed)) for seed in RECORDED]
    with planted(fault):
        for case, vllm in cases:
            try:
                checked(case, vllm.step)
            except (OracleError, CoreError) as error:
                return str(error)
    return None


@pytest.mark.parametrize("seed", RECORDED)
def test_the_core_decides_as_vllm_did(seed: int) -> None:
    report = checked(random_case(seed), recording(seed).step)
    assert report.compared == report.equal_ids == report.steps > 100


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Patch) -> None:
    found = first_difference(fault)
    assert found is not None
    # the core itself refuses to give out a block in use
    said = "cache.eviction: " if fault is referenced_block else "vLLM decides differently: step "
    assert found.startswith(said)


def test_a_difference_names_step_request_and_both_sides() -> None:
    found = first_difference(chunk_budget)
    assert found is not None
    assert "request " in found
    assert " here, " in found
    assert " in vLLM" in found
