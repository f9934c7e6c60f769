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

from harness.config.errors import ConfigError
from harness.config.groups import groups, list_options, option_file
from harness.config.schema import RunConfig

BASE = "base"
SUFFIXES = (".yaml", ".yml")
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
        "link_efficiency": 0.6,
        "host_link_gbs": 32.0,
        "host_link_latency_us": 2.0,
    }
}


def is_option_file(value: Any) -> bool:
    """Whether the value of a group names a file, and not an option: it ends as YAML files do."""
    return isinstance(value, str) and value.endswith(SUFFIXES)


def apply_option_file(tree: DictConfig, group: str, named: str) -> None:
    """Set the group's section of `tree` to what the file says.

    Raises:
        ConfigError: the file cannot be read, is no flat mapping, or has an unknown, repeated, missing or wrong key;
            names the file, the line and the key.
    """
    file = Path(named).expanduser()
    found = dict(_entries(file, group))
    section = tree[group]
    base = found.pop(BASE, None)
    start: dict[str, Any] = _base_values(file, group, base) if base else dict(_ASSUMED.get(group, {}))
    if base and found:
        start["name"] = file.stem  # what differs from a preset does not go by its name
    known = set(section)
    for key, (value, line) in found.items():
        if key not in known:
            raise _error(
                file, line, group, f"no key {key!r}; the keys are {', '.join([BASE, *sorted(known)])}"
            )
        start[key] = value
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
            wanted = _expected(_defaults(group)[key])
            raise _error(file, place, f"{group}.{key}", f"found {value!r}, must be {wanted}") from None


def _expected(default: Any) -> str:
    """What a value must be, in words, by the schema's default."""
    if isinstance(default, StrEnum):
        return "one of " + ", ".join(type(default))
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(type(default), "text")


def _defaults(group: str) -> dict[str, Any]:
    """The schema's own values of the section."""
    return vars(OmegaConf.to_object(OmegaConf.structured(get_type_hints(RunConfig)[group])))


def _base_values(file: Path, group: str, base: tuple[Any, int]) -> dict[str, Any]:
    value, line = base
    if value not in groups()[group]:
        raise _error(
            file, line, group, f"base names no option ({value!r}); the options are\n{list_options(group)}"
        )
    return {key: value for key, (value, _) in _entries(option_file(group, value), group)}


def _entries(file: Path, group: str) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Each key of the file with its value and its line, counted from 1."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(group, f"cannot read '{file}': {error}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        raise _error(file, mark.line + 1 if mark else None, group, f"no YAML: {reason}") from None
    if not isinstance(node, yaml.MappingNode):
        raise _error(file, 1, group, "must be 'key: value' lines")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if key is None or not isinstance(value_node, yaml.ScalarNode):
            raise _error(file, line, group, f"the value of {key!r} must be one word or number")
        if key in seen:
            raise _error(file, line, group, f"key {key!r} stands twice")
        seen.add(key)
        yield (
            key,
            (yaml.safe_load(text[value_node.start_mark.index : value_node.end_mark.index] or "null"), line),
        )


def _error(file: Path, line: int | None, key: str, reason: str) -> ConfigError:
    place = str(file) if line is None else f"{file}:{line}"
    return ConfigError(key, f"{place}: {reason}")
