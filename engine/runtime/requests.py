"""A request in the engine: the checks before it is queued, its state while it runs, and its outputs.

`check_prompt` refuses what the engine cannot run. `RequestState` holds the text of a running request, its stop strings,
and how much was already reported. `RequestOutput` is what the user gets.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from engine.core.identity import TokenIdentity
from engine.core.options import Decoding, SchedulerLimits
from engine.runtime.decoding.generation import Generation, TokenLogprobs
from engine.runtime.errors import ParamsError, PromptError, TokenizerError
from engine.runtime.models.load import LoadedModel
from engine.runtime.params import MAX_BAD_WORDS, OutputKind, SamplingParams, is_whole, listed
from engine.runtime.text import Detokenizer, Tokenizer, decode_ids, encode_text, find_stop

FinishReason = Literal["stop", "length", "abort", "error"]
BEFORE = 6  # tokens of the prompt that decide how an output begins: some characters have four


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of the engine's clock, None until they happen, and its token counts."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between steps with tokens, since the last output
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    output_tokens: int = 0  # of all sequences
    longest: int = 0  # tokens of the longest sequence
    steps: int = 0  # with tokens for the request
    preemptions: int = 0
    drafted_tokens: int = 0  # proposed by the draft model
    accepted_tokens: int = 0  # of the drafted tokens

    def note_tokens(self, now_s: float) -> None:
        """Count a step with tokens."""
        self.steps += 1
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_token_s)
        self.last_token_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first of the longest sequence, in seconds: (E2E - TTFT) / (tokens - 1)."""
        if self.first_token_s is None or self.last_token_s is None or self.steps < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (max(self.longest, self.steps) - 1)

    @property
    def queue_s(self) -> float | None:
        """Time from arrival until the request was first in a batch, in seconds."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the end, in seconds."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence: all of it, or only what is new, depending on the request's `output_kind`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    score: float = 0.0  # of a beam: log-probability, normalised by length
    finish_reason: FinishReason | None = None  # None while the sequence grows
    stop_reason: str | int | None = None  # the stop string or token that ended it
    # of all tokens so far, whatever is new; None unless log-probabilities were asked for
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of a request after a step. With finish reason `error`, `error` is the exception."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: Exception | None = field(default=None)
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # one per prompt token, None for the first

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache, under vLLM's name."""
        return self.metrics.cached_tokens


def encode_prompt(prompt: str | Sequence[int], tokenizer: Tokenizer | None, **encoding: Any) -> list[int]:
    """The token ids of a prompt; `encoding` is for the tokenizer's `encode`.

    Raises PromptError, or TokenizerError if the tokenizer fails on a text.
    """
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise PromptError(f"a prompt is a text or a list of token ids, not {prompt!r}")
        for token in prompt:
            if not is_whole(token):
                raise PromptError(f"{token!r} in the prompt is not a token id")
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise TokenizerError("this engine has no tokenizer: give the prompt as token ids")
    try:
        return list(tokenizer.encode(prompt, **encoding))
    except Exception as error:
        raise TokenizerError(f"the tokenizer cannot encode the prompt: {error}") from error


def check_prompt(
    ids: Sequence[int], params: SamplingParams, loaded: LoadedModel, limits: SchedulerLimits
) -> int:
    """Check a prompt and its parameters. Returns how many tokens each sequence may generate.

    Raises PromptError or ParamsError.
    """
    if not ids:
        raise PromptError("the prompt is empty: it must have at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= loaded.vocab_size:
        wrong = low if low < 0 else high
        reason = f"token id {wrong} in the prompt is outside of the vocabulary (0 to {loaded.vocab_size - 1})"
        raise PromptError(reason)
    longest = limits.max_model_len or loaded.max_position
    if len(ids) >= longest:
        raise PromptError(
            f"the prompt has {len(ids)} tokens; prompt and output together take {longest} at most, "
            "and at least one token is generated"
        )
    _check_width(params, loaded, limits)
    available = longest - len(ids)
    if params.max_tokens is not None and params.max_tokens > available:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}; together they take "
            f"{longest} at most"
        )
    return params.max_tokens or available


def truncated(ids: list[int], params: SamplingParams, limits: SchedulerLimits) -> list[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; -1: what leaves room for the output."""
    most = params.truncate_prompt_tokens
    if most is None:
        return ids
    longest = limits.max_model_len
    if most == -1:
        most = max(1, longest - (params.max_tokens or 1)) if longest else len(ids)
    return ids[-most:] if ids else ids


def bounded(params: SamplingParams, ids: Sequence[int], limits: SchedulerLimits) -> SamplingParams:
    """The parameters with an output that ends where the longest sequence does, as in vLLM."""
    room, most = (limits.max_model_len or 0) - len(ids), params.max_tokens
    if most is None or not 0 < room < most:
        return params
    return replace(params, max_tokens=room, min_tokens=min(room, params.min_tokens))


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """The token ids of each bad word, at the begin of a text and, where another token as long is, after a space.

    As vLLM's `update_from_tokenizer`. Raises TokenizerError, and ParamsError for too many.
    """
    if words and tokenizer is None:
        raise TokenizerError("bad_words: this engine has no tokenizer")
    found: list[list[int]] = []
    for word in (one.lstrip() for one in dict.fromkeys(words)):
        begin, spaced = (encode_text(tokenizer, one, add_special_tokens=False) for one in (word, f" {word}"))
        if not begin:
            raise ParamsError("bad_words", f"{word!r} has no token")
        other = len(spaced) == len(begin) and spaced[0] != begin[0]
        found += [begin, spaced] if other else [begin]
    if len(found) > MAX_BAD_WORDS:
        raise ParamsError("bad_words", f"are {len(found)} in tokens, {MAX_BAD_WORDS} at most")
    return found


def check_choices(
    params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int, end_ids: Sequence[int]
) -> None:
    """Raise ParamsError for tokens outside of the vocabulary, and where no token might be left to choose."""
    changes = params.changes(bad_words)
    if changes is None:
        return
    named = (("logit_bias", [token for token, _ in changes.bias]), ("allowed_token_ids", changes.allowed))
    for field_name, tokens in named:
        for token in tokens:
            if not 0 <= token < vocab_size:
                where = f"outside of the vocabulary (0 to {vocab_size - 1})"
                raise ParamsError(field_name, f"{token} is {where}")
    hidden = {word[-1] for word in bad_words}  # at the worst moment
    if changes.min_tokens:
        hidden |= params.rules(end_ids).end_ids
    choices = set(changes.allowed) if changes.allowed else set(range(vocab_size))
    if choices <= hidden:
        wrong = "allowed_token_ids" if changes.allowed else "bad_words" if bad_words else "min_tokens"
        raise ParamsError(wrong, "bad_words and min_tokens may leave no token to choose")


def _check_width(params: SamplingParams, loaded: LoadedModel, limits: SchedulerLimits) -> None:
    most = min(limits.max_running, limits.max_batched_tokens, loaded.vocab_size)
    if params.width > most:
        field = "beam_width" if params.beam_width > 1 else "n"
        raise ParamsError(field, f"{params.width} sequences; this engine runs {most} at most")
    if params.logprobs is not None and params.logprobs > loaded.vocab_size:
        raise ParamsError("logprobs", f"{params.logprobs}, but the vocabulary has {loaded.vocab_size}")
    for token in listed(params.stop_token_ids):
        if not 0 <= token < loaded.vocab_size:
            raise ParamsError("stop_token_ids", f"{token} is outside of the vocabulary")


@dataclass(slots=True)
class _Reported:
    """How many tokens and characters of one branch were already reported, and the log-probability of these tokens."""

    tokens: int = 0
    characters: int = 0
    logprob: float = 0.0


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request between `add_request` and its last output.

    After each step the engine calls `extend_identity`, `read` and `output`.
    """

    request_id: str
    number: int  # its id in the scheduler
    prompt: str | None
    prompt_ids: Sequence[int]
    params: SamplingParams
    generation: Generation
    identity: TokenIdentity
    tokenizer: Tokenizer | None
    metrics: RequestMetrics
    error: Exception | None = None
    _texts: list[Detokenizer] = field(default_factory=list)
    _hashable: list[int] = field(default_factory=list)  # per branch: generated tokens that `identity` holds
    _read: list[int] = field(default_factory=list)  # per branch: generated tokens that its text holds
    _reported: list[_Reported] = field(default_factory=list)
    _stopped_by: dict[int, str] = field(default_factory=dict)  # stop strings by branch
    _cut: dict[int, int] = field(default_factory=dict)  # by branch: characters of its text that are kept

    def __post_init__(self) -> None:
        width = self.generation.request.width
        self._reported = [_Reported() for _ in range(width)]
        self._read = [0] * width
        self._hashable = [0] * width
        if self.tokenizer is not None and not self._is_beam:
            self._texts = [self._detokenizer(self.tokenizer) for _ in range(width)]

    def _detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        skip = self.params.skip_special_tokens
        return Detokenizer(tokenizer, self.prompt_ids[-BEFORE:], skip_special_tokens=skip)

    @property
    def _is_beam(self) -> bool:
        return self.generation.request.decoding is Decoding.beam

    # -- a step's tokens -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Add new tokens to the texts, and end branches whose text holds a stop string. Raises TokenizerError."""
        for branch, text in enumerate(self._texts):
            if branch not in self._stopped_by:
                self._read_branch(branch, text)

    def check_form(self) -> None:
        """Raise GrammarError if the grammar of the output became too large."""
        changes = self.generation.rules.changes
        if changes is not None and changes.constraint is not None and changes.constraint.failure is not None:
            raise changes.constraint.failure

    def _read_branch(self, branch: int, text: Detokenizer) -> None:
        generation, kept = self.generation, self.params.include_stop_str_in_output
        ended = generation.ends[branch]
        known = generation.known[branch] - generation.request.prompt_tokens if ended is None else ended
        while self._read[branch] < known:
            token = int(generation.output_ids(branch)[self._read[branch]])
            self._read[branch] += 1
            if self._read[branch] == ended and token in generation.rules.end_ids and not kept:
                return  # the end token does not belong to the text
            before = len(text.text)
            text.add([token])
            watched = self.params.stops and self._read[branch] > self.params.min_tokens
            found = find_stop(text.text, self.params.stops, before) if watched else None
            if found:
                position, stop = found
                self._stopped_by[branch], self._cut[branch] = stop, position + len(stop) * kept
                generation.ends[branch] = self._read[branch]
                return

    def extend_identity(self, block_size: int) -> None:
        """Add generated tokens that fill blocks to `identity`, so that a later request gets prefix cache hits."""
        if self._is_beam:
            return
        start = self.generation.request.prompt_tokens
        for branch, held in enumerate(self._hashable):
            if self.generation.known[branch] // block_size > (start + held) // block_size:
                ids = self.generation.output_ids(branch)
                self.identity.extend(branch, ids[held:].tolist())
                self._hashable[branch] = len(ids)

    def drop_text(self) -> None:
        """Report only tokens from now on, because the tokenizer failed."""
        self.tokenizer, self._texts = None, []
        self._cut.clear()
        self._reported = [_Reported(reported.tokens) for reported in self._reported]

    # -- outputs -------------------------------------------------------------------------------------------

    def output(self, *, finished: bool, reason: FinishReason | None = None) -> RequestOutput:
        """The output of the request now. Give `reason` if the tokens do not show why it ended."""
        outputs = self._beams(finished, reason) if self._is_beam else self._branches(finished, reason)
        scored: list[TokenLogprobs | None] | None = None
        if self.params.prompt_logprobs is not None:
            scored = [None, *self._named(self.generation.prompt_logprobs)]
        metrics, self.metrics.gaps_s = replace(self.metrics), []  # a copy: the next steps go on with these
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_ids, outputs, finished, metrics, self.error, scored
        )

    def _beams(self, finished: bool, reason: FinishReason | None) -> list[CompletionOutput]:
        """Hypotheses are reported only at the end, because their earlier tokens can still change."""
        if not finished:
            return []
        beams, ends, kept = [], self.generation.rules.end_ids, self.params.include_stop_str_in_output
        pairs = zip(self.generation.outputs(), self.generation.scores(), strict=False)
        for rank, (ids, score) in enumerate(pairs):
            end, text = ids[-1] if ids and ids[-1] in ends else None, ""
            if self.tokenizer is not None:
                whole = self._detokenizer(self.tokenizer)
                whole.add(ids if end is None or kept else ids[:-1], last=True)
                text = whole.text
            why: FinishReason = reason or ("length" if end is None else "stop")
            beams.append(CompletionOutput(rank, text, ids, None, score, why, end))
        return beams

    def _branches(self, finished: bool, reason: FinishReason | None) -> list[CompletionOutput]:
        outputs = []
        for branch in range(self.generation.request.width):
            output = self._branch(branch, finished, reason)
            if finished or output.token_ids or output.text or output.finish_reason:
                outputs.append(output)
        return outputs

    def _branch(self, branch: int, finished: bool, reason: FinishReason | None) -> CompletionOutput:
        generation = self.generation
        over = finished or generation.ends[branch] is not None
        ids = generation.output_ids(branch)[: generation.ends[branch]].tolist()
        text = self._text(branch, over)
        since = self._reported[branch] if self.params.output_kind is OutputKind.DELTA else _Reported()
        logprobs: list[TokenLogprobs] | None = None
        total: float | None = None
        if generation.rules.logprobs is not None:
            logprobs = self._named(generation.logprobs[branch][since.tokens : len(ids)])
            total = since.logprob + sum(entry.logprob for entry in logprobs)
        self._reported[branch] = _Reported(len(ids), len(text), total or 0.0)
        why, by = self._why(branch, ids, reason) if over else (None, None)
        new = text[since.characters :], ids[since.tokens :]
        return CompletionOutput(branch, *new, logprobs, 0.0, why, by, total)

    def _named(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """The entries with the texts of their tokens."""
        decode = None if self.tokenizer is None else partial(decode_ids, self.tokenizer)
        return [replace(entry, decode=decode) for entry in entries]

    def _text(self, branch: int, over: bool) -> str:
        """The text that can be reported. Until the end, characters that may begin a stop string are held back."""
        if not self._texts:
            return ""
        if over and branch not in self._cut:
            self._texts[branch].add([], last=True)
        text = self._texts[branch].text
        if branch in self._cut:
            return text[: self._cut[branch]]
        held = 0 if over else max((len(stop) - 1 for stop in self.params.stops), default=0)
        return text[: len(text) - held] if held < len(text) else ""

    def _why(
        self, branch: int, ids: list[int], reason: FinishReason | None
    ) -> tuple[FinishReason, str | int | None]:
        if branch in self._stopped_by:
            return "stop", self._stopped_by[branch]
        if self.generation.ends[branch] is not None:  # the tokenizer's own end token is no reason, as in vLLM
            return "stop", None if ids[-1] == getattr(self.tokenizer, "eos_token_id", None) else ids[-1]
        return reason or "length", None
