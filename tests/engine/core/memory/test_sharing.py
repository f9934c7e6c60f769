"""Forks, copy-on-write and beams: counts that follow from theory."""

import numpy as np
import pytest
from slot_model import SlotModel

from engine.core.identity import TokenIdentity
from engine.core.memory.contiguous import ContiguousManager
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits
from engine.core.request import Request
from engine.core.scheduling.scheduler import Scheduler


def run_group(mode: str, width: int, prompt: int, output: int, size: int = 16, **kwargs) -> SlotModel:  # type: ignore[no-untyped-def]
    model = SlotModel(Scheduler(PagedManager(200, size), SchedulerLimits(512, 64)))
    tokens = np.arange(prompt)
    model.submit(Request(0, prompt, output, width, Decoding(mode), TokenIdentity(0, tokens)), tokens.tolist())
    model.run(**kwargs)
    return model


@pytest.mark.parametrize("width", [2, 4, 8])
def test_samples_sharing_a_partial_tail_cost_one_copy_less_than_their_number(width: int) -> None:
    assert run_group("sample", width, prompt=20, output=3).copies == width - 1


def test_samples_of_a_prompt_that_ends_on_a_block_copy_nothing() -> None:
    assert run_group("sample", 4, prompt=32, output=3).copies == 0


def test_sixty_four_token_prompt_with_four_beams_peaks_at_eight_blocks() -> None:
    model = run_group("beam", 4, prompt=64, output=11)
    assert max(plan.usage.physical_blocks for plan in model.plans) == 8
    assert max(plan.usage.logical_blocks for plan in model.plans) == 20


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("prompt", [7, 16, 33])
def test_beam_copies_are_width_less_distinct_parents_off_a_block_boundary(width: int, prompt: int) -> None:
    expected, steps = 0, [0]

    def choose(k: int) -> list[int]:
        nonlocal expected
        steps[0] += 1
        parents = [(steps[0] * i) % k for i in range(k)]
        kv_len = prompt + steps[0]
        if kv_len % 16 and steps[0] < 29:  # the last choice is never written
            expected += k - len(set(parents))
        return parents

    model = run_group("beam", width, prompt, output=30, choose_parents=choose)
    fork = width - 1 if prompt % 16 else 0
    assert model.copies == expected + fork


def test_unmoved_beams_copy_only_at_the_fork() -> None:
    model = run_group("beam", 4, prompt=20, output=30, choose_parents=lambda k: list(range(k)))
    assert model.copies == 3


def test_nothing_is_left_after_a_beam_group_ends() -> None:
    model = run_group("beam", 4, prompt=20, output=30)
    usage = model.scheduler.manager.usage(None)
    assert (usage.token, usage.logical_blocks, usage.internal, usage.reserved) == (0, 0, 0, 0)


def test_generated_blocks_of_samples_are_cached_per_branch() -> None:
    model = run_group("sample", 2, prompt=16, output=18)
    assert model.scheduler.manager.usage(None).cached == 16 + 2 * 16


def test_a_contiguous_fork_copies_the_prompt_for_every_branch_but_the_first() -> None:
    model = SlotModel(Scheduler(ContiguousManager(400, 100), SchedulerLimits(512, 64)))
    model.submit(Request(0, 20, 5, 4, Decoding.sample), list(range(20)))
    model.run()
    assert model.copies == 3 * 20
    assert model.finished == [0]


def test_contiguous_beams_copy_only_what_was_generated() -> None:
    model = SlotModel(Scheduler(ContiguousManager(400, 100), SchedulerLimits(512, 64)))
    model.submit(Request(0, 20, 4, 2, Decoding.beam), list(range(20)))
    model.run(choose_parents=lambda k: [0, 0])
    assert model.copies == 20 + 1 + 2
