"""A conversation as one prompt: by the tokenizer's own template, or plainly where bytes are tokens."""

from collections.abc import Sequence
from typing import Any

from engine.runtime.errors import TokenizerError
from engine.runtime.text import ByteTokenizer


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Token ids of the conversation and the opening of the answer. Raises TokenizerError."""
    if tokenizer is None:
        raise TokenizerError("this server has no tokenizer: it takes completions of token ids alone")
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
