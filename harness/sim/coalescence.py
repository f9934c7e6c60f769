"""The parameters of the beams' survival process, from recorded parents; and what follows from them."""

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.sim.genealogy import EVEN, Genealogy

Choices = Sequence[Sequence[int]]
"""Parents of each hypothesis, one entry per selection."""


def choices_of_run(steps: Sequence[Mapping[int, Sequence[int]]]) -> list[list[Sequence[int]]]:
    """A run's selections by request, in order, without each request's first, which has one parent by force."""
    by_request: dict[int, list[Sequence[int]]] = {}
    for step in steps:
        for request_id, parents in step.items():
            by_request.setdefault(request_id, []).append(parents)
    return [choices[1:] for choices in by_request.values()]


def churn_of_run(width: int, distinct_parents: Sequence[int]) -> float:
    """Mean share of `width` beams without a child, from the number of distinct parents at each step."""
    if not distinct_parents:
        return 0.0
    return 1 - sum(distinct_parents) / (width * len(distinct_parents))


def evenness_of_run(choices: Choices) -> float:
    """The urn's weight whose expected pairs of siblings equal those seen; EVEN where it does not matter.

    With d survivors and e places beyond one each, n_i children of survivor i have
    E[sum n_i (n_i - 1)] = e (e - 1) (a + 1) / (d a + 1) + 2 e: the Dirichlet-multinomial's second moment.
    """
    seen, places = 0, []
    for parents in choices:
        children = Counter(parents)
        extra = len(parents) - len(children)
        seen += sum(n * (n - 1) for n in children.values()) - 2 * extra
        places.append((len(children), extra * (extra - 1)))

    def expected(a: float) -> float:
        return sum(pairs * (a + 1) / (d * a + 1) for d, pairs in places)

    if seen <= expected(EVEN):
        return EVEN
    low, high = 1e-6, EVEN
    for _ in range(80):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if expected(middle) > seen else (low, middle)
    return low


def lineages(choices: Choices, width: int) -> list[int]:
    """Of the `width` beams before the first of `choices`, how many have descendants after 0, 1, 2 … selections."""
    origin, alive = list(range(width)), [width]
    for parents in choices:
        origin = [origin[parent] for parent in parents]
        alive.append(len(set(origin)))
    return alive


def drawn_choices(genealogy: Genealogy, request_id: int, width: int, steps: int) -> list[list[int]]:
    """Selections of a model, in the form of recorded ones."""
    return [genealogy.parents(request_id, generated, width) for generated in range(1, steps + 1)]


def copies_per_token(churn: float, block_size: int) -> float:
    """Blocks copied on write per generated token of a beam group.

    A parent of n children has n - 1 of them copy its tail, so `churn` times the width a step; where a block has just
    been filled there is no tail.
    """
    return churn * (block_size - 1) / block_size
