"""Names of the files of a store."""

from dataclasses import dataclass
from pathlib import Path

SCHEMA = (
    1  # of record.json, failure.json and sweep.json; raise it when a reader of the old form would be misled
)


@dataclass(frozen=True)
class Layout:
    """Paths inside the store at `root`; nothing is created."""

    root: Path

    @property
    def points(self) -> Path:
        """The folder with one folder a point."""
        return self.root / "points"

    @property
    def manifest(self) -> Path:
        """What the store was last asked for."""
        return self.root / "sweep.json"

    @property
    def summary(self) -> Path:
        """One row a point, derived."""
        return self.root / "summary.parquet"

    def point(self, fingerprint: str) -> Path:
        """The folder of a point."""
        return self.points / fingerprint

    def record(self, fingerprint: str) -> Path:
        """The record of a finished point."""
        return self.point(fingerprint) / "record.json"

    def failure(self, fingerprint: str) -> Path:
        """What went wrong with a point."""
        return self.point(fingerprint) / "failure.json"

    def table(self, fingerprint: str, name: str) -> Path:
        """A table of a finished point: `steps` or `requests`."""
        return self.point(fingerprint) / f"{name}.parquet"
