"""The identity of a point: a hash of all that its result depends on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.store.layout import SCHEMA

_NOT_IDENTITY = (
    *("name", "out", "workers", "report", "trace.path"),
    *("cost.cache_dir", "cost.kernels", "replay.compiled"),
)
_BYTES = 16


def fingerprint(config: RunConfig, identity: Mapping[str, Any]) -> str:
    """Hex name of a point (32 digits): its normalised configuration, and what else decides its result.

    Args:
        config: validated and normalised. Where it is written, what is reported and how many run at once do not count,
            nor where a trace or timed kernels lie, since the digests of their content are part of `identity`.
        identity: trace digest, code version, device and cost model, from `harness.point.point_identity`.
    """
    content = asdict(config)
    for key in _NOT_IDENTITY:
        section, _, name = key.rpartition(".")
        del (content[section] if section else content)[name]
    for section, key in (("model", "path"), ("decoding", "draft_path"), ("decoding", "beam_parents")):
        if content[section][key] is not None:
            content[section][key] = str(Path(content[section][key]).resolve())
    text = json.dumps([SCHEMA, content, identity], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_BYTES).hexdigest()
