"""Ceilings of a log give settings that it does not name, and nothing else does."""

from dataclasses import replace

import numpy as np
import pytest

from harness.twin.inferred import INFERRED, with_ceilings
from harness.twin.log import LoggedRequests, Timeseries
from harness.twin.settings import EngineSettings
from traces.trace import CHAINED, Segment, Trace, TraceHeader, TraceRequest


def served(seats: int, sent_s: list[float], seed: int = 5) -> LoggedRequests:
    """Requests of some seconds each, of which at most `seats` run at once; the others wait in their order."""
    draw = np.random.default_rng(seed)
    count = len(sent_s)
    free, first, last = np.zeros(seats), np.zeros(count), np.zeros(count)
    for place, at in enumerate(sent_s):
        seat = int(np.argmin(free))
        first[place] = max(at, free[seat]) + 0.02
        last[place] = free[seat] = first[place] + draw.uniform(1.0, 4.0)
    sizes = draw.integers(50, 400, count), draw.integers(20, 300, count)
    return LoggedRequests(tuple(map(str, range(count))), np.array(sent_s), first, last, *sizes)


def workload(requests: LoggedRequests, key: int | None = None) -> Trace:
    count = len(requests)
    rows = tuple(
        TraceRequest(i, 0, int(prompt), 5, (Segment(key, int(prompt)),))
        for i, prompt in enumerate(requests.prompt_tokens)
    )
    return Trace(TraceHeader("made", "simple", "x", CHAINED, None, 1, "0" * 64, count, count), rows)


def found(requests: LoggedRequests, series: Timeseries | None = None, **said: int) -> EngineSettings:
    return with_ceilings(replace(EngineSettings(), **said), requests, series, workload(requests))


CROWD = [0.01 * place for place in range(600)]


@pytest.mark.parametrize("seats", [16, 64, 128, 100])
def test_a_number_of_running_requests_that_stands_while_others_wait_is_the_limit(seats: int) -> None:
    settings = found(served(seats, CROWD))
    assert settings.max_running == seats
    assert settings.origin["max_running"].startswith(INFERRED)


def test_a_limit_that_is_given_is_kept() -> None:
    assert found(served(64, CROWD), max_running=256).max_running == 256


def test_requests_that_never_wait_show_no_limit() -> None:
    assert found(served(500, CROWD)).max_running is None


def test_requests_that_wait_now_and_then_show_no_limit() -> None:
    gaps = np.random.default_rng(2).exponential(0.06, 600)
    assert found(served(64, [float(at) for at in np.cumsum(gaps)])).max_running is None


def series_of(requests: LoggedRequests, pool: int) -> Timeseries:
    at_s = np.linspace(1.0, 8.0, 40)
    held = np.zeros(40)
    for place, at in enumerate(at_s):
        runs = (requests.first_token_s <= at) & (at < requests.last_token_s)
        done = (at - requests.first_token_s) / (requests.last_token_s - requests.first_token_s)
        held[place] = (requests.prompt_tokens + done * requests.output_tokens)[runs].sum()
    running, waiting = requests.under_way(at_s)
    return Timeseries(at_s, running.astype(float), waiting.astype(float), held / pool)


def test_the_use_of_the_pool_gives_its_size() -> None:
    requests = served(64, CROWD)
    assert found(requests, series_of(requests, 90_000)).pool_tokens == pytest.approx(90_000, rel=0.01)


def test_a_pool_that_is_given_is_kept() -> None:
    requests = served(64, CROWD)
    assert found(requests, series_of(requests, 90_000), pool_blocks=7).pool_tokens is None


def test_prompts_that_share_blocks_tell_no_size() -> None:
    requests = served(64, CROWD)
    shared = with_ceilings(EngineSettings(), requests, series_of(requests, 90_000), workload(requests, 4))
    assert shared.pool_tokens is None
