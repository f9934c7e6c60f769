"""A request, as the scheduler gets it. All lengths are in tokens."""

from dataclasses import dataclass, field

from engine.core.errors import CoreError
from engine.core.identity import BlockIdentity
from engine.core.options import Decoding, SpeculationMode


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding: verify up to `tokens` draft tokens per step. Raises CoreError if `tokens` is below 1."""

    tokens: int
    mode: SpeculationMode = SpeculationMode.whole

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise CoreError(f"speculation needs at least 1 draft token, found {self.tokens}")

    @property
    def whole(self) -> bool:
        """Whether drafts go on past the end of a request, and reserve slots for the next ones, as in vLLM."""
        return self.mode is SpeculationMode.whole


@dataclass(frozen=True, slots=True)
class Request:
    """One request, lengths in tokens. Raises CoreError if its values are impossible.

    Each of the `width` sequences generates `output_tokens` tokens; a replay fixes this number, so that both sides do
    the same work. `identity` gives the hashes of full blocks for the prefix cache; with None the request does not use
    the cache. Requests are served in order of submission, or by `priority`, lower first. `final_kv_tokens` follows from
    the lengths: the KV slots that one finished sequence has written. The last generated token is never fed back.
    `most_kv_tokens` counts those of drafts past the end too. `session` is the conversation that the request is a turn
    of, and `arrival_ns` its time in the trace; policies may look at them.
    """

    request_id: int
    prompt_tokens: int
    output_tokens: int
    width: int = 1
    decoding: Decoding = Decoding.greedy
    identity: BlockIdentity | None = None
    priority: int = 0
    speculation: Speculation | None = None
    session: str | None = None
    arrival_ns: int = 0
    final_kv_tokens: int = field(init=False, repr=False, compare=False)
    most_kv_tokens: int = field(init=False, repr=False, compare=False)

    @property
    def tenant(self) -> str:
        """Whose request it is: the salt of its prefixes; empty for none."""
        return "" if self.identity is None else self.identity.salt

    def __post_init__(self) -> None:
        final = self.prompt_tokens + self.output_tokens - 1
        past = self.speculation.tokens if self.speculation is not None and self.speculation.whole else 0
        object.__setattr__(self, "final_kv_tokens", final)
        object.__setattr__(self, "most_kv_tokens", final + past)
        if min(self.prompt_tokens, self.output_tokens, self.width) < 1:
            for name in ("prompt_tokens", "output_tokens", "width"):
                if getattr(self, name) < 1:
                    raise CoreError(
                        f"request {self.request_id}: {name} is {getattr(self, name)}, must be at least 1"
                    )
        if self.width == 1:
            return
        if self.decoding is Decoding.greedy:
            raise CoreError(
                f"request {self.request_id}: greedy decoding has one sequence, found width {self.width}"
            )
        if self.speculation is not None:
            raise CoreError(
                f"request {self.request_id}: speculation is for one sequence, found width {self.width}"
            )
