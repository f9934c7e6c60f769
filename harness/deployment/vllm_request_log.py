"""vLLM's own request log (`--enable-log-requests`): prompts, and times of streamed chats.

Source: `vllm/entrypoints/logger.py` and `openai/chat_completion/serving.py` of vLLM 0.19.0, 0.10.2 and 0.8.5. The ids
of a prompt stand in `Received request` (0.10 and before, INFO) or in `Request ... details` (0.19, DEBUG). Only answers
that are streamed to a chat have a line for each chunk (`--enable-log-outputs`), which gives the first and the last
token. The clock has whole seconds, unless the user's logging configuration adds fractions.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from harness.deployment.rows import LoggedRequest, RequestLog, located
from traces.errors import RowError
from traces.formats.files import SourceFile, decode
from traces.formats.parsing import MAX_INTEGER

_RECEIVED = re.compile(r"(?:Received request|Request) (\S+?)(?::| details:)")
_IDS = re.compile(r"prompt_token_ids: (\[[\d, ]*\])")
_DELTA = re.compile(
    r"Generated response (\S+) \(streaming delta\): .*output_token_ids: (\[[\d, ]*\]), finish_reason: "
)
_SHORT = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,](\d+))?")
_LONG = re.compile(r"\b(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d+))?")
MARKS = ("Received request ", "Generated response ", " details: prompt: ")


@dataclass
class _Open:
    """A request that was received: when, and the times and tokens of its chunks."""

    at_s: float
    line: int
    prompt: tuple[int, ...] | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)


def is_request_log(text: str) -> bool:
    """Whether a text has lines of vLLM's request logger."""
    return any(mark in text for mark in MARKS)


def read_vllm_requests(file: SourceFile) -> tuple[RequestLog, dict[str, tuple[int, ...]]]:
    """The requests whose chunks were logged, and the prompts of all requests by their id. Raises TraceError."""
    log = RequestLog("vLLM's request log", file)
    found: dict[str, _Open] = {}
    fractions = False
    for line, raw in file.lines():
        try:
            for name, at_s, has_fraction, ids, tokens in _events(decode(raw)):
                fractions |= has_fraction
                request = found.setdefault(name, _Open(at_s, line))
                request.prompt = ids or request.prompt
                if tokens:
                    request.chunks.append((at_s, tokens))
        except RowError as error:
            raise located(file, line, error) from error
    for name, request in found.items():
        row = _row(name, request)
        log.drop(row) if isinstance(row, str) else log.rows.append(row)
    if log.rows and not fractions:
        log.notes.append(
            f"{file.name}: its clock has whole seconds, so the times of a request are known to about a second only. "
            "Spans (--otlp-traces-endpoint) or a benchmark's result have exact times."
        )
    return log, {name: request.prompt for name, request in found.items() if request.prompt}


def _events(words: str) -> Iterator[tuple[str, float, bool, tuple[int, ...] | None, int]]:
    """Request, time, whether the time has a fraction, prompt and number of generated tokens of a line."""
    if "Generated response " in words:
        delta = _DELTA.search(words)
        if delta is not None:
            yield delta[1], *_time(words), None, len(_ids(delta[2], "output_token_ids"))
    elif any(mark in words for mark in MARKS):
        received = _RECEIVED.search(words)
        if received is not None:
            ids = _IDS.findall(words)  # a prompt's text may hold the same words: the last ones are vLLM's
            yield received[1], *_time(words), _ids(ids[-1], "prompt_token_ids") if ids else None, 0


def _ids(text: str, field: str) -> tuple[int, ...]:
    try:
        found: list[int] = json.loads(text)
    except ValueError as error:
        raise RowError(field, "no list of token ids (cut line?)") from error
    if any(one >= MAX_INTEGER for one in found):
        raise RowError(field, "a token id is too large")
    return tuple(found)


def _time(words: str) -> tuple[float, bool]:
    stamp = _LONG.search(words) or _SHORT.search(words)
    if stamp is None:
        raise RowError("time", "a line on a request has no time of the known form")
    text = stamp[1].replace("T", " ")
    text = text if len(text) > 14 else f"2000-{text}"  # a leap year: it has every date
    try:
        moment = datetime.strptime(text, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError as error:
        raise RowError("time", f"no such time: {stamp[1]}") from error
    return moment + (float(f"0.{stamp[2]}") if stamp[2] else 0.0), stamp[2] is not None


def _row(name: str, request: _Open) -> LoggedRequest | str:
    if not request.chunks:
        return "no times of its tokens (not a streamed chat, or without --enable-log-outputs)"
    if request.prompt is None:
        return "no prompt_token_ids (vLLM after 0.10 logs them with VLLM_LOGGING_LEVEL=DEBUG)"
    tokens = sum(count for _, count in request.chunks)
    first, last = request.chunks[0][0], request.chunks[-1][0]
    return LoggedRequest(
        name,
        request.at_s,
        first,
        last,
        len(request.prompt),
        tokens,
        prompt_ids=request.prompt,
        line=request.line,
    )
