"""A sweep over many traces keeps only as many in memory as have a bounded number of requests together."""

from harness.workload.trace import RecentTraces
from traces.synth.generator import generate_trace
from traces.trace import Trace


def made(requests: int) -> Trace:
    return generate_trace("azure_conv", num_requests=requests, seed=0)


def fail() -> Trace:
    raise AssertionError("made again")


def test_a_trace_that_was_used_lately_is_not_made_again() -> None:
    recent = RecentTraces(8, 100)
    assert recent.get("a", lambda: made(10)) is recent.get("a", fail)


def test_the_oldest_traces_are_forgotten_when_they_have_too_many_requests() -> None:
    recent = RecentTraces(8, 25)
    for key in "abc":
        recent.get(key, lambda: made(10))
    assert recent.requests == 20
    recent.get("b", fail)
    recent.get("a", lambda: made(5))
    assert recent.requests == 25


def test_no_more_traces_are_kept_than_allowed() -> None:
    recent = RecentTraces(2, 1000)
    for key in "abc":
        recent.get(key, lambda: made(1))
    assert recent.requests == 2


def test_the_last_trace_is_kept_however_large_it_is() -> None:
    recent = RecentTraces(8, 5)
    recent.get("a", lambda: made(10))
    recent.get("a", fail)
