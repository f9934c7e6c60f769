"""What a workload is and what it needs: `trace`, `capacity`, `advise`."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.options import CachePolicy, GroupPages
from harness.cli import Arguments, Command, add_out, out_folder
from harness.config.errors import ConfigError, UserError
from harness.console import remark, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.capacity import CapacityAnswer, Trial, Trials
    from harness.capacity.advice import Advice
    from harness.config.schema import RunConfig
    from harness.trace.flags import Actions
    from traces.trace import Trace

SLO = "ttft_p99<2,tpot_mean<0.1"
SIZES = (4, 8, 16, 32, 64)
_CAPACITY = """\
An SLO is a list of bounds on metrics: ttft_p99<2,tpot_mean<0.1 (seconds). Overrides (key=value) choose model, device,
trace and the rest, as for `run`; nothing is measured. Each seed draws its own arrivals (replay=poisson, or
replay=gamma) and searches on its own. The interval is Student's over the seeds. workers=N searches
N seeds at a time (0: one a core, where the first takes longer than 5 s). A simulation in which a request is
left out or not finished does not meet any SLO.
example:
  python -m harness capacity --slo 'ttft_p99<2,tpot_mean<0.1' model=llama3_8b device=h200 workload.num_requests=2000"""

_ADVISE = """\
SOURCE is a trace file of any readable format, a folder with a deployment's log (as for twin), a folder that twin has
written (its requests; name model and device again), or a store of a sweep (its first point). Overrides (key=value) say
the rest. Requests are simulated at their own times; nothing is measured.
Models with windowed layers are predicted with cache.groups=uniform, pages as in vLLM, unless cache.groups is given.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness advise mooncake.jsonl --model llama31_8b --device h100 --slo 'ttft_p99<2,tpot_mean<0.05'"""

_WHOLE = ("replay.mode=trace", "workload=as_recorded")  # all requests, at their own times and lengths
_SOME = 2000
_SOME_IN_GROUPS = 200


def _actions() -> "dict[str, tuple[Callable[[Actions], None], Callable[[argparse.Namespace], int]]]":
    """How each action describes itself and how it runs, in the order of `trace --help`."""
    from harness.trace import capture, inspect, make

    return {
        "ls": (inspect.add_ls, inspect.run_ls),
        "get": (inspect.add_get, inspect.run_get),
        "inspect": (inspect.add_inspect, inspect.run_inspect),
        "convert": (make.add_convert, make.run_convert),
        "slice": (make.add_slice, make.run_slice),
        "scale": (make.add_scale, make.run_scale),
        "capture": (capture.add_capture, capture.run_capture),
        "synth": (make.add_synth, make.run_synth),
        "validate": (inspect.add_validate, inspect.run_validate),
    }


def _add_trace(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="python -m harness trace"
    )
    for add_action, _ in _actions().values():
        add_action(actions)


def _run_trace(arguments: Arguments) -> int:
    _, run_action = _actions()[arguments.flags.action]
    return run_action(arguments.flags)


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    parser.add_argument("--find", choices=("rate", "pool", "block"), default="rate", help="default: rate")
    parser.add_argument("--seeds", type=int, default=5, help="independent searches; default: 5")
    parser.add_argument(
        "--precision", type=float, default=0.02, help="share at which a search stops; default: 0.02"
    )
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(SIZES), help="for --find block")
    add_out(parser, "results/capacity")


def _run_capacity(arguments: Arguments) -> int:
    """Search, write and print; returns the exit code: 0 found, 1 nothing meets the SLO."""
    flags = arguments.flags
    if flags.seeds < 1 or not 0 < flags.precision < 1:
        raise UserError("capacity: --seeds must be at least 1, --precision between 0 and 1")
    from harness.capacity import Trials, parse_slo
    from harness.capacity.page import CapacityStudy, answer_text, notes, write_study

    out = out_folder(flags.out)
    slo = parse_slo(flags.slo)
    config = _capacity_config(arguments.overrides)
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
    say(f"{len(trials.made)} simulations; {write_study(study, out)}")
    return 0 if answer.value else 1


def _answer(trials: "Trials", flags: argparse.Namespace) -> "CapacityAnswer":
    from harness.capacity import best_block_size, highest_rate, smallest_pool

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


def _shown(trials: "Trials", flags: argparse.Namespace, answer: "CapacityAnswer") -> "list[Trial]":
    """The trials of the picture: a curve around the answer of a rate search, otherwise the trials of the search."""
    from harness.capacity import curve

    if flags.find == "rate" and answer.value:
        return list(curve(trials, answer.value.mean, flags.seeds))
    return list(trials.made)


def _capacity_config(overrides: Sequence[str]) -> "RunConfig":
    """The one configured point, as a simulation; raises UserError."""
    from harness.config.checks import checked
    from harness.config.compose import normalise
    from harness.config.schema import Place
    from harness.point.cost import check_cost
    from harness.sweep.plan import one_configuration
    from harness.workload.deployment import deployment_of

    config = checked(normalise(one_configuration(("measure=false", *overrides), "capacity takes")))
    if config.execute.place is not Place.local:
        reason = "capacity searches on this machine alone, in processes of its own (workers=N)"
        raise ConfigError("execute", reason)
    deployment = deployment_of(config)
    check_cost(deployment)
    return config


def _settings(trials: "Trials", overrides: Sequence[str], flags: argparse.Namespace) -> list[tuple[str, str]]:
    from harness.point.cost import cost_model
    from harness.workload.deployment import deployment_of

    config = trials.config
    deployment = deployment_of(config)
    pool, source = deployment.pool, cost_model(deployment).source
    return [
        (
            "command",
            " ".join([f"python -m harness capacity --find {flags.find} --slo '{flags.slo}'", *overrides]),
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


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="trace file, folder with a log, or store")
    parser.add_argument("--model", metavar="M", help="a preset, or a folder with a checkpoint")
    parser.add_argument("--device", metavar="D", help="a preset, or a file of calibrate --from-log")
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    most = f"simulate the first N; default: {_SOME}, with groups {_SOME_IN_GROUPS}"
    parser.add_argument("--requests", type=int, metavar="N", help=most)


def _run_advise(arguments: Arguments) -> int:
    """Read, simulate and print; returns the exit code."""
    from harness.capacity import parse_slo
    from harness.capacity.advice import advise

    flags = arguments.flags
    if flags.requests is not None and flags.requests < 1:
        raise UserError("--requests: must be at least 1")
    slo = parse_slo(flags.slo)
    config, trace, said = _source(Path(flags.source).expanduser(), _words(arguments))
    config = _with_groups(config, arguments.overrides)
    trace, note = _first(config, trace, flags.requests)
    for line in said:
        say(line)
    advice = advise(config, trace, slo, lambda what: remark(f"simulating: {what}"))
    _say_advice(advice, config, len(trace.requests), note)
    return 0


def _words(arguments: Arguments) -> list[str]:
    flags, words = arguments.flags, list(arguments.overrides)
    if flags.model:
        is_folder = Path(flags.model).expanduser().is_dir()
        words.insert(0, f"model.path={flags.model}" if is_folder else f"model={flags.model}")
    if flags.device:
        words.insert(0, f"device={flags.device}")
    return words


def _source(source: Path, words: list[str]) -> "tuple[RunConfig, Trace, Sequence[str]]":
    """The configuration and the requests of a trace, a store or a log, and what to know before any figure of them."""
    from harness.config.groups import groups
    from harness.config.overrides import of_a_file
    from harness.store.reading import read_store
    from harness.sweep.plan import run_request

    if not source.exists():
        raise UserError(f"SOURCE: no such file or folder: '{source}'")
    if source.is_file():
        return _of_trace(["trace=file", f"trace.path={source}", *words])
    if (source / "points").is_dir():
        records = read_store(source).records
        if not records:
            raise UserError(f"SOURCE: '{source}' is a store without a finished point")
        name, record = next(iter(records.items()))
        keys = [axis.key for axis in run_request(words).axes]
        typed = *(f"{key}=" for key in keys), *(f"{key}." for key in keys if key in groups())
        kept = (
            word for word in record.overrides if not word.startswith(("out=", "report.", "measure=", *typed))
        )
        return _of_trace([*of_a_file(kept, f"the record of {name} in {source}", source), *words])
    written = source / "workload.jsonl"
    if written.is_file():
        return _of_trace(["trace=pagetwin", f"trace.path={written}", *words])
    from harness.twin.configured import configured
    from harness.twin.reading import read_engine_log

    log = read_engine_log(source)
    found = configured(log, words)
    return found.config, log.workload, found.warnings


def _of_trace(words: list[str]) -> "tuple[RunConfig, Trace, Sequence[str]]":
    from harness.config.checks import checked
    from harness.config.compose import normalise
    from harness.config.schema import Oversize
    from harness.sweep.plan import one_configuration
    from harness.workload.point import resolve
    from harness.workload.trace import reshaped_trace

    last = {word.lstrip("+").partition("=")[0]: word for word in ("measure=false", *_WHOLE, *words)}
    config = checked(normalise(one_configuration(tuple(last.values()), "advice is for")))
    dropping = replace(config, workload=replace(config.workload, oversize=Oversize.drop))
    kept = resolve(dropping).trace
    return config, kept, _left_out(reshaped_trace(config), kept, config)


def _left_out(whole: "Trace", kept: "Trace", config: "RunConfig") -> Sequence[str]:
    """What to say where requests are too long for the model or the pool: how many, and how much of the load."""
    from harness.workload.deployment import max_position
    from harness.workload.point import TOO_LONG

    lost = len(whole.requests) - len(kept.requests)
    if not lost:
        return []
    tokens, left = (sum(row.prompt_tokens for row in one.requests) for one in (whole, kept))
    longest = config.cache.max_model_len or max_position(config.model)
    too_long = kept.header.dropped.get(TOO_LONG, 0)
    reasons = [f"{too_long:,} are longer than {longest:,} tokens (cache.max_model_len)"] if too_long else []
    reasons += (
        [f"{lost - too_long:,} never fit the pool or the limits of the scheduler"] if lost > too_long else []
    )
    return [
        f"Left out: {lost:,} of {len(whole.requests):,} requests with {100 * (1 - left / tokens):.0f} % of the prompt "
        f"tokens, because {' and '.join(reasons)}. All advice is for the others."
    ]


def _with_groups(config: "RunConfig", overrides: tuple[str, ...]) -> "RunConfig":
    """The configuration with groups where the model has windows and the user does not say otherwise."""
    from harness.config.capabilities import check_combinations
    from harness.workload.deployment import max_position, model_shape

    window = model_shape(config.model).window
    longest = config.cache.max_model_len or max_position(config.model)
    asked = any(word.startswith("cache.groups=") for word in overrides)
    if asked or window is None or window >= longest or config.cache.policy is not CachePolicy.paged:
        return config
    grouped = replace(config, cache=replace(config.cache, groups=GroupPages.uniform))
    return config if list(check_combinations(grouped)) else grouped


def _first(config: "RunConfig", trace: "Trace", most: int | None) -> "tuple[Trace, str]":
    most = most or (_SOME if config.cache.groups is GroupPages.off else _SOME_IN_GROUPS)
    if not trace.requests:
        raise UserError("SOURCE: no request of it can be served by this model")
    if len(trace.requests) <= most:
        return trace, f"{len(trace.requests):,} requests"
    rows = trace.requests[:most]
    return replace(
        trace, requests=rows
    ), f"the first {most:,} of {len(trace.requests):,} requests (--requests)"


def _say_advice(advice: "Advice", config: "RunConfig", requests: int, note: str) -> None:
    from harness.capacity.advice import FEWEST
    from harness.config.compose import TOY_MODELS
    from harness.workload.deployment import deployment_of

    for line in advice.answers:
        say(line)
    for line in advice.warnings:
        say(f"warning: {line}")
    say(f"Prefixes: {advice.floor}.")
    say("")
    say("block size  match unit   waste    hits  most hits  output tokens/s  TTFT p99 s  preemptions")
    for row in advice.rows:
        say(
            f"{row.block_size:>10}  {row.match_unit:>10}  {100 * row.waste:>4.1f} %  {100 * row.hits:>4.1f} %"
            f"  {100 * row.most_hits:>7.1f} %  {row.throughput:>15,.0f}  {row.ttft_p99_s:>10.3f}"
            f"  {row.preemptions:>11,.0f}"
        )
    for line in advice.notes:
        say(f"note: {line}")
    say(
        f"note: simulated {note} on {config.device.name} with {config.model.name}, pool "
        f"{deployment_of(config).pool.origin}; hits are without outputs of earlier turns, which traces do not name"
    )
    say("")
    if requests < FEWEST:
        say(f"No flags: {requests} requests are too few to advise from; give {FEWEST} or more.")
        return
    if not config.model.path and config.model.name in TOY_MODELS:
        say(
            f"note: {config.model.name} is a toy with random weights, so there is no command; name yours with --model"
        )
        return
    if any(flag.startswith("--gpu-memory-utilization") for flag in advice.flags):
        say("note: the pool is that of --gpu-memory-utilization below; vLLM's own default is 0.92")
    say(f"vllm serve {config.model.path or f'<hub id of {config.model.name}>'} {' '.join(advice.flags)}")


COMMANDS = (
    Command(
        "trace",
        "list, fetch, look into, convert, cut, scale, capture, make or check traces",
        _add_trace,
        _run_trace,
        about="Work on request traces.",
        usage="ACTION ...",
        takes_overrides=False,
    ),
    Command(
        "capacity",
        "search for the highest rate, smallest pool or best block size under an SLO",
        _add_capacity,
        _run_capacity,
        about="Search with the simulator for the capacity of a configuration under an SLO.",
        more=_CAPACITY,
    ),
    Command(
        "advise",
        "say which block size, pool and flags suit a trace or a log",
        _add_advise,
        _run_advise,
        about="Say which block size, pool, sequences and flags suit a trace or a log, and warn.",
        more=_ADVISE,
    ),
)
