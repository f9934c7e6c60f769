"""The answer to a sweep with points that cannot run: all of them, grouped by what is wrong."""

from dataclasses import dataclass

from harness.config.errors import UserError


@dataclass(frozen=True)
class BadPoint:
    """A point that cannot run, and every reason."""

    label: str
    reasons: tuple[str, ...]


class PlanError(UserError):
    """Nothing was run, because some points cannot run."""

    def __init__(self, bad: tuple[BadPoint, ...], total: int) -> None:
        self.bad = bad
        self.total = total
        super().__init__(self._message())

    def _message(self) -> str:
        if self.total == 1:
            return "\n".join(self.bad[0].reasons)
        lines = [f"nothing was run: {len(self.bad)} of {self.total} points cannot run"]
        reasons = dict.fromkeys(reason for point in self.bad for reason in point.reasons)
        for reason in reasons:
            labels = [point.label for point in self.bad if reason in point.reasons]
            lines.append(reason)
            lines += (
                ["  (every point)"] if len(labels) == self.total else [f"  at {label}" for label in labels]
            )
        return "\n".join(lines)
