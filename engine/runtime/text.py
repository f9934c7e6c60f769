"""Tokens to text, token by token, and the search for stop strings in the text."""

from collections.abc import Sequence
from typing import Any, Protocol

from engine.runtime.errors import ModelError, TokenizerError

_UNFINISHED = (
    "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for a character whose bytes are not all there
)


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer; those of transformers offer it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...


class ByteTokenizer:
    """Bytes as tokens, for models without a tokenizer: id = first + byte. Other ids read as <id>."""

    chat_template = None

    def __init__(self, first_id: int = 0) -> None:
        self._first = first_id

    def encode(self, text: str) -> list[int]:
        """One id per byte of UTF-8."""
        return [self._first + byte for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Bytes joined where they are bytes."""
        parts = b"".join(
            bytes([token - self._first]) if 0 <= token - self._first < 256 else b"<%d>" % token
            for token in token_ids
        )
        return parts.decode(errors="replace")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a local checkpoint directory. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path}: no tokenizer can be loaded from it ({error})") from error


class RunningText:
    """A sequence's text, grown token by token. Raises TokenizerError when the tokenizer does.

    A token may hold part of a character, and a decoder may join tokens with spaces: so the last tokens are decoded
    again with every new one, and what is not yet a whole character waits.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._shown = self._anchor = 0  # ids whose text is out; where decoding starts again

    def add(self, token_ids: Sequence[int], *, last: bool = False) -> None:
        """Take new tokens; after the `last` ones an unfinished character is shown as such."""
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
    """Place of the earliest stop string that ends at or after `start`, and the string."""
    found = [
        (place, stop) for stop in stops if (place := text.find(stop, max(0, start - len(stop) + 1))) >= 0
    ]
    return min(found) if found else None
