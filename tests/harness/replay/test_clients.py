"""What stands between the requests and the engine: a client that holds requests back, a server's front end."""

import json
from pathlib import Path

import numpy as np
import pytest
from sim_cases import LinearCost, replay, request

from engine.core.memory.paged import PagedManager
from harness.config.errors import ConfigError
from harness.config.schema import ReplayMode, RunConfig
from harness.metrics.log import Outcome, RunLog
from harness.replay.arrivals import (
    Capped,
    ClosedLoop,
    FrontEnd,
    OpenLoop,
    Sessions,
    TimedRequest,
    Turn,
    to_ns,
)
from harness.workload.point import resolve
from harness.workload.simulate import simulate
from harness.workload.trace import Traffic
from traces.errors import TraceError
from traces.formats.pagetwin import write_jsonl
from traces.reading import read_trace
from traces.trace import AFTER, CHAINED, Client, ClientKind, Segment, Trace, TraceHeader, TraceRequest


def spaced(count: int, gap_s: float) -> list[TimedRequest]:
    return [request(rid, rid * gap_s, 20, 10) for rid in range(count)]


def capped(requests: list[TimedRequest], most: int, pause_s: float = 0.0) -> RunLog:
    source = Capped(OpenLoop(iter(requests), len(requests)), most, to_ns(pause_s))
    return replay(requests, source)[0]


def test_a_capped_client_never_has_more_in_flight_than_it_may() -> None:
    log = capped(spaced(40, 0.0), 3)
    assert (log.steps["running"] + log.steps["waiting"]).max() == 3
    assert (log.requests["outcome"] == Outcome.FINISHED).all()


def test_a_cap_that_is_never_reached_changes_nothing() -> None:
    requests = spaced(20, 0.5)
    plain = replay(requests, OpenLoop(iter(requests), 20))[0]
    assert capped(requests, 5).requests["finish_s"].tolist() == plain.requests["finish_s"].tolist()


def test_a_request_that_is_held_is_sent_when_an_answer_ends() -> None:
    log = capped(spaced(6, 0.001), 1, pause_s=0.25)
    gaps = log.requests["arrival_s"][1:] - log.requests["finish_s"][:-1]
    assert gaps.tolist() == pytest.approx([0.25] * 5)


def test_a_client_with_room_sends_at_its_own_time() -> None:
    requests = [request(0, 0.0, 20, 10), request(1, 0.0, 20, 10), request(2, 9.0, 20, 10)]
    assert capped(requests, 1).requests["arrival_s"][2] == 9.0


def test_a_rejected_request_makes_room() -> None:
    requests = [request(rid, 0, 900 if rid == 1 else 20, 5) for rid in range(4)]
    log, _ = replay(requests, Capped(OpenLoop(iter(requests), 4), 1), manager=PagedManager(10, 16))
    assert (log.requests["outcome"] == Outcome.FINISHED).sum() == 3


def test_turns_are_held_back_too() -> None:
    turns = [Turn(request(0, 0, 20, 5)), Turn(request(1, 0, 20, 40)), Turn(request(2, 0, 20, 5), (0,))]
    log, _ = replay([turn.timed for turn in turns], Capped(Sessions(turns), 1))
    assert log.requests["arrival_s"][2] == pytest.approx(log.requests["finish_s"][1])


def test_requests_that_a_stopped_client_holds_are_unfinished() -> None:
    requests = spaced(5, 0.0)
    log, _ = replay(requests, Capped(OpenLoop(iter(requests), 5), 1), until_s=0.001)
    assert log.requests["outcome"].tolist() == [Outcome.UNFINISHED] * 5


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_front_end_delays_the_first_step_of_a_request_and_not_its_arrival(fast_forward: bool) -> None:
    requests = spaced(3, 2.0)
    source = FrontEnd(OpenLoop(iter(requests), 3), to_ns(0.1), 1e6)
    log, _ = replay(requests, source, fast_forward=fast_forward)
    assert log.requests["arrival_s"].tolist() == [0.0, 2.0, 4.0]
    waited = log.requests["first_scheduled_s"] - log.requests["arrival_s"]
    assert waited.tolist() == pytest.approx([0.12] * 3, abs=0.015)
    assert len(set(waited.tolist())) == 3  # by chance no two take the same


def test_requests_that_are_sent_at_once_pass_the_front_end_one_by_one() -> None:
    requests = spaced(3, 0.0)
    log, _ = replay(requests, FrontEnd(OpenLoop(iter(requests), 3), 0, 0.0, to_ns(5.0)))
    assert log.requests["first_scheduled_s"].tolist() == pytest.approx([5.0, 10.0, 15.0], abs=0.05)
    assert log.requests["arrival_s"].tolist() == [0.0] * 3


@pytest.mark.parametrize("pause_s", [0.0, 2.0])
def test_answers_that_end_together_reach_their_clients_one_by_one(pause_s: float) -> None:
    users = ClosedLoop((each.request for each in spaced(6, 0.0)), 6, 3, [to_ns(pause_s)] * 6)
    front = FrontEnd(users, 0, 0.0, to_ns(1.0))
    assert [each.request.request_id for each in front.take(to_ns(3.0))] == [0, 1, 2]
    for request_id in range(3):
        front.ended(request_id, to_ns(10.0))
    sent = [(when_s, each) for when_s in np.arange(10.0, 20.0) for each in front.take(to_ns(when_s))]
    assert [each.arrival_ns for _, each in sent] == [to_ns(10.0 + pause_s + turn) for turn in (1, 2, 3)]
    assert [when_s for when_s, _ in sent] == [14.0, 15.0, 16.0]  # after the three answers


def test_a_short_prompt_passes_a_long_one_in_the_front_end() -> None:
    requests = [request(0, 0.0, 500, 5), request(1, 0.001, 20, 5)]
    log, _ = replay(requests, FrontEnd(OpenLoop(iter(requests), 2), 0, 1e6))
    scheduled = dict(zip(log.requests["request_id"], log.requests["first_scheduled_s"], strict=True))
    assert scheduled[1] < scheduled[0]


# -- the client of a trace ------------------------------------------------------------------------------------------


def trace(client: Client, count: int = 12) -> Trace:
    header = TraceHeader("made", "simple", "made", CHAINED, None, 1, "0" * 64, count, count, client=client)
    rows = (TraceRequest(rid, 1000 * rid, 64, 20, (Segment(None, 64),)) for rid in range(count))
    return Trace(header, tuple(rows))


def simulated(client: Client, config: RunConfig | None = None) -> RunLog:
    config = config or RunConfig(measure=False)
    return simulate(resolve(config, trace(client)), LinearCost())


def in_flight(log: RunLog) -> int:
    return int((log.steps["running"] + log.steps["waiting"]).max())


TWO = Client(ClientKind.capped, 2)


def test_the_client_of_a_trace_holds_its_requests_back() -> None:
    assert in_flight(simulated(TWO)) == 2


def test_a_cap_of_the_configuration_wins_over_the_trace_s() -> None:
    config = RunConfig(measure=False)
    config.replay.max_in_flight = 3
    assert in_flight(simulated(TWO, config)) == 3


def test_a_cap_of_0_is_none() -> None:
    config = RunConfig(measure=False)
    config.replay.max_in_flight = 0
    assert in_flight(simulated(TWO, config)) > 3


def test_users_of_the_configuration_replace_the_client_of_a_trace() -> None:
    config = RunConfig(measure=False)
    config.replay.mode, config.replay.users = ReplayMode.closed, 5
    assert in_flight(simulated(TWO, config)) == 5


def test_turns_of_a_trace_whose_client_sends_them_so_follow_their_answers() -> None:
    made = trace(Client(ClientKind.multi_turn), 2)
    first, second = made.requests
    later = TraceRequest(
        1, second.arrival_us, 64, 20, second.segments, after=(0,), think_us=500_000, release=AFTER
    )
    log = simulate(resolve(RunConfig(measure=False), Trace(made.header, (first, later))), LinearCost())
    assert log.requests["arrival_s"][1] == pytest.approx(log.requests["finish_s"][0] + 0.5)


def test_traces_that_differ_in_their_client_have_other_digests() -> None:
    assert trace(TWO).digest != trace(Client()).digest


def test_replicas_refuse_a_client_that_waits() -> None:
    config = RunConfig(measure=False)
    config.device.data_parallel = 2
    with pytest.raises(ConfigError, match="may run on another replica"):
        resolve(config, trace(TWO))


def test_the_front_end_of_a_device_delays_what_is_simulated() -> None:
    config = RunConfig(measure=False)
    config.device.frontend_request_us, config.device.frontend_token_us = 3000.0, 10.0
    log = simulated(Client(), config)
    waited = log.requests["first_scheduled_s"][0] - log.requests["arrival_s"][0]
    assert waited == pytest.approx(0.003 + 64 * 10e-6, abs=0.15 * 0.003)


def test_an_open_client_lets_nothing_wait() -> None:
    assert Traffic().waits is None


@pytest.mark.parametrize("client", [Client(), TWO, Client(ClientKind.multi_turn, None, 300)])
def test_a_file_of_a_trace_names_its_client(client: Client, tmp_path: Path) -> None:
    write_jsonl(trace(client), tmp_path / "trace.jsonl")
    found = read_trace(tmp_path / "trace.jsonl", "pagetwin")
    assert found.header.client == client
    assert found.digest == trace(client).digest


@pytest.mark.parametrize(
    ("client", "said"),
    [
        ({"kind": "capped"}, "a capped client has one"),
        ({"kind": "shy"}, "one of open, capped, closed, multi_turn expected"),
        ({"users": 3}, "object of kind, max_in_flight and pause_us expected"),
        ({"kind": "capped", "max_in_flight": 0}, "max_in_flight"),
    ],
)
def test_a_client_of_a_file_that_makes_no_sense_is_refused(
    client: dict[str, object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    write_jsonl(trace(TWO), file)
    head, _, rest = file.read_text().partition("\n")
    header = json.loads(head)
    header["header"]["client"] = client
    file.write_text(f"{json.dumps(header)}\n{rest}")
    with pytest.raises(TraceError, match=said):
        read_trace(file, "pagetwin")
