"""Models of when sampled branches end and how many drafts are accepted.

Both depend on token values, which a simulation does not have, so it draws them. A draw depends on the seed, the request
and the place alone, and not on the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p

from engine.core.options import Decoding
from engine.core.plan import StepPlan
from engine.core.request import Request

SCALE = 2**32
_MASK = 2**64 - 1
_GOLDEN, _SEED = 0x9E3779B97F4A7C15, 0xA0761D6478BD642F
_ENDS, FIRST_DRAFT = 2**40, 2**41  # first places of these draws; beams use the places below


def seed_word(seed: int) -> int:
    """What a seed gives to the state of a generator, which the rest is combined with by exclusive or."""
    return seed * _SEED & _MASK


class SplitMix64:
    """Uniform integers for one place of a request, from the SplitMix64 generator (Steele, Lea and Flood 2014)."""

    def __init__(self, seed: int, request_id: int, place: int) -> None:
        self._state = (seed_word(seed) ^ request_id * 0xD1B54A32D192ED03 ^ place * _GOLDEN) & _MASK

    def below(self, limit: int) -> int:
        """A whole number from 0 to `limit - 1`."""
        self._state = (self._state + _GOLDEN) & _MASK
        word = self._state
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((word ^ (word >> 31)) * limit) >> 64

    def happens(self, probability: float) -> bool:
        """True with this probability, to 2^-32."""
        return self.below(SCALE) < probability * SCALE


@dataclass(frozen=True)
class BranchSurvival:
    """Each branch of a sampled request ends after every token with probability `hazard`, independently.

    So branches differ in length, and a branch that ends releases its blocks while the others go on. The length depends
    on `seed` and the branch, and not on the batch.
    """

    hazard: float
    seed: int = 0

    def length(self, request_id: int, branch: int, longest: int) -> int:
        """Tokens that the branch generates, at most `longest`: a geometric draw by inversion."""
        if self.hazard <= 0:
            return longest
        if self.hazard >= 1:
            return 1
        uniform = (SplitMix64(self.seed, request_id, _ENDS + branch).below(SCALE) + 0.5) / SCALE
        return 1 + int(min(longest - 1, log(uniform) / log1p(-self.hazard)))

    @classmethod
    def fitted(cls, lengths: Sequence[int], longest: Sequence[int]) -> "BranchSurvival":
        """The most likely hazard for branches of these lengths; a branch as long as its limit did not end."""
        ends = sum(length < most for length, most in zip(lengths, longest, strict=True))
        return cls(ends / sum(lengths) if sum(lengths) else 0.0)


class BranchEnds:
    """Follows the sampled requests of a replay and says which branches end in a step."""

    def __init__(self, survival: BranchSurvival, requests: Mapping[int, Request]) -> None:
        self._survival = survival
        self._requests = requests
        self._due: dict[int, dict[int, list[int]]] = {}  # by request and token number: the branches that end
        self._generated: dict[int, int] = {}

    def of(self, plan: StepPlan) -> dict[int, list[int]]:
        """Branches that end with this step, by request; the plan is run for one step."""
        for request_id in plan.admitted:
            request = self._requests[request_id]
            if request.decoding is Decoding.sample and request_id not in self._due:
                self._due[request_id] = self._ends(request)
                self._generated[request_id] = 0
        sampled = dict.fromkeys([*plan.steady_ids, *(it.request_id for it in plan.other_rows if it.samples)])
        return {rid: ends for rid in sampled if rid in self._due and (ends := self._advance(rid))}

    def _ends(self, request: Request) -> dict[int, list[int]]:
        due: dict[int, list[int]] = {}
        for branch in range(request.width):
            length = self._survival.length(request.request_id, branch, request.output_tokens)
            if length < request.output_tokens:
                due.setdefault(length, []).append(branch)
        return due

    def _advance(self, request_id: int) -> list[int]:
        self._generated[request_id] += 1
        return self._due[request_id].pop(self._generated[request_id], [])


@dataclass(frozen=True)
class DraftAcceptance:
    """Each draft token is right with probability `share`, if all before it were (Leviathan, Kalman and Matias 2023)."""

    share: float
    seed: int = 0

    @classmethod
    def fitted(cls, drafts: Sequence[int], accepted: Sequence[int]) -> "DraftAcceptance":
        """The most likely share for steps with so many draft tokens, of which so many were right.

        The token after the accepted ones was wrong, unless all were right; later tokens were not checked.
        """
        wrong = sum(right < most for most, right in zip(drafts, accepted, strict=True))
        tried = sum(accepted) + wrong
        return cls(sum(accepted) / tried if tried else 0.0)

    def accepted(self, request_id: int, position: int, drafts: int) -> int:
        """How many of the `drafts` draft tokens after `position` are accepted."""
        draw = SplitMix64(self.seed, request_id, FIRST_DRAFT + position)
        count = 0
        while count < drafts and draw.happens(self.share):
            count += 1
        return count

    def of(self, plan: StepPlan) -> dict[int, int]:
        """Accepted draft tokens of the plan's rows that have some, by request."""
        return {
            row.request_id: self.accepted(row.request_id, row.context_len, row.drafts)
            for row in plan.other_rows
            if row.drafts and row.request_id not in plan.padded
        }
