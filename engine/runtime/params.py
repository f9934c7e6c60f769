"""How the tokens of a request are chosen.

Users set `SamplingParams`, whose fields have the same names as in vLLM. `SamplingParams.rules` turns them into
`DecodingRules`, and the code in `decoding/` reads only these.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from engine.core.options import Decoding
from engine.runtime.errors import ParamsError

EarlyStopping = bool | Literal["never"]
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_COUNT = 2**31 - 1  # of any count: larger numbers overflow in tensors
MIN_TEMPERATURE = 1e-5  # below, logits / temperature overflows
MAX_LENGTH_PENALTY = 30.0  # length to this power does not overflow


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """How the tokens of one request are chosen. The decoding mode is not here but in its `Request`.

    Without `seed`, random numbers depend on the engine's seed and the number of the request. A token of `end_ids` ends
    a sequence and is part of it; beam search looks at one more candidate per hypothesis for each of them. `logprobs`
    is the number of most likely tokens that are reported with the chosen one; None reports no log-probabilities.
    """

    temperature: float | None = None  # None: the engine's
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    end_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False

    @property
    def restricted(self) -> bool:
        """Whether only a part of the vocabulary may be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


DEFAULT_RULES = DecodingRules()


class OutputKind(StrEnum):
    """What `Engine.step` returns of a request."""

    CUMULATIVE = "cumulative"  # after every token: all tokens so far
    DELTA = "delta"  # after every token: the new tokens
    FINAL = "final"  # once, at the end: all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Raises ParamsError, which names the field, for invalid values.

    `temperature` 0 takes the most likely token; a higher one draws `n` samples. `beam_width` above 1 runs beam search
    as transformers does, without sampling, and returns all beams. A sequence ends with an end token of the model
    (unless `ignore_eos`), a token of `stop_token_ids`, or one of the `stop` strings, which is cut off.
    """

    n: int = 1  # parallel samples
    beam_width: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the engine's seed and the number of the request
    max_tokens: int | None = 16  # None: as many as the model allows
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the most likely tokens to report at each position
    length_penalty: float = 1.0  # of beam search
    early_stopping: EarlyStopping = False  # of beam search
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stops: tuple[str, ...] = field(init=False, repr=False)  # `stop` as a tuple

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stops", stops)
        self._check_ranges()
        self._check_combinations()

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("n", 1, MAX_COUNT),
            ("beam_width", 1, MAX_COUNT),
            ("temperature", 0, MAX_COUNT),
            ("top_k", -1, MAX_COUNT),
            ("min_p", 0, 1),
            ("max_tokens", 1, MAX_COUNT),
            ("logprobs", 0, MAX_LOGPROBS),
            ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "logprobs"):
                continue
            if not low <= value <= high:  # NaN is refused too
                raise ParamsError(name, f"{value} is not {_range(low, high, value)}")
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ParamsError(
                "temperature", f"{self.temperature} is too small: 0 takes the most likely token"
            )
        if not 0 < self.top_p <= 1:
            raise ParamsError("top_p", f"{self.top_p} is not above 0 and at most 1")
        if self.early_stopping not in (True, False, "never"):
            raise ParamsError("early_stopping", f"{self.early_stopping!r} is not True, False or 'never'")
        if len(self.stops) > MAX_STOPS or not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ParamsError("stop", f"must be at most {MAX_STOPS} strings, none of them empty")

    def _check_combinations(self) -> None:
        if self.beam_width > 1 and self.n > 1:
            raise ParamsError("n", "beam search returns beam_width sequences: set beam_width or n, not both")
        if self.beam_width > 1 and (self.stops or self.logprobs is not None):
            raise ParamsError("beam_width", "beam search supports neither stop strings nor logprobs")
        if self.decoding is Decoding.greedy and self.n > 1:
            raise ParamsError("n", f"{self.n} samples at temperature 0 would all be the same")
        if self.stops and not self.detokenize:
            raise ParamsError("stop", "stop strings need the text: set detokenize")

    @property
    def decoding(self) -> Decoding:
        """The decoding mode that these parameters ask for."""
        if self.beam_width > 1:
            return Decoding.beam
        return Decoding.sample if self.temperature > 0 else Decoding.greedy

    @property
    def width(self) -> int:
        """Sequences per request."""
        return max(self.beam_width, self.n)

    def rules(self, model_ends: Sequence[int]) -> DecodingRules:
        """The decoding rules for a model with these end tokens."""
        ends = [] if self.ignore_eos else list(model_ends)
        return DecodingRules(
            temperature=self.temperature if self.temperature > 0 else None,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            end_ids=frozenset([*ends, *self.stop_token_ids]),
            logprobs=self.logprobs,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


def _range(low: float, high: float, found: float) -> str:
    """The range in words. The technical limit MAX_COUNT is named only if the value exceeds it."""
    return f"{low} or more" if high == MAX_COUNT and not found > high else f"between {low} and {high}"
