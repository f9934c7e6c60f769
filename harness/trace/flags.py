"""Options that several actions share, the trace that they choose, and the file that they write.

Public traces are in the user's cache. A trace is written completely or not at all; an existing file is replaced only
with `--overwrite`. This module is imported for `--help`, so everything heavy is imported inside functions.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, TypeAlias

from harness.config.errors import UserError
from harness.console import say

if TYPE_CHECKING:
    from traces.arrivals import ArrivalProcess
    from traces.catalogue import CatalogueEntry
    from traces.trace import Trace

    Actions: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]
    Run: TypeAlias = Callable[[argparse.Namespace], int]
    Write: TypeAlias = Callable[[Trace, str | Path], None]

_ENDS = (".jsonl", ".jsonl.gz", ".parquet")
_ARRIVALS = ("even", "poisson", "gamma", "diurnal", "modulated")
_FLAGS = {
    "format": "--format",
    "ticks": "--ticks",
    "on_error": "--on-error",
    "seed": "--seed",
    "limit": "--requests",
    "num_requests": "--requests",
    "arrivals": "--arrivals",
    "rate_rps": "--rate",
    "requests_per_s": "--to-rate",
    "shape": "--shape",
    "tokenizer": "--tokenizer",
    "share": "--share",
    "num_prefixes": "--count",
    "zipf": "--zipf",
    "factor": "--lengths",
}


def describe(
    actions: "Actions", run: "Run", what: str, usage: str, more: str = ""
) -> argparse.ArgumentParser:
    """A parser for one action, whose name its usage begins with; `run` returns the exit code."""
    parser = actions.add_parser(
        usage.split()[0],
        help=what,
        description=what[0].upper() + what[1:] + ".",
        usage=f"python -m harness trace {usage}",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run_action=user_errors_explained(run))
    return parser


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options for the source trace and how to read it."""
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a file or folder, a generator, or a fetched public trace")
    add("--format", default="auto", help="the format; default: recognise it by content")
    add("--requests", type=int, metavar="N", help="the first N requests; generators: 1,000")
    add("--seed", type=int, default=0, help="of everything that is drawn; default: 0")
    add("--ticks", default="keep", help="keep, even or random: arrivals with equal times of a coarse clock")
    add("--on-error", default="stop", help="stop, or skip and count malformed rows")
    add("--sort", action="store_true", help="allow rows out of order, and sort them by time")
    add("--tokenizer", metavar="PATH", help="folder with tokenizer.json, for traces that hold text")
    add_arrivals(parser)


def add_arrivals(parser: argparse.ArgumentParser) -> None:
    """Add the options for arrivals, for sources without a clock and for generators."""
    parser.add_argument("--arrivals", choices=_ARRIVALS, help="an arrival process; default: as recorded")
    parser.add_argument("--rate", type=float, help="its requests (conversations) per second; default: 1")
    parser.add_argument("--shape", type=float, help="of gamma arrivals; default: 0.5")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options for the output file."""
    parser.add_argument("--out", metavar="FILE", required=True, help="ends in .jsonl, .jsonl.gz or .parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE where it exists")


def chosen_trace(flags: argparse.Namespace) -> "Trace":
    """The trace that the options name. Raises UserError."""
    from harness.workload.trace import encoder
    from traces.reading import read_trace
    from traces.synth.generator import GENERATORS, generate_trace

    if flags.trace in GENERATORS and not Path(flags.trace).exists():
        count = 1000 if flags.requests is None else flags.requests
        return generate_trace(
            flags.trace, num_requests=count, seed=flags.seed, arrivals=chosen_arrivals(flags)
        )
    if flags.trace in trace_options() and not Path(flags.trace).exists():
        return _of_option(flags)
    path = cached_trace(flags.trace)
    return read_trace(
        path,
        flags.format,
        ticks=flags.ticks,
        on_error=flags.on_error,
        seed=flags.seed,
        limit=flags.requests,
        sort=flags.sort,
        arrivals=chosen_arrivals(flags),
        encode=encoder(flags.tokenizer) if flags.tokenizer else None,
    )


def trace_options() -> list[str]:
    """The generated traces of `conf/trace/` that a sweep takes as `trace=NAME`."""
    import yaml

    from harness.config.groups import groups, option_file

    files = {name: option_file("trace", name) for name in groups()["trace"]}
    kinds = {
        name: yaml.safe_load(file.read_text(encoding="utf-8")).get("format") for name, file in files.items()
    }
    return [name for name, kind in kinds.items() if kind == "generated"]


def _of_option(flags: argparse.Namespace) -> "Trace":
    """The generated trace of an option of `conf/trace/`, as a sweep with `workload=as_recorded` has it."""
    from harness.config.compose import compose_config
    from harness.config.overrides import parse_overrides
    from harness.workload.trace import reshaped_trace

    count = 1000 if flags.requests is None else flags.requests
    texts = [f"trace={flags.trace}", "workload=as_recorded"]
    texts += [f"workload.num_requests={count}", f"workload.seed={flags.seed}"]
    if process := chosen_arrivals(flags):
        texts += [f"trace.arrivals={process.kind}", f"trace.arrival_rate={process.rate_rps}"]
        texts += [f"trace.arrival_shape={process.shape}"]
    return reshaped_trace(compose_config(axis.settings[0] for axis in parse_overrides(texts)))


def chosen_arrivals(flags: argparse.Namespace) -> "ArrivalProcess | None":
    """The arrival process that the options name, if any."""
    from traces.arrivals import ArrivalProcess

    if flags.arrivals is None:
        refuse_idle(flags, ("rate", "shape"), "--arrivals; without it requests come as recorded")
        return None
    if flags.arrivals != "gamma":
        refuse_idle(flags, ("shape",), "--arrivals gamma")
    rate, shape = 1.0 if flags.rate is None else flags.rate, 0.5 if flags.shape is None else flags.shape
    return ArrivalProcess(flags.arrivals, rate, shape=shape)


def refuse_idle(flags: argparse.Namespace, names: Iterable[str], lacking: str) -> None:
    """Raise UserError if one of these options is given, which say nothing without another one."""
    if given := [f"--{name}" for name in names if getattr(flags, name) is not None]:
        raise UserError(f"{given[0]} goes with {lacking}")


# -- files -------------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """The folder of fetched traces: $PAGETWIN_TRACES, or `pagetwin/traces` in the user's cache folder."""
    chosen = os.environ.get("PAGETWIN_TRACES")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pagetwin" / "traces"


def folder_of(entry: "CatalogueEntry") -> Path:
    """The folder of one trace."""
    return cache_folder() / entry.name


def trace_path(entry: "CatalogueEntry") -> Path:
    """The path to read: the trace's file, or its folder if it has several files."""
    return folder_of(entry) / entry.files[0].path if len(entry.files) == 1 else folder_of(entry)


def is_fetched(entry: "CatalogueEntry") -> bool:
    """Whether all files of a public trace exist."""
    return bool(entry.files) and all((folder_of(entry) / file.path).is_file() for file in entry.files)


def cached_trace(name: str) -> Path:
    """The path for a name: a file or folder, or else a public trace that was fetched. Raises UserError."""
    from traces.catalogue import catalogue, public_trace
    from traces.synth.generator import GENERATORS

    path = Path(name).expanduser()
    try:
        if path.is_file() or path.is_dir():
            return path
        if path.exists():  # reading a pipe or device may never end
            raise UserError(f"'{name[:80]}' is a pipe or a device; name a trace file, or a folder")
    except OSError as error:
        raise UserError(f"cannot use '{name[:80]}': {error.strerror}") from error
    entry = public_trace(name)
    if entry is None:
        public = ", ".join(known.name for known in catalogue() if known.format != "generated")
        reason = f"'{name}' is neither a file nor a generator ({', '.join(GENERATORS)}) nor a public trace ({public})"
        raise UserError(reason)
    if not is_fetched(entry):
        raise UserError(f"'{name}' is not in {cache_folder()}; fetch it: python -m harness trace get {name}")
    return trace_path(entry)


def checked_output(name: str, overwrite: bool) -> Path:
    """The path to write. Raises UserError before any work is done."""
    path = Path(name).expanduser()
    if not name.endswith(_ENDS):
        raise UserError(f"--out: '{name}' must end in {', '.join(_ENDS)}")
    if path.exists() and not overwrite:
        raise UserError(f"--out: '{name}' exists; add --overwrite to replace it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out: no such folder: {path.absolute().parent}")
    return path


def write_trace(trace: "Trace", path: Path, writer: "Write | None" = None) -> None:
    """Write through a temporary file and a rename, and print what was written. Raises UserError."""
    from traces.formats.pagetwin import write_jsonl, write_parquet

    digest = trace.digest  # before a file is written: a trace without one is no trace
    end = next((end for end in (".jsonl.gz", *_ENDS) if path.name.endswith(end)), path.suffix)
    write = writer or (write_parquet if end == ".parquet" else write_jsonl)
    try:
        with NamedTemporaryFile(dir=path.absolute().parent, suffix=end, delete=False) as file:
            temporary = Path(file.name)
        try:
            write(trace, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot write '{path}': {error.strerror or error}") from error
    left = "".join(f", {count:,} left out ({reason})" for reason, count in trace.header.dropped.items())
    say(f"{path}: {len(trace.requests):,} requests{left}, digest {digest}")
    for change in trace.header.changes:
        say(f"  {change}")


# -- errors ------------------------------------------------------------------------------------------------------------


def user_errors_explained(run: "Run") -> "Run":
    """The action, whose errors in traces and parameters become UserError with a hint."""

    @wraps(run)
    def wrapped(flags: argparse.Namespace) -> int:
        from traces.errors import ParameterError, TraceError

        try:
            return run(flags)
        except TraceError as error:
            raise UserError(f"{error}{_hint(error)}") from error
        except ParameterError as error:
            flag = _FLAGS.get(error.parameter, error.parameter)
            raise UserError(f"{flag}: {error.reason}") from error

    return wrapped


def _hint(error: Exception) -> str:
    if "arrival process is required" in str(error):
        return "; here: --arrivals poisson --rate 1"
    return "; here: --tokenizer FOLDER" if "must be tokenised" in str(error) else ""
