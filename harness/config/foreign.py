"""What a file of somebody else says: data, of which configuration takes a few kinds of values alone.

A store, a log and a file of settings may be a stranger's. Their overrides are `Foreign` texts: shown and compared as
strings, and where they become settings `accept` lets pass what can do no more than choose a simulation. It lets no
class or program be named, no cluster, no place to write, no interpolation, and, in what was downloaded, no file outside
of it and of the working directory. What is refused the user may type.
"""

import shlex
from functools import cache
from pathlib import Path
from typing import Any

from engine.core.options import Eviction
from harness.config.errors import ConfigError
from harness.config.schema import config_keys

SUFFIXES = (".yaml", ".yml")
# The keys with free text that a file may set: words that are shown, and files that are read.
_SHOWN = (
    "name", "trace.name", "model.name", "model.family", "device.name", "device.fitted_from", "device.fits",
    "device.seen",
)  # fmt: skip
_READ = (
    *("trace.path", "trace.tokenizer", "model.path", "decoding.beam_parents", "decoding.draft_path"),
    *("cost.operators", "cost.kernels", "report.kernels"),
)
_CHOICES = {"cache.eviction": frozenset(Eviction)}  # texts that name what is shipped
_PLACES = ("out", "cost.cache_dir", "execute.folder", "execute.partition", "execute.address")


class Foreign(str):
    """An override, or a command of overrides, of a file that somebody else may have written.

    `where` names the file in messages. `folder` is what was downloaded with it; None: the user names the file himself.
    """

    where: str
    folder: Path | None

    def __new__(cls, text: str, where: str = "a file", folder: Path | None = None) -> "Foreign":
        """The text as it stands."""
        made = super().__new__(cls, text)
        made.where, made.folder = where, folder
        return made

    def words(self) -> list["Foreign"]:
        """The words of a command.

        Raises:
            ConfigError: it cannot be read as the words of a shell.
        """
        try:
            return [Foreign(word, self.where, self.folder) for word in shlex.split(self)]
        except ValueError as error:
            raise ConfigError("command", f"{self.where}: no words of a shell: {error}") from None


def is_option_file(value: Any) -> bool:
    """Whether the value of a group names a file, and not an option: it ends as YAML files do."""
    return isinstance(value, str) and value.endswith(SUFFIXES)


def accept(key: str, value: Any, where: str, folder: Path | None = None) -> None:
    """Raise ConfigError unless a file may give this value to the key; `where` and `folder` as in `Foreign`."""
    typed = f"if you trust it, type {key}=... on the command line of a run of your own"
    what = "code to run" if key in _texts() and key not in _PLACES else "a place to run or to write"
    if "${" in str(value):
        raise ConfigError(key, f"{where} holds an interpolation, {str(value)!r}, and no file may; {typed}")
    is_text = key in _texts() and value is not None and value not in _CHOICES.get(key, ())
    if key.partition(".")[0] == "execute" or (is_text and key not in (*_SHOWN, *_READ)):
        raise ConfigError(key, f"{where} names {what}, {str(value)!r}, and no file may; {typed}")
    if folder is not None and ((is_text and key in _READ) or is_option_file(value)):
        path = Path(str(value)).expanduser().resolve()
        if not any(path.is_relative_to(place.resolve()) for place in (folder, Path.cwd())):
            said = f"{where} names a file outside of it and of this folder, {str(value)!r}"
            raise ConfigError(key, f"{said}; {typed}")


@cache
def _texts() -> frozenset[str]:
    """The keys whose values are text, not numbers, truth values or choices."""
    return frozenset(key for key, found in config_keys().items() if found.kind is str)
