"""What swapped blocks and a draft model's passes cost: features of the plan, priced by each model."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from sim_cases import replay, request

from engine.core.memory.paged import PagedManager
from engine.core.options import Preemption, SchedulerLimits
from engine.core.request import Request, Speculation
from engine.core.scheduling.scheduler import Scheduler
from harness.cost.fitted import fit_cost
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.replay.arrivals import TimedRequest
from harness.replay.beams import BeamGenealogy
from harness.replay.branches import DraftAcceptance
from harness.replay.cost_model import CostSource, price_table
from harness.replay.executors import SimulatedExecutor
from harness.replay.features import AT, FEATURES
from harness.replay.loop import Replay
from harness.replay.recorder import PlanRecording

MODEL = ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
DEVICE = DeviceShape("h200", 4.8e12, 989e12, 1e-4, 1e-6, host_bandwidth=64e9, host_latency_s=2e-6)
SLOTS, BLOCKS, PASSES, TOKENS, DRAFT_KV = [
    AT.swapped_slots,
    AT.swapped_blocks,
    AT.draft_passes,
    AT.draft_tokens,
    AT.draft_kv,
]


def swapping(block_size: int) -> np.ndarray:
    """Features of a run whose requests do not fit all at once."""
    requests = [request(rid, 0, 40, 60) for rid in range(8)]
    manager = PagedManager(480 // block_size, block_size, host_blocks=960 // block_size)
    limits = SchedulerLimits(512, 64, preemption=Preemption.swap)
    _, recorder = replay(requests, manager=manager, limits=limits, fast_forward=False)
    return recorder.features


def test_swapped_slots_are_whole_blocks_out_and_back() -> None:
    features = swapping(16)
    assert features[:, BLOCKS].sum() > 0
    assert features[:, SLOTS].tolist() == (16 * features[:, BLOCKS]).tolist()


def test_a_roofline_prices_a_swap_by_its_bytes_and_its_transfers() -> None:
    features = swapping(16)
    still = features.copy()
    still[:, [SLOTS, BLOCKS]] = 0
    cost = RooflineCost(MODEL, DEVICE)
    more = price_table(cost, features)[0] - price_table(cost, still)[0]
    moved = features[:, SLOTS] * MODEL.kv_bytes_per_token / 64e9 + features[:, BLOCKS] * 2 * 32 * 2e-6
    assert more.tolist() == pytest.approx(moved.tolist(), abs=1e-12)


def test_a_swapped_byte_costs_more_in_small_blocks() -> None:
    cost = RooflineCost(MODEL, DEVICE)

    def per_slot(block_size: int) -> float:
        row = np.zeros((2, len(FEATURES)))
        row[1, SLOTS], row[1, BLOCKS] = 1024, 1024 / block_size
        still, swapped = price_table(cost, row)[0]
        return float(swapped - still) / 1024

    costs = [per_slot(size) for size in (1, 4, 16, 64)]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > 3 * costs[-1]


def test_devices_that_split_a_model_swap_their_shares_at_once() -> None:
    features = swapping(16)
    still = features.copy()
    still[:, SLOTS] = 0
    one, four = (RooflineCost(MODEL, replace(DEVICE, parallel=count)) for count in (1, 4))
    bytes_s = [(price_table(c, features)[0] - price_table(c, still)[0]).sum() for c in (one, four)]
    assert bytes_s[0] == pytest.approx(4 * bytes_s[1])


def test_a_fit_tells_the_bytes_of_a_swap_from_its_transfers() -> None:
    features = np.concatenate([swapping(size) for size in (4, 16)])
    seconds = 1e-3 * features[:, 0] + 2e-7 * features[:, SLOTS] + 5e-6 * features[:, BLOCKS]
    cost = fit_cost(features, seconds, np.zeros(len(features)), CostSource("fitted", "t", "t"))
    assert cost.coefficients()["swapped_slots"] == pytest.approx(2e-7, rel=0.05)
    assert cost.coefficients()["swapped_blocks"] == pytest.approx(5e-6, rel=0.05)


def drafted(share: float, drafts: int = 3, outputs: int = 40) -> np.ndarray:
    """Features of two requests that speculate."""
    requests = [
        TimedRequest(Request(rid, 30, outputs, speculation=Speculation(drafts)), 0) for rid in range(2)
    ]
    recorder, live = PlanRecording(), {}
    executor = SimulatedExecutor(
        RooflineCost(MODEL, DEVICE, MODEL),
        live,
        16,
        BeamGenealogy({}),
        fast_forward=False,
        acceptance=DraftAcceptance(share),
    )
    scheduler = Scheduler(PagedManager(100, 16), SchedulerLimits(512, 64))
    Replay(requests, scheduler, executor, recorder, live=live).run()
    return recorder.features


def test_a_rejected_draft_costs_a_pass_a_token_and_an_accepted_one_another_to_catch_up() -> None:
    rejected, accepted = drafted(0.0), drafted(1.0)
    assert rejected[0, [PASSES, TOKENS, DRAFT_KV]].tolist() == [
        1,
        60,
        60,
    ]  # the prompts run through both models
    assert rejected[1, [PASSES, TOKENS]].tolist() == [3, 6]
    assert rejected[1, DRAFT_KV] == 2 * (31 + 32 + 33)
    assert accepted[1, [PASSES, TOKENS]].tolist() == [4, 8]
    assert accepted[1, DRAFT_KV] == 2 * (31 + 32 + 33 + 34)


def test_a_run_without_drafts_has_no_passes() -> None:
    features = replay([request(0, 0, 40, 30)], fast_forward=False)[1].features
    assert not features[:, [PASSES, TOKENS, DRAFT_KV]].any()


def test_a_roofline_reads_the_draft_s_weights_once_a_pass() -> None:
    features = drafted(0.0)
    small = replace(MODEL, layers=4)
    with_draft = price_table(RooflineCost(MODEL, DEVICE, small), features)[0]
    without = price_table(RooflineCost(MODEL, DEVICE), features)[0]
    passes = features[1:, PASSES] * (small.step_bytes / 4.8e12 + 4 * 1e-6)
    read = features[1:, DRAFT_KV] * small.kv_bytes_per_token / 4.8e12
    assert (with_draft - without)[1:].tolist() == pytest.approx((passes + read).tolist())


@pytest.mark.parametrize("make", [lambda: swapping(16), lambda: drafted(0.6)])
def test_numbers_and_arrays_are_priced_to_the_same_bits(make: Callable[[], np.ndarray]) -> None:
    features = make()
    cost = RooflineCost(MODEL, DEVICE, MODEL)
    single = [cost.price(row).seconds for row in features.tolist()]
    assert single == price_table(cost, features)[0].tolist()
