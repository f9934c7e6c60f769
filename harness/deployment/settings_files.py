"""Files with the settings of an engine: a JSON dump of its arguments, vLLM's YAML for `--config`, a command line.

JSON is `engine.json` or `meta.json` of LLMServingSim's recorder (`engine_kwargs`, `kv_cache`, `hardware`), or an object
of vLLM's arguments by name. A command line is a text file with `vllm serve ...` or `sglang.launch_server ...`.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from harness.deployment import sglang_settings, vllm_settings
from harness.deployment.documents import JsonDocument
from harness.deployment.settings import EngineSettings
from traces.errors import RowError, TraceError
from traces.formats.files import SourceFile, read_document
from traces.formats.parsing import kind

_COMMAND = re.compile(r"vllm\s+serve\b|vllm\.entrypoints\.|sglang\.launch_server|sglang\s+serve\b")
_VERSION_OF_IMAGE = re.compile(r"(?:vllm-openai|sglang):v?(\d+\.\d+(?:\.\d+)?\S*)")
_TELLING = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "tensor_parallel_size")


def is_command(text: str) -> bool:
    """Whether a text holds the command line of a known engine."""
    return _COMMAND.search(text) is not None


def read_json_settings(file: SourceFile) -> EngineSettings:
    """The settings of a JSON dump. Raises TraceError."""
    document = JsonDocument(file)
    record = document.value
    wrapped = "engine_kwargs" in record
    args = document.at(("engine_kwargs",)) if wrapped else record
    if not isinstance(args, dict):
        raise document.error(("engine_kwargs",), RowError(None, f"object expected, found {kind(args)}"))
    version = record.get("vllm_version")
    if not isinstance(version, str | None):
        raise document.error((), RowError("vllm_version", f"string expected, found {kind(version)}"))
    place = ("engine_kwargs",) if wrapped else ()
    try:
        found = vllm_settings.vllm_settings(
            {name: value for name, value in args.items() if name != "vllm_version"}, file.name, version
        )
    except RowError as error:
        raise document.error(place, error) from error
    try:
        found = _with_facts(found, record.get("kv_cache") or {}, file.name)
    except RowError as error:
        raise document.error(("kv_cache",), error) from error
    hardware = record.get("hardware")
    name = hardware.get("device_name", hardware.get("name")) if isinstance(hardware, dict) else None
    return found.changed(file.name, device=str(name)) if name else found


def is_json_settings(head: Mapping[str, Any]) -> bool:
    """Whether an object is a dump of an engine's arguments."""
    return "engine_kwargs" in head or any(name in head for name in _TELLING)


def _with_facts(found: EngineSettings, facts: Any, where: str) -> EngineSettings:
    """What the engine found out at its start: the pool that it made."""
    if not isinstance(facts, dict):
        raise RowError(None, f"object expected, found {kind(facts)}")
    known = {
        "pool_blocks": facts.get("num_gpu_blocks"),
        "block_size": facts.get("block_size"),
        "pool_tokens": facts.get("num_kv_tokens"),
    }
    values = {field: vllm_settings.count(value, field) for field, value in known.items() if value is not None}
    return found.changed(f"{where}, as the engine found it", **values) if values else found


def read_yaml_settings(file: SourceFile) -> EngineSettings:
    """The settings of vLLM's YAML for `--config`. Raises TraceError."""
    import yaml

    try:
        record = yaml.safe_load(read_document(file))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        raise TraceError(
            file.path, line, None, f"no YAML: {getattr(error, 'problem', None) or error}"
        ) from error
    if not isinstance(record, dict):
        raise TraceError(file.path, 1, None, f"names and values expected, found {kind(record)}")
    try:
        return vllm_settings.vllm_settings(record, file.name)
    except RowError as error:
        raise TraceError(file.path, _line_of(file, error.field), error.field, error.reason) from error


def read_command(file: SourceFile) -> EngineSettings:
    """The settings of a command line. Lines may end in a backslash, and `#` starts a comment. Raises TraceError."""
    whole = read_document(file)
    try:
        words = shlex.split(whole.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise TraceError(file.path, None, None, f"no shell command: {error}") from error
    try:
        found = settings_of_words(words, file.name)
    except RowError as error:
        raise TraceError(file.path, _line_of(file, error.field), error.field, error.reason) from error
    version = _VERSION_OF_IMAGE.search(whole)
    return found.changed(file.name, version=version[1]) if version else found


def settings_of_words(words: list[str], where: str) -> EngineSettings:
    """The settings of the words of a command line. Raises RowError."""
    text = " ".join(words)
    is_sglang = "sglang" in text and "vllm serve" not in text
    short = sglang_settings.SHORT if is_sglang else vllm_settings.SHORT
    args: dict[str, Any] = {}
    start = next(
        (at + 1 for at, word in enumerate(words) if word in ("serve", "sglang.launch_server")
         or word.startswith("vllm.entrypoints.")),
        0,
    )  # fmt: skip
    words = words[start:]
    if words and not words[0].startswith("-") and start and not is_sglang:
        args["model"] = words.pop(0)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            continue
        name, sign, value = word.lstrip("-").partition("=")
        name = short.get(name, name).replace("-", "_")
        if sign:
            args[name] = value
        elif words and not _is_flag(words[0]):
            args[name] = words.pop(0)
        elif name.startswith("no_"):
            args[name.removeprefix("no_")] = False
        else:
            args[name] = True
    read = sglang_settings.sglang_settings if is_sglang else vllm_settings.vllm_settings
    return read(args, where)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+(\.\d+)?", word)


def _line_of(file: SourceFile, name: str | None) -> int | None:
    """The line on which an option stands, written with `-` or `_`."""
    if name is None:
        return None
    wanted = name.replace("_", "-").encode()
    return next((line for line, raw in file.lines() if wanted in raw.replace(b"_", b"-")), None)
