"""The books of reading: what became of every row. Rows read = rows kept + rows dropped."""

from dataclasses import dataclass, field

from traces.errors import RowError, TraceError
from traces.rows import note


@dataclass
class Books:
    """Counts so far. A row is kept, dropped (by reason) or, where `on_error` is stop, refused."""

    file: str
    on_error: str = "stop"
    limit: int | None = None  # kept rows after which a source stops reading
    more_follows: bool = False  # it stopped, and there was more
    read: int = 0
    kept: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)

    def is_full(self) -> bool:
        """Whether a source must stop here; asked when another record is known to follow, which is then recorded."""
        if self.limit is None or self.kept < self.limit:
            return False
        self.more_follows = True
        return True

    def refuse(self, line: int | None, error: RowError, file: str | None = None) -> None:
        """Raise TraceError, or count the row as dropped by its field where malformed rows are skipped."""
        if self.on_error == "stop":
            raise TraceError(file or self.file, line, error.field, error.reason) from error
        note(self.dropped, f"malformed {error.field}")

    def nothing_kept(self) -> str:
        """Why there is no trace."""
        if not self.read:
            return "no data rows"
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items())
        return f"none of {self.read:,} rows can be replayed: {reasons}"
