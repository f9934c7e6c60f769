"""An option of a group from a file of the user's own: `device=./mine.yaml`, `model=~/shapes/mine.yaml`.

The file is YAML, one key and value a line, with the keys that the group's files under `conf/` have. A key that it
leaves out has the value of the option named by `base`, or else the default of the schema. The shares of a device's
rates and its overheads are then those that the presets of GPUs assume.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml.events import CollectionEndEvent, CollectionStartEvent

from harness.config.errors import ConfigError
from harness.config.foreign import accept
from harness.config.groups import groups, list_options, option_file
from harness.config.overrides import renamed
from harness.config.schema import RunConfig, config_keys

BASE = "base"
_LONGEST, _DEEPEST = 1 << 18, 20  # characters and levels of a YAML file of settings
# Without these a device or a model would be mostly that of the schema's defaults, which are those of a small CPU run.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "device": ("name", "memory_gb", "bandwidth_gbs", "tflops"),
    "model": (
        *("name", "family", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"),
        *("max_position", "dtype"),
    ),
}

# What every preset of a GPU assumes, and a PCIe Gen4 x16 link, 32 GB/s one way. A file without `base` gets these.
_ASSUMED: Mapping[str, Mapping[str, float | None]] = {
    "device": {
        "step_overhead_us": 500.0,
        "layer_overhead_us": 8.0,
        "attention_overhead_us": 10.0,
        "row_overhead_us": 0.2,
        "bandwidth_efficiency": 0.85,
        "kv_efficiency": 0.92,
        "compute_efficiency": 0.65,
        "attention_efficiency": 0.5,
        "activation_gb": None,
        "other_memory_gb": 0.16,
        "link_gbs": 32.0,
        "link_efficiency": 0.3,
        "host_link_gbs": 32.0,
        "host_link_latency_us": 2.0,
    }
}


def plain_yaml(text: str) -> Any:
    """The value of a YAML text. Of a few lines with aliases YAML makes gigabytes, so a text has none.

    Raises:
        yaml.YAMLError: no YAML, or longer, deeper or of other kinds than a file of settings is.
    """
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"{len(text):,} characters; a file of settings has at most {_LONGEST:,}")
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        is_start, is_end = (isinstance(event, kind) for kind in (CollectionStartEvent, CollectionEndEvent))
        depth += is_start - is_end
        if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
            problem = "an alias; write the value again" if depth <= _DEEPEST else "nesting too deep"
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise yaml.YAMLError(f"line {line}: {problem}")
    _refuse_odd(yaml.compose(text, Loader=yaml.SafeLoader))
    try:
        return yaml.safe_load(text)
    except (ValueError, AttributeError, KeyError) as error:  # a number, date or truth value in form only
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def _refuse_odd(node: yaml.Node | None) -> None:
    """Raise YAMLError for a key that stands twice, of which YAML takes the last, and for half a character."""
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            problem = (
                f"key {key.value!r} stands twice"
                if isinstance(key, yaml.ScalarNode)
                else "a key that is no word"
            )
            if not isinstance(key, yaml.ScalarNode) or key.value in seen:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
            _refuse_odd(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_odd(value)
    elif isinstance(node, yaml.ScalarNode) and not node.value.isascii():
        try:
            node.value.encode()
        except UnicodeEncodeError:
            problem = "half a character, which no file can hold"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def spelt(value: Any, kind: type) -> Any:
    """A value of a file as its key's type spells it: YAML reads `off` as false, which some choices are called."""
    is_off = value is False and issubclass(kind, StrEnum) and "off" in kind.__members__
    return "off" if is_off else value


def apply_option_file(tree: DictConfig, group: str, named: str) -> None:
    """Set the group's section of `tree` to what the file says.

    Raises:
        ConfigError: the file cannot be read, is no flat mapping, or has an unknown, repeated, missing or wrong key, or
            one that meant something else; names the file, the line and the key.
    """
    file = Path(named).expanduser()
    found, entries = {}, dict(_entries(file, group))
    if entries.get("tensor_parallel", (0, 0))[0] == 1:
        entries.pop("link_latency_us", None)  # of a fit to one device, which taught it nothing of links
    for name, (value, line) in entries.items():
        key, value = renamed(f"{group}.{name}", value, f"{file}:{line}: ")
        found[key.partition(".")[2]] = value, line
    section = tree[group]
    base = found.pop(BASE, None)
    start: dict[str, Any] = _base_values(file, group, base) if base else dict(_ASSUMED.get(group, {}))
    if base and found:
        start["name"] = file.stem  # what differs from a preset does not go by its name
    known = set(section)
    for key, (value, line) in found.items():
        if key not in known:
            reason = f"no key {key!r}; the keys are {', '.join([BASE, *sorted(known)])}"
            raise _error(file, line, group, reason)
        accept(f"{group}.{key}", value, f"{file}:{line}")
        start[key] = spelt(value, type(_defaults(group)[key]))
    missing = [key for key in _NEEDED.get(group, ()) if key not in start]
    if missing:
        raise _error(
            file,
            None,
            group,
            f"missing: {', '.join(missing)}; or name a preset to start from, like base: {groups()[group][0]}",
        )
    for key, value in (_defaults(group) | start).items():
        try:
            OmegaConf.update(tree, f"{group}.{key}", value, merge=False)
        except OmegaConfBaseException:
            place = found[key][1] if key in found else None
            wanted = config_keys()[f"{group}.{key}"].expected
            raise _error(file, place, f"{group}.{key}", f"found {value!r}, must be {wanted}") from None


def _defaults(group: str) -> dict[str, Any]:
    """The schema's own values of the section."""
    return vars(OmegaConf.to_object(OmegaConf.structured(get_type_hints(RunConfig)[group])))


def _base_values(file: Path, group: str, base: tuple[Any, int]) -> dict[str, Any]:
    value, line = base
    if value not in groups()[group]:
        reason = f"base names no option ({value!r}); the options are\n{list_options(group)}"
        raise _error(file, line, group, reason)
    return {key: value for key, (value, _) in _entries(option_file(group, value), group)}


def _entries(file: Path, group: str) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Each key of the file with its value and its line, counted from 1."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(group, f"cannot read '{file}': {error}") from None
    try:
        plain_yaml(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        raise _error(file, mark.line + 1 if mark else None, group, f"no YAML: {reason}") from None
    if not isinstance(node, yaml.MappingNode):
        raise _error(file, 1, group, "must be 'key: value' lines")
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or not isinstance(value_node, yaml.ScalarNode):
            raise _error(file, line, group, f"the value of {key!r} must be one word or number")
        yield key, (yaml.SafeLoader("").construct_document(value_node), line)


def _error(file: Path, line: int | None, key: str, reason: str) -> ConfigError:
    place = str(file) if line is None else f"{file}:{line}"
    return ConfigError(key, f"{place}: {reason}")
