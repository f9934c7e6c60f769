"""Files and folders that a configuration names: can they be read, can they be written?"""

import os
from collections.abc import Iterator
from pathlib import Path

from harness.config.errors import ConfigError


def check_trace_file(path: str) -> Iterator[ConfigError]:
    """Errors if a trace file is absent, is not a file or cannot be read; its content is for `traces` to judge."""
    file = Path(path).expanduser()
    if not file.exists():
        yield ConfigError("trace.path", f"no such file: '{path}' (looked for {file.absolute()})")
    elif not file.is_file():
        yield ConfigError("trace.path", f"'{path}' is not a file; name one trace file")
    elif not os.access(file, os.R_OK):
        yield ConfigError("trace.path", f"'{path}' cannot be read: permission denied")


def check_out(out: str) -> Iterator[ConfigError]:
    """Errors if the results folder cannot be created or written, found without creating it."""
    if not out.strip():
        yield ConfigError("out", "is empty; name the results folder, like out=results/mine")
        return
    folder = Path(out).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield ConfigError("out", f"cannot use '{out}': {existing} is not a folder")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield ConfigError("out", f"cannot write to '{out}': no permission in {existing}")
