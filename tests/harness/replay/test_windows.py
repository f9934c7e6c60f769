"""KV slots and query-key pairs outside of a model's window, against counting them one by one; fast-forward included."""

import numpy as np
import pytest
from sim_cases import replay, request

from engine.core.options import SchedulerLimits
from harness.cost.model_shape import ModelShape
from harness.cost.roofline import DeviceShape, RooflineCost
from harness.replay.cost_model import price_table
from harness.replay.features import AT, Sight

UNSEEN = [AT.decode_unseen_kv, AT.prefill_unseen_kv, AT.prefill_unseen_work]
GEMMA = ModelShape(42, 3584, 16, 8, 256, 14336, 256000, 2, window=64, windowed_layers=21)
DEVICE = DeviceShape("h100", 3.35e12, 989e12, 1e-4, 1e-6)


def sees(position: int, window: Sight) -> range:
    """The positions, from 1, that a query at `position` sees."""
    if window.chunked:
        return range((position - 1) // window.tokens * window.tokens + 1, position + 1)
    return range(max(1, position - window.tokens + 1), position + 1)


def counted(first: int, last: int, window: Sight) -> tuple[int, int]:
    """Of queries at positions `first` to `last`: slots that none of them sees, and pairs outside of the window."""
    seen: set[int] = set()
    for position in range(first, last + 1):
        seen.update(sees(position, window))
    pairs = sum(position - len(sees(position, window)) for position in range(first, last + 1))
    return last - len(seen), pairs


WINDOWS = [*map(Sight, (1, 16, 50, 1000)), Sight(16, chunked=True), Sight(48, chunked=True)]


@pytest.mark.parametrize("window", WINDOWS)
def test_what_a_chunk_does_not_see_is_what_counting_gives(window: Sight) -> None:
    """A prompt of 100 tokens in chunks of 40."""
    limits = SchedulerLimits(40, 4)
    log = replay([request(0, 0, 100, 2)], limits=limits, fast_forward=False, window=window)[1]
    chunks = [counted(1, 40, window), counted(41, 80, window), counted(81, 100, window)]
    assert log.features[:3][:, UNSEEN[1:]].tolist() == [list(map(float, chunk)) for chunk in chunks]


def test_what_decode_rows_do_not_see_grows_from_the_window_on() -> None:
    log = replay([request(0, 0, 10, 20)], fast_forward=False, window=Sight(16))[1]
    assert log.features[1:, UNSEEN[0]].tolist() == [float(max(0, 10 + n - 16)) for n in range(1, 20)]


def test_a_decode_row_sees_nothing_before_its_chunk_of_attention() -> None:
    log = replay([request(0, 0, 10, 40)], fast_forward=False, window=Sight(16, chunked=True))[1]
    assert log.features[1:, UNSEEN[0]].tolist() == [(10 + n) // 16 * 16.0 for n in range(39)]


def test_without_a_window_nothing_is_unseen() -> None:
    log = replay([request(0, 0, 100, 20)], fast_forward=False)[1]
    assert not log.features[:, UNSEEN].any()


@pytest.mark.parametrize("window", [Sight(64), Sight(32, chunked=True)])
def test_a_fast_forward_costs_to_the_bit_what_its_steps_cost(window: Sight) -> None:
    requests = [request(n, 0.001 * n, 20 + 31 * n, 40 + 7 * n) for n in range(6)]
    cost = RooflineCost(GEMMA, DEVICE)
    slow = replay(requests, cost=cost, fast_forward=False, window=window)[0]
    fast = replay(requests, cost=cost, fast_forward=True, window=window)[0]
    assert np.array_equal(slow.steps["seconds"], fast.steps["seconds"])
    for name, column in slow.requests.items():
        assert np.array_equal(column, fast.requests[name], equal_nan=column.dtype.kind == "f"), name


def test_a_decode_step_reads_the_window_in_windowed_layers_and_all_in_the_others() -> None:
    features = replay([request(0, 0, 300, 3)], fast_forward=False, window=Sight(64))[1].features
    attention = price_table(RooflineCost(GEMMA, DEVICE), features)[1]
    layer = 2 * 8 * 256 * 2
    assert attention[1] == pytest.approx((21 * 301 + 21 * 64) * layer / 3.35e12, rel=1e-8)
