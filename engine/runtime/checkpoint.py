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
    _check_architecture(path, config)
    for weights in sorted(folder.glob("*.safetensors")):
        _check_whole(weights)
    return config


def checkpoint_stamp(path: str) -> str:
    """Names, sizes and times of the checkpoint's files: other weights at the same path are another model."""
    files = sorted(file for file in Path(path).expanduser().glob("*") if file.is_file())
    return " ".join(f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}" for file in files)


def _check_architecture(path: str, config: dict[str, Any]) -> None:
    """Only models with a language-model head choose next tokens."""
    names = [str(name) for name in config.get("architectures") or ()]
    if names and not any("CausalLM" in name or "LMHead" in name for name in names):
        raise ModelError(
            f"model path {path}: {', '.join(names)} is no causal language model (…ForCausalLM or …LMHeadModel)"
        )


def _check_whole(weights: Path) -> None:
    """A safetensors file says in its header how long it is: 8 bytes of header length, JSON, data."""
    size = weights.stat().st_size
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 0 < length <= size - 8 else None
        ends = [entry["data_offsets"][1] for name, entry in (header or {}).items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{weights}: not a safetensors file ({error})") from error
    if not ends or size < 8 + length + max(ends):
        expected = f"{8 + length + max(ends):,}" if ends else "a header and data"
        raise ModelError(f"{weights}: cut short or no safetensors file: {size:,} bytes, {expected} expected")
