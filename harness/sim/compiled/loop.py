"""The loop: a step at a time until the log is full or everything has ended."""

import numpy as np

from harness.sim.clock import LATEST_NS, NS_PER_S
from harness.sim.compiled.committing import commit, log_step
from harness.sim.compiled.compiling import part
from harness.sim.compiled.entering import admit, take_arrivals
from harness.sim.compiled.pricing import measure, price, took
from harness.sim.compiled.scheduling import continue_running
from harness.sim.compiled.state import ARRIVED, GAPS, HEAD, NOW, PREEMPTED, RUNNING, STEPS, TAIL, Run

FULL, DONE, TOO_LONG = 0, 1, 2
_NS, _LATEST_NS = float(NS_PER_S), float(LATEST_NS)


def advance(run: Run, num_blocks: int) -> int:
    """Run steps; returns FULL, DONE, or TOO_LONG where the next one would end beyond what the clock counts."""
    at, log = run.at, run.log
    while at[STEPS] < len(log.counts) and at[GAPS] + run.rules.max_running < len(log.gap_ns):
        take_arrivals(run)
        if at[RUNNING] or at[HEAD] < at[TAIL]:
            if not step(run, num_blocks):
                return TOO_LONG
        elif at[ARRIVED] < len(run.lengths.prompt):
            at[NOW] = run.lengths.arrival_ns[at[ARRIVED]]
        else:
            return DONE
    return FULL


@part
def step(run: Run, num_blocks: int) -> bool:
    """One step; False, and nothing logged, where it would end too late."""
    budget = continue_running(run)
    if not run.at[PREEMPTED]:
        admit(run, budget)
    measure(run)
    seconds, attention_s = price(run)
    if not run.at[NOW] + seconds * _NS <= _LATEST_NS:
        return False
    took_ns = max(1, int(np.rint(seconds * _NS)))
    log_step(run, num_blocks, took_ns, attention_s)
    took(run)
    run.at[NOW] += took_ns
    commit(run, run.at[NOW])
    return True
