"""The catalogue: built-in generators, and public traces with source, licence and checksums."""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from traces.synth.generator import TABLES, CalibrationTable, load_table


@dataclass(frozen=True)
class RemoteFile:
    """A file to download. `sha256` and `bytes` are None if the publisher's file is not known."""

    path: str  # its name in the trace's folder
    url: str
    sha256: str | None
    bytes: int | None


@dataclass(frozen=True)
class CatalogueEntry:
    """One trace. `rows` is None if not known. `sha256` is that of the trace's header."""

    name: str
    format: str  # 'generated', or the name of the reader
    rows: int | None
    licence: str
    sharing: str
    where: str  # the publisher's page, or the data that the generator is calibrated on
    sha256: str | None = None
    files: tuple[RemoteFile, ...] = ()  # empty: the user must fetch them from the page

    @property
    def bytes(self) -> int | None:
        """Size of the download, None if a size is not known."""
        sizes = [file.bytes for file in self.files]
        return None if not sizes or None in sizes else sum(size or 0 for size in sizes)


@lru_cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """The embedded generators first, then the public traces."""
    public = json.loads((files("traces") / "data" / "catalogue.json").read_text("utf-8"))
    remote = [tuple(RemoteFile(**file) for file in entry.pop("files")) for entry in public]
    downloads = (CatalogueEntry(**entry, files=paths) for entry, paths in zip(public, remote, strict=True))
    return (*(_generated(load_table(name)) for name in TABLES), *downloads)


def public_trace(name: str) -> CatalogueEntry | None:
    """The public trace of that name, or None."""
    entries = (entry for entry in catalogue() if entry.format != "generated")
    return next((entry for entry in entries if entry.name == name), None)


def licence_of(sha256: str) -> str:
    """The licence of the catalogue's trace with this checksum, or a sentence that it is not known."""
    known = (entry.licence for entry in catalogue() if entry.sha256 == sha256)
    return next(known, "not known: the checksum is not in the catalogue")


def _generated(table: CalibrationTable) -> CatalogueEntry:
    shared = table.sharing()
    # Titles of tables that follow published means say what they are calibrated to.
    verb = "" if table.title.startswith("calibrated to") else "calibrated on "
    return CatalogueEntry(
        name=table.name,
        format="generated",
        rows=None,
        licence=table.licence,
        sharing=shared.describe() if shared else "none; add it with trace.sharing or workload.prefix_share",
        where=f"{verb}{table.title}: {table.source}",
    )
