"""How the tokens of a request are chosen.

Users set `SamplingParams`, whose fields have the same names as in vLLM. `SamplingParams.rules` turns them into
`DecodingRules`, and the code in `decoding/` reads only these.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from numbers import Integral
from typing import Any, Literal

from engine.core.options import Decoding
from engine.runtime.errors import ParamsError, not_offered
from engine.runtime.structured import Constraint, StructuredOutputsParams

log = logging.getLogger(__name__)
EarlyStopping = bool | Literal["never"]
MAX_LOGPROBS = 20
MAX_SEQUENCES = 16384  # as vLLM
MAX_COUNT = 2**31 - 1  # of any count: larger numbers overflow in tensors
MIN_TEMPERATURE = 0.01  # as vLLM, which takes it for lower ones
MAX_REPETITION_PENALTY = 1e3
MAX_BIAS = 100  # that a client may ask for
FINITE = 1e30  # a bias beyond it could be infinite beside the logits
MAX_BAD_WORDS = 128
MAX_LENGTH_PENALTY = 30.0  # length to this power does not overflow


@dataclass(frozen=True, slots=True)
class LogitChanges:
    """How the logits of one request are changed before a token is chosen. Reported log-probabilities are unchanged.

    In this order, as in vLLM: what cannot follow in the form of the output, tokens that are not allowed, end tokens
    before `min_tokens`, bias, bad words, penalties.
    """

    allowed: tuple[int, ...] = ()  # (): all tokens
    min_tokens: int = 0  # before so many tokens no token of `end_ids` is chosen
    bias: tuple[tuple[int, float], ...] = ()  # (token, number that is added)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear in the output
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    constraint: Constraint | None = None  # of the form of the output


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
    every_end: bool = False  # beam search as vLLM's
    changes: LogitChanges | None = None  # of the logits, before a token is chosen
    prompt_logprobs: int | None = None  # as `logprobs`, for each token of the prompt but the first


DEFAULT_RULES = DecodingRules()


class OutputKind(StrEnum):
    """What `Engine.step` returns of a request."""

    CUMULATIVE = "cumulative"  # after every token: all tokens so far
    DELTA = "delta"  # after every token: the new tokens
    FINAL = "final"  # once, at the end: all tokens
    FINAL_ONLY = "final"  # the same, as vLLM calls it


# vLLM's other fields that name a number, a list or a rule
_LEFT_OUT = (
    *("prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids", "stream_interval"),
    *("thinking_token_budget", "repetition_detection", "trace_decode_token_ids"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # vLLM's other fields, with the values that ask for nothing
    **dict.fromkeys(_LEFT_OUT, (None,)),
    **dict.fromkeys(("watermarking", "skip_reading_prefix_cache"), (None, False)),
    "flat_logprobs": (False,),
    "spaces_between_special_tokens": (True,),
    "skip_clone": (False, True),
    "output_text_buffer_length": (0,),
    "extra_args": (None, {}),
    "routed_experts_prompt_start": (0,),
}


class _TakesVllm(type):
    """Takes vLLM's other fields where they ask for nothing, and refuses them by name where they do."""

    def __call__(cls, **given: Any) -> Any:
        for name in _NEUTRAL.keys() & given.keys():
            if reason := not_offered(given.pop(name), _NEUTRAL[name]):
                raise ParamsError(name, reason)
        return super().__call__(**given)


@dataclass(slots=True, kw_only=True)
class SamplingParams(metaclass=_TakesVllm):
    """How to continue a prompt. Raises ParamsError, which names the field, for invalid values.

    Fields may be set later, as vLLM's: they are checked again when a request is added, which keeps a copy.

    `temperature` 0 takes the most likely token; a higher one, 0.01 at least, draws `n` samples. `beam_width` above 1
    runs beam search as transformers does, without sampling, and returns all beams. A sequence ends with an end token of
    the model or the tokenizer (unless `ignore_eos`), a token of `stop_token_ids`, or one of the `stop` strings, which
    is cut off.
    """

    n: int = 1  # parallel samples
    beam_width: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # of what `top_k` and `top_p` leave, as in transformers; vLLM applies it before them
    seed: int | None = None  # None: the engine's seed and the number of the request
    max_tokens: int | None = 16  # None: as many as the model allows
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many of the most likely tokens to report at each position
    length_penalty: float = 1.0  # of beam search
    early_stopping: EarlyStopping = False  # of beam search
    every_end: bool = False  # beam search as vLLM's `LLM.beam_search`, of one beam too; see `EveryEndSearch`
    min_tokens: int = 0  # before so many tokens a sequence does not end
    repetition_penalty: float = 1.0  # above 1: tokens of prompt and output become less likely
    frequency_penalty: float = 0.0  # subtracted from a logit for each time its token was generated
    presence_penalty: float = 0.0  # subtracted once for a token that was generated
    logit_bias: Mapping[int, float] | None = None  # added to logits, by token id
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # texts that must not appear in the output
    structured_outputs: StructuredOutputsParams | None = None  # the form that the output must have
    prompt_logprobs: int | None = None  # as `logprobs`, for the tokens of the prompt
    # keep only so many last tokens of the prompt; -1: as many as leave room for max_tokens (vLLM: for one token)
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        check_types(self)
        self.seed = None if self.seed == -1 else self.seed  # as vLLM
        self.output_kind = OutputKind(self.output_kind)
        if 0 < self.temperature < MIN_TEMPERATURE:
            log.warning("temperature %s is taken as %s, as in vLLM", self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        self._check_ranges()
        self._check_combinations()

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """The parameters, with the default of each number that is given as None, and no bias beyond ±`MAX_BIAS`."""
        if given.get("logit_bias"):  # as vLLM, which takes no more from a client
            pairs = given["logit_bias"].items()
            given["logit_bias"] = {int(token): min(max(bias, -MAX_BIAS), MAX_BIAS) for token, bias in pairs}
        return cls(**{name: one for name, one in given.items() if one is not None or name in _OPTIONAL})

    def clone(self) -> "SamplingParams":
        """A checked copy. Raises ParamsError for what was set since."""
        return replace(self)

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(listed(self.stop))

    def _check_ranges(self) -> None:
        for name, low, high in (
            ("n", 1, MAX_SEQUENCES),
            ("beam_width", 1, MAX_COUNT),
            ("temperature", 0, 2),
            ("top_k", -1, MAX_COUNT),
            ("min_p", 0, 1),
            ("max_tokens", 1, MAX_COUNT),
            ("logprobs", 0, MAX_LOGPROBS),
            ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
            ("min_tokens", 0, MAX_COUNT),
            ("repetition_penalty", 1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
            ("frequency_penalty", -2, 2),
            ("presence_penalty", -2, 2),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("truncate_prompt_tokens", -1, MAX_COUNT),
        ):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not low <= value <= high:  # NaN is refused too
                raise ParamsError(name, f"{value} is not {_range(low, high, value)}")
        if not 0 < self.top_p <= 1:
            raise ParamsError("top_p", f"{self.top_p} is not above 0 and at most 1")
        if self.early_stopping not in (True, False, "never"):
            raise ParamsError("early_stopping", f"{self.early_stopping!r} is not True, False or 'never'")
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ParamsError("stop", "must be strings, none of them empty")

    def _check_lists(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not is_whole(token) or not _is_number(bias) or not abs(bias) <= FINITE:
                what = f"a token id and a number from -{FINITE:g} to {FINITE:g}"
                raise ParamsError("logit_bias", f"{token!r}: {bias!r} is not {what}")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            empty = "is empty: no token could be chosen; leave it out to allow all"
            raise ParamsError("allowed_token_ids", empty)
        if not all(listed(self.bad_words)):
            raise ParamsError("bad_words", "must be texts, none of them empty")
        if self.truncate_prompt_tokens == 0:
            nothing = "0 would leave no prompt; give -1 or a number of at least 1"
            raise ParamsError("truncate_prompt_tokens", nothing)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParamsError("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")

    def _check_combinations(self) -> None:
        self._check_lists()
        changed = self.changes(()) is not None or self.structured_outputs is not None
        is_beam = self.decoding is Decoding.beam
        if is_beam and (changed or self.prompt_logprobs is not None):
            raise ParamsError(
                "beam_width",
                "beam search supports no penalties, min_tokens, logit_bias, allowed_token_ids, bad_words, "
                "structured_outputs and prompt_logprobs",
            )
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos"):
            if self.structured_outputs is not None and getattr(self, name):  # could leave no token, or no end
                raise ParamsError("structured_outputs", f"cannot be combined with {name}")
        if is_beam and self.n > 1:
            raise ParamsError("n", "beam search returns beam_width sequences: set beam_width or n, not both")
        if is_beam and (self.stops or self.logprobs is not None):
            raise ParamsError("beam_width", "beam search supports neither stop strings nor logprobs")
        if self.decoding is Decoding.greedy and self.n > 1:
            raise ParamsError("n", f"{self.n} samples at temperature 0 would all be the same")
        if self.stops and not self.detokenize:
            raise ParamsError("stop", "stop strings need the text: set detokenize")

    @property
    def decoding(self) -> Decoding:
        """The decoding mode that these parameters ask for."""
        if self.beam_width > 1 or self.every_end:
            return Decoding.beam
        return Decoding.sample if self.temperature > 0 else Decoding.greedy

    @property
    def width(self) -> int:
        """Sequences per request."""
        return max(self.beam_width, self.n)

    def changes(
        self, bad_words: Sequence[Sequence[int]], constraint: Constraint | None = None
    ) -> LogitChanges | None:
        """What is changed in the logits, with the token ids of the bad words; None if nothing is.

        `constraint` is that of `structured_outputs`, made for the engine's tokenizer.
        """
        found = LogitChanges(
            allowed=tuple(int(token) for token in self.allowed_token_ids or ()),
            min_tokens=self.min_tokens,
            bias=tuple((int(token), float(bias)) for token, bias in (self.logit_bias or {}).items()),
            bad_words=tuple(map(tuple, bad_words)),
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            constraint=constraint,
        )
        return None if found == LogitChanges() and not self.bad_words else found

    def rules(
        self,
        model_ends: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        constraint: Constraint | None = None,
    ) -> DecodingRules:
        """The decoding rules for a model with these end tokens; bad words and constraint as in `changes`."""
        ends = [] if self.ignore_eos else list(model_ends)
        return DecodingRules(
            temperature=self.temperature if self.temperature > 0 else None,
            top_k=max(0, self.top_k),
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            end_ids=frozenset([*ends, *listed(self.stop_token_ids)]),
            logprobs=self.logprobs,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            every_end=self.every_end,
            changes=self.changes(bad_words, constraint),
            prompt_logprobs=self.prompt_logprobs,
        )


_WHOLE = (
    *("n", "beam_width", "top_k", "seed", "max_tokens", "logprobs"),
    *("min_tokens", "prompt_logprobs", "truncate_prompt_tokens"),
)
_REAL = (
    *("temperature", "top_p", "min_p", "length_penalty"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize", "every_end")
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")


def check_types(params: SamplingParams) -> None:
    """Raise ParamsError for a field of a wrong type. A bool is no number, and 2.0 is no whole number."""
    for name in (*_WHOLE, *_REAL, *_FLAGS):
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        if name in _FLAGS:
            wanted, fits = "True or False", isinstance(value, bool)
        elif name in _WHOLE:
            wanted, fits = "a whole number", is_whole(value)
        else:
            wanted, fits = "a number", _is_number(value)
        if not fits:
            raise ParamsError(name, f"{value!r} is not {wanted}")
        if name in _WHOLE:
            setattr(params, name, int(value))  # of NumPy, which compiled code takes for none
    stop, tokens = params.stop, params.allowed_token_ids
    bias, form = params.logit_bias, params.structured_outputs
    words = partial(_is_list_of, fits=lambda one: isinstance(one, str))
    ids = partial(_is_list_of, fits=is_whole)
    for name, fits, wanted in (
        ("stop", stop is None or isinstance(stop, str) or words(stop), "a string or a list of strings"),
        ("stop_token_ids", ids(listed(params.stop_token_ids)), "a list of whole numbers"),
        ("logit_bias", bias is None or isinstance(bias, Mapping), "a mapping from token ids to numbers"),
        ("allowed_token_ids", tokens is None or ids(tokens), "a list of whole numbers"),
        ("bad_words", words(listed(params.bad_words)), "a list of strings"),
        ("structured_outputs", isinstance(form, StructuredOutputsParams | None), "StructuredOutputsParams"),
        ("output_kind", params.output_kind in tuple(OutputKind), f"one of {', '.join(OutputKind)}"),
    ):
        if not fits:
            raise ParamsError(name, f"{getattr(params, name)!r} is not {wanted}")


def listed(values: Any) -> Any:
    """The values, or none where a field is None."""
    return () if values is None else values


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, NumPy's included, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list_of(values: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(values, Collection) and not isinstance(values, str | bytes) and all(map(fits, values))


def _range(low: float, high: float, found: float) -> str:
    """The range in words. A technical limit is named only if the value exceeds it."""
    return f"{low} or more" if high >= MAX_SEQUENCES and not found > high else f"between {low} and {high}"
