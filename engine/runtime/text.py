"""Incremental detokenization, and the search for stop strings in the text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from engine.runtime.errors import ModelError, TokenizerError

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from a character whose bytes are incomplete


class Tokenizer(Protocol):
    """The methods of a tokenizer that the engine uses. The tokenizers of transformers have them."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around every text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""


class ByteTokenizer:
    """One token per byte, for models without a tokenizer: id = first_id + byte. Other ids are decoded to <id>."""

    chat_template = None

    def __init__(self, first_id: int = 0) -> None:
        self.first_id = first_id  # of byte 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """One id per byte of the text in UTF-8."""
        return [self.first_id + byte for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of the bytes; invalid UTF-8 becomes replacement characters."""
        parts = b"".join(
            bytes([token - self.first_id]) if 0 <= token - self.first_id < 256 else b"<%d>" % token
            for token in token_ids
        )
        return parts.decode(errors="replace")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local checkpoint directory. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelError(f"{path}: no tokenizer can be loaded from it ({error})") from error


_TEMPLATE_RESERVED = """
    conversation tools documents chat_template add_generation_prompt continue_final_message tokenize padding truncation
    max_length return_tensors return_dict tokenizer_kwargs return_assistant_tokens_mask"""


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **given: Any,
) -> list[int]:
    """Token ids of a conversation and of the opening of the answer. Raises TokenizerError.

    `continue_final_message` lets the last message go on instead. `given` are other arguments of `templated`.
    """
    if tokenizer is None:
        raise TokenizerError("there is no tokenizer: only prompts of token ids are taken")
    if add_generation_prompt and continue_final_message:
        reason = "continue_final_message goes on with the last message: set add_generation_prompt to false"
        raise TokenizerError(reason)
    if isinstance(tokenizer, ByteTokenizer):
        if given.get("template_values") or given.get("chat_template") or given.get("tools"):
            raise TokenizerError("chat_template_kwargs, chat_template, tools: the model has no template")
        text = "".join(f"{message['role']}: {joined(message.get('content'))}\n" for message in messages)
        text = text[:-1] if continue_final_message else text
        return tokenizer.encode(f"{text}assistant: " if add_generation_prompt else text)
    if given.get("chat_template") is None and getattr(tokenizer, "chat_template", None) is None:
        raise TokenizerError("the model's tokenizer has no chat template: give a prompt instead of messages")
    given |= {"add_generation_prompt": add_generation_prompt, "return_dict": False}
    given["continue_final_message"] = continue_final_message
    return [int(token) for token in templated(tokenizer, messages, **given)]


def templated(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    template_values: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    content_format: str = "auto",
    **asked: bool,
) -> Any:
    """What the chat template makes of messages: ids, or text with `tokenize=False`. Raises TokenizerError.

    `template_values` are variables of the template, which is the tokenizer's own, or `chat_template`; `tools` are what
    it may say that the model can call. It gets the content of each message as one text (`content_format` "string"), as
    parts ("openai"), or as vLLM would hand it ("auto"). `asked` are flags of `apply_chat_template`.
    """
    if reserved := sorted(set(_TEMPLATE_RESERVED.split()) & set(template_values or ())):
        raise TokenizerError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set there")
    more: dict[str, Any] = {} if chat_template is None else {"chat_template": chat_template}
    parted = content_format == "openai" or (content_format == "auto" and _takes_parts(tokenizer, more))
    form = _parts if parted else joined
    more |= {"tools": [*map(dict, tools)]} if tools else {}
    try:
        written = [with_objects(one) | {"content": form(one.get("content"))} for one in messages]
        return tokenizer.apply_chat_template(written, **asked, **more, **template_values or {})
    except Exception as error:
        raise TokenizerError(f"the chat template cannot render these messages: {error}") from error


def with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as vLLM hands it to a template: arguments of tool calls as objects, and no list of no calls."""
    found, calls = dict(message), message.get("tool_calls")
    if found.get("role") == "assistant" and isinstance(calls, list | tuple):
        found["tool_calls"] = [{**one, "function": _with_object(one["function"])} for one in calls]
    return {name: one for name, one in found.items() if name != "tool_calls" or one}


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    try:
        given = json.loads(given) if isinstance(given, str) else given
    except ValueError:  # vLLM goes on with none: an earlier turn would have every later one refused
        given = None
    return {**function, "arguments": given if isinstance(given, Mapping) else {}}


def _takes_parts(tokenizer: Any, more: Mapping[str, Any]) -> bool:
    """Whether a chat template goes through the parts of a message: then vLLM hands it parts, and else one text.

    vLLM looks for the loop in the template's syntax. Here the template shows the texts of two parts, and not how Python
    writes a list.
    """
    asked = [{"role": "user", "content": [*_parts("one part"), *_parts("other part")]}]
    try:
        text = tokenizer.apply_chat_template(asked, tokenize=False, **more)
    except Exception:  # it cannot write parts
        return False
    return "one part" in text and "other part" in text and "'text'" not in text


Content = str | Sequence[Mapping[str, Any]] | None


def joined(content: Content) -> str:
    """The content of a message as one text: its parts as lines, as vLLM joins them."""
    return content or "" if isinstance(content, str | None) else "\n".join(part["text"] for part in content)


def _parts(content: Content) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or ()


def is_text(content: Any) -> bool:
    """Whether the content of a message is a text, nothing, or parts of type text."""
    parts = content if isinstance(content, list | tuple) else ()
    mappings = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
    kinds = isinstance(content, str | list | tuple | None)
    return kinds and mappings and all(isinstance(part.get("text"), str) for part in parts)


def effort_values(effort: str | None) -> dict[str, Any]:
    """The variables of a chat template that vLLM makes of a request's `reasoning_effort`."""
    return {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def encode_text(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text. Raises TokenizerError."""
    if tokenizer is None:
        raise TokenizerError("there is no tokenizer: give the prompt as token ids")
    try:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]
    except Exception as error:
        raise TokenizerError(f"the tokenizer cannot encode the text: {error}") from error


def decode_ids(tokenizer: Any, token_ids: Sequence[int], *, skip: bool = False) -> str:
    """The text of token ids, with `skip` without special tokens. Raises TokenizerError."""
    if tokenizer is None:
        raise TokenizerError("there is no tokenizer: token ids have no text")
    try:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip))
    except Exception as error:
        raise TokenizerError(f"the tokenizer cannot decode these ids: {error}") from error


class Detokenizer:
    """The text of one sequence. Call `add` with new token ids and read `text`. Raises TokenizerError.

    A token may hold only a part of a character, and a decoder may put spaces between tokens. So the last tokens are
    decoded again with every new one, and an incomplete character is not yet part of `text`. `before` are the last
    tokens of the prompt: a decoder that leaves out the space in front of a text would leave out that of the first word.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(before)
        # number of ids that `text` holds, or that are before it; index where decoding starts again
        self._shown, self._anchor = len(self._ids), 0

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> None:
        """Add new tokens. With `last` an incomplete character at the end becomes a replacement character."""
        for token in token_ids:
            self._ids.append(token)
            self._show(last=False)
        if last:
            self._show(last=True)

    def _show(self, *, last: bool) -> None:
        before = self._decode(self._ids[self._anchor : self._shown])
        now = self._decode(self._ids[self._anchor :])
        if len(now) > len(before) and (last or not now.endswith(_UNFINISHED)):
            self.text += now[len(before) :]
            self._anchor, self._shown = self._shown, len(self._ids)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
        except Exception as error:
            raise TokenizerError(f"the tokenizer cannot decode {token_ids[-3:]}: {error}") from error


def find_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """Position of the stop string that is whole first, after index `start`, and the string; None if there is none.

    Of several that end with the same character it is the first of the list, as in vLLM.
    """
    places = ((text.find(stop, max(0, start - len(stop) + 1)), stop) for stop in stops)
    found = [(index, stop) for index, stop in places if index >= 0]
    return min(found, key=lambda one: one[0] + len(one[1]), default=None)
