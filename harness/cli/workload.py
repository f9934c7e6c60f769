"""What a workload is and what it needs: `trace`, `capacity`, `advise`."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.core.options import CachePolicy, GroupPages
from harness.cli import Arguments, Command, add_out, out_folder
from harness.config.errors import ConfigError, UserError
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.capacity import CapacityAnswer
    from harness.capacity.advice import Advice
    from harness.capacity.case import LoadCase
    from harness.capacity.slo import Slo
    from harness.config.schema import RunConfig
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
written (its requests; name model and device again), or a store of a sweep (its first point, whose workload is kept:
workload=as_recorded takes its whole trace). Overrides (key=value) say the rest. Requests of traces and logs are
simulated at their own times; nothing is measured, but with --measure N: there several values of
a setting (scheduler.max_running=32,64,128) span a grid, all its cells are predicted, at most N measured (engine=cpu or
engine=vllm), and the best is named with its regret, how much worse it may be than the best of all.
With --tokenizer DIR SOURCE is a log of chat requests as clients send them (JSON lines with messages, and tools, user,
cache_salt, timestamp where there are any): hits of the prefix cache by pool size, the message that breaks each lost
prefix, and what a salt per tenant costs. No model, GPU or server is needed, and nothing is simulated.
Models with windowed layers are predicted with cache.groups=uniform, pages as in vLLM, unless cache.groups is given.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness advise mooncake.jsonl --model llama31_8b --device h100 --slo 'ttft_p99<2,tpot_mean<0.05'"""

_QUEUED = "Measured TTFT counts from the scheduler's queue, predicted TTFT from the arrival there: up to a step more."
_WHOLE = ("replay.mode=trace", "workload=as_recorded")  # all requests, at their own times and lengths


def _add_trace(parser: argparse.ArgumentParser) -> None:
    from harness.trace import capture, inspect, make

    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="python -m harness trace"
    )
    for add_action in (
        *(inspect.add_ls, inspect.add_get, inspect.add_inspect, make.add_convert, make.add_slice),
        *(make.add_scale, capture.add_capture, make.add_synth, inspect.add_validate),
    ):
        add_action(actions)


def _run_trace(arguments: Arguments) -> int:
    return int(arguments.flags.run_action(arguments.flags))


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    parser.add_argument("--find", choices=("rate", "pool", "block"), default="rate", help="default: rate")
    parser.add_argument("--seeds", type=int, default=5, help="independent searches; default: 5")
    parser.add_argument("--precision", type=float, default=0.02, help="share where it stops; default: 0.02")
    sizes = f"for --find block; default: {' '.join(map(str, SIZES))}"
    parser.add_argument("--block-sizes", type=int, nargs="+", metavar="N", help=sizes)
    add_out(parser, "results/capacity")


def _run_capacity(arguments: Arguments) -> int:
    """Search, write and print; returns the exit code: 0 found, 1 nothing meets the SLO."""
    flags = arguments.flags
    if flags.seeds < 1 or not 0 < flags.precision < 1:
        raise UserError("capacity: --seeds must be at least 1, --precision between 0 and 1")
    if flags.block_sizes and flags.find != "block":
        raise UserError("--block-sizes: only --find block tries several; the one size is cache.block_size=N")
    from harness.capacity import curve
    from harness.capacity.case import LoadCase
    from harness.capacity.page import CapacityStudy, answer_text, notes, rate_words, write_study
    from harness.capacity.slo import parse_slo
    from harness.config.values import replaced

    out = out_folder(flags.out)
    config = _capacity_config(arguments.overrides, flags.find)
    case = LoadCase(config, parse_slo(flags.slo))
    say(str(case.scope))
    if (often := case.most // len(case.trace.requests)) > 1 and not case.held_back:
        remark(f"a simulation sends them up to {often:,} times one after the other, so that growth shows")
    for seed in range(1, flags.seeds if case.draws else 1):
        drawn = replaced(config, {"workload.seed": config.workload.seed + seed})
        scope = LoadCase(drawn, case.slo).scope
        if scope.left_out != case.scope.left_out:
            say(f"Seed {drawn.workload.seed}: {scope}")
    answer = _answer(case, flags)
    rate = answer.value.mean if answer.value and flags.find == "rate" else None
    shown = curve(case, rate, flags.seeds) if rate else case.made
    settings = _settings(case, arguments.overrides, flags)
    study = CapacityStudy(settings, case, flags.find, answer, list(shown))
    say(answer_text(case, answer))
    for size, its_rate in answer.choices:
        say(f"  blocks of {size:g}: {rate_words(its_rate)}")
    for note in notes(study):
        say(note)
    say(f"{len(case.made)} simulations; {write_study(study, out)}")
    return 0 if answer.value else 1


def _answer(case: "LoadCase", flags: argparse.Namespace) -> "CapacityAnswer":
    from harness.capacity import best_block_size, highest_rate, smallest_pool

    if flags.find == "rate":
        return highest_rate(case, flags.seeds, flags.precision, remark)
    if case.config.cache.groups is not GroupPages.off and flags.find == "pool":
        raise UserError(
            f"--find pool: not with cache.groups={case.config.cache.groups}, whose pools have pages of groups; find "
            "the rate for some cache.pool_tokens, or set cache.groups=off"
        )
    if flags.find == "pool":
        return smallest_pool(case, flags.seeds, remark)
    return best_block_size(case, flags.block_sizes or SIZES, flags.seeds, flags.precision, remark)


def _simulation(words: Sequence[str], command: str, sizes: bool = False) -> "RunConfig":
    """The one configuration of these words, of which nothing is measured; raises UserError.

    With `sizes` a pool is searched, which is compared with what the device's memory holds.
    """
    from harness.config.checks import checked
    from harness.config.compose import OF_MEMORY, normalise
    from harness.sweep.plan import idle_words, one_configuration

    if unread := [word for word in words if word.startswith(("out=", "report."))]:
        folder = "its folder is --out DIR" if command.startswith("capacity") else "it writes no folder"
        raise UserError(f"{', '.join(unread)}: not read by {command.split()[0]}; {folder}")
    asked = one_configuration(("measure=false", *words), command)
    config = checked(normalise(asked))
    heard = [f"device.{name}" for name in OF_MEMORY.split()] if sizes else []
    if idle := idle_words([word for word in words if word.partition("=")[0] not in heard], asked, config):
        remark(idle)
    return config


def _capacity_config(overrides: Sequence[str], find: str) -> "RunConfig":
    """The one configured point, as a simulation; raises UserError."""
    from harness.config.schema import Place
    from harness.point.cost import check_cost
    from harness.workload.deployment import deployment_of

    config = _simulation(overrides, "capacity takes", find == "pool")
    if config.execute.place is not Place.local:
        reason = "capacity searches on this machine alone, in processes of its own (workers=N)"
        raise ConfigError("execute", reason)
    check_cost(deployment_of(config))
    return config


def _settings(case: "LoadCase", overrides: Sequence[str], flags: argparse.Namespace) -> list[tuple[str, str]]:
    from harness.point.cost import cost_model
    from harness.workload.deployment import deployment_of

    config = case.config
    deployment = deployment_of(config)
    pool, source = deployment.pool, cost_model(deployment).source
    words = [f"python -m harness capacity --find {flags.find} --slo '{flags.slo}'", *overrides]
    return [
        ("command", " ".join(words)),
        ("model", config.model.name),
        ("device", f"{config.device.tensor_parallel * config.device.data_parallel} x {config.device.name}"),
        ("cost model", f"{source.kind}: {source.name}"),
        ("not priced", str(source.provenance.get("not priced") or "nothing known")),
        ("pool", f"{pool.num_blocks:,} blocks of {pool.block_size} ({pool.policy})"),
        ("requests", str(case.scope)),
        ("arrivals", str(config.replay.mode)),
        ("trace", config.trace.name),
        ("seeds", str(flags.seeds) if case.draws else "none, because nothing is drawn"),
    ]


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="trace file, folder with a log, or store")
    parser.add_argument("--model", metavar="M", help="a preset, or a folder with a checkpoint")
    parser.add_argument("--device", metavar="D", help="a preset, or a file of calibrate --from-log")
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    most = "simulate about N, in windows over the whole trace; default: as many as are quick"
    parser.add_argument("--requests", type=int, metavar="N", help=most)
    chats = "SOURCE is a log of chat requests: hits of the prefix cache with this folder's tokenizer and chat template"
    parser.add_argument("--tokenizer", metavar="DIR", help=chats)
    measured = "the best cell of the grid that overrides span (key=a,b,…), of which at most N are measured"
    parser.add_argument("--measure", type=int, metavar="N", help=measured)


def _run_chats(arguments: Arguments, source: Path) -> int:
    """Count the prefix cache of a log of chat requests and print; returns the exit code."""
    from harness.capacity.chat import chat_answer, read_chat, tokenizer_of

    flags, block_size = arguments.flags, 16
    for word in arguments.overrides:
        key, _, value = word.partition("=")
        if key != "cache.block_size" or not value.isdecimal() or not int(value):
            raise UserError(f"{word}: with --tokenizer only cache.block_size=N can be set, N at least 1")
        block_size = int(value)
    if flags.model or flags.device or flags.requests or flags.measure or flags.slo != SLO:
        raise UserError(
            "--model, --device, --slo, --requests, --measure: not with --tokenizer, which counts the prefix cache alone"
        )
    tokenizer = tokenizer_of(flags.tokenizer)
    log = read_chat(source, tokenizer)
    for line in chat_answer(log, tokenizer, block_size, flags.tokenizer):
        say(line)
    return 0


def _run_advise(arguments: Arguments) -> int:
    """Read, simulate and print; returns the exit code."""
    from harness.capacity.advice import advise
    from harness.capacity.slo import parse_slo

    flags, source = arguments.flags, _there(arguments.flags.source)
    if flags.tokenizer:
        return _run_chats(arguments, source)
    words = _words(arguments)
    if flags.measure is not None:
        return _measure(flags, source, words, parse_slo(flags.slo))
    found = case_of(source, words, parse_slo(flags.slo), flags.requests)
    for line in (str(found.case.scope), *found.said):
        say(line)
    advice = advise(found.case, lambda what: remark(f"simulating: {what}"), found.measured)
    _say_advice(found.case, advice)
    return 0


def _there(name: str) -> Path:
    """The file or folder of that name. Raises UserError where there is none."""
    source = Path(name).expanduser()
    if not source.exists():
        raise UserError(f"SOURCE: no such file or folder: '{source}'")
    if not (source.is_file() or source.is_dir()):  # reading a pipe may never end
        raise UserError(f"SOURCE: '{source}' is a pipe or a device; name a file or a folder")
    return source


def _measure(flags: argparse.Namespace, source: Path, words: list[str], slo: "Slo") -> int:
    from harness.capacity.tune import tune_grid

    if flags.measure < 1 or flags.requests is not None or not source.is_file():
        raise UserError(
            "--measure N: at least 1 cell, of a SOURCE that is a trace file; workload.num_requests takes fewer requests"
        )
    for line in tune_grid(_whole(["trace=file", f"trace.path={source}", *words]), slo, flags.measure, remark):
        say(line)
    return 0


class AskedCase(NamedTuple):
    """The case of a SOURCE, what is to be said of it before any figure, and the figures that a log has."""

    case: "LoadCase"
    said: Sequence[str] = ()
    measured: Mapping[str, float] | None = None


def case_of(source: Path, words: list[str], slo: "Slo", requests: int | None = None) -> AskedCase:
    """The requests and the settings of SOURCE under an SLO; `words` are overrides of the user's.

    Raises:
        UserError: it cannot be read, or a setting is not allowed.
    """
    from harness.capacity.case import LoadCase
    from harness.point.bands import unseen

    found = _source(source, words)
    case = LoadCase(found.config, slo, found.recorded, requests)
    new = unseen(case.served) if case.served else ""
    said = (*found.warnings, f"Warning: {new}. Figures may be far off.") if new else found.warnings
    return AskedCase(case, said, found.measured)


def _words(arguments: Arguments) -> list[str]:
    flags, words = arguments.flags, list(arguments.overrides)
    if flags.model:
        is_folder = Path(flags.model).expanduser().is_dir()
        words.insert(0, f"model.path={flags.model}" if is_folder else f"model={flags.model}")
    if flags.device:
        words.insert(0, f"device={flags.device}")
    return words


class _Source(NamedTuple):
    """What SOURCE gives: a configuration; of a log also its requests, what is to be said of it, and its figures."""

    config: "RunConfig"
    recorded: "Trace | None" = None
    warnings: Sequence[str] = ()
    measured: Mapping[str, float] | None = None


def _source(source: Path, words: list[str]) -> _Source:
    """The configuration and the requests of a trace, a store or a log."""
    from harness.config.groups import groups
    from harness.config.overrides import of_a_file
    from harness.store.commit import read_store
    from harness.sweep.plan import run_request

    if source.is_file():
        return _of_trace(_whole(["trace=file", f"trace.path={source}", *words]))
    if (source / "points").is_dir():
        records = read_store(source).records
        if not records:
            raise UserError(f"SOURCE: '{source}' is a store without a finished point")
        name, record = next(iter(records.items()))
        keys = [axis.key for axis in run_request(words).axes]
        typed = *(f"{key}=" for key in keys), *(f"{key}." for key in keys if key in groups())
        kept = (it for it in record.overrides if not it.startswith(("out=", "report.", "measure=", *typed)))
        return _of_trace([*of_a_file(kept, f"the record of {name} in {source}", source), *words])
    written = source / "workload.jsonl"
    if written.is_file() and ((source / "summary.md").is_file() or len(list(source.iterdir())) == 1):
        answers = ["cache.answers=true"] if b'"output_key"' in written.read_bytes() else []  # as twin does
        own = _whole(["trace=pagetwin", f"trace.path={written}", *answers, *words])
        return _Source(_with_groups(_simulation(own, "advice is for"), words))
    from harness.twin.configured import configured
    from harness.twin.reading import read_engine_log
    from harness.twin.what_ifs import measured_figures
    from harness.workload.deployment import WINDOWS_KEPT

    log = read_engine_log(source)
    found = configured(log, words)
    config = _with_groups(found.config, words)
    said = [one for one in found.warnings if config is found.config or WINDOWS_KEPT not in one]
    said += [f"note: {one}" for one in (*log.notes, *found.notes)]
    said += [_QUEUED] if log.requests.queued_s is not None else []
    return _Source(config, log.workload, (log.client, *said), measured_figures(log))


def _of_trace(words: list[str]) -> _Source:
    return _Source(_with_groups(_simulation(words, "advice is for"), words))


def _whole(words: Sequence[str]) -> list[str]:
    """The words, behind those of whole traces where the words do not say otherwise, a group of theirs included."""
    last = {word.lstrip("+").partition("=")[0]: word for word in words}
    own = (word for word in _WHOLE if not {word.partition("=")[0], word.partition(".")[0]} & last.keys())
    return [*own, *last.values()]


def _with_groups(config: "RunConfig", words: Sequence[str]) -> "RunConfig":
    """The configuration with groups where the model has windows and no word, file or record says otherwise."""
    from harness.config.capabilities import check_combinations
    from harness.sweep.plan import run_request
    from harness.workload.deployment import max_position, model_shape

    window = model_shape(config.model).window
    longest = config.cache.max_model_len or max_position(config.model)
    asked, cache = {axis.key for axis in run_request(words).axes}, config.cache
    if "cache.groups" in asked or not window or window >= longest or cache.policy is not CachePolicy.paged:
        return config
    answers = cache.answers and "cache.answers" in asked  # groups keep none
    grouped = replace(config, cache=replace(cache, groups=GroupPages.uniform, answers=answers))
    return config if list(check_combinations(grouped)) else grouped


def _say_advice(case: "LoadCase", advice: "Advice") -> None:
    from harness.capacity.flags import beyond_flags, serve_line
    from harness.workload.deployment import deployment_of

    for line in advice.answers:
        say(line)
    for line in advice.warnings:
        say(f"warning: {line}")
    say(f"Prefixes: {advice.floor}.")
    if advice.effects:
        say(f"\nOne flag changed, {advice.where}; worst figure: over that of the present value")
        say(f"{'flag':32} worst figure  TTFT p99 s  TPOT mean s  {'hits':>6}  preemptions")
    for one in advice.effects:
        figures = one.trial.metrics
        row = f"{figures.get('ttft_p99', nan):>10.3f}  {figures.get('tpot_mean', nan):>11.4f}  "
        row += f"{100 * figures.get('hit_ratio', 0.0):>4.1f} %  {figures.get('preemptions', nan):>11,.0f}"
        say(f"{one!s:32} {one.worse:>10.2f} x  " + row.replace("nan", "  -"))
    config = case.config
    if not config.scheduler.async_scheduling:
        say(
            "note: a step is scheduled when the step before it has ended; vLLM schedules ahead by default, and its "
            "first tokens come up to a step later (scheduler.async_scheduling=true)"
        )
    say(
        f"note: {len(case.made)} simulations on {config.device.name} with {config.model.name}, pool "
        f"{deployment_of(config).pool.origin}; hits are with{'' if config.cache.answers else 'out'} outputs of earlier "
        "turns that the trace names (cache.answers)"
    )
    if advice.config is None:
        return
    say("")
    say(
        serve_line(advice.config)
        or f"note: {config.model.name} is a toy with random weights, so there is no command; "
        "name yours with --model"
    )
    if more := beyond_flags(advice.config):
        say(f"note: simulated, and not asked for by this line: {more}")


COMMANDS = (
    Command("trace", "list, fetch, look into, convert, cut, scale, capture, make or check traces", _add_trace,
            _run_trace, about="Work on request traces.", usage="ACTION ...", takes_overrides=False),
    Command("capacity", "search for the highest rate, smallest pool or best block size under an SLO",
            _add_capacity, _run_capacity,
            about="Search with the simulator for the capacity of a configuration under an SLO.",
            more=_CAPACITY),
    Command("advise", "say which block size, pool and flags suit a trace or a log", _add_advise, _run_advise,
            about="Say which block size, pool, sequences and flags suit a trace or a log, and warn.",
            more=_ADVISE),
)  # fmt: skip
