"""The client of a log is told by its times: what it may have in flight, what it held back, and which turns follow."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from harness.twin.client import LogClient, client_of
from harness.twin.log import LoggedRequests
from traces.trace import CHAINED, ClientKind, Segment, Trace, TraceHeader, TraceRequest


def served(own_s: Sequence[float], most: int, seed: int = 3, noise_s: float = 0.0) -> LoggedRequests:
    """Requests of some seconds each, sent at `own_s` with at most `most` in flight."""
    draw = np.random.default_rng(seed)
    sent, ended = np.zeros(len(own_s)), np.zeros(len(own_s))
    for place, own in enumerate(own_s):
        free = np.sort(ended[:place])[place - most] if place >= most else 0.0
        sent[place] = max(own, free + 2e-4)
        ended[place] = sent[place] + draw.uniform(1.0, 3.0)
    ended += draw.normal(0, noise_s, len(ended)) if noise_s else 0.0
    ones = np.ones(len(own_s), np.int64)
    return LoggedRequests(tuple(map(str, range(len(own_s)))), sent, sent + 0.2, ended, 9 * ones, 5 * ones)


def poisson(rate: float, count: int = 300, seed: int = 1) -> list[float]:
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(at) for at in np.cumsum(gaps)]


def test_a_client_that_is_often_held_back_is_capped() -> None:
    found = client_of(served(poisson(3.0), 8))
    assert (found.client.kind, found.client.max_in_flight) == (ClientKind.capped, 8)
    assert found.client.pause_us == pytest.approx(200, abs=1)


def test_inexact_clocks_hide_no_cap() -> None:
    found = client_of(served([0.0] * 300, 8, noise_s=0.004))
    assert (found.client.kind, found.client.max_in_flight) == (ClientKind.closed, 8)


@pytest.mark.parametrize("most", [1, 4, 64])
def test_a_client_that_sends_whenever_it_may_is_a_closed_loop(most: int) -> None:
    found = client_of(served([0.0] * 300, most))
    assert (found.client.kind, found.client.max_in_flight) == (ClientKind.closed, most)
    assert found.own_s.max() == pytest.approx(2e-4)


@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0, 20.0, 400.0])
@pytest.mark.parametrize("seed", range(4))
def test_an_open_loop_is_not_taken_for_a_capped_client(rate: float, seed: int) -> None:
    found = client_of(served(poisson(rate, seed=seed), 10_000, seed))
    assert found.client.kind is ClientKind.open
    assert "open loop" in found.said


def test_a_cap_that_a_log_states_and_never_reaches_is_kept_and_said() -> None:
    times = served(poisson(0.5), 10_000)
    found = client_of(times, cap=100)
    assert found.client.max_in_flight == 100
    assert "which the log never reaches" in found.said
    assert found.own_s.tolist() == times.arrival_s.tolist()


def test_a_stated_cap_that_the_times_exceed_is_said_and_not_believed() -> None:
    times = served(poisson(4.0), 8)
    found = client_of(times, cap=3)
    assert found.client.max_in_flight == 8
    assert "It states at most 3 (max_concurrency), but 8 were" in found.said
    assert "It states" not in client_of(times, cap=8).said


def test_a_client_without_a_rate_that_never_reaches_its_cap_is_doubted() -> None:
    """As where start times are in milliseconds, and the gaps between tokens in seconds."""
    times = served([0.0] * 60, 4)
    apart = replace(times, arrival_s=1000 * times.arrival_s)
    shift = apart.arrival_s - times.arrival_s
    apart = replace(apart, first_token_s=times.first_token_s + shift, last_token_s=times.last_token_s + shift)
    assert "of one unit" in client_of(apart, cap=4, rate=math.inf).said
    assert "of one unit" not in client_of(times, cap=4, rate=math.inf).said
    assert "of one unit" not in client_of(apart, cap=4, rate=0.001).said


def test_the_own_schedule_of_held_requests_lies_between_those_that_were_not_held() -> None:
    own = poisson(3.6)
    times = served(own, 8)
    found = client_of(times)
    assert (found.own_s <= times.arrival_s + 1e-9).all()
    assert np.abs(found.own_s - own).mean() < np.abs(times.arrival_s - own).mean()


def test_a_stated_rate_gives_the_own_schedule_of_held_requests() -> None:
    own = [0.2 * place for place in range(100)]
    found = client_of(served(own, 6), cap=6, rate=5.0)
    assert found.client.kind is ClientKind.capped
    assert found.own_s == pytest.approx(own, abs=0.25)


def test_a_stated_rate_without_limit_is_no_schedule() -> None:
    assert client_of(served([0.0] * 50, 8), cap=8, rate=math.inf).client.kind is ClientKind.closed


# -- conversations ---------------------------------------------------------------------------------------------------


def conversations(count: int = 30, turns: int = 4, gap_s: float = 2.0) -> tuple[LoggedRequests, list[str]]:
    """Conversations that begin every 0.7 s; a turn comes `gap_s` after the answer before it."""
    sent = [0.7 * one + turn * (1.0 + gap_s) for one in range(count) for turn in range(turns)]
    names = [f"s{one}" for one in range(count) for _ in range(turns)]
    order = np.argsort(sent, kind="stable")
    at, ones = np.array(sent)[order], np.ones(len(sent), np.int64)
    times = LoggedRequests(tuple(map(str, order)), at, at + 0.2, at + 1.0, 9 * ones, 5 * ones)
    return times, [names[place] for place in order]


def trace_of(times: LoggedRequests) -> Trace:
    count = len(times)
    rows = (
        TraceRequest(i, round(1e6 * float(at)), 9, 5, (Segment(None, 9),))
        for i, at in enumerate(times.arrival_s)
    )
    return Trace(TraceHeader("made", "simple", "x", CHAINED, None, 1, "0" * 64, count, count), tuple(rows))


def found_conversations(gap_s: float = 2.0) -> tuple[LogClient, LoggedRequests]:
    times, names = conversations(gap_s=gap_s)
    return client_of(times, sessions=names), times


def test_turns_that_follow_their_answers_are_a_multi_turn_client() -> None:
    found, times = found_conversations()
    assert found.client.kind is ClientKind.multi_turn
    assert (found.before >= 0).sum() == 90
    rows = found.sends(trace_of(times), times).requests
    assert [row.think_us for row in rows if row.after] == pytest.approx([2_000_000] * 90, abs=1)


def test_turns_that_do_not_wait_for_their_answers_are_an_open_loop() -> None:
    found, _ = found_conversations(gap_s=-0.5)
    assert found.client.kind is ClientKind.open


def test_the_trace_of_a_log_names_its_client() -> None:
    times = served([0.0] * 40, 4)
    found = client_of(times)
    sent = found.sends(trace_of(times), times)
    assert sent.header.client == found.client
    assert {row.arrival_us for row in sent.requests} == {200}
