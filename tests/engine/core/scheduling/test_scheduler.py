import numpy as np
import pytest
from slot_model import SlotModel

from engine.core.errors import CoreError, NeverFitsError
from engine.core.identity import KeyIdentity, TokenIdentity
from engine.core.memory.paged import PagedManager
from engine.core.options import Decoding, SchedulerLimits, Scheduling
from engine.core.plan import StepResult
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler


def model_of(
    blocks: int = 32,
    size: int = 4,
    budget: int = 16,
    running: int = 8,
    *,
    chunked: bool = True,
    mixed: bool = True,
) -> SlotModel:
    manager = PagedManager(blocks, size)
    limits = SchedulerLimits(budget, running, chunked_prefill=chunked, mixed_steps=mixed)
    return SlotModel(Scheduler(manager, limits))


def submit(
    model: SlotModel, rid: int, prompt: int, output: int, width: int = 1, mode: str = "greedy", first: int = 0
) -> None:
    tokens = np.arange(first, first + prompt)
    identity = TokenIdentity(rid, tokens)
    request = Request(rid, prompt, output, width, Decoding(mode), identity)
    model.submit(request, tokens.tolist())


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    model = model_of(budget=16)
    submit(model, 0, prompt=40, output=2)
    model.run()
    assert [plan.rows[0].query_len for plan in model.plans] == [16, 16, 8, 1]


def test_only_the_last_chunk_samples() -> None:
    model = model_of(budget=16)
    submit(model, 0, prompt=40, output=1)
    model.run()
    assert [plan.rows[0].samples for plan in model.plans] == [False, False, True]


def test_running_requests_come_before_waiting_ones() -> None:
    model = model_of(budget=16)
    submit(model, 0, prompt=24, output=4)
    submit(model, 1, prompt=24, output=4, first=100)
    model.step()
    plan = model.step()
    assert [(row.request_id, row.query_len) for row in plan.rows] == [(0, 8), (1, 8)]


def test_all_that_decodes_waits_for_prompts_where_steps_are_not_mixed() -> None:
    model = model_of(budget=16, mixed=False)
    submit(model, 0, prompt=8, output=6)
    submit(model, 1, prompt=8, output=6, first=50)
    model.step()
    model.step()  # both decode
    submit(model, 2, prompt=24, output=4, first=100)
    model.run()
    rows = [[(row.request_id, row.query_len) for row in plan.rows] for plan in model.plans]
    decodes = [(0, 1), (1, 1), (2, 1)]
    assert rows == [[(0, 8), (1, 8)], decodes[:2], [(2, 16)], [(2, 8)], *[decodes] * 3, decodes[:2]]


def test_decodes_go_on_where_no_prompt_fits_and_steps_are_not_mixed() -> None:
    model = model_of(blocks=6, size=4, mixed=False)
    submit(model, 0, prompt=16, output=5)
    submit(model, 1, prompt=16, output=2, first=100)
    model.run()
    rows = [[(row.request_id, row.query_len) for row in plan.rows] for plan in model.plans]
    assert rows == [[(0, 16)], *[[(0, 1)]] * 4, [(1, 16)], [(1, 1)]]


def test_a_full_prefix_hit_still_computes_the_last_block() -> None:
    model = model_of(size=4)
    submit(model, 0, prompt=8, output=1)
    model.run()
    submit(model, 1, prompt=8, output=1)
    plan = model.step()
    assert (plan.rows[0].context_len, plan.rows[0].query_len, plan.hit_tokens) == (4, 4, 4)


def test_a_second_request_in_the_same_step_hits_the_first() -> None:
    model = model_of(budget=64)
    submit(model, 0, prompt=13, output=2)
    submit(model, 1, prompt=13, output=2)
    plan = model.step()
    assert plan.hit_tokens == 12
    assert plan.rows[0].table[:3] == plan.rows[1].table[:3]


def test_preemption_takes_the_youngest_and_keeps_its_tokens() -> None:
    model = model_of(blocks=6, size=4, running=4)
    submit(model, 0, prompt=8, output=9)
    submit(model, 1, prompt=8, output=9, first=100)
    model.run()
    assert [rid for plan in model.plans for rid in plan.preempted] == [1]
    assert sorted(model.finished) == [0, 1]
    assert len(model.tokens[1, 0]) == 17


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    model = model_of(blocks=6, size=4, running=4)
    for rid in range(3):
        submit(model, rid, prompt=8, output=9, first=100 * rid)
    model.run()
    assert any(plan.preempted for plan in model.plans)
    assert not any(plan.preempted and plan.admitted for plan in model.plans)


def test_a_resumed_request_hits_what_survived_apart_from_fresh_hits() -> None:
    model = model_of(blocks=6, size=4, running=4)
    submit(model, 0, prompt=8, output=9)
    submit(model, 1, prompt=8, output=9, first=100)
    model.run()
    stats = model.stats[1]
    assert stats.preemptions == 1
    assert stats.hit_tokens == 0
    assert stats.resumed_hit_tokens + stats.recomputed_tokens >= 8


def test_what_another_request_computed_meanwhile_is_not_computed_again() -> None:
    """Request 0 is preempted, computes 7 of its 16 lost tokens, is preempted again, and then finds 8 of them."""
    scheduler = Scheduler(
        PagedManager(8, 4), SchedulerLimits(8, policy=Scheduling.priority, admit_whole_prompt=False)
    )
    # step, prompt, output, priority, text
    coming = [(1, 15, 3, 3, 1), (2, 19, 7, 1, 2), (10, 10, 3, 0, 1), (4, 12, 3, 1, 2)]
    reached, again, counted = [0] * 4, [0] * 4, [0] * 4
    for step in range(1, 20):
        for rid, (at, prompt, output, priority, text) in enumerate(coming):
            if at == step:
                identity = KeyIdentity(rid, ((text, prompt),))
                scheduler.submit(Request(rid, prompt, output, identity=identity, priority=priority))
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        for row in plan.rows:
            end = row.context_len + row.query_len
            again[row.request_id] += max(0, min(reached[row.request_id], end) - row.context_len)
            reached[row.request_id] = max(reached[row.request_id], end)
        for rid, stats in scheduler.commit(plan, StepResult()).stats.items():
            counted[rid] = stats.recomputed_tokens
    assert counted == again == [15, 0, 0, 0]


def test_the_first_request_that_does_not_fit_blocks_the_queue() -> None:
    model = model_of(blocks=8, size=4, budget=64)
    submit(model, 0, prompt=16, output=4)
    submit(model, 1, prompt=24, output=4, first=100)
    submit(model, 2, prompt=4, output=4, first=200)
    assert model.step().admitted == [0]


def test_a_prompt_that_exceeds_the_step_waits_without_chunking() -> None:
    model = model_of(budget=16, chunked=False)
    submit(model, 0, prompt=10, output=2)
    submit(model, 1, prompt=10, output=2, first=100)
    assert model.step().admitted == [0]
    assert model.step().admitted == [1]


def test_branches_count_against_the_running_limit() -> None:
    model = model_of(running=4, budget=64)
    submit(model, 0, prompt=4, output=3, width=3, mode="beam")
    submit(model, 1, prompt=4, output=3, width=2, mode="sample", first=100)
    assert model.step().admitted == [0]


@pytest.mark.parametrize(
    ("prompt", "output", "width", "mode", "reason"),
    [
        (128, 8, 1, "greedy", "needs 34 blocks of 4 tokens, the pool has 32"),
        (100, 8, 4, "beam", "needs 33 blocks"),
        (4, 4, 9, "beam", "has 9 sequences, a step takes 8"),
    ],
)
def test_what_can_never_fit_is_rejected_at_once(
    prompt: int, output: int, width: int, mode: str, reason: str
) -> None:
    model = model_of()
    with pytest.raises(NeverFitsError, match=reason):
        submit(model, 0, prompt, output, width, mode)
    assert not model.scheduler.has_work


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    model = model_of(blocks=8, size=4)
    submit(model, 0, prompt=25, output=8)
    model.run()
    assert model.finished == [0]


def test_an_early_end_releases_everything() -> None:
    model = model_of()
    submit(model, 0, prompt=6, output=50)
    plan = model.scheduler.schedule()
    report = model.scheduler.commit(plan, StepResult(finished=frozenset({0})))
    assert report.finished == [0]
    assert model.scheduler.manager.usage(None).token == 0


def test_submitting_a_request_twice_is_refused() -> None:
    model = model_of()
    submit(model, 0, 4, 4)
    with pytest.raises(CoreError, match="request 0 was submitted before"):
        submit(model, 0, 4, 4)


def test_scheduling_without_work_is_refused() -> None:
    with pytest.raises(CoreError, match="nothing is running or waiting"):
        model_of().scheduler.schedule()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("can_admit", "nothing runs, and request 7 has no room"),
        ("can_extend", "request 7 has no room although it runs alone"),
    ],
)
def test_a_memory_that_never_has_room_for_what_it_accepts_is_an_error_and_no_endless_run(
    wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagedManager, wrong, lambda *asked: False)
    scheduler = model_of().scheduler
    scheduler.submit(Request(7, 4, 4))

    def run() -> None:
        for _ in range(1000):
            scheduler.commit(scheduler.schedule(), StepResult())

    with pytest.raises(CoreError, match=said):
        run()


def test_preemptions_that_others_caused_do_not_end_a_run_in_which_a_request_is_once_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = model_of(budget=16).scheduler
    scheduler.submit(Request(7, 40, 4))
    scheduler.commit(scheduler.schedule(), StepResult())
    stats = scheduler.stats[7]
    stats.preemptions = 500
    with monkeypatch.context() as full:
        full.setattr(PagedManager, "can_extend", lambda *asked: False)
        scheduler.commit(scheduler.schedule(), StepResult())
    while scheduler.has_work:
        scheduler.commit(scheduler.schedule(), StepResult())
    assert stats.preemptions == 501


def test_a_static_batch_whose_last_request_is_aborted_gives_its_memory_to_the_next() -> None:
    model = SlotModel(Scheduler(PagedManager(8, 4), SchedulerLimits(32, 8, static_batch=True)))
    submit(model, 0, prompt=8, output=1)
    submit(model, 1, prompt=8, output=9, first=100)
    submit(model, 2, prompt=28, output=2, first=200)
    model.step()  # request 0 ends, and keeps its blocks until the batch does
    model.scheduler.abort(1)
    model.run()
    assert model.plans[-1].rows[0].request_id == 2


def test_a_watermark_keeps_blocks_free_beside_running_requests() -> None:
    manager = PagedManager(10, 4)
    model = SlotModel(Scheduler(manager, SchedulerLimits(64, 8, watermark=0.3)))
    submit(model, 0, prompt=16, output=4)
    submit(model, 1, prompt=16, output=4, first=100)
    assert model.step().admitted == [0]


def test_the_counters_of_an_ended_request_come_with_the_report_and_are_not_kept() -> None:
    model = model_of()
    submit(model, 0, prompt=8, output=2)
    submit(model, 1, prompt=8, output=2)
    model.run()
    assert model.stats[1].hit_tokens == 4
    assert not model.scheduler.stats


def test_the_counters_of_an_aborted_request_are_returned_and_not_kept() -> None:
    model = model_of()
    submit(model, 0, prompt=8, output=2)
    assert model.scheduler.abort(0).hit_tokens == 0
    assert not model.scheduler.stats


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    model = model_of()
    submit(model, 0, prompt=8, output=2)
    model.run()
    submit(model, 0, prompt=8, output=2)
    model.run()
    assert model.finished == [0, 0]


def contended(*, adaptive: bool) -> SlotModel:
    """Six requests of which one or two fit until their ends."""
    limits = SchedulerLimits(64, 8, adaptive_watermark=adaptive)
    model = SlotModel(Scheduler(PagedManager(12, 4), limits))
    for rid in range(6):
        submit(model, rid, prompt=8, output=30, first=100 * rid)
    return model


def test_an_adaptive_watermark_keeps_requests_out_after_a_preemption() -> None:
    preemptions = []
    for adaptive in (False, True):
        model = contended(adaptive=adaptive)
        model.run()
        assert sorted(model.finished) == list(range(6))
        preemptions.append(sum(len(plan.preempted) for plan in model.plans))
    assert preemptions[1] < preemptions[0]


def test_an_adaptive_watermark_falls_with_the_steps() -> None:
    model = contended(adaptive=True)
    while not any(plan.preempted for plan in model.plans):
        model.step()
    rules = model.scheduler._admission
    kept = [rules._spare_blocks()]
    for _ in range(300):
        model.scheduler._batch.calendar.clock.now += 1
        kept.append(rules._spare_blocks())
    assert kept[0] > 0
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0


def test_nothing_is_fast_forwarded_while_requests_wait_for_the_watermark_to_fall() -> None:
    model = contended(adaptive=True)
    while not any(plan.preempted for plan in model.plans):
        model.step()
    assert len(model.scheduler.waiting)
    assert model.step(max_steps=30).num_steps == 1


def test_the_watermark_counts_the_null_block_as_vllm_does() -> None:
    scheduler = Scheduler(PagedManager(19, 4), SchedulerLimits(64, 8, watermark=0.1))  # a tenth of 20
    scheduler.submit(Request(0, 37, 3))
    scheduler.commit(scheduler.schedule(), StepResult())
    scheduler.submit(Request(1, 29, 2))  # 8 blocks of the 9 that are left: with two spare ones too many
    assert scheduler.schedule().admitted == []


def test_a_first_chunk_is_as_long_as_the_cap_where_it_alone_must_fit() -> None:
    limits = SchedulerLimits(64, 8, admit_whole_prompt=False, long_prefill_tokens=4)
    scheduler = Scheduler(PagedManager(8, 4), limits)
    scheduler.submit(Request(0, 32, 1))
    scheduler.submit(Request(1, 31, 1))  # its first chunk needs one block of the seven that are left
    assert scheduler.schedule().admitted == [0, 1]


@pytest.mark.parametrize(("adaptive", "chunks"), [(False, [8, 8]), (True, [16, 16])])
def test_an_adaptive_cap_is_at_least_the_share_of_each_request(adaptive: bool, chunks: list[int]) -> None:
    limits = SchedulerLimits(32, 8, long_prefill_tokens=8, long_prefill_adaptive=adaptive)
    scheduler = Scheduler(PagedManager(100, 4), limits)
    for number in range(2):
        scheduler.submit(Request(number, 40, 1))
    assert [row.query_len for row in scheduler.schedule().rows] == chunks


def test_the_token_of_a_preempted_decoder_goes_to_the_chunk_behind() -> None:
    """Two prompts in chunks of at most 8 beside a decoder that matters less; the pool is full before the last chunk."""
    limits = SchedulerLimits(16, 8, long_prefill_tokens=8, policy=Scheduling.priority)
    scheduler = Scheduler(PagedManager(12, 4), limits)
    plans = []
    for requests in ([Request(0, 8, 9, priority=5)], [Request(1, 24, 1), Request(2, 24, 1)], [], []):
        for request in requests:
            scheduler.submit(request)
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1], StepResult())
    assert [row.query_len for row in plans[2].rows] == [1, 8, 7]
    assert list(plans[3].preempted) == [0]
    assert [row.query_len for row in plans[3].rows] == [8, 8]


def test_a_decoder_that_is_preempted_for_prompts_alone_gives_them_no_token() -> None:
    """The second prompt needs its blocks; the third one gets what the first two leave of 20 tokens."""
    limits = SchedulerLimits(20, 8, long_prefill_tokens=8, policy=Scheduling.priority, mixed_steps=False)
    scheduler = Scheduler(PagedManager(15, 4), limits)
    plans = []
    prompts = [Request(number, 24, 1) for number in (1, 2, 3)]
    for requests in ([Request(0, 8, 9, priority=5)], prompts, [], []):
        for request in requests:
            scheduler.submit(request)
        plans.append(scheduler.schedule())
        scheduler.commit(plans[-1], StepResult())
    assert list(plans[3].preempted) == [0]
    assert [row.query_len for row in plans[3].rows] == [8, 8, 4]


def test_what_a_step_ends_keeps_its_blocks_and_place_until_the_next_one_is_scheduled() -> None:
    """The second request finds no place beside the step under way: its step is scheduled when that one has ended."""
    manager, waited = PagedManager(4, 4), list[int]()
    scheduler = Scheduler(manager, SchedulerLimits(max_running=1, ahead=True))
    for number in range(2):
        scheduler.submit(Request(number, 4, 1))
    report = scheduler.commit(scheduler.schedule(), StepResult())
    assert report.finished == [0]
    assert manager.pool.free_blocks == 3
    assert [group.request.request_id for group in scheduler.running] == [0]
    plan = scheduler.schedule(waited=lambda: waited.append(manager.pool.free_blocks))
    assert (waited, plan.admitted) == ([4], [1])


def test_drafts_go_on_past_the_end_of_a_request_and_reserve_slots_for_the_next() -> None:
    """Three drafts a step, all right; the second step needs one token and still verifies three drafts."""
    manager = PagedManager(10, 4)
    scheduler, seen = Scheduler(manager, SchedulerLimits()), list[tuple[int, int]]()
    scheduler.submit(Request(0, 4, 6, speculation=Speculation(3)))
    while scheduler.has_work:
        plan = scheduler.schedule()
        seen.append((plan.rows[0].query_len, len(plan.rows[0].table)))
        scheduler.commit(plan, StepResult(accepted={0: 3} if plan.rows[0].drafts else {}))
        manager.check()
    assert seen == [(4, 2), (4, 3), (4, 4)]
    assert manager.usage(None).token == 0
