"""A request in the engine: the checks before it is queued, its state while it runs, and its outputs.

`check_prompt` refuses what the engine cannot run. `Ticket` holds the text of a running request, its stop strings, and
what was already reported. `RequestOutput` is what the user gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.core.identity import TokenIdentity
from engine.core.options import Decoding, SchedulerLimits
from engine.runtime.decoding.generation import Generation, TokenLogprobs
from engine.runtime.errors import ParamsError, PromptError, TokenizerError
from engine.runtime.models.load import LoadedModel
from engine.runtime.params import OutputKind, SamplingParams
from engine.runtime.text import RunningText, Tokenizer, find_stop

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of the engine's clock, None until they happen, and its token counts."""

    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    gap_s: float | None = None  # between the last two steps that gave tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    output_tokens: int = 0  # of all sequences
    longest: int = 0  # tokens of the longest sequence
    steps: int = 0  # in which the request got tokens
    preemptions: int = 0
    drafted_tokens: int = 0  # proposed by the draft model
    accepted_tokens: int = 0  # of them

    def note_tokens(self, now_s: float) -> None:
        """A step gave tokens."""
        self.steps += 1
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = now_s
        else:
            self.gap_s = now_s - self.last_token_s
        self.last_token_s = now_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, of one sequence: (E2E - TTFT) / (tokens - 1)."""
        if self.first_token_s is None or self.last_token_s is None or self.steps < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (max(self.longest, self.steps) - 1)

    @property
    def queue_s(self) -> float | None:
        """Time until the request was first in a batch."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Time from arrival to the end."""
        return None if self.finished_s is None else self.finished_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sequence: all of it, or what is new, as the request's `output_kind` says."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    score: float = 0.0  # of a beam: log-probability, normalised by length
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that ended it

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over `token_ids`, where log-probabilities were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request's news; `error` says why one with finish reason `error` failed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: Exception | None = field(default=None)


def token_ids_of(prompt: str | Sequence[int], tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's token ids. Raises TokenizerError."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if tokenizer is None:
        raise TokenizerError("this engine has no tokenizer: give the prompt as token ids")
    try:
        return list(tokenizer.encode(prompt))
    except Exception as error:
        raise TokenizerError(f"the tokenizer cannot encode the prompt: {error}") from error


def check_prompt(
    ids: Sequence[int], params: SamplingParams, loaded: LoadedModel, limits: SchedulerLimits
) -> int:
    """How many tokens each sequence may generate. Raises PromptError or ParamsError."""
    if not ids:
        raise PromptError("the prompt is empty: it must have at least one token")
    low, high = min(ids), max(ids)
    if low < 0 or high >= loaded.vocab_size:
        wrong = low if low < 0 else high
        raise PromptError(
            f"token id {wrong} in the prompt is outside of the vocabulary (0 to {loaded.vocab_size - 1})"
        )
    longest = limits.max_model_len or loaded.max_position
    if len(ids) >= longest:
        raise PromptError(
            f"the prompt has {len(ids)} tokens; prompt and output together take {longest} at most, "
            "and at least one token is generated"
        )
    _check_width(params, loaded, limits)
    room = longest - len(ids)
    if params.max_tokens is not None and params.max_tokens > room:
        raise PromptError(
            f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}; together they take "
            f"{longest} at most"
        )
    return params.max_tokens or room


def _check_width(params: SamplingParams, loaded: LoadedModel, limits: SchedulerLimits) -> None:
    most = min(limits.max_running, limits.max_batched_tokens, loaded.vocab_size)
    if params.width > most:
        field = "beam_width" if params.beam_width > 1 else "n"
        raise ParamsError(field, f"{params.width} sequences; this engine runs {most} at most")
    if params.logprobs is not None and params.logprobs > loaded.vocab_size:
        raise ParamsError("logprobs", f"{params.logprobs}, but the vocabulary has {loaded.vocab_size}")
    for token in params.stop_token_ids:
        if not 0 <= token < loaded.vocab_size:
            raise ParamsError("stop_token_ids", f"{token} is outside of the vocabulary")


@dataclass(slots=True)
class _Told:
    """What has been told of one branch: so many tokens, so many characters."""

    tokens: int = 0
    characters: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """One request between `add_request` and its last output."""

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
    _texts: list[RunningText] = field(default_factory=list)
    _named: list[int] = field(default_factory=list)  # tokens per branch that the prefix cache knows of
    _read: list[int] = field(default_factory=list)  # tokens per branch that are in its text
    _told: list[_Told] = field(default_factory=list)
    _stopped_by: dict[int, str] = field(default_factory=dict)
    _cut: dict[int, int] = field(default_factory=dict)  # characters of a branch's text that are kept

    def __post_init__(self) -> None:
        width = self.generation.request.width
        self._told = [_Told() for _ in range(width)]
        self._read = [0] * width
        self._named = [0] * width
        if self.tokenizer is not None and not self._is_beam:
            skip = self.params.skip_special_tokens
            self._texts = [RunningText(self.tokenizer, skip_special_tokens=skip) for _ in range(width)]

    @property
    def _is_beam(self) -> bool:
        return self.generation.request.decoding is Decoding.BEAM

    # -- a step's tokens -----------------------------------------------------------------------------------

    def read(self) -> None:
        """Put new tokens into the texts and end the branches that said a stop string. Raises TokenizerError."""
        for branch, text in enumerate(self._texts):
            if branch not in self._stopped_by:
                self._read_branch(branch, text)

    def _read_branch(self, branch: int, text: RunningText) -> None:
        generation = self.generation
        ended = generation.ends[branch]
        known = generation.known[branch] - generation.request.prompt_tokens if ended is None else ended
        while self._read[branch] < known:
            token = int(generation.text(branch)[self._read[branch]])
            self._read[branch] += 1
            if self._read[branch] == ended and token in generation.rules.end_ids:
                return  # the end token itself is no text
            before = len(text.text)
            text.add([token])
            found = find_stop(text.text, self.params.stops, before) if self.params.stops else None
            if found:
                self._stop(branch, *found)
                return

    def _stop(self, branch: int, place: int, stop: str) -> None:
        self._stopped_by[branch] = stop
        self._cut[branch] = place + (len(stop) if self.params.include_stop_str_in_output else 0)
        self.generation.ends[branch] = self._read[branch]

    def name_outputs(self, block_size: int) -> None:
        """Tell the prefix cache of blocks that generated tokens fill, so that a later turn finds them."""
        if self._is_beam:
            return
        start = self.generation.request.prompt_tokens
        for branch, named in enumerate(self._named):
            if self.generation.known[branch] // block_size > (start + named) // block_size:
                text = self.generation.text(branch)
                self.identity.extend(branch, text[named:].tolist())
                self._named[branch] = len(text)

    def mute(self) -> None:
        """Tell tokens alone from now on: the tokenizer is not to be asked again."""
        self.tokenizer, self._texts = None, []
        self._cut.clear()
        self._told = [_Told(told.tokens) for told in self._told]

    # -- what is told --------------------------------------------------------------------------------------

    def output(self, *, finished: bool, reason: FinishReason | None = None) -> RequestOutput:
        """The request's news; with `reason` it ended for a reason that its tokens do not tell."""
        outputs = self._beams(finished, reason) if self._is_beam else self._branches(finished, reason)
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_ids, outputs, finished, self.metrics, self.error
        )

    def _beams(self, finished: bool, reason: FinishReason | None) -> list[CompletionOutput]:
        """Hypotheses are told at the end alone: until then they change their past."""
        if not finished:
            return []
        pairs = zip(self.generation.outputs(), self.generation.scores(), strict=False)
        return [self._beam(rank, ids, score, reason) for rank, (ids, score) in enumerate(pairs)]

    def _beam(self, rank: int, ids: list[int], score: float, reason: FinishReason | None) -> CompletionOutput:
        ends = self.generation.rules.end_ids
        by_token = bool(ids) and ids[-1] in ends
        text = ""
        if self.tokenizer is not None:
            whole = RunningText(self.tokenizer, skip_special_tokens=self.params.skip_special_tokens)
            whole.add(ids[:-1] if by_token else ids, last=True)
            text = whole.text
        why: FinishReason = reason or ("stop" if by_token else "length")
        return CompletionOutput(rank, text, ids, None, score, why, ids[-1] if by_token else None)

    def _branches(self, finished: bool, reason: FinishReason | None) -> list[CompletionOutput]:
        outputs = []
        for branch in range(self.generation.request.width):
            news = self._branch(branch, finished, reason)
            if finished or news.token_ids or news.text or news.finish_reason:
                outputs.append(news)
        return outputs

    def _branch(self, branch: int, finished: bool, reason: FinishReason | None) -> CompletionOutput:
        generation, told = self.generation, self._told[branch]
        over = finished or generation.ends[branch] is not None
        ids = generation.text(branch)[: generation.ends[branch]].tolist()
        text = self._text(branch, over)
        since = (
            _Told(told.tokens, told.characters) if self.params.output_kind is OutputKind.DELTA else _Told()
        )
        self._told[branch] = _Told(len(ids), len(text))
        logprobs: list[TokenLogprobs] | None = None
        if generation.rules.logprobs is not None:
            logprobs = generation.logprobs[branch][since.tokens : len(ids)]
        why, by = self._why(branch, ids, reason) if over else (None, None)
        return CompletionOutput(branch, text[since.characters :], ids[since.tokens :], logprobs, 0.0, why, by)

    def _text(self, branch: int, over: bool) -> str:
        """What may be shown: until the end, not the characters that could turn out to begin a stop string."""
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
        if self.generation.ends[branch] is not None:
            return "stop", ids[-1]
        return reason or "length", None
