"""The loop: a step at a time until the log is full or everything has ended."""

import numpy as np

from harness.sim.compiled.committing import commit, log_step
from harness.sim.compiled.compiling import part
from harness.sim.compiled.entering import admit, take_arrivals
from harness.sim.compiled.pricing import measure, price, took
from harness.sim.compiled.scheduling import continue_running
from harness.sim.compiled.state import ARRIVED, GAPS, HEAD, NOW, PREEMPTED, RUNNING, STEPS, TAIL, Run

FULL, DONE = 0, 1


def advance(run: Run, num_blocks: int) -> int:
    """Run steps; returns FULL or DONE."""
    at, log = run.at, run.log
    while at[STEPS] < len(log.counts) and at[GAPS] + run.rules.max_running < len(log.gap_ns):
        take_arrivals(run)
        if at[RUNNING] or at[HEAD] < at[TAIL]:
            step(run, num_blocks)
        elif at[ARRIVED] < len(run.lengths.prompt):
            at[NOW] = run.lengths.arrival_ns[at[ARRIVED]]
        else:
            return DONE
    return FULL


@part
def step(run: Run, num_blocks: int) -> None:
    """One step."""
    budget = continue_running(run)
    if not run.at[PREEMPTED]:
        admit(run, budget)
    measure(run)
    seconds, attention_s = price(run)
    took_ns = max(1, int(np.rint(seconds * 1e9)))
    log_step(run, num_blocks, took_ns, attention_s)
    took(run)
    run.at[NOW] += took_ns
    commit(run, run.at[NOW])
