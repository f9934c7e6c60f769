"""Where points run: which settings apply there, and which values are safe to hand to a cluster.

Texts go into a batch script, so each is held to a form in which it can mean nothing else.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

from harness.config.errors import ConfigError
from harness.config.schema import ExecuteConfig, Place, RunConfig

# The group and its keys: they belong to a whole sweep, not to a point.
EXECUTION_KEYS = ("execute", *(f"execute.{field.name}" for field in fields(ExecuteConfig)))

_NEUTRAL = ExecuteConfig()
_OF_BOTH = ("cpus", "gpus", "memory_gb", "attempts")
_APPLIES = {
    Place.local: ("spread_s",),
    Place.slurm: tuple(
        field.name for field in fields(ExecuteConfig) if field.name not in ("place", "address", "spread_s")
    ),
    Place.ray: (*_OF_BOTH, "address"),
}
_PARTITION = re.compile(r"\w[\w.-]*(,\w[\w.-]*)*")
_OPTION = re.compile(r"--[a-z][a-z-]*(=.*)?")
_ADDRESS = re.compile(r"auto|local|[\w.\[\]-][\w.:\[\]-]*:\d{1,5}")
_LONGEST = 2000  # characters of a text
_OURS = {  # options of sbatch that PageTwin sets, with the key that says what they are
    **dict.fromkeys(
        ("array", "job-name", "output", "error", "open-mode", "signal", "requeue", "no-requeue"), None
    ),
    **dict.fromkeys(
        ("chdir", "wrap", "parsable", "wait", "test-only", "export-file", "ntasks", "nodes"), None
    ),
    "partition": "execute.partition",
    "time": "execute.minutes",
    "mem": "execute.memory_gb",
    "cpus-per-task": "execute.cpus",
    "gpus": "execute.gpus",
    "gpus-per-node": "execute.gpus",
}


def applicable(execute: ExecuteConfig) -> ExecuteConfig:
    """The settings with those that do not apply at their place set to their defaults; `~` becomes the home folder."""
    if execute == _NEUTRAL:
        return execute
    kept = {name: getattr(execute, name) for name in _APPLIES[execute.place]}
    if kept.get("folder"):
        kept["folder"] = str(Path(kept["folder"]).expanduser())
    return replace(_NEUTRAL, place=execute.place, **kept)


def _is_address(text: str) -> bool:
    port = text.rpartition(":")[2]
    return _ADDRESS.fullmatch(text) is not None and (not port.isdecimal() or 0 < int(port) < 2**16)


def check_execution(config: RunConfig) -> Iterator[ConfigError]:
    """Errors in the texts of `execute` that apply at its place."""
    execute = config.execute
    for name in ("options", "setup", "python", "srun", "folder"):
        text = getattr(execute, name)
        if text is not None and not (text.strip() and text.isprintable() and len(text) <= _LONGEST):
            rule = f"must be one line of 1 to {_LONGEST:,} printable characters, or null"
            yield ConfigError(f"execute.{name}", f"{rule}; found {text[:80]!r}")
    if execute.partition is not None and not _PARTITION.fullmatch(execute.partition):
        reason = f"found '{execute.partition}', must be names of letters, digits and . _ -"
        yield ConfigError("execute.partition", reason)
    if execute.address is not None and not _is_address(execute.address):
        yield ConfigError(
            "execute.address",
            f"found '{execute.address}', must be HOST:PORT of the head node as `ray start` prints it, "
            "auto (the cluster that this machine belongs to) or local (a new one, for this sweep alone)",
        )
    yield from _options("execute.options", execute.options, _OURS)
    yield from _options("execute.srun", execute.srun, {"output": None, "error": None, "unbuffered": None})
    yield from _folder(config)
    if execute.place is Place.ray and config.measure:
        yield ConfigError(
            "execute",
            "found ray, but other tasks share its nodes, which a measured run must not; use measure=false, or "
            "execute=slurm, which gives measured points a node of their own",
        )


def split_options(text: str | None) -> list[tuple[str, str | bool]]:
    """(name without dashes, value; True where there is none) of each option of a text as on a command line."""
    words = (word.removeprefix("--").partition("=") for word in shlex.split(text or ""))
    return [(name, value if sign else True) for name, sign, value in words]


def _options(key: str, text: str | None, ours: "dict[str, str | None]") -> Iterator[ConfigError]:
    if text is None:
        return
    try:
        words = shlex.split(text)
    except ValueError as error:
        yield ConfigError(key, f"cannot be read as words of a shell: {error}")
        return
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if not _OPTION.fullmatch(word):
            yield ConfigError(key, f"found '{word}', must be --name=value or --name, one after the other")
        elif name in ours:
            instead = f"; use {ours[name]}" if ours[name] else ""
            yield ConfigError(key, f"--{name} is set by PageTwin{instead}")


def _folder(config: RunConfig) -> Iterator[ConfigError]:
    """Job files are pickles, so they must never lie where somebody else's store may be opened."""
    folder = config.execute.folder
    if folder is None or config.execute.place is not Place.slurm:
        return
    if "%" in folder:
        yield ConfigError("execute.folder", f"found '{folder}', but Slurm replaces % in names; take another")
        return
    own, store = Path(folder).expanduser().absolute(), Path(config.out).expanduser().absolute()
    if own.is_relative_to(store) or store.is_relative_to(own):
        yield ConfigError(
            "execute.folder",
            f"found '{folder}', which overlaps the store '{config.out}'; job files are private and need a folder of "
            "their own",
        )
