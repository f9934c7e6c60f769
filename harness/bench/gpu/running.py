"""Run the steps of `bench gpu` one after the other, against the clock, each in a process of its own."""

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from harness.bench.gpu.preflight import (
    ROOT,
    check_checkout,
    check_gpu,
    check_packages,
    device_folder,
    device_option,
)
from harness.bench.gpu.steps import Outcome, Step, steps
from harness.cli.say import remark, say
from harness.config.errors import UserError
from harness.environment import gpu_names

_LAST_LINES = 12  # of a failed step's output that are shown at once
_GRACE_S = 5.0


def run_steps(flags: argparse.Namespace) -> int:
    """Run or rehearse every step; returns the exit code.

    Raises:
        UserError: it cannot run here; says all that is missing.
    """
    check_checkout()
    check_packages()
    names = gpu_names() if flags.dry_run else check_gpu()
    out = Path(flags.out).absolute() if flags.out else ROOT / "results" / "reference" / device_folder(names)
    chosen = _chosen(steps(out, device_option(names)), flags.only)
    if flags.dry_run:
        return _rehearse(chosen)
    outcomes = _run(chosen, out, time.monotonic() + 60 * flags.minutes)
    from harness.bench.gpu.summary import write_summary

    say(f"written: {write_summary(out, outcomes, names[0])}")
    return 0 if all(outcome.state == "done" for outcome in outcomes) else 1


def _chosen(all_steps: Sequence[Step], only: str | None) -> list[Step]:
    if not only:
        return list(all_steps)
    wanted, known = [name.strip() for name in only.split(",")], [step.name for step in all_steps]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such step; there are {', '.join(known)}")
    return [step for step in all_steps if step.name in wanted]


def _rehearse(chosen: Sequence[Step]) -> int:
    """Every step's command as far as it goes without a GPU; returns the exit code."""
    failed = 0
    for step in chosen:
        done = subprocess.run(
            step.rehearsal, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
        )
        ready = done.returncode == 0
        say(f"{step.name}: {'ready' if ready else 'NOT READY'}: {' '.join(step.command[1:])}")
        if not ready:
            failed += 1
            remark("\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:]))
    say("nothing was timed")
    return 1 if failed else 0


def _run(chosen: Sequence[Step], out: Path, deadline: float) -> list[Outcome]:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    outcomes = []
    for step in chosen:
        outcome = _run_one(step, out / "logs" / f"{step.name}.txt", deadline)
        say(f"{step.name}: {outcome.state} after {outcome.seconds:.0f} s")
        outcomes.append(outcome)
    return outcomes


def _run_one(step: Step, log: Path, deadline: float) -> Outcome:
    """Run one step until its limit or the deadline, whichever comes first; its output goes to `log`."""
    start = time.monotonic()
    left = min(step.limit_s, deadline - start)
    if left < _GRACE_S:
        return Outcome(step, "left out", None, 0.0)
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {' '.join(step.command)}\n")
        output.flush()
        try:
            done = subprocess.run(
                step.command,
                cwd=ROOT,
                env=_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=left,
            )
        except subprocess.TimeoutExpired:
            return Outcome(step, "stopped", None, time.monotonic() - start)
    state = "done" if done.returncode in step.answers else "failed"
    if state == "failed":
        remark("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]))
    return Outcome(step, state, done.returncode, time.monotonic() - start)


def _environment() -> dict[str, str]:
    """A bare checkout works too: its folders come first on the path."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
