"""GPU acceptance: tests and measurements on a GPU, in parts of ten minutes, each with one folder. `make gpu` runs it.

The steps of a part run one after another, each in a process of its own and with a time limit. A failing step does not
stop the others, and its output is kept. `--dry-run` rehearses every step without a GPU. docs/gpu.md says how to use
little GPU time well.
"""

import argparse
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from gpu_acceptance.machine import (
    ROOT,
    check_gpu,
    check_packages,
    device_folder,
    device_overrides,
    run_for,
    step_environment,
)
from gpu_acceptance.parts import PARTS, Outcome, Setting, Step, found_tool, steps_of
from harness.config.errors import UserError
from harness.console import remark, say
from harness.environment import gpu_names

ENDINGS = (".tar.gz", ".tgz")
_LAST_LINES = 12  # of a failed step's output that are shown at once
_LEAST_S = 5.0  # with less time left no step starts
MINUTES = 9.5  # of a ten-minute call; starting and packing take the rest
_MORE = """\
parts:
  quick       GPU tests, kernels by every provider, latency gate, calibration, a small sweep
  kernels     tests, memory checker, the full grid of attention calls, hardware counters
  engine      decode steps of 1B- and 8B-class models, graphs on and off, beside transformers
  prediction  predicted against measured, contiguous memory beside paged, a trial of the latency gate
Exit codes: 0 every step gave an answer, 1 one step did not or a test failed, 2 the part cannot run here."""


def check_archive(file: Path) -> None:
    """Raise UserError if the file name does not end as an archive's. This is checked before any measuring."""
    if not file.name.endswith(ENDINGS):
        raise UserError(f"--pack {file}: name a file that ends in {' or '.join(ENDINGS)}")


def pack(folder: Path, file: Path) -> Path:
    """Pack `folder` under its own name into the archive `file`, completely or not at all; returns `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(folder, arcname=folder.name, filter=_without_leftovers)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _without_leftovers(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out hidden (partial) files and bytecode caches, and remove the owner's name."""
    name = Path(member.name).name
    if name.startswith(".") or name == "__pycache__":
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def run_part(flags: argparse.Namespace) -> int:
    """Run, rehearse or judge a part again; returns the exit code.

    Raises:
        UserError: the part cannot run here; the message names everything that is missing.
    """
    _check_flags(flags)
    if flags.judge:
        return _judge_again(flags)
    check_packages()
    names = gpu_names() if flags.dry_run else check_gpu()
    out = _folder(flags, names)
    chosen = _chosen(steps_of(flags.part, Setting(out, device_overrides(names), flags.trace)), flags.only)
    if flags.dry_run:
        return _rehearse(chosen)
    try:
        outcomes = _measure(chosen, out, flags, names[0])
    finally:  # the measured results are packed even after an error
        if flags.pack and out.exists():
            file = pack(out, Path(flags.pack).absolute())
            say(f"packed: {file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0 if all(outcome.state in ("done", "not installed") for outcome in outcomes) else 1


def _check_flags(flags: argparse.Namespace) -> None:
    if flags.pack:
        check_archive(Path(flags.pack))
    if flags.trace and not Path(flags.trace).is_file():
        raise UserError(f"--trace {flags.trace}: no such file")
    if not (isfinite(flags.minutes) and flags.minutes > 0):
        raise UserError(f"--minutes is {flags.minutes:g}, must be above 0")


def _folder(flags: argparse.Namespace, names: Sequence[str]) -> Path:
    base = Path(flags.out).absolute() if flags.out else ROOT / "results" / "reference" / device_folder(names)
    return base / str(flags.part)


def _judge_again(flags: argparse.Namespace) -> int:
    """Write the page of an earlier run, or of another machine's, with goals judged by the present code."""
    from gpu_acceptance.page import known_device, write_page

    if not flags.out:
        raise UserError("--judge needs --out, the folder that holds the part's")
    out = _folder(flags, ())
    say(f"written: {write_page(out, flags.part, [], known_device(out), here=False)}")
    return 0


def _measure(chosen: Sequence[Step], out: Path, flags: argparse.Namespace, device: str) -> list[Outcome]:
    """Run the steps and write the page. A page with the device is written first, in case the run is cut off."""
    from gpu_acceptance.page import write_page

    deadline = time.monotonic() + 60 * flags.minutes
    write_page(out, flags.part, [], device)
    outcomes = _run(_sharing(chosen, 60 * flags.minutes), out, deadline)
    page = write_page(out, flags.part, outcomes, device)
    say(page.read_text(encoding="utf-8"))
    say(f"written: {page}")
    return outcomes


def _chosen(all_steps: Sequence[Step], only: str | None) -> list[Step]:
    if not only:
        return list(all_steps)
    wanted, known = [name.strip() for name in only.split(",")], [step.name for step in all_steps]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such step; there are {', '.join(known)}")
    return [step for step in all_steps if step.name in wanted]


def _sharing(chosen: Sequence[Step], seconds: float) -> list[Step]:
    """The steps with longer limits where they are few, so that together they may use all the time."""
    factor = max(1.0, seconds / sum(step.limit_s for step in chosen))
    return [replace(step, limit_s=step.limit_s * factor) for step in chosen]


def _rehearse(chosen: Sequence[Step]) -> int:
    """Run the rehearsal command of every step, without a GPU; returns the exit code."""
    failed = 0
    for step in (one.within(one.limit_s) for one in chosen):
        done = subprocess.run(
            step.rehearsal, cwd=ROOT, env=step_environment(), capture_output=True, text=True, check=False
        )
        ready = done.returncode == 0
        absent = f" ({step.tool} is not installed here)" if step.tool and not found_tool(step.tool) else ""
        words = " ".join([step.tool, *step.command] if step.tool else step.command[1:])
        say(f"{step.name}: {'ready' if ready else 'NOT READY'}{absent}: {words}")
        if not ready:
            failed += 1
            remark("\n".join((done.stdout + done.stderr).splitlines()[-_LAST_LINES:]))
    say("nothing was timed")
    return 1 if failed else 0


def _run(chosen: Sequence[Step], out: Path, deadline: float) -> list[Outcome]:
    (out / "logs").mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for number, step in enumerate(chosen, 1):
        outcome = _run_one(step, out / "logs" / f"{step.name}.txt", deadline)
        say(f"{step.name}: {outcome.state} after {outcome.seconds:.0f} s")
        outcomes.append(outcome)
        if outcome.code in step.ends:
            say(f"{step.name} ended with {outcome.code}: nothing more is begun")
            return outcomes + [Outcome(other, "left out", None, 0.0) for other in chosen[number:]]
    return outcomes


def _run_one(step: Step, log: Path, deadline: float) -> Outcome:
    """Run one step until its limit or the deadline, whichever comes first; its output goes to `log`."""
    if step.tool and not found_tool(step.tool):
        return Outcome(step, "not installed", None, 0.0)
    start = time.monotonic()
    left = min(step.limit_s, deadline - start)
    if left < _LEAST_S:
        return Outcome(step, "left out", None, 0.0)
    step = step.within(left)
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {' '.join(step.words)}\n")
        output.flush()
        code = run_for(step.words, left, output, ROOT, step_environment(step.environment))
    state = "stopped" if code is None else "done" if code in step.answers else "failed"
    if state == "failed":
        remark("\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]))
    return Outcome(step, state, code, time.monotonic() - start)


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps of a part; returns the exit code."""
    flags = _parser().parse_args(words)
    try:
        return run_part(flags)
    except UserError as error:
        remark(f"error: {error}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_acceptance.run",
        description="Run one part of the GPU acceptance in ten minutes: one folder, one page of goals.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="default: %(default)s")
    parser.add_argument(
        "--out", metavar="DIR", help="results go to DIR/<part>; default: results/reference/<device>"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="stop after this time; default: %(default)s"
    )
    parser.add_argument("--only", metavar="A,B", help="only these steps; they share the whole time")
    parser.add_argument("--trace", metavar="CSV", help="prediction: an Azure LLM inference trace")
    parser.add_argument(
        "--pack", metavar="FILE.tar.gz", help="pack the part's folder into this file at the end"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="rehearse every step; needs no GPU, times nothing"
    )
    parser.add_argument(
        "--judge", action="store_true", help="write the page again from the raw data in --out; needs no GPU"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
