"""The fingerprint of a point: a hash of everything that its result depends on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from harness.config.schema import DecodingConfig, ModelConfig, RunConfig
from harness.config.values import PerObject
from harness.store.commit import SCHEMA

# Settings that do not change a point's result.
_NOT_IDENTITY = (
    *("name", "out", "workers", "report", "execute", "trace.path"),
    *("cost.cache_dir", "cost.kernels", "cost.operators", "replay.compiled", "oracle.python"),
)
_SECTIONS = get_type_hints(RunConfig)
_IDENTIFYING = tuple(
    (name, kind if is_dataclass(kind) else None)
    for name, kind in sorted(_SECTIONS.items())
    if name not in _NOT_IDENTITY
)
_PATHS = {ModelConfig: ("path",), DecodingConfig: ("draft_path", "beam_parents")}  # absolute in a fingerprint
_FINGERPRINT_BYTES = 16


def fingerprint(config: RunConfig, identity: Mapping[str, Any]) -> str:
    """The identifier of a point (32 hexadecimal digits): a hash of its configuration and of `identity`.

    Args:
        config: validated and normalised. Four things do not count: the output folder, the report settings, the number
            of workers, and the paths of traces and timed kernels. `identity` holds the digests of their content.
        identity: trace digest, code version, device and cost model, from `harness.point.point_identity`.
    """
    parts = [
        f'"{name}": {_section_text(getattr(config, name)) if kind is not None else _json(getattr(config, name))}'
        for name, kind in _IDENTIFYING
    ]
    text = f"[{SCHEMA}, {{{', '.join(parts)}}}, {_json(identity)}]"  # as JSON with sorted keys
    return hashlib.blake2b(text.encode(), digest_size=_FINGERPRINT_BYTES).hexdigest()


def _identity_text(section: Any) -> str:
    """The settings of a section on which a result depends, as JSON with sorted keys."""
    content, kind = dict(vars(section)), type(section)
    for key in _NOT_IDENTITY:
        name, _, inner = key.rpartition(".")
        if name and kind is _SECTIONS[name]:
            del content[inner]
    for inner in _PATHS.get(kind, ()):
        if content[inner] is not None:
            content[inner] = str(Path(content[inner]).resolve())
    return _json(content)


_identity_texts = PerObject(_identity_text, 1 << 12)


def _section_text(section: Any) -> str:
    """The text of a section, which points share; not remembered where it depends on the working directory."""
    for inner in _PATHS.get(type(section), ()):
        if getattr(section, inner) is not None:
            return _identity_text(section)
    return _identity_texts(section)


_json = json.JSONEncoder(sort_keys=True, default=str).encode
