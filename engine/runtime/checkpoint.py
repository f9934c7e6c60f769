"""What can be said about a checkpoint directory without loading it."""

import json
from pathlib import Path
from typing import Any

from engine.runtime.errors import ModelError


def read_config(path: str) -> dict[str, Any]:
    """The config.json of a local checkpoint directory. Raises ModelError if it is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"model path {path} is not a checkpoint: there is no such directory")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model path {path} is not a checkpoint: it has no config.json") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"model path {path} is not a checkpoint: config.json: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"model path {path} is not a checkpoint: config.json names no model_type")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelError(f"model path {path} is not a checkpoint: it has no weights (*.safetensors or *.bin)")
    return config
