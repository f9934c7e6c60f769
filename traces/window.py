"""Windows of a trace: what is inside keeps its ids, keys and times to each other; the first arrival is 0."""

from dataclasses import replace

from traces.errors import ParameterError
from traces.links import relinked
from traces.trace import Trace, TraceRequest


def slice_rows(trace: Trace, first: float, last: float, *, whole_sessions: bool = False) -> Trace:
    """Requests number `first` to before `last`, counted from 0 in order of arrival; raises ParameterError if none.

    `whole_sessions` takes every turn of a conversation whose first turn is inside, and no turn of another.
    """
    inside = [first <= number < last for number in range(len(trace.requests))]
    return _cut(trace, inside, whole_sessions, f"requests {first:g} to {last:g}")


def slice_time(trace: Trace, first: float, last: float, *, whole_sessions: bool = False) -> Trace:
    """Requests that arrive from `first` to before `last`, in seconds from the trace's start; otherwise the same."""
    start = trace.requests[0].arrival_us if trace.requests else 0
    inside = [first <= (request.arrival_us - start) / 1e6 < last for request in trace.requests]
    return _cut(trace, inside, whole_sessions, f"arrivals from {first:g} to {last:g} s")


def _cut(trace: Trace, inside: list[bool], whole_sessions: bool, window: str) -> Trace:
    if whole_sessions:
        inside = _whole(trace.requests, inside)
    kept = relinked(trace.requests, inside)
    if not kept:
        raise ParameterError(
            "window", f"no request in the window ({window}); the trace has {len(trace.requests):,}"
        )
    start = kept[0].arrival_us
    moved = tuple(replace(request, arrival_us=request.arrival_us - start) for request in kept)
    if moved == trace.requests:
        return trace
    cut = sum(request.parent is None and (request.turn or 1) > 1 for request in moved)
    more = (
        "; conversations whole" if whole_sessions else f"; {cut:,} turns lost the turn before" if cut else ""
    )
    return trace.changed(moved, f"{window}: {len(moved):,} of {len(trace.requests):,} requests{more}")


def _whole(requests: tuple[TraceRequest, ...], inside: list[bool]) -> list[bool]:
    """A conversation is what the first request at the root of its links belongs to."""
    roots: dict[int, int] = {}
    sessions: dict[str, int] = {}
    chosen: dict[int, bool] = {}
    whole = []
    for request, is_inside in zip(requests, inside, strict=True):
        root = request.request_id if request.parent is None else roots.get(request.parent, request.request_id)
        if request.session is not None:
            root = sessions.setdefault(request.session, root)
        roots[request.request_id] = root
        whole.append(chosen.setdefault(root, is_inside))
    return whole
