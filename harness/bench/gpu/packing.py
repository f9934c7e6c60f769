"""All that a part left, as one archive: few files come back from a machine that is only borrowed."""

import tarfile
from pathlib import Path

from harness.config.errors import UserError

ENDINGS = (".tar.gz", ".tgz")


def check_archive(file: Path) -> None:
    """Raises UserError for a name that is no archive's: asked before minutes of measuring."""
    if not file.name.endswith(ENDINGS):
        raise UserError(f"--pack {file}: name a file that ends in {' or '.join(ENDINGS)}")


def pack(folder: Path, file: Path) -> Path:
    """Write `folder` under its own name into `file`, whole or not at all; returns `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        with tarfile.open(partial, "w:gz") as archive:
            archive.add(folder, arcname=folder.name, filter=_without_leftovers)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def _without_leftovers(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """No owner's name and nothing half-written; caches of compilers are made again."""
    name = Path(member.name).name
    if name.startswith(".") or name == "__pycache__":
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
