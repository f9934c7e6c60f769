"""Bodies of requests in OpenAI's format, with vLLM's additional sampling fields; chat messages as one prompt.

Unknown fields are refused. A known field is refused if its value asks for something that this server cannot do. A
silently ignored option would make a measurement worthless.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from engine.runtime.errors import TokenizerError
from engine.runtime.params import MAX_LOGPROBS, OutputKind, SamplingParams
from engine.runtime.text import ByteTokenizer

_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields with the values that ask for nothing
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "store": (None, False),
}
_WITHOUT_EFFECT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")


TokenId = Annotated[int, Strict()]  # refuses true, which would count as 1


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False  # a last chunk without choices has the usage of the whole request
    continuous_usage_stats: bool = False  # as in vLLM: with `include_usage`, every chunk has the usage so far


class _Sampling(BaseModel):
    """The fields that completions and chat have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # `n` is then the number of beams
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_neutral(cls, values: Any) -> Any:
        """Drop fields that ask for nothing. Raises ValueError for those that ask for something unsupported."""
        if not isinstance(values, dict):
            return values
        for name, neutral in _NEUTRAL.items():
            if name in values and values[name] not in neutral:
                raise ValueError(f"{name}: this server knows only {neutral[-1]!r}, found {values[name]!r}")
        dropped = {*_NEUTRAL, *_WITHOUT_EFFECT}
        given = {key: value for key, value in values.items() if key not in dropped}
        return {key: value for key, value in given.items() if value is not None or key == "max_tokens"}

    @model_validator(mode="after")
    def _check_stream(self) -> "_Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        return self

    def _sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Raises ParamsError."""
        return SamplingParams(
            n=1 if self.use_beam_search else self.n,
            beam_width=self.n if self.use_beam_search else 1,
            temperature=0.0 if self.use_beam_search else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL,
        )


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = 16
    logprobs: Annotated[int, Field(le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters. Raises ParamsError."""
        return self._sampling_params(self.max_tokens, self.logprobs)


class TextPart(BaseModel):
    """A part of a message. This server supports only text."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs=true")
        return self

    def sampling_params(self) -> SamplingParams:
        """The engine's parameters. Raises ParamsError."""
        most = self.max_completion_tokens or self.max_tokens
        return self._sampling_params(most, (self.top_logprobs or 0) if self.logprobs else None)


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of the conversation and the opening of the answer. Raises TokenizerError."""
    if tokenizer is None:
        raise TokenizerError("this server has no tokenizer: it takes only completions of token ids")
    if isinstance(tokenizer, ByteTokenizer):
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return tokenizer.encode(f"{text}assistant: ")
    if getattr(tokenizer, "chat_template", None) is None:
        raise TokenizerError("the model's tokenizer has no chat template: use /v1/completions")
    try:
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except Exception as error:
        raise TokenizerError(f"the chat template cannot render these messages: {error}") from error
    return [int(token) for token in ids]
