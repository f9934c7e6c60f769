"""Arrivals and ends of requests. It does what `harness.replay.arrivals` does, for given times, for
waiting users, and for turns of conversations; for a client's cap, and for a server's front end.
"""

import numpy as np

from harness.compiled.numba_edge import called, inlined
from harness.compiled.state import ENTRY, Heap, ReplayState
from harness.replay.arrivals import LATEST_NS, NEVER

FOREVER = int(np.iinfo(np.int64).max)
_LATEST_NS = float(LATEST_NS)


@called
def push(heap: Heap, size: int, key: int, tie: int, request: int) -> None:
    """Add a request to the `size` ones of `heap`."""
    place = size
    while place:
        above = (place - 1) // 2
        if not is_before(key, tie, heap.key[above], heap.tie[above]):
            break
        heap.key[place], heap.tie[place] = heap.key[above], heap.tie[above]
        heap.request[place] = heap.request[above]
        place = above
    heap.key[place], heap.tie[place], heap.request[place] = key, tie, request


@called
def pop(heap: Heap, size: int) -> int:
    """Take the first of the `size` requests of `heap`."""
    first, last = heap.request[0], size - 1
    key, tie, place = heap.key[last], heap.tie[last], 0
    while 2 * place + 1 < last:
        below = 2 * place + 1
        if below + 1 < last and is_before(
            heap.key[below + 1], heap.tie[below + 1], heap.key[below], heap.tie[below]
        ):
            below += 1
        if not is_before(heap.key[below], heap.tie[below], key, tie):
            break
        heap.key[place], heap.tie[place] = heap.key[below], heap.tie[below]
        heap.request[place] = heap.request[below]
        place = below
    heap.key[place], heap.tie[place], heap.request[place] = key, tie, heap.request[last]
    return int(first)


@called
def is_before(key: int, tie: int, other_key: int, other_tie: int) -> bool:
    """Whether a request of `key` and `tie` goes before one of the others."""
    return key < other_key or (key == other_key and tie < other_tie)


@called
def send(state: ReplayState, request: int, at_ns: int) -> None:
    """`request` is due at `at_ns`; of equal times those that were told first go first."""
    at = state.at
    push(state.arriving, at[ENTRY.due], at_ns, at[ENTRY.next], request)
    at[ENTRY.due] += 1
    at[ENTRY.next] += 1


@inlined
def take_arrivals(state: ReplayState) -> None:
    """Queue the requests that the next step sees; those that can never be served end at once."""
    at, arrival_ns, requests = state.at, state.inputs.arrival_ns, state.requests
    if len(state.arriving.key):
        pass_entrance(state)
    while (
        at[ENTRY.arrived] < at[ENTRY.coming]
        and arrival_ns[requests.lane[at[ENTRY.arrived]]] <= at[ENTRY.seen]
    ):
        request = requests.lane[at[ENTRY.arrived]]
        requests.place[request] = at[ENTRY.arrived]
        at[ENTRY.arrived] += 1
        if state.inputs.fits[request]:
            put_last(state, request)
        else:
            note_end(state, request, at[ENTRY.now])


@called
def pass_entrance(state: ReplayState) -> None:
    """What is due by the time that the next step sees is sent where it may be, and comes through the front end."""
    at, inside, lane = state.at, state.entrance.inside, state.requests.lane
    enter(state, at[ENTRY.seen])
    while at[ENTRY.inside] and inside.key[0] <= at[ENTRY.seen]:
        lane[at[ENTRY.coming]] = pop(inside, at[ENTRY.inside])
        at[ENTRY.inside] -= 1
        at[ENTRY.coming] += 1


@called
def enter(state: ReplayState, until_ns: int) -> None:
    """What is due by then is sent where it may be, and has its turn of the front end."""
    at, entrance = state.at, state.entrance
    while next_sent(state) <= until_ns:
        sent_ns, number = next_sent(state), at[ENTRY.sent]
        request = pop(state.arriving, at[ENTRY.due])
        state.inputs.arrival_ns[request] = sent_ns
        takes_ns = np.rint(entrance.varied_ns[number] + entrance.token_ns[request])
        leaves_ns = take_turn(state, sent_ns) + int(min(takes_ns, _LATEST_NS))
        push(entrance.inside, at[ENTRY.inside], leaves_ns, number, request)
        at[ENTRY.due] -= 1
        at[ENTRY.sent] += 1
        at[ENTRY.inside] += 1


@called
def take_turn(state: ReplayState, from_ns: int) -> int:
    """When the thread of the front end is done with what comes to it at `from_ns`."""
    state.at[ENTRY.free] = max(state.at[ENTRY.free], from_ns) + state.entrance.turn_ns
    return int(state.at[ENTRY.free])


@called
def next_sent(state: ReplayState) -> int:
    """When the client sends the next request, as far as is known now; else FOREVER."""
    at, entrance = state.at, state.entrance
    makes_room = at[ENTRY.sent] - entrance.most
    if not at[ENTRY.due] or makes_room >= at[ENTRY.ended]:
        return FOREVER
    due_ns = state.arriving.key[0]
    return int(due_ns if makes_room < 0 else max(due_ns, entrance.free_ns[makes_room]))


@called
def put_last(state: ReplayState, request: int) -> None:
    """`request` waits: at the end of the queue, or where its priority says."""
    at = state.at
    if state.rules.ordered:
        place = state.requests.place[request]
        push(state.waiting, at[ENTRY.tail] - at[ENTRY.head], state.inputs.priority[request], place, request)
    else:
        state.requests.queue[at[ENTRY.tail]] = request
    at[ENTRY.tail] += 1


@called
def put_back(state: ReplayState, request: int) -> None:
    """`request` was preempted: it came before all that wait, or its priority says where it waits."""
    if state.rules.ordered:
        put_last(state, request)
        return
    state.at[ENTRY.head] -= 1
    state.requests.queue[state.at[ENTRY.head]] = request


@called
def first_waiting(state: ReplayState) -> int:
    """The request that is served next."""
    at = state.at
    return int(state.waiting.request[0] if state.rules.ordered else state.requests.queue[at[ENTRY.head]])


@called
def take_first(state: ReplayState) -> int:
    """The same, which waits no more."""
    at, request = state.at, first_waiting(state)
    if state.rules.ordered:
        pop(state.waiting, at[ENTRY.tail] - at[ENTRY.head])
    at[ENTRY.head] += 1
    return request


@called
def note_end(state: ReplayState, request: int, at_ns: int) -> None:
    """`request` has finished, or was rejected."""
    at, inputs, waits_for = state.at, state.inputs, state.inputs.waits_for
    if len(state.entrance.free_ns):
        enter(state, at_ns)
        at_ns = take_turn(state, at_ns)
        state.entrance.free_ns[at[ENTRY.ended]] = at_ns + state.entrance.pause_ns
    state.requests.ended[at[ENTRY.ended]] = request
    at[ENTRY.ended] += 1
    if len(waits_for):  # the turns that follow, each after its own pause
        for place in range(inputs.first_follower[request], inputs.first_follower[request + 1]):
            turn = inputs.follower[place]
            waits_for[turn] -= 1
            if not waits_for[turn]:
                send(state, turn, at_ns + inputs.pause_ns[turn])
    elif at[ENTRY.next] < len(inputs.pause_ns):  # its user takes the next of the list
        send(state, at[ENTRY.next], at_ns + inputs.pause_ns[at[ENTRY.next]])


@inlined
def next_arrival(state: ReplayState) -> int:
    """When the next request arrives, as far as is known now; else NEVER."""
    at, inside = state.at, state.entrance.inside
    found_ns = next_sent(state)
    if at[ENTRY.inside]:
        found_ns = min(found_ns, inside.key[0])
    if found_ns < FOREVER:
        return int(found_ns)
    if at[ENTRY.arrived] == at[ENTRY.coming]:
        return NEVER
    return int(state.inputs.arrival_ns[state.requests.lane[at[ENTRY.arrived]]])


def open_lane(state: ReplayState, users: int) -> None:
    """Say when what waits for no other request is due: all, the first of each user at 0, or the first turns."""
    inputs, at, order = state.inputs, state.at, np.argsort(state.inputs.arrival_ns, kind="stable")
    if not len(state.arriving.key):
        state.requests.lane[:] = order
        at[ENTRY.coming] = len(order)
    elif not len(inputs.pause_ns):
        state.arriving.key[:], state.arriving.request[:] = inputs.arrival_ns[order], order
        state.arriving.tie[:] = np.arange(len(order))
        at[ENTRY.due] = at[ENTRY.next] = len(order)
    elif len(inputs.waits_for):
        for turn in np.flatnonzero(inputs.waits_for == 0):
            send(state, turn, inputs.arrival_ns[turn])
    else:
        for request in range(min(users, len(inputs.pause_ns))):
            send(state, request, 0)
