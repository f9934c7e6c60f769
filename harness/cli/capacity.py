"""`capacity`: search with the simulator for the highest rate, smallest pool or best block size under an SLO."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.core.options import GroupPages
from harness.config.errors import ConfigError, UserError
from harness.config.paths import check_out
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.capacity.search import Answer
    from harness.capacity.trials import Trial, Trials
    from harness.config.schema import RunConfig
    from harness.console import Arguments


SLO = "ttft_p99<2,tpot_mean<0.1"
SIZES = (4, 8, 16, 32, 64)
_MORE = """\
An SLO is a list of bounds on metrics: ttft_p99<2,tpot_mean<0.1 (seconds). Overrides (key=value) choose model, device,
trace and the rest, as for `run`; nothing is measured. Each seed draws its own arrivals (replay=poisson, or
replay=gamma) and searches on its own. The interval is Student's over the seeds. workers=N searches
N seeds at a time (0: one a core, where the first takes longer than 5 s). A simulation in which a request is
left out or not finished does not meet any SLO.
example:
  python -m harness capacity --slo 'ttft_p99<2,tpot_mean<0.1' model=llama3_8b device=h200 workload.num_requests=2000"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `capacity`."""
    parser = commands.add_parser(
        "capacity",
        help="search for the highest rate, smallest pool or best block size under an SLO",
        description="Search with the simulator for the capacity of a configuration under an SLO.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    parser.add_argument("--find", choices=("rate", "pool", "block"), default="rate", help="default: rate")
    parser.add_argument("--seeds", type=int, default=5, help="independent searches; default: 5")
    parser.add_argument(
        "--precision", type=float, default=0.02, help="share at which a search stops; default: 0.02"
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(SIZES), help="for --find block")
    parser.add_argument("--out", default="results/capacity", metavar="DIR", help="default: results/capacity")
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Search, write and print; returns the exit code: 0 found, 1 nothing meets the SLO."""
    flags = arguments.flags
    if flags.seeds < 1 or not 0 < flags.precision < 1:
        raise UserError("capacity: --seeds must be at least 1, --precision between 0 and 1")
    from pathlib import Path

    from harness.capacity.page import CapacityStudy, answer_text, notes, write_study
    from harness.capacity.trials import Trials, parse_slo

    for wrong in check_out(flags.out):
        raise UserError(f"--out {flags.out}: {wrong}")
    slo = parse_slo(flags.slo)
    config = _config(arguments.overrides)
    trials = Trials(config, slo)
    answer = _answer(trials, flags)
    shown = _shown(trials, flags, answer)
    study = CapacityStudy(
        config.name,
        _settings(trials, arguments.overrides, flags),
        slo,
        flags.find,
        answer,
        trials.made,
        shown,
    )
    say(answer_text(answer))
    for size, rate in answer.choices:
        say(f"  blocks of {size:g}: " + (f"{rate.mean:.4g} requests/s" if rate else "no edge found"))
    for note in notes(study):
        say(note)
    say(f"{len(trials.made)} simulations; {write_study(study, Path(flags.out))}")
    return 0 if answer.value else 1


def _answer(trials: "Trials", flags: argparse.Namespace) -> "Answer":
    from harness.capacity.search import best_block_size, highest_rate, smallest_pool

    if flags.find == "rate":
        return highest_rate(trials, flags.seeds, flags.precision, remark)
    if trials.config.cache.groups is not GroupPages.off and flags.find == "pool":
        raise UserError(
            f"--find pool: not with cache.groups={trials.config.cache.groups}, whose pools have pages of groups; find "
            "the rate for some cache.pool_tokens, or set cache.groups=off"
        )
    if flags.find == "pool":
        return smallest_pool(trials, flags.seeds, remark)
    return best_block_size(trials, flags.block_sizes, flags.seeds, flags.precision, remark)


def _shown(trials: "Trials", flags: argparse.Namespace, answer: "Answer") -> "list[Trial]":
    """The trials of the picture: a curve around the answer of a rate search, otherwise the trials of the search."""
    from harness.capacity.search import curve

    if flags.find == "rate" and answer.value:
        return list(curve(trials, answer.value.mean, flags.seeds))
    return list(trials.made)


def _config(overrides: Sequence[str]) -> "RunConfig":
    """The one configured point, as a simulation; raises UserError."""
    from harness.config.checks import check_config
    from harness.config.compose import compose_config, normalise
    from harness.config.schema import Place
    from harness.point.cost import check_cost
    from harness.sweep.plan import run_request

    request = run_request(("measure=false", *overrides))
    several = [axis.text for axis in request.axes if len(axis.settings) > 1]
    if several:
        raise UserError(f"capacity: one setting at a time; '{several[0]}' makes a sweep")
    config = normalise(compose_config(axis.settings[0] for axis in request.axes))
    errors = check_config(config)
    if config.execute.place is not Place.local:
        errors.append(
            ConfigError(
                "execute", "capacity searches on this machine alone, in processes of its own (workers=N)"
            )
        )
    if errors:
        raise UserError("\n".join(map(str, errors)))
    check_cost(config)
    return config


def _settings(trials: "Trials", overrides: Sequence[str], flags: argparse.Namespace) -> list[tuple[str, str]]:
    from harness.point.cost import cost_model
    from harness.workload.shapes import pool_shape

    config = trials.config
    pool, source = pool_shape(config), cost_model(config).source
    return [
        (
            "command",
            " ".join(
                ["python -m harness capacity", f"--find {flags.find}", f"--slo '{flags.slo}'", *overrides]
            ),
        ),
        ("model", config.model.name),
        ("device", f"{config.device.tensor_parallel} x {config.device.name}"),
        ("cost model", f"{source.kind}: {source.name}"),
        ("not priced", str(source.provenance.get("not priced") or "nothing known")),
        ("pool", f"{pool.num_blocks:,} blocks of {pool.block_size} ({pool.policy})"),
        ("arrivals", f"{config.replay.mode}, {config.workload.num_requests or 'all'} requests a simulation"),
        ("trace", config.trace.name),
        ("seeds", str(flags.seeds)),
    ]
