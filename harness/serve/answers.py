"""The engine's outputs as the bodies that OpenAI clients read, whole or chunk by chunk."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.runtime.decoding.generation import TokenLogprobs
from engine.runtime.requests import CompletionOutput, RequestOutput
from engine.runtime.text import Tokenizer

Choice = dict[str, Any]


@dataclass(frozen=True)
class Envelope:
    """What all bodies of one answer have in common."""

    model: str
    chat: bool
    tokenizer: Tokenizer | None
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: Sequence[Choice], usage: dict[str, Any] | None, *, chunk: bool) -> dict[str, Any]:
        """One body, whole or a chunk."""
        kind = "text_completion" if not self.chat else "chat.completion" + (".chunk" if chunk else "")
        prefix = "chatcmpl" if self.chat else "cmpl"
        body: dict[str, Any] = {
            "id": f"{prefix}-{self.answer_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }
        if usage is not None or not chunk:
            body["usage"] = usage
        return body

    def choice(self, output: CompletionOutput, index: int, *, chunk: bool) -> Choice:
        """One sequence's share."""
        reason = output.finish_reason
        choice: Choice = {"index": index, "finish_reason": reason, "stop_reason": output.stop_reason}
        if not self.chat:
            return choice | {"text": output.text, "logprobs": self._completion_logprobs(output)}
        said = {"role": "assistant", "content": output.text} if not chunk else {"content": output.text}
        return choice | {"delta" if chunk else "message": said, "logprobs": self._chat_logprobs(output)}

    def opening(self, index: int) -> Choice:
        """The first chunk of a chat answer says who speaks."""
        said = {"role": "assistant", "content": ""}
        return {"index": index, "delta": said, "finish_reason": None, "logprobs": None}

    # -- log-probabilities ---------------------------------------------------------------------------------

    def _token(self, token: int) -> str:
        return self.tokenizer.decode([token]) if self.tokenizer is not None else f"token_id:{token}"

    def _completion_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        names = [self._token(entry.token) for entry in output.logprobs]
        ends = [0]
        for name in names:
            ends.append(ends[-1] + len(name))
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in output.logprobs],
            "top_logprobs": [self._best(entry) for entry in output.logprobs],
            "text_offset": ends[:-1],
        }

    def _best(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._token(token): value for token, value in (*entry.best, (entry.token, entry.logprob))}

    def _chat_logprobs(self, output: CompletionOutput) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None

        def named(token: int, value: float) -> dict[str, Any]:
            name = self._token(token)
            return {"token": name, "logprob": value, "bytes": list(name.encode())}

        return {
            "content": [
                named(entry.token, entry.logprob) | {"top_logprobs": [named(*pair) for pair in entry.best]}
                for entry in output.logprobs
            ]
        }


def usage_of(outputs: Sequence[RequestOutput], token_count: Callable[[RequestOutput], int]) -> dict[str, Any]:
    """Tokens of the prompts and of all sequences, and how many were found in the prefix cache."""
    prompt = sum(output.metrics.prompt_tokens for output in outputs)
    completion = sum(token_count(output) for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.metrics.cached_tokens for output in outputs)},
    }
