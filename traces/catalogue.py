"""What can be replayed: the embedded generators, and the public trace files with their origin and licence."""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from traces.tables import TABLES, CalibrationTable, load_table


@dataclass(frozen=True)
class CatalogueEntry:
    """One trace: `rows` and `sha256` are None where the publisher's file has not been seen."""

    name: str
    format: str  # 'generated', or the name of the reader
    rows: int | None
    licence: str
    sharing: str
    where: str  # an address to download from, or what the generator is calibrated on
    sha256: str | None = None


@lru_cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """The embedded generators first, then the public files."""
    public = json.loads((files("traces") / "data" / "catalogue.json").read_text("utf-8"))
    generated = (_generated(load_table(name)) for name in TABLES)
    return (*generated, *(CatalogueEntry(**entry) for entry in public))


def licence_of(sha256: str) -> str:
    """Licence of a file that is known by its checksum."""
    known = (entry.licence for entry in catalogue() if entry.sha256 == sha256)
    return next(known, "not known: the checksum is not in the catalogue")


def _generated(table: CalibrationTable) -> CatalogueEntry:
    return CatalogueEntry(
        name=table.name,
        format="generated",
        rows=None,
        licence=table.licence,
        sharing="none; add it with workload.prefix_share",
        where=f"calibrated on {table.title}: {table.source}",
    )
