"""The config.json of a checkpoint: read once, checked, and asked under the names that its family uses.

Families of transformers call the same number differently (`n_embd`, `d_model`, `hidden_size`). `CheckpointFacts` knows
these names. It refuses a missing or impossible number, because a default in its place would be a silent error.
"""

import json
from os.path import expanduser
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError

_MOST = 10**9  # of any number of a shape; more is a mistake, and sizes in bytes would not fit 64 bits


class CheckpointFacts:
    """The facts of the checkpoint folder `path`; of a model with several parts those of its text part.

    Raises:
        ConfigError: config.json cannot be read, or is no object. `key` is the setting that named the folder.
    """

    def __init__(self, path: str, key: str = "model.path") -> None:
        self.file = Path(expanduser(path)) / "config.json"
        self._key = key
        try:
            whole = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                key, f"{self.file}: not a readable checkpoint configuration ({error})"
            ) from error
        inner = whole.get("text_config") if isinstance(whole, dict) else None
        if not isinstance(whole, dict) or not isinstance(inner, dict | None):
            raise ConfigError(key, f"{self.file}: it and its text_config must be objects of names and values")
        self._whole: dict[str, Any] = whole
        self._facts: dict[str, Any] = inner or whole

    def get(self, name: str) -> Any:
        """The value under `name`, or None."""
        return self._facts.get(name)

    @property
    def family(self) -> str:
        """transformers' model_type."""
        return str(self._facts.get("model_type") or self._whole.get("model_type") or "")

    @property
    def dtype(self) -> Any:
        """The element type of the weights as it is written, without the prefix `torch.`; None where nothing is said."""
        found = next(
            (
                part[key]
                for part in (self._whole, self._facts)
                for key in ("dtype", "torch_dtype")
                if part.get(key)
            ),
            None,
        )
        if found == "auto":
            return None
        return found.removeprefix("torch.") if isinstance(found, str) else found

    def wrong(self, name: str, allowed: str) -> ConfigError:
        """The error of the value under `name`; `allowed` says what it must be."""
        return ConfigError(self._key, f"{self.file}: {name} is {self.get(name)!r}, must be {allowed}")

    def number(self, *names: str, most: int = _MOST) -> int:
        """The first of `names` that is given: a whole number from 1 to `most`.

        Raises:
            ConfigError: none is given.
        """
        found = self.maybe(*names, most=most)
        if found is None:
            raise ConfigError(
                self._key, f"{self.file}: has none of {', '.join(names)}, so the model's shape is not known"
            )
        return found

    def maybe(self, *names: str, most: int = _MOST) -> int | None:
        """The same, or None where none is given.

        Raises:
            ConfigError: it is no whole number, below 1, or above `most`.
        """
        name = next((name for name in names if self._facts.get(name) is not None), None)
        if name is None:
            return None
        value = self._facts[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a whole number of at least 1")
        if value > most:
            raise self.wrong(name, f"at most {most:,}")
        return value
