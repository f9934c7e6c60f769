"""Cases that a provider did not serve: why, kept beside the timings, because a missing column must explain itself."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class ProblemKind(StrEnum):
    """How grave it is."""

    unsupported = "unsupported"  # the provider said so; nothing is wrong
    wrong = "wrong"  # it ran, and computed something else
    failed = "failed"  # it raised an error of its own


@dataclass(frozen=True)
class Problem:
    """One case that one provider did not serve."""

    case: str
    provider: str
    kind: ProblemKind
    reason: str


def kind_of(error: Exception) -> ProblemKind:
    """What an error of a provider means."""
    from paged_kernels.providers import UnsupportedCaseError
    from paged_kernels.providers.verify import DisagreementError

    if isinstance(error, UnsupportedCaseError):
        return ProblemKind.unsupported
    return ProblemKind.wrong if isinstance(error, DisagreementError) else ProblemKind.failed


def note(file: Path, problem: Problem) -> None:
    """Append a problem to a file of JSON lines."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(problem)) + "\n")


def read_problems(file: Path) -> list[Problem]:
    """The problems in a file of JSON lines; none if there is no file."""
    if not file.exists():
        return []
    found = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [Problem(**{**values, "kind": ProblemKind(values["kind"])}) for values in found]


def shortened(text: str, most: int = 600) -> str:
    """A compiler's message in one line: its beginning says what was tried, its end what was wrong."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 3]} … {line[-2 * most // 3 :]}"
