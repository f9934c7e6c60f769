"""What a configuration names: files and folders that must exist or be writable, and the config.json of a checkpoint."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any

from harness.config.errors import ConfigError
from harness.config.schema import RunConfig
from traces.reading import may_be_trace

# `report.kernels=none`: no kernel section, even where timings lie beside the results.
NO_KERNELS = "none"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")  # what Path makes of `://` has one slash
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_KEY = re.compile(r"\w[\w.=,+-]*(/\w[\w.=,+-]*)*")
_LONGEST_KEY = 500


def check_trace_file(path: str, may_be_folder: bool = False) -> Iterator[ConfigError]:
    """Errors if a trace is absent, is no file (or folder) or cannot be read; `traces` checks its content."""
    file = Path(path).expanduser()
    try:
        exists = file.exists()
    except OSError as error:
        yield ConfigError("trace.path", f"cannot use '{path}': {error.strerror}")
        return
    if not exists:
        yield ConfigError("trace.path", f"no such file: '{path}' (looked for {file.absolute()})")
    elif not file.is_file() and not (may_be_folder and file.is_dir()):
        yield ConfigError("trace.path", f"'{path}' is not a file; name one trace file")
    elif file.is_dir() and not may_be_trace(file):
        yield ConfigError("trace.path", f"'{path}' is a folder without files of a trace; name one trace file")
    elif not os.access(file, os.R_OK):
        yield ConfigError("trace.path", f"'{path}' cannot be read: permission denied")


def is_url(named: str) -> bool:
    """Whether a store's name is an address (s3://...) and no folder."""
    return _URL.match(named) is not None


def bucket_of(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://BUCKET/PREFIX.

    Raises:
        ConfigError: another protocol, or names that S3 or the local copy cannot have.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3":
        raise ConfigError("out", f"found '{url[:200]}', must be a folder or s3://BUCKET/PREFIX")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            "out",
            f"found '{url[:200]}', whose bucket must be 3 to 63 lower-case letters, digits, dots and hyphens",
        )
    prefix = prefix.rstrip("/")
    if not _KEY.fullmatch(prefix) or len(prefix) > _LONGEST_KEY:
        raise ConfigError(
            "out",
            f"found '{url[:200]}', which must name a place in the bucket, like s3://{bucket}/studies/one: at most "
            f"{_LONGEST_KEY} letters, digits and . _ = , + -, between single slashes",
        )
    return bucket, prefix


def check_store(out: str) -> Iterator[ConfigError]:
    """Errors if a sweep cannot write its store there: a folder, or a place on object storage, which is asked later."""
    if not is_url(out):
        yield from check_out(out)
        return
    try:
        bucket_of(out)
    except ConfigError as error:
        yield error


def check_out(out: str) -> Iterator[ConfigError]:
    """Errors if the results folder cannot be created or written; it is not created here."""
    if not out.strip():
        yield ConfigError("out", "is empty; name the results folder, like out=results/mine")
    elif is_url(out):
        reason = f"'{out[:200]}' is no folder; only the store of a sweep may lie on object storage"
        yield ConfigError("out", reason)
    else:
        yield from _check_folder("out", out)


def check_cache_dir(folder: str | None) -> Iterator[ConfigError]:
    """Errors if the folder for calibrations cannot be created or written; null is checked when it is used."""
    if folder is not None:
        yield from _check_folder("cost.cache_dir", folder)


def check_kernels(key: str, named: str | None) -> Iterator[ConfigError]:
    """Errors if a named run of `bench kernels` does not exist; its content is checked when it is read."""
    if named is None or (key, named) == ("report.kernels", NO_KERNELS):
        return
    path = Path(named).expanduser()
    file = path / "kernels.parquet" if path.is_dir() else path
    if not named.strip() or not file.is_file():
        yield ConfigError(
            key,
            f"no kernels.parquet in '{named}' (looked for {file.absolute()}); name the folder that "
            "'python -m harness bench kernels --out FOLDER' wrote",
        )
    elif not os.access(file, os.R_OK):
        yield ConfigError(key, f"'{file}' cannot be read: permission denied")
    elif not _is_parquet(file):
        reason = f"'{file}' is no Parquet table; name what 'python -m harness bench kernels' wrote"
        yield ConfigError(key, reason)


def _is_parquet(file: Path) -> bool:
    """Whether the first bytes are those of Parquet, so that a wrong file is refused before hours of points."""
    with file.open("rb") as content:
        return content.read(4) == b"PAR1"


def _check_folder(key: str, name: str) -> Iterator[ConfigError]:
    folder = Path(name).expanduser().absolute()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name that is too long, or a folder above it that may not be looked into
        yield ConfigError(key, f"cannot use '{name}': {error.strerror}")
        return
    links = [path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()]
    if links:
        yield ConfigError(key, f"cannot use '{name}': {links[0]} is a link that leads nowhere")
    elif not existing.is_dir():
        yield ConfigError(key, f"cannot use '{name}': {existing} is not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield ConfigError(key, f"cannot write to '{name}': no permission in {existing}")


def check_paths(config: RunConfig) -> list[ConfigError]:
    """Errors in the files and folders that all points of a sweep share."""
    paths = (
        check_store(config.out),
        check_cache_dir(config.cost.cache_dir),
        check_kernels("cost.kernels", config.cost.kernels),
        check_kernels("report.kernels", config.report.kernels),
    )
    return [error for errors in paths for error in errors]


@dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint's config.json: the `whole`, and the `text` part of a model with several parts (else the whole)."""

    file: Path
    whole: dict[str, Any]
    text: dict[str, Any]

    @property
    def dtype(self) -> Any:
        """The element type of the weights as it is written, without the prefix `torch.`; None where nothing is said."""
        said = (part.get(key) for part in (self.whole, self.text) for key in ("dtype", "torch_dtype"))
        found = next(filter(None, said), None)
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
