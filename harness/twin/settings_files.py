"""Files with the settings of an engine: a JSON dump of its arguments, vLLM's YAML for `--config`, a command line.

JSON is `engine.json` or `meta.json` of LLMServingSim's recorder (`engine_kwargs`, `kv_cache`, `hardware`), or an object
of vLLM's arguments by name. A command line is a text file with `vllm serve ...` or `sglang.launch_server ...`.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from engine.runtime.options import VLLM_NAMES
from harness.config.option_files import plain_yaml
from harness.twin.rows import JsonDocument
from harness.twin.settings import SGLANG, VLLM, EngineSettings, count
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, read_document
from traces.formats.parsing import kind

_COMMAND = re.compile(r"vllm\s+serve\b|vllm\.entrypoints\.|sglang\.launch_server|sglang\s+serve\b")
_PROGRAM = re.compile(r"serve$|sglang\.launch_server$|vllm\.entrypoints\.")
_NEXT = re.compile(
    r"\d?[;&|<>]|vllm$|python3?$"
)  # where a command ends, or a client's begins on another line
_VERSION_OF_IMAGE = re.compile(r"(?:vllm-openai|sglang):v?(\d+\.\d+(?:\.\d+)?\S*)")
_SHELL = re.compile(r"-[a-z]*c")  # what is behind it is a command
_NUMBER = re.compile(r"-\d+(\.\d+)?")  # below 0: a value, and no flag
_TELLING = [
    VLLM_NAMES[name]
    for name in ("max_running", "max_batched_tokens", "memory_utilization", "tensor_parallel")
]


def is_command(text: str) -> bool:
    """Whether a text holds the command line of a known engine."""
    return _COMMAND.search(text) is not None


def read_json_settings(file: SourceFile) -> EngineSettings:
    """The settings of a JSON dump. Raises TraceError."""
    document = JsonDocument(file)
    record = document.value
    place = ("engine_kwargs",) if "engine_kwargs" in record else ()
    args = document.object(place)
    version = record.get("vllm_version")
    with document.placed(()):
        if not isinstance(version, str | None):
            raise RowError("vllm_version", f"string expected, found {kind(version)}")
    with document.placed(place):
        said = {name: value for name, value in args.items() if name != "vllm_version"}
        found = VLLM.read(said, file.name, version)
    if record.get("kv_cache"):  # what the engine found out at its start: the pool that it made
        facts = document.object(("kv_cache",))
        names = {"pool_blocks": "num_gpu_blocks", "block_size": "block_size", "pool_tokens": "num_kv_tokens"}
        with document.placed(("kv_cache",)):
            values = {
                field: count(facts[name], field)
                for field, name in names.items()
                if facts.get(name) is not None
            }
            for field, size in (("pool_blocks", 1), ("pool_tokens", values.get("block_size", 0))):
                if field in values:
                    values[field] -= size  # vLLM's null block
        found = found.changed(f"{file.name}, as the engine found it", **values)
    hardware = record.get("hardware")
    name = hardware.get("device_name", hardware.get("name")) if isinstance(hardware, dict) else None
    return found.changed(file.name, device=str(name)) if name else found


def is_json_settings(head: Mapping[str, Any]) -> bool:
    """Whether an object is a dump of an engine's arguments."""
    return "engine_kwargs" in head or any(name in head for name in _TELLING)


def read_yaml_settings(file: SourceFile) -> EngineSettings:
    """The settings of vLLM's YAML for `--config`. Raises TraceError."""
    import yaml

    try:
        record = plain_yaml(read_document(file))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        reason = f"no YAML: {getattr(error, 'problem', None) or error}"
        raise TraceError(file.path, line, None, reason) from error
    if not isinstance(record, dict):
        raise TraceError(file.path, 1, None, f"names and values expected, found {kind(record)}")
    return _by_line(file, VLLM.read, record)


def read_command(file: SourceFile) -> EngineSettings:
    """The settings of a command line. Lines may end in a backslash, and `#` starts a comment. Raises TraceError."""
    whole = read_document(file)
    try:
        words = shlex.split(whole.replace("\\\n", " "), comments=True)
        # what a shell is given to run, as bash -c '…'
        given = {word for last, word in pairwise(words) if _SHELL.fullmatch(last) and is_command(word)}
        words = [part for word in words for part in (shlex.split(word, True) if word in given else [word])]
    except ValueError as error:
        raise TraceError(file.path, None, None, f"no shell command: {error}") from error
    found = _by_line(file, settings_of_words, words)
    version = _VERSION_OF_IMAGE.search(whole)
    return found.changed(file.name, version=version[1]) if version else found


def settings_of_words(words: list[str], where: str) -> EngineSettings:
    """The settings of the words of a command line. Raises RowError."""
    text = " ".join(words)
    is_sglang = "sglang" in text and "vllm serve" not in text
    engine = SGLANG if is_sglang else VLLM
    args: dict[str, Any] = {}
    starts = [at for at, word in enumerate(words, 1) if _PROGRAM.match(word)]
    servers = [at for at in starts if words[at - 2] != "bench"]
    if len(servers) > 1:
        raise RowError(None, f"the commands of {len(servers)} servers; keep that of the server of this log")
    start = servers[0] if servers else 0
    words = words[start : next((at for at in range(start, len(words)) if _NEXT.match(words[at])), None)]
    if words and not words[0].startswith("-") and start and not is_sglang:
        args["model"] = words.pop(0)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            continue
        name, sign, value = word.lstrip("-").partition("=")
        first, dot, member = name.partition(".")
        name = (engine.short.get(first, first) + dot + member).replace("-", "_")
        if sign:
            args[name] = value
        elif words and (not words[0].startswith("-") or _NUMBER.fullmatch(words[0])):
            args[name] = words.pop(0)
        elif name.startswith("no_"):
            args[name.removeprefix("no_")] = False
        else:
            args[name] = True
    return engine.read(args, where)


def _by_line(file: SourceFile, read: Callable[[Any, str], EngineSettings], options: Any) -> EngineSettings:
    """What `read` makes of options. An error names the line on which its option stands, written with `-` or `_`."""
    try:
        return read(options, file.name)
    except RowError as error:
        wanted = (error.field or "").replace("_", "-").encode()
        lines = (line for line, raw in file.lines() if wanted in raw.replace(b"_", b"-"))
        line = None if error.field is None else next(lines, None)
        raise TraceError(file.path, line, error.field, error.reason) from error
