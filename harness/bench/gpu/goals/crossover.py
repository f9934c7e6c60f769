"""From how many shared tokens a cascade pays, whether the cost rule knows it, and which constants would.

The rule (`paged_kernels.cascade_plan`): a cascade saves `(rows - tiles) x bytes of the shared KV / speed` and costs
`overhead`; the speed is the memory's, or the cache's where the shared KV stays in half of it. Both are linear in
`1 / speed` and `overhead`, so measured savings (flat time less that of a cascade whether or not it pays) give them by
bounded least squares, each case weighted by its flat time so that the doubtful small ones count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.bench.gpu.goals.goal import Found, missing
from harness.bench.gpu.goals.rows import TimedCase
from harness.bench.kernels.grid import CaseSpec
from harness.bench.kernels.names import ALWAYS, CASCADE, OURS

if TYPE_CHECKING:
    from paged_kernels.cascade_plan import CascadeCost

NOISE = 1.02
"""A choice that is slower than the other by less than this is no mistake."""
FEWEST = 6  # cases on which three constants can rest


@dataclass(frozen=True)
class Sharing:
    """A measured case: what the rule sees of it, and seconds flat and as a cascade."""

    name: str
    rows: int
    kv_bytes: int
    tiles: int
    flat_s: float
    cascade_s: float


def wrong_decisions(shared: Iterable[TimedCase]) -> Found:
    """How many cases the rule decided for the slower way, by more than noise."""
    judged = [case for case in shared if {OURS, CASCADE, ALWAYS} <= case.us.keys()]
    if not judged:
        return missing("no case was timed flat, as the rule says, and as a cascade in any case")
    wrong = [case.name for case in judged if case.us[CASCADE] > NOISE * min(case.us[OURS], case.us[ALWAYS])]
    return Found(len(wrong), f"of {len(judged)}{': ' if wrong else ''}{', '.join(wrong[:4])}")


def crossovers(shared: Iterable[TimedCase]) -> dict[int, int | None]:
    """By sequences: the fewest shared tokens from which on a cascade was faster at every measured length; or None."""
    faster: dict[int, dict[int, bool]] = {}
    for case in shared:
        if ALWAYS in case.us:
            lengths = faster.setdefault(int(case.ours["batch"]), {})
            won = case.us[ALWAYS] < case.us[OURS]
            lengths[int(case.ours["shared_prefix"])] = won and lengths.get(
                int(case.ours["shared_prefix"]), True
            )
    return {rows: _from_where(lengths) for rows, lengths in sorted(faster.items())}


def _from_where(faster: Mapping[int, bool]) -> int | None:
    start = None
    for length in sorted(faster, reverse=True):
        if not faster[length]:
            break
        start = length
    return start


def sharings(shared: Iterable[TimedCase]) -> list[Sharing]:
    """The cases that were timed both ways."""
    return [_sharing(case) for case in shared if ALWAYS in case.us]


def _sharing(case: TimedCase) -> Sharing:
    import torch

    from paged_kernels.cascade_plan import rows_per_tile

    row = case.ours
    spec = CaseSpec(**{name: row[name] for name in CaseSpec.__dataclass_fields__})
    token_bytes = 2 * spec.kv_heads * spec.head_dim * spec.element_bytes
    tiles = -(-spec.batch // rows_per_tile(spec.heads // spec.kv_heads, torch.device("cuda")))
    seconds = (case.us[OURS] / 1e6, case.us[ALWAYS] / 1e6)
    return Sharing(case.name, spec.batch, spec.shared_prefix * token_bytes, tiles, *seconds)


def fitted_cost(cases: Sequence[Sharing], cache_bytes: int) -> "CascadeCost | None":
    """Constants that explain the savings best; None where there are too few cases on either side of the cache."""
    import numpy as np
    from scipy.optimize import lsq_linear

    from paged_kernels.cascade_plan import CascadeCost

    cached = np.array([case.kv_bytes <= cache_bytes / 2 for case in cases])
    if len(cases) < FEWEST or cached.all() or not cached.any():
        return None
    saved = np.array([(case.rows - case.tiles) * case.kv_bytes for case in cases], dtype=np.float64)
    weight = 1 / np.array([case.flat_s for case in cases])
    columns = np.stack(
        [np.where(cached, 0, saved) / 1e12, np.where(cached, saved, 0) / 1e12, -np.full(len(cases), 1e-6)]
    )
    gain = np.array([case.flat_s - case.cascade_s for case in cases])
    found = lsq_linear((columns * weight).T, gain * weight, bounds=(1e-3, np.inf)).x
    return CascadeCost(1e12 / found[0], 1e12 / found[1], cache_bytes, found[2] * 1e-6)


def mistakes(cases: Sequence[Sharing], cost: "CascadeCost") -> list[str]:
    """The cases that a rule with these constants decides for the slower way, by more than noise."""
    return [case.name for case in cases if _chosen_s(case, cost) > NOISE * min(case.flat_s, case.cascade_s)]


def _chosen_s(case: Sharing, cost: "CascadeCost") -> float:
    from paged_kernels.cascade_plan import SharedRun

    saved = cost.saved_s(SharedRun(case.rows, case.kv_bytes, case.tiles)) - cost.overhead_s
    return case.cascade_s if saved > 0 else case.flat_s


def proposal(shared: Sequence[TimedCase], cache_bytes: int) -> dict[str, Any] | None:
    """What a person is to read before changing `cascade_cost.py`; None where nothing was timed both ways.

    Nothing applies it: a constant in the code is changed by who has looked at it.
    """
    from dataclasses import asdict

    from paged_kernels.cascade_plan import H200

    cases = sharings(shared)
    if not cases:
        return None
    fitted = fitted_cost(cases, cache_bytes)
    return {
        "what": "constants of CascadeCost fitted to measured savings; a proposal, applied by nobody",
        "cases": len(cases),
        "crossover_tokens_by_sequences": crossovers(shared),
        "today": {"constants": asdict(H200), "mistakes": mistakes(cases, H200)},
        "proposed": {"constants": asdict(fitted), "mistakes": mistakes(cases, fitted)} if fitted else None,
    }
