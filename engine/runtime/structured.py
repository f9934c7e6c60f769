"""Outputs of a given form: a JSON schema, a regular expression, one of some texts, or a grammar.

The library llguidance computes which tokens can follow (extra `structured`). A mask of the vocabulary hides
all others before a token is chosen, so every output that ends by itself has the form. One that `max_tokens` ends may
be incomplete.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.runtime.errors import ParamsError, RequestError
from engine.runtime.text import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_FIELD = "structured_outputs"
MAX_CHOICES = 1024
# characters; and repetitions of one place: a hundred times as many take seconds for one mask
MAX_REGEX = 10_000
_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{(\d{1,18})(?:,(\d{1,18})?)?\}|.", re.DOTALL)
_NEVER = float("-inf")
_BYTES = 256


class GrammarError(RequestError):
    """The grammar of a request became too large while its output grew; the request ends."""


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form of an output. Exactly one of the first five fields is set; names and order are those of vLLM.

    Raises ParamsError, which names the field `structured_outputs`, also where one of the last four is set.
    """

    json: str | Mapping[str, Any] | None = None  # a JSON schema, as text or as an object
    regex: str | None = None  # the syntax of Rust's crate `regex`, for the whole output
    choice: Sequence[str] | None = None  # the output is one of these texts
    grammar: str | None = None  # Lark, or the EBNF of llama.cpp (GBNF)
    json_object: bool | None = None  # True: any JSON object
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        for name in names[5:]:
            if name in given:
                raise ParamsError(_FIELD, f"{name} is not served; the form alone says what an output has")
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ParamsError(_FIELD, f"set exactly one of {', '.join(names[:5])}; found {found}")
        self._check_types()

    def _check_types(self) -> None:
        for name, kinds, words in (
            ("json", (str, Mapping), "a JSON schema, as text or as an object"),
            ("regex", (str,), "a string"),
            ("grammar", (str,), "a string"),
            ("json_object", (bool,), "true or false"),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise ParamsError(_FIELD, f"{name}: {value!r} is not {words}")
        if self.regex is not None and len(self.regex) > MAX_REGEX:
            raise ParamsError(_FIELD, f"regex: {len(self.regex):,} characters; allowed are {MAX_REGEX:,}")
        if self.regex is not None and _repetitions(self.regex) > MAX_REGEX:
            raise ParamsError(_FIELD, f"regex: its counts repeat one place more than {MAX_REGEX:,} times")
        choice = self.choice
        if choice is None:
            return
        texts = isinstance(choice, Sequence) and not isinstance(choice, str)
        if not texts or not all(isinstance(one, str) and one for one in choice):
            raise ParamsError(_FIELD, f"choice: {choice!r} is not a list of texts, none of them empty")
        if not 1 <= len(choice) <= MAX_CHOICES:
            raise ParamsError(_FIELD, f"choice: {len(choice)} texts; allowed are 1 to {MAX_CHOICES}")

    def source(self) -> tuple[str, str]:
        """The kind of the grammar, and its text, as llguidance names them. Raises ParamsError."""
        if isinstance(self.json, str):
            return "json_schema", self.json
        if self.json is not None:
            try:
                return "json_schema", json.dumps(self.json)
            except (TypeError, ValueError) as error:
                raise ParamsError(_FIELD, f"json: the schema is not JSON ({error})") from error
        if self.json_object:
            return "json_schema", '{"type": "object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "lark", "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in self.choice)
        return "grammar", str(self.grammar)


def _repetitions(regex: str) -> int:
    """How often the counts of a regular expression, multiplied where they are nested, repeat one place at most."""
    inside, last = [1], 1  # the most repetitions in each open group, and those of the part before
    for part in _PART.finditer(regex):
        if part[0] == "(":
            inside.append(1)
            last = 1
        elif part[0] == ")" and len(inside) > 1:
            last = inside.pop()
        elif part[1]:
            last *= max(1, int(part[2] or part[1]))
        elif part[0] not in "?*+":
            last = 1
        inside[-1] = max(inside[-1], last)
    return max(inside)


class Grammars:
    """Compiles the forms of requests for one tokenizer and one vocabulary. The tokenizer is read once, at first use."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._words: LLTokenizer | None = None

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an output with its form: the model's, or else the tokenizer's.

        Raises:
            ParamsError: neither has one.
        """
        if self._end_ids:
            return self._end_ids
        found = getattr(self._tokenizer, "eos_token_id", None)
        if isinstance(self._tokenizer, ByteTokenizer):
            behind = self._tokenizer.first_id + _BYTES
            found = behind if behind < self._vocab_size else None
        if found is None:
            raise ParamsError(_FIELD, "neither model nor tokenizer has an end token, so no output could end")
        return [int(found)]

    def constraint(self, wanted: StructuredOutputsParams) -> "Constraint":
        """The constraint of one request.

        Raises:
            ParamsError: llguidance is not installed, the tokenizer or the model has no part that it needs, or the form
                cannot be compiled; the message holds llguidance's reason.
        """
        try:
            from llguidance import LLMatcher, grammar_from
        except ModuleNotFoundError as error:
            raise ParamsError(_FIELD, "needs the package llguidance: pip install llguidance") from error
        self._words = words = self._words or self._read_tokenizer()
        kind, text = wanted.source()
        try:
            grammar = grammar_from(kind, text)
        except ValueError as error:
            raise ParamsError(_FIELD, _first_line(str(error))) from error
        matcher = LLMatcher(words, grammar, log_level=0)
        if matcher.is_error():
            raise ParamsError(_FIELD, _first_line(matcher.get_error()))
        return Constraint(matcher, self._vocab_size)

    def _read_tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer
        from llguidance.hf import from_tokenizer

        tokenizer = self._tokenizer
        if tokenizer is None:
            raise ParamsError(_FIELD, "needs a tokenizer, and this engine has none")
        if isinstance(tokenizer, ByteTokenizer):
            from llguidance import TokenizerWrapper

            table = _ByteTable(tokenizer, self._vocab_size, self.end_ids[0])
            return LLTokenizer(TokenizerWrapper(table), n_vocab=self._vocab_size, eos_token=self.end_ids)
        try:
            made: LLTokenizer = from_tokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=self.end_ids)
        except ValueError as error:
            raise ParamsError(_FIELD, f"cannot read this tokenizer: {_first_line(str(error))}") from error
        return made


class _ByteTable:
    """The tokens of a `ByteTokenizer` in the form that llguidance reads: bytes by id."""

    def __init__(self, tokenizer: ByteTokenizer, vocab_size: int, end_id: int) -> None:
        first = tokenizer.first_id
        self.eos_token_id, self.bos_token_id = end_id, None
        self.special_token_ids = [each for each in range(vocab_size) if not first <= each < first + _BYTES]
        self.tokens = [
            bytes([each - first]) if first <= each < first + _BYTES else b"<%d>" % each
            for each in range(vocab_size)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))


@dataclass(slots=True, eq=False)
class _Path:
    """The state of the grammar after the tokens `read` of one branch."""

    matcher: "LLMatcher"
    read: list[int] = field(default_factory=list)


class Constraint:
    """What may follow in each branch of one request.

    `failure` is set where the grammar became too large for llguidance's limits. The engine then ends the request.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int) -> None:
        self._start = matcher
        self._vocab_size = vocab_size
        self._paths: dict[int, _Path] = {}
        self.failure: GrammarError | None = None

    def hide(self, logits: torch.Tensor, branch: int, output: Sequence[int]) -> None:
        """Set the logits `[vocab]` of tokens that cannot follow `output` to -inf, in place.

        Behind a draft token that the grammar forbids nothing is hidden: its own position has hidden it, so it will be
        refused, and this position is not used.
        """
        matcher = self._advanced(branch, output)
        if matcher is None or self.failure is not None:
            return
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            self.failure = GrammarError(f"{_FIELD}: {_first_line(matcher.get_error())}")
            return
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        hidden = torch.from_numpy(allowed == 0).to(logits.device)
        logits[: len(hidden)].masked_fill_(hidden, _NEVER)
        logits[len(hidden) :] = _NEVER

    def _advanced(self, branch: int, output: Sequence[int]) -> "LLMatcher | None":
        """The matcher after `output`; None if the grammar forbids one of its tokens."""
        path = self._paths.setdefault(branch, _Path(self._start.deep_copy()))
        pairs = enumerate(zip(path.read, output, strict=False))
        shorter = min(len(path.read), len(output))
        # equal at the beginning
        same = next((index for index, (read, token) in pairs if read != token), shorter)
        if same < len(path.read) and not path.matcher.rollback(len(path.read) - same):
            path.matcher, same = self._start.deep_copy(), 0
        new = list(output[same:])
        taken = path.matcher.try_consume_tokens(new)
        path.read = list(output[: same + taken])
        return path.matcher if taken == len(new) else None


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "the form cannot be used"
