"""`advise`: block size, pool, sequences and warnings for a trace or a log on a model and a device."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.errors import UserError
from harness.console import remark, say

if TYPE_CHECKING:
    from harness.capacity.advice import Advice
    from harness.config.schema import RunConfig
    from harness.console import Arguments
    from traces.trace import Trace

SLO = "ttft_p99<2,tpot_mean<0.1"
_MORE = """\
SOURCE is a trace file of any readable format, a folder with a deployment's log (as for twin), a folder that twin has
written (its requests; name model and device again), or a store of a sweep (its first point). Overrides (key=value) say
the rest. Requests are simulated at their own times; nothing is measured.
Models with windowed layers are predicted with cache.groups=uniform, as vLLM serves them, unless cache.groups is given.
Exit codes: 0 done, 2 the input was wrong.
example:
  python -m harness advise mooncake.jsonl --model llama31_8b --device h100 --slo 'ttft_p99<2,tpot_mean<0.05'"""
_WHOLE = ("replay.mode=trace", "workload=as_recorded")  # all requests, at their own times and lengths
_SOME = 2000
_SOME_IN_GROUPS = 200


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Describe `advise`."""
    parser = commands.add_parser(
        "advise",
        help="say which block size, pool and flags suit a trace or a log",
        description="Say which block size, pool, sequences and flags suit a trace or a log, and warn.",
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="trace file, folder with a log, or store")
    parser.add_argument("--model", metavar="M", help="a preset, or a folder with a checkpoint")
    parser.add_argument("--device", metavar="D", help="a preset, or a file of calibrate --from-log")
    parser.add_argument("--slo", default=SLO, help=f"bounds on metrics; default: {SLO}")
    parser.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"simulate the first N; default: {_SOME}, with groups {_SOME_IN_GROUPS}",
    )
    parser.set_defaults(takes_overrides=True)


def run(arguments: "Arguments") -> int:
    """Read, simulate and print; returns the exit code."""
    from harness.capacity.advice import advise
    from harness.capacity.trials import parse_slo

    flags = arguments.flags
    if flags.requests is not None and flags.requests < 1:
        raise UserError("--requests: must be at least 1")
    slo = parse_slo(flags.slo)
    config, trace = _source(Path(flags.source).expanduser(), _words(arguments))
    config = _with_groups(config, arguments.overrides)
    trace, note = _first(config, trace, flags.requests)
    advice = advise(config, trace, slo, lambda what: remark(f"simulating: {what}"))
    _print(advice, config, note)
    return 0


def _words(arguments: "Arguments") -> list[str]:
    flags, words = arguments.flags, list(arguments.overrides)
    if flags.model:
        is_folder = Path(flags.model).expanduser().is_dir()
        words.insert(0, f"model.path={flags.model}" if is_folder else f"model={flags.model}")
    if flags.device:
        words.insert(0, f"device={flags.device}")
    return words


def _source(source: Path, words: list[str]) -> "tuple[RunConfig, Trace]":
    """The configuration and the requests of a trace file, a store or the log of a deployment."""
    from harness.store.reading import read_store

    if not source.exists():
        raise UserError(f"SOURCE: no such file or folder: '{source}'")
    if source.is_file():
        return _of_trace(["trace=file", f"trace.path={source}", *words])
    if (source / "points").is_dir():
        records = read_store(source).records
        if not records:
            raise UserError(f"SOURCE: '{source}' is a store without a finished point")
        own = [
            word
            for word in next(iter(records.values()))["overrides"]
            if not word.startswith(("out=", "report.", "measure="))
        ]
        return _of_trace([*own, *words])
    written = source / "workload.jsonl"
    if written.is_file():
        return _of_trace(["trace=pagetwin", f"trace.path={written}", *words])
    from harness.deployment.configured import configured
    from harness.deployment.reading import read_deployment

    deployment = read_deployment(source)
    return configured(deployment, words).config, deployment.workload


def _of_trace(words: list[str]) -> "tuple[RunConfig, Trace]":
    from dataclasses import replace

    from harness.config.checks import check_config
    from harness.config.compose import compose_config, normalise
    from harness.config.schema import Oversize
    from harness.sweep.plan import run_request
    from harness.workload.workload import build_workload

    last = {word.lstrip("+").partition("=")[0]: word for word in ("measure=false", *_WHOLE, *words)}
    request = run_request(tuple(last.values()))
    several = [axis.text for axis in request.axes if len(axis.settings) > 1]
    if several:
        raise UserError(f"advice is for one configuration: write one value for {', '.join(several)}")
    config = normalise(compose_config(axis.settings[0] for axis in request.axes))
    errors = check_config(config)
    if errors:
        raise UserError("\n".join(map(str, errors)))
    dropping = replace(config, workload=replace(config.workload, oversize=Oversize.drop))
    return config, build_workload(dropping).trace


def _with_groups(config: "RunConfig", overrides: tuple[str, ...]) -> "RunConfig":
    """The configuration with groups where the model has windows and the user does not say otherwise."""
    from dataclasses import replace

    from engine.core.options import CachePolicy, GroupPages
    from harness.config.checks import check_groups
    from harness.workload.shapes import max_position, model_shape

    window = model_shape(config.model).window
    longest = config.cache.max_model_len or max_position(config.model)
    asked = any(word.startswith("cache.groups=") for word in overrides)
    if asked or window is None or window >= longest or config.cache.policy is not CachePolicy.paged:
        return config
    grouped = replace(config, cache=replace(config.cache, groups=GroupPages.uniform))
    return config if list(check_groups(grouped)) else grouped


def _first(config: "RunConfig", trace: "Trace", most: int | None) -> "tuple[Trace, str]":
    from dataclasses import replace

    from engine.core.options import GroupPages

    most = most or (_SOME if config.cache.groups is GroupPages.off else _SOME_IN_GROUPS)
    if not trace.requests:
        raise UserError("SOURCE: no request of it can be served by this model")
    if len(trace.requests) <= most:
        return trace, f"{len(trace.requests):,} requests"
    rows = trace.requests[:most]
    return replace(
        trace, requests=rows
    ), f"the first {most:,} of {len(trace.requests):,} requests (--requests)"


def _print(advice: "Advice", config: "RunConfig", note: str) -> None:
    from harness.workload.shapes import pool_shape

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
        f"note: simulated {note} on {config.device.name} with {config.model.name}, pool {pool_shape(config).origin}; "
        "hits are without outputs of earlier turns, which traces do not name"
    )
    say("")
    say(f"vllm serve {config.model.path or config.model.name} {' '.join(advice.flags)}")
