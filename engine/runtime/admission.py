"""What a request must be like before it is queued, and what an engine can take at most."""

from collections.abc import Sequence

from engine.core.limits import SchedulerLimits
from engine.runtime.errors import ParamsError, PromptError, TokenizerError
from engine.runtime.model import LoadedModel
from engine.runtime.options import EngineOptions
from engine.runtime.params import SamplingParams
from engine.runtime.text import Tokenizer


def engine_limits(loaded: LoadedModel, options: EngineOptions) -> tuple[SchedulerLimits, int]:
    """The limits in effect, and how many slots they can use at most."""
    limits = options.limits or SchedulerLimits(max_model_len=loaded.max_position)
    longest = min(limits.max_model_len or loaded.max_position, loaded.max_position)
    return limits, limits.max_running * longest


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
