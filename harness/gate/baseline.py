"""Baselines: what a gate compares with, with where it came from. JSON under `results/baselines/`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.config.errors import UserError
from harness.store.atomic import write_files

FORMAT = 1


@dataclass(frozen=True)
class Baseline:
    """What a layer accepted: `cases` by name, and on what, why and when.

    `made_on` holds what a comparison depends on (compiler or device, packages), `environment` what is worth knowing
    beside it; `kernels` is the digest of the kernel sources, None where the layer does not depend on them.
    """

    layer: str
    made_on: Mapping[str, Any]
    kernels: str | None
    reason: str
    date: str
    cases: Mapping[str, Any]
    environment: Mapping[str, Any]
    format: int = FORMAT


def read_baseline(file: Path, layer: str) -> Baseline | None:
    """The baseline in `file`; None if there is none.

    Raises:
        UserError: the file is no baseline of this layer.
    """
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = Baseline(**content)
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is no baseline: {error}; write it again with gate --update") from error
    if (found.layer, found.format) != (layer, FORMAT):
        held = f"layer {found.layer!r}, format {found.format}"
        raise UserError(f"{file} holds a baseline of {held}; expected {layer!r}, format {FORMAT}")
    return found


def write_baseline(file: Path, baseline: Baseline) -> None:
    """Write whole or not at all; cases sorted, so that a change of the file shows what changed."""
    text = json.dumps(asdict(baseline), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_files(file.parent, {file.name: text.encode()})
