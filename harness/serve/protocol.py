"""Bodies of requests in OpenAI's format, with vLLM's additional sampling fields; chat messages as one prompt.

Unknown fields are refused. A known field is refused if its value asks for something that this server cannot do. A
silently ignored option would make a measurement worthless.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, model_validator

from engine.runtime.errors import ParamsError
from engine.runtime.params import MAX_COUNT, MAX_LOGPROBS, OutputKind, SamplingParams
from engine.runtime.structured import StructuredOutputsParams
from engine.runtime.text import chat_prompt, effort_values, encode_text, joined

# fields of a number, a text or an object that this server has no use for
_LEFT_OUT = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "chat_template"),
    *("kv_transfer_params", "audio", "prediction", "verbosity", "web_search_options"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields with the values that ask for nothing
    **dict.fromkeys(_LEFT_OUT, (None,)),
    **dict.fromkeys(("tools", "functions", "documents", "logits_processors"), (None, [])),
    **dict.fromkeys(("tool_choice", "function_call"), (None, "none", "auto")),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    **dict.fromkeys(("store", "return_weight_versions", "watermarking"), (None, False)),
    "vllm_xargs": (None, {}),
    "spaces_between_special_tokens": (None, True),
    "parallel_tool_calls": (None, True, False),  # says nothing without tools
}
MAX_DIGITS = 18  # of a token id in text
MAX_STOPS = 4  # as vLLM
MAX_SALT = 1024  # characters
MAX_SHOWN = 80  # characters of a wrong value in a message
_SAMPLING = [field.name for field in fields(SamplingParams)]
_WITHOUT_EFFECT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "session_id")


class FieldError(ValueError):
    """A field of a request is wrong; `field` names it."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer shows beside the new text."""

    echo: bool = False  # the prompt in front of the text
    hides_output: bool = False  # max_tokens=0: one token is computed, and none is shown
    token_ids: bool = False
    prompt_logprobs: bool = False
    tokens_as_ids: bool = False  # tokens of log-probabilities are called token_id:N


TokenId = Annotated[int, Strict()]  # refuses true, which would count as 1
Long = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # what vLLM's transport takes


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False  # a last chunk without choices has the usage of the whole request
    continuous_usage_stats: bool = False  # as in vLLM: with `include_usage`, every chunk has the usage so far


class StructuredForm(BaseModel):
    """vLLM's field `structured_outputs`: exactly one of these."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def params(self) -> StructuredOutputsParams:
        """The engine's form. Raises ParamsError."""
        return StructuredOutputsParams(**self.model_dump(by_alias=True))


class JsonSchema(BaseModel):
    """OpenAI's name for a schema with its description. `strict` says nothing here: every output follows the schema."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's field `response_format`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("response_format", "the type json_schema and a json_schema belong together")
        return self

    def params(self) -> StructuredOutputsParams | None:
        """The engine's form; None for text."""
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class _Sampling(BaseModel):
    """The fields that completions and chat have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Long | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # `n` is then the number of beams
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    priority: Long = 0
    request_id: str | None = None  # of the answer, where the header X-Request-Id gives none
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] = Field(default_factory=list)
    allowed_token_ids: list[TokenId] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredForm | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT)
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
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
                reason = f"this server knows only {neutral[-1]!r}, found {_short(values[name])}"
                raise FieldError(name, reason)
        dropped = {*_NEUTRAL, *_WITHOUT_EFFECT}
        return {key: value for key, value in values.items() if key not in dropped and value is not None}

    @model_validator(mode="after")
    def _check_together(self) -> "_Sampling":
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only with stream=true")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise FieldError("stop", f"at most {MAX_STOPS} strings")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "only without stream")
        return self

    def _form(self) -> StructuredOutputsParams | None:
        """The form of the output. Raises ParamsError."""
        asked = None if self.response_format is None else self.response_format.params()
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise ParamsError("structured_outputs", "cannot be combined with response_format")
        return self.structured_outputs.params()

    def _shown(self) -> AnswerOptions:
        return AnswerOptions(
            token_ids=self.return_token_ids,
            prompt_logprobs=self.prompt_logprobs is not None,
            tokens_as_ids=self.return_tokens_as_token_ids,
        )

    def _bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        for token in self.logit_bias:
            if not token.isascii() or not token.isdigit() or len(token) > MAX_DIGITS:
                raise ParamsError("logit_bias", f"{_short(token)} is not a token id")
        return {int(token): bias for token, bias in self.logit_bias.items()}

    def _sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        defaults: Mapping[str, Any],
    ) -> SamplingParams:
        """The fields of the same names, and those that are said in another way here. Raises ParamsError.

        `defaults` are the values of fields that the client left out.
        """
        given = self.model_fields_set
        if self.use_beam_search:  # no default is meant for it
            defaults = {}
        defaults = {name: value for name, value in defaults.items() if name not in given}
        if given & {"max_tokens", "max_completion_tokens"}:
            defaults.pop("max_tokens", None)
        alike = {name: getattr(self, name) for name in _SAMPLING if name in _Sampling.model_fields} | defaults
        translated: dict[str, Any] = {
            "max_tokens": defaults.get("max_tokens", max_tokens),
            "stop": self.stop,
            "logprobs": logprobs,
            "logit_bias": self._bias(),
            "prompt_logprobs": prompt_logprobs,
            "structured_outputs": self._form(),
            "output_kind": OutputKind.DELTA if self.stream else OutputKind.FINAL,
        }
        if self.use_beam_search:
            translated |= {"n": 1, "beam_width": self.n, "temperature": 0.0}
        return SamplingParams.from_optional(**alike | translated)


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int = 16
    logprobs: Annotated[int, Field(le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def most_tokens(self) -> int | None:
        """The tokens that are asked for, at most."""
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [one for one in self.prompt if isinstance(one, int)]
        return [ids] if ids else [one for one in self.prompt if not isinstance(one, int)]

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """The engine's parameters; `defaults` are those of fields that were left out. Raises ParamsError."""
        scores = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scores = max(self.logprobs, scores or 0)
        most = 1 if self.max_tokens == 0 else self.max_tokens
        # a checkpoint's number of tokens is for chats alone, as in vLLM
        others = {name: value for name, value in defaults.items() if name != "max_tokens"}
        return self._sampling_params(most, self.logprobs, scores, others)

    def answer_options(self) -> AnswerOptions:
        """What the answer shows."""
        return replace(self._shown(), echo=self.echo, hides_output=self.max_tokens == 0)


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

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nothing(cls, values: Any) -> Any:
        """Drop what a client sends back of an answer that had none of it: a refusal, calls of tools."""
        pairs = values.items() if type(values) is dict else ()
        return {key: one for key, one in pairs if one not in (None, [])} if pairs else values

    @property
    def text(self) -> str:
        """All of its text."""
        return joined(self.model_dump()["content"])


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    # variables of the template, which may leave the thoughts out; a model without one has nothing to switch off
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "only with logprobs=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The tokens that are asked for, at most."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """Token ids of the conversation. Raises TokenizerError."""
        idle = self.reasoning_effort == "none" and not getattr(tokenizer, "chat_template", None)
        effort = {} if idle else effort_values(self.reasoning_effort)
        asked = "add_generation_prompt" in self.model_fields_set or not self.continue_final_message
        return chat_prompt(
            tokenizer,
            [message.model_dump(exclude_none=True) for message in self.messages],
            add_generation_prompt=self.add_generation_prompt and asked,
            continue_final_message=self.continue_final_message,
            template_values=effort | (self.chat_template_kwargs or {}),
        )

    def sampling_params(self, defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
        """The engine's parameters; `defaults` are those of fields that were left out. Raises ParamsError."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling_params(self.most_tokens, logprobs, self.prompt_logprobs, defaults)

    def answer_options(self) -> AnswerOptions:
        """What the answer shows."""
        return self._shown()


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt, or messages with the fields of a chat."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "give either a prompt or messages")
        if self.messages and self.add_special_tokens and "add_special_tokens" in self.model_fields_set:
            raise FieldError("add_special_tokens", "messages have those of the chat template alone")
        return self

    def token_ids(self, tokenizer: Any) -> list[int]:
        """The token ids. Raises TokenizerError."""
        if self.messages is not None:
            chat = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
            return ChatRequest(**self.model_dump(include=chat, exclude_unset=True)).prompt_ids(tokenizer)
        return encode_text(tokenizer, self.prompt or "", add_special_tokens=self.add_special_tokens)


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[Annotated[int, Strict(), Field(ge=0, le=MAX_COUNT)]]


def _short(value: Any) -> str:
    """A value in an error message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
