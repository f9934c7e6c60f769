"""What a gate layer found, and what follows from it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """Of a case, a layer or the whole gate. `inconclusive` is no pass: it says that nobody can know from this run."""

    passed = "pass"
    inconclusive = "inconclusive"
    regressed = "regressed"


_GRAVITY = (Verdict.passed, Verdict.inconclusive, Verdict.regressed)
EXIT_CODES = {Verdict.passed: 0, Verdict.regressed: 1, Verdict.inconclusive: 3}  # 2 is the user's mistake


@dataclass(frozen=True)
class Finding:
    """One case of a layer: its name, the verdict and, in a sentence with figures, why."""

    case: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class LayerResult:
    """All findings of a layer, what they were made on, and remarks that change no verdict."""

    layer: str
    findings: tuple[Finding, ...]
    made_on: str
    remarks: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """The gravest finding; a layer that looked at nothing has nothing to say."""
        return gravest(finding.verdict for finding in self.findings)

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The findings that kept the layer from passing, gravest first."""
        found = [finding for finding in self.findings if finding.verdict is not Verdict.passed]
        return tuple(sorted(found, key=lambda finding: -_GRAVITY.index(finding.verdict)))


def gravest(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict of several together; of none it is inconclusive."""
    return max(verdicts, key=_GRAVITY.index, default=Verdict.inconclusive)
