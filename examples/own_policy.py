"""Replace a scheduling decision: a rule of your own chooses which request is preempted.

Run it with `python examples/own_policy.py`. The same class works from the command line, in the simulator and on the
engine; Python must be able to import its module:

    PYTHONPATH=examples python -m harness sweep scheduler.victim=null,own_policy:CheapestToRepeat

Queue order and admission are replaced in the same way: `scheduler.order`, `scheduler.admission`. Their methods are in
`engine/core/policies.py`. For eviction see `own_eviction.py`.
"""

from collections.abc import Sequence

from engine.core.sequence import Group
from harness.config.schema import CostKind, RunConfig
from harness.point import run_point


class CheapestToRepeat:
    """Preempt the request with the fewest tokens: its tokens are computed again when it comes back."""

    def choose(self, candidates: Sequence[Group]) -> int:
        """Index of the group to preempt; `candidates` are the running groups and are never empty."""
        return min(range(len(candidates)), key=lambda index: candidates[index].tokens)


def simulate(victim: str | None) -> dict[str, float]:
    """The simulated metrics of 200 requests in a pool that is too small for all that may run."""
    config = RunConfig(measure=False)
    config.workload.num_requests = 200
    config.workload.length_scale = 0.1
    config.workload.request_rate = 100.0
    config.cache.pool_tokens = 1536
    config.cache.max_model_len = 1024
    config.cost.kind = CostKind.roofline
    config.scheduler.victim = victim
    metrics: dict[str, float] = run_point(config).record.simulated
    return metrics


def main() -> None:
    """Compare the built-in choice (the youngest request) with the rule above; here the built-in one is better."""
    print("victim             preemptions   tokens computed again   latency p99")
    for label, victim in (("youngest", None), ("CheapestToRepeat", "own_policy:CheapestToRepeat")):
        found = simulate(victim)
        print(
            f"{label:16}   {found['preemptions']:11.0f}   {found['recomputed_tokens']:21.0f}"
            f"   {found['e2e_p99']:9.2f} s"
        )


if __name__ == "__main__":
    main()
