"""The config.json of a checkpoint: read, checked to be an object, and asked for the element type of its weights."""

import json
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint's config.json: the `whole`, and the `text` part of a model with several parts (else the whole)."""

    file: Path
    whole: dict[str, Any]
    text: dict[str, Any]

    @property
    def dtype(self) -> Any:
        """The element type of the weights as it is written, without the prefix `torch.`; None where nothing is said."""
        found = next(
            (
                part[key]
                for part in (self.whole, self.text)
                for key in ("dtype", "torch_dtype")
                if part.get(key)
            ),
            None,
        )
        if found == "auto":
            return None
        return found.removeprefix("torch.") if isinstance(found, str) else found


def read_checkpoint(path: str, key: str = "model.path") -> CheckpointFile:
    """The config.json in the folder `path`, which the setting `key` names.

    Raises:
        ConfigError: config.json cannot be read, or is no object.
    """
    file = Path(expanduser(path)) / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(key, f"{file}: not a readable checkpoint configuration ({error})") from error
    inner = whole.get("text_config") if isinstance(whole, dict) else None
    if not isinstance(whole, dict) or not isinstance(inner, dict | None):
        raise ConfigError(key, f"{file}: it and its text_config must be objects of names and values")
    return CheckpointFile(file, whole, inner or whole)
