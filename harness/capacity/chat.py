"""The prefix cache from a log of chat requests: hits by pool size, what breaks prefixes, what a salt per tenant costs.

A line is one request as a client sends it to an OpenAI-style server: `messages`, and if there are any `tools`,
`chat_template_kwargs`, `cache_salt`, `user` and `timestamp`; or an object with these under `body` or `request`. The
model's own tokenizer and chat template make the prompts, as an engine does. No code of the folder runs: transformers
loads it without remote code, and renders templates in jinja's sandbox.

Hits of all pool sizes come from one pass (`traces.analysis.reuse.reuse_profile`): requests one after the other, least
recently used blocks evicted. Prompts alone are counted: what answers leave in the cache is not.
"""

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.runtime.errors import ModelError, TokenizerError
from engine.runtime.text import (
    effort_values,
    encode_text,
    is_text,
    joined,
    load_tokenizer,
    templated,
    with_objects,
)
from harness.capacity.advice import MOST_BLOCKS, percent
from harness.capacity.case import FEWEST
from harness.config.errors import UserError
from harness.console import one_line
from traces.analysis.reuse import (
    PrefixPaths,
    ReuseProfile,
    optimal_hit_tokens,
    reuse_profile,
    shared_prefix_tokens,
)
from traces.errors import TraceError
from traces.formats.files import open_source
from traces.formats.segments import Tokens, TokenTree
from traces.trace import CONTENT, Segment, Trace, TraceHeader, TraceRequest

Message = dict[str, Any]
_NEARLY = 0.95  # of the hits of an unlimited pool
_MOST_SHOWN = 5  # causes of lost prefixes
_LATEST_S = 1e11  # of Unix time, in the year 5138; a number above is of milliseconds or smaller
_OTHER_PROMPT = {  # what gives a request another prompt than its messages and tools, and the value that does not
    "chat_template": None,
    "documents": None,
    "add_generation_prompt": True,
    "continue_final_message": False,
}
_AROUND = 24  # characters of a text that are shown on each side of a difference
_CHANGING = re.compile(  # what differs from request to request though nobody means it
    r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b(?=[a-f]*\d)[0-9a-f]{8,}\b|\d+"
    r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b"
    r"|\b(?:january|february|march|april|may|june|july|august|september|october|november|december)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class LoggedChat:
    """One request of the log; `at_s` is its time in seconds, None where the log has none."""

    line: int
    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    template_values: Mapping[str, Any] = field(default_factory=dict)
    salt: str = ""
    tenant: str = ""
    at_s: float | None = None
    other_prompt: str = ""  # the key that gives it a prompt which is not made here


@dataclass(frozen=True)
class ChatLog:
    """The requests that the chat template takes, in order, each with its prompt; `left_out` counts the others."""

    name: str
    requests: Sequence[LoggedChat]
    prompts: Sequence[Tokens]
    left_out: Mapping[str, int]

    def trace(self, tenants: bool = False) -> Trace:
        """Their prompts as a trace; prompts with different salts share nothing, with `tenants` those of two users."""
        trees: dict[tuple[str, str], TokenTree] = {}
        groups = [(one.salt, one.tenant if tenants else "") for one in self.requests]
        for group, prompt in zip(groups, self.prompts, strict=True):
            trees.setdefault(group, TokenTree()).insert(prompt, (len(prompt),))
        base = {group: number << 40 for number, group in enumerate(trees)}
        start = self.requests[0].at_s or 0.0
        rows = []
        for number, (one, group, prompt) in enumerate(zip(self.requests, groups, self.prompts, strict=True)):
            parts = tuple(
                Segment(None if key is None else base[group] + key, tokens)
                for key, tokens in trees[group].segments(prompt)
            )
            at_us = round(1e6 * ((one.at_s or start) - start))
            rows.append(TraceRequest(number, at_us, len(prompt), 1, parts))
        header = TraceHeader(self.name, "chat", self.name, CONTENT, None, 1, "", len(rows), len(rows))
        return Trace(header, tuple(rows))


class LostPrefix(NamedTuple):
    """A request that shares less than its messages would: the message that breaks it, and the tokens after the break.

    `cause` names the message and what differs, `example` has both texts.
    """

    cause: str
    example: str
    line: int
    tokens: int


# -- reading -----------------------------------------------------------------------------------------------


def read_chat(path: Path, tokenizer: Any) -> ChatLog:
    """Read a log and make its prompts. Requests come in the order of their times, where each has one.

    Raises:
        UserError: a line is no chat request, or nothing is left.
    """
    found = list(_lines(path))
    if all(one.at_s is not None for one in found):
        found.sort(key=lambda one: one.at_s or 0.0)
    kept, prompts, left_out = [], [], Counter[str]()
    for one in found:
        if not all(is_text(message["content"]) for message in one.messages):
            left_out["with parts that are no text, whose tokens are not known"] += 1
            continue
        if one.other_prompt:
            left_out[f"with {one.other_prompt}, which makes another prompt"] += 1
            continue
        try:
            ids = encode_text(tokenizer, _text(tokenizer, one), add_special_tokens=False)
        except TokenizerError as error:
            left_out[f"without a prompt ({one_line(error, 120)})"] += 1
            continue
        if not ids:
            left_out["whose prompt is empty, by the chat template"] += 1
            continue
        kept.append(one)
        prompts.append(np.array(ids, np.int64))
    if not kept:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in left_out.items())
        raise UserError(f"{path}: no chat request is left to count: {reasons or 'the file has none'}")
    return ChatLog(path.name, kept, prompts, left_out)


def tokenizer_of(folder: str) -> Any:
    """The tokenizer of a folder, with its chat template. Raises UserError."""
    try:
        found = load_tokenizer(str(Path(folder).expanduser()))
    except ImportError as error:
        raise UserError("--tokenizer needs transformers: pip install 'pagetwin[engine]'") from error
    except ModelError as error:
        reason = f"--tokenizer {error}; name a folder with tokenizer.json and tokenizer_config.json"
        raise UserError(reason) from error
    if not found.chat_template:
        raise UserError(
            f"--tokenizer {folder}: it has no chat template (chat_template.jinja, or in its configuration)"
        )
    if not found.is_fast:
        reason = f"--tokenizer {folder}: it has no tokenizer.json, which gives the place of each token"
        raise UserError(reason)
    return found


def _lines(path: Path) -> Iterator[LoggedChat]:
    try:
        for number, raw in open_source(path).lines():
            if raw.strip():
                yield _request(json.loads(raw), number)
    except TraceError as error:
        raise UserError(str(error)) from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = 'a line is one chat request in JSON, as {"messages": [{"role": "user", "content": "…"}]}'
        raise UserError(f"{path}, line {number}: {error}; {reason}") from error


def _request(record: Any, line: int) -> LoggedChat:
    """The request in a line. Raises ValueError."""
    outer = _typed(record, dict, "line")
    body = next((outer[key] for key in ("body", "request") if isinstance(outer.get(key), dict)), outer)
    messages = [_message(each) for each in _typed(body.get("messages"), list, "messages")]
    if not messages:
        raise ValueError("messages: is empty")
    at = next((each[key] for each in (outer, body) for key in ("timestamp", "created") if key in each), None)
    return LoggedChat(
        line,
        messages,
        [_typed(each, dict, "tools") for each in _typed(body.get("tools") or [], list, "tools")],
        effort_values(body.get("reasoning_effort"))
        | _typed(body.get("chat_template_kwargs") or {}, dict, "chat_template_kwargs"),
        str(body.get("cache_salt") or ""),
        str(body.get("user") or ""),
        None if at is None else _seconds(at),
        next((key for key, usual in _OTHER_PROMPT.items() if body.get(key) not in (None, usual)), ""),
    )


def _typed(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        found = "missing" if value is None else f"found {type(value).__name__}"
        raise ValueError(f"{name}: {kind.__name__} expected, {found}")
    return value


def _message(value: Any) -> Message:
    """A message as templates expect it: arguments of tool calls as objects (as vLLM does)."""
    message = dict(_typed(value, dict, "messages"))
    _typed(message.get("role"), str, "role")
    message.setdefault("content", None)
    return with_objects(message)


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LATEST_S:
        reason = f"timestamp: Unix time in seconds or an ISO date expected, found {one_line(value, 40)}"
        raise ValueError(reason)
    return float(value)


def _text(tokenizer: Any, one: LoggedChat) -> str:
    given: dict[str, Any] = {"tools": one.tools, "template_values": one.template_values}
    return str(templated(tokenizer, one.messages, **given, tokenize=False, add_generation_prompt=True))


# -- what breaks prefixes ----------------------------------------------------------------------------------


def lost_prefixes(log: ChatLog, shared: Sequence[int], tokenizer: Any, least: int) -> Iterator[LostPrefix]:
    """Requests whose tools and messages are those of an earlier request but for what changes by itself.

    That is the order of tools, and numbers, dates and identifiers. `shared` has the tokens that each prompt shares with
    an earlier one; a loss of fewer than `least` tokens is none.
    """
    chains: dict[tuple[int, Any], int] = {}  # (chain before it, unit): the chain with it
    latest = [0]  # request of each chain
    for index, one in enumerate(log.requests):
        chain, alike, before = 0, 0, 0
        for unit in _units(one):
            known = chains.setdefault((chain, unit), len(latest))
            if known == len(latest):
                latest.append(index)
            else:
                before, alike, latest[known] = latest[known], alike + 1, index
            chain = known
        lost = _lost(log, (before, index), alike, shared[index], tokenizer) if alike else None
        if lost is not None and lost.tokens >= least:
            yield lost


def _units(one: LoggedChat) -> Iterator[tuple[str, ...]]:
    """The tools and then each message, without what changes by itself."""
    yield (one.salt, *sorted(json.dumps(tool, sort_keys=True) for tool in one.tools))
    for message in one.messages:
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        said = joined(message["content"]), json.dumps(rest, sort_keys=True)
        yield message["role"], *(_CHANGING.sub("#", each) for each in said)


def _lost(log: ChatLog, pair: tuple[int, int], alike: int, shared: int, tokenizer: Any) -> LostPrefix | None:
    """What the second request of a pair loses against the first, whose first `alike` units it repeats."""
    earlier, one = (log.requests[index] for index in pair)
    same = takewhile(lambda both: both[0] == both[1], zip(earlier.messages, one.messages, strict=False))
    broken = sum(1 for _ in same) + 1  # number of the unit; the tools are number 0
    if earlier.tools != one.tools:
        broken = 0
    if broken >= alike:
        return None
    text = _text(tokenizer, one)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    whole = bisect_right([end for _, end in places], _end(text, one.messages, alike - 1))
    cause, example = _difference(earlier, one, broken)
    return LostPrefix(cause, f"{example} (lines {earlier.line} and {one.line})", one.line, whole - shared)


def _end(text: str, messages: Sequence[Message], count: int) -> int:
    """Where the first `count` messages end in the rendered text; of none: where the first begins."""
    end = 0
    for number, message in enumerate(messages[: max(1, count)]):
        said = joined(message["content"]).strip()
        if said and (place := text.find(said, end)) >= 0:  # a template may leave a message out
            end = place + len(said) if number < count else place
    return end


def _difference(earlier: LoggedChat, one: LoggedChat, broken: int) -> tuple[str, str]:
    if not broken:
        names = [", ".join(_name(tool) for tool in each.tools) for each in (earlier, one)]
        moved = "tools in another order" if names[0] != names[1] else "tools that are written otherwise"
        return moved, " against ".join(one_line(each, 100) for each in names)
    message = one.messages[broken - 1]
    said = [json.dumps(each.messages[broken - 1], ensure_ascii=False) for each in (earlier, one)]
    at = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*said, strict=False)))
    cause = f"a number, date or identifier in the {message['role']} message (number {broken})"
    return cause, " against ".join(f"'{one_line(one[max(0, at - _AROUND) : at + _AROUND])}'" for one in said)


def _name(tool: Message) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", "?"))


# -- the answer --------------------------------------------------------------------------------------------


def chat_answer(log: ChatLog, tokenizer: Any, block_size: int, folder: str) -> Iterator[str]:
    """The answer, line by line; hits are shares of all prompt tokens."""
    trace = log.trace()
    paths, total = PrefixPaths(trace), sum(map(len, log.prompts))
    profile = reuse_profile(paths, block_size, spare_last_token=True)
    tenants = sorted({one.tenant for one in log.requests} - {""})
    salted = reuse_profile(log.trace(tenants=True), block_size, spare_last_token=True) if tenants else None
    yield _scope(log, total, folder)
    most, sizes = profile.hit_tokens(float("inf")) / total, pool_sizes(profile, max(map(len, log.prompts)))
    enough = next(size for size in sizes if profile.hit_ratio(size) >= _NEARLY * most)
    yield (
        f"The prefix cache has {percent(most)} of the prompt tokens with an unlimited pool, in blocks of {block_size} "
        f"tokens; a pool of {enough * block_size:,} tokens has {percent(profile.hit_ratio(enough))}."
    )
    lost = list(lost_prefixes(log, shared_prefix_tokens(trace), tokenizer, block_size))
    yield from _lost_text(lost, total, len(log.requests))
    if salted is None:
        yield "What a salt per tenant costs is not known: no request names its user (user)."
    else:
        each = salted.hit_tokens(float("inf")) / total
        yield (
            f"A salt per tenant (cache_salt, {len(tenants):,} users) leaves {percent(each)}: it costs "
            f"{percent(most - each)} of the prompt tokens."
        )
    yield ""
    yield from _curve(paths, profile, salted, sizes)
    if len(log.requests) < FEWEST:
        yield f"note: {len(log.requests)} requests are too few to answer from; give {FEWEST} or more"
    yield (
        "note: requests one after the other, least recently used blocks evicted; answers, of which the next turn finds "
        "its part too, are not counted"
    )
    edges = sum(len(prompt) % block_size == 0 for prompt in log.prompts)
    if edges:
        yield (
            f"note: {edges:,} prompts end on a block's edge; where one was whole in the cache an engine keeps its last "
            "block twice, which the curve leaves out"
        )


def _scope(log: ChatLog, total: int, folder: str) -> str:
    count, missing = len(log.requests), sum(log.left_out.values())
    of_all = f"all {count:,} requests" if not missing else f"{count:,} of {count + missing:,} requests"
    times = [one.at_s for one in log.requests]
    span = "" if None in times else f", over {max(times) - min(times):,.0f} s"  # type: ignore[operator, type-var]
    source = f"the tokenizer and chat template of {folder}"
    parts = [f"Counted: {of_all} of {log.name}{span}; {total:,} prompt tokens by {source}."]
    parts += [f"Left out: {number:,}, {reason}." for reason, number in log.left_out.items()]
    return " ".join(parts)


def pool_sizes(profile: ReuseProfile, longest: int) -> list[int]:
    """Ten pools in blocks, from one that holds the longest prompt to one that holds all, in equal ratios."""
    least = -(-longest // profile.block_size) + 1
    return sorted(
        {round(size) for size in np.geomspace(least, max(least, profile.distinct_blocks + 1), 10).tolist()}
    )


def _lost_text(lost: Sequence[LostPrefix], total: int, requests: int) -> Iterator[str]:
    if not lost:
        yield "No prefix is lost to an order of tools, a number, a date or an identifier."
        return
    share = percent(sum(one.tokens for one in lost) / total)
    yield f"{len(lost):,} of {requests:,} requests lose what others like them share, {share} of the prompt tokens:"
    causes = Counter[str]()
    for one in lost:
        causes[one.cause] += one.tokens
    for cause, count in causes.most_common(_MOST_SHOWN):
        mine = [one for one in lost if one.cause == cause]
        yield f"  {cause}: {len(mine):,} requests, {count:,} tokens; first {mine[0].example}"


def _curve(
    paths: PrefixPaths, profile: ReuseProfile, salted: ReuseProfile | None, sizes: Iterable[int]
) -> Iterator[str]:
    bounded = profile.blocks_in_all <= MOST_BLOCKS
    head = f"{'pool, tokens':>14}  {'hits':>8}" + (
        f"  {'bound of any eviction (Belady)':>30}" if bounded else ""
    )
    yield head + (f"  {'a salt per tenant':>17}" if salted else "")
    for size in sizes:
        line = f"{size * profile.block_size:>14,}  {percent(profile.hit_ratio(size)):>8}"
        if bounded:
            best = optimal_hit_tokens(paths, profile.block_size, size) / max(1, profile.prompt_tokens)
            line += f"  {percent(best):>30}"
        yield line + (f"  {percent(salted.hit_ratio(size)):>17}" if salted else "")
