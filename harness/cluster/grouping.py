"""Points shared out among jobs by their cost, so that a thousand small points are not a thousand jobs."""

import heapq
from collections.abc import Sequence
from math import ceil

from harness.sweep.estimate import Pace, work_of
from harness.sweep.plan import PlannedPoint

Group = tuple[PlannedPoint, ...]


def groups_of(points: Sequence[PlannedPoint], pace: Pace, jobs: int, job_min_s: float) -> list[Group]:
    """Share points out among at most `jobs` groups of about equal cost.

    The cost of a point is its estimated seconds where earlier points tell them, else its size. With known seconds no
    group is made shorter than `job_min_s`, so there may be fewer. The largest points are dealt first, each to the group
    that has the least so far (longest processing time first, Graham 1969: at most 4/3 of the best possible longest
    group). Inside a group the points keep their order.
    """
    if not points:
        return []
    estimates = [pace.seconds(point.config) for point in points]
    costs = [seconds for seconds in estimates if seconds is not None]
    known = len(costs) == len(points)
    if not known:
        costs = [float(work_of(point.config)) for point in points]
    wanted = min(jobs, len(points))
    if known and sum(costs) < wanted * job_min_s:
        wanted = max(1, ceil(sum(costs) / job_min_s))
    loads: list[tuple[float, int]] = [(0.0, number) for number in range(wanted)]
    members: list[list[int]] = [[] for _ in range(wanted)]
    for place in sorted(range(len(points)), key=lambda place: -costs[place]):
        load, number = heapq.heappop(loads)
        members[number].append(place)
        heapq.heappush(loads, (load + costs[place], number))
    return [tuple(points[place] for place in sorted(member)) for member in members]
