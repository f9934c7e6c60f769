"""Writing traces: whole or not at all, and never over something that is there unless asked to."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile

from harness.cli.say import say
from harness.config.errors import UserError
from traces.trace import Trace

Write = Callable[[Trace, str | Path], None]


def _writers() -> dict[str, Write]:
    from traces.formats.pagetwin import write_jsonl, write_parquet

    return {".jsonl": write_jsonl, ".jsonl.gz": write_jsonl, ".parquet": write_parquet}


def checked_output(name: str, overwrite: bool) -> Path:
    """Where to write; raises UserError before any work is done."""
    path = Path(name).expanduser()
    if not name.endswith(tuple(_writers())):
        raise UserError(f"--out: '{name}' must end in {', '.join(_writers())}")
    if path.exists() and not overwrite:
        raise UserError(f"--out: '{name}' exists; add --overwrite to replace it")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--out: no such folder: {path.absolute().parent}")
    return path


def write_trace(trace: Trace, path: Path, writer: Write | None = None) -> None:
    """Write through a temporary file and a rename, and say what was written; raises UserError."""
    end = next((end for end in (".jsonl.gz", ".jsonl", ".parquet") if path.name.endswith(end)), path.suffix)
    write = writer or _writers()[end]
    try:
        with NamedTemporaryFile(dir=path.absolute().parent, suffix=end, delete=False) as file:
            temporary = Path(file.name)
        try:
            write(trace, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot write '{path}': {error.strerror or error}") from error
    say(f"{path}: {len(trace.requests):,} requests, digest {trace.digest}")
    for change in trace.header.changes:
        say(f"  {change}")
