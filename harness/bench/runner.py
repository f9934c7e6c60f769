"""A run of `bench kernels`: time the cases, print the table, write the folder, report problems."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from harness.bench import results
from harness.bench.cases import KernelCase, chosen_device
from harness.config.errors import UserError
from harness.config.paths import check_out
from harness.console import remark, say
from harness.cost.timings import NATIVE, OURS

TIMINGS = Path(__file__).parent / "benchmarks.py"
SLOW_ON_CPU = ("flex",)  # runs a C++ compiler for each case; used only when it is named
CLOCK = "harness.bench.calls.seconds"


def run_cases(cases: Sequence[KernelCase], flags: argparse.Namespace) -> int:
    """Time the cases and write everything to the folder `flags.out`; returns the exit code."""
    from harness.bench.page import printed, table_of, write_run

    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    out, device = Path(flags.out), chosen_device(flags)
    providers, absent = _providers(flags, device)
    for name, reason in absent.items():
        remark(f"provider {name} cannot run here: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    notes = out / "problems.jsonl"
    notes.unlink(missing_ok=True)
    settings = {
        "cases": [case.values() for case in cases],
        "providers": providers,
        "user_function": flags.function,
        "device": device,
        "rounds": flags.rounds,
        "threads": flags.threads,
        "problems": str(notes.resolve()),
        "until": None if flags.seconds is None else time.time() + flags.seconds,
    }
    timings = results.run_session(TIMINGS, settings, out / "kernels.json", timer=CLOCK)
    problems = results.read_problems(notes)
    limits, made_on = results.ceilings_of(timings), results.made_on(device, flags.threads)
    table = table_of(results.rows_of(timings), made_on)
    for line in (printed(table), *legend(device, providers)):
        say(line)
    _say_problems(problems)
    say(f"written: {write_run(table, limits, problems, absent, made_on, out)}")
    return int(any(it.provider == OURS and it.kind is not results.ProblemKind.unsupported for it in problems))


def legend(device: str, providers: Sequence[str]) -> list[str]:
    """What the columns of the table mean, and which of them the engine runs on this device."""
    lines = [
        "µs, ±: our median time of a call and the spread of rounds. of copy, of read: share of the bandwidth that a "
        "copy and a read of memory reach in this run. of matmul: share of the speed of a matrix product."
    ]
    others = [name for name in providers if name != OURS]
    if others:
        meaning = "2.00× is twice as slow as ours, 0.50× twice as fast."
        lines.append(f"{', '.join(others)}: time divided by ours ('{OURS}'). {meaning}")
    if device == "cpu" and NATIVE in providers:
        engine = f"On a CPU the engine decodes with '{NATIVE}' (C), and computes chunks of float32 with it"
        lines.append(f"{engine}; '{OURS}' is the torch path.")
    return [*lines, "CPU figures." if device == "cpu" else "GPU figures."]


def _providers(flags: argparse.Namespace, device: str) -> tuple[list[str], dict[str, str]]:
    """The names of the providers to run, ours first; and for requested ones that cannot run, the reason."""
    import torch

    from paged_kernels.arguments import OptionError
    from paged_kernels.providers import find_providers

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here")
    try:
        known = find_providers(flags.function)
    except OptionError as error:
        raise UserError(f"--function {error}") from error
    slow = SLOW_ON_CPU if device == "cpu" else ()
    usual = [name for name in known if name not in slow and (name != NATIVE or device == "cpu")]
    wanted = [name.strip() for name in flags.provider.split(",")] if flags.provider else usual
    wanted += [flags.function] if flags.function else []
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UserError(f"--provider {unknown[0]}: no such provider; there are {', '.join(known)}")
    reasons = {name: known[name].available(torch.device(device)) for name in dict.fromkeys([OURS, *wanted])}
    absent = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in reasons if name not in absent], absent


def _say_problems(problems: Sequence[results.Problem]) -> None:
    """Print every error, and for each provider one line about the cases that it does not support."""
    for one in problems:
        if one.kind is not results.ProblemKind.unsupported:
            remark(f"{one.kind}: {one.case} by {one.provider}: {one.reason}")
    for provider in dict.fromkeys(one.provider for one in problems):
        refused = (one for one in problems if one.kind is results.ProblemKind.unsupported)
        if left_out := [one for one in refused if one.provider == provider]:
            example = f"e.g. {left_out[0].case}: {left_out[0].reason}"
            remark(f"{provider} left out {len(left_out)} of the cases, {example}")
