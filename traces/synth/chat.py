"""Generated conversations: the prompt of a turn is all earlier questions and answers, and then a new question.

They are drawn from the table `chat_turns`. A later turn waits for the answer and a pause. `output_key` is the key of
the answer in the next prompt.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.arrivals import ArrivalProcess
from traces.randomness import uniform
from traces.synth.sharing import FIRST_KEY, Sharing, text_tokens, zipf_place
from traces.trace import AFTER, Segment, TraceRequest

CHAT = "chat"
_STARTS = ArrivalProcess("poisson", 0.2)
_LONGEST = 8192  # tokens of prompt and answer; a conversation ends before it exceeds them
_MEAN_TURNS = 6
_SESSION_STREAM = 21
_KEPT = (
    "arrival_us",
    "prompt_tokens",
    "output_tokens",
    "segments",
    "session",
    "turn",
    "think_us",
    "output_key",
)


def chat_source() -> str:
    """The data that the conversations are calibrated on."""
    return str(_table()["source"])


def chat_requests(
    count: int, seed: int, starts: ArrivalProcess | None, system: Sharing | None
) -> tuple[tuple[TraceRequest, ...], dict[str, float | str], str]:
    """`count` turns in order of arrival, the quality of their calibration, and the licence.

    `starts` gives the starts of conversations (default: 0.2 per second). Arrivals of later turns do not contain the
    time of the answers. They only order the trace: the replay releases a turn after the answer before it.
    """
    process = starts or _STARTS
    sessions = zip(range(count), process.stream_us(seed), strict=False)
    made: list[tuple[int, int, int, TraceRequest]] = []
    for session, start_us in sessions:
        turns = list(_session(session, start_us, seed, system))
        made.extend((turn.arrival_us, session, number, turn) for number, turn in enumerate(turns))
        if len(made) >= count + 64 * _MEAN_TURNS and _settled(made, start_us) >= count:
            break
    ordered = [turn for *_, turn in sorted(made, key=lambda entry: entry[:3])]
    return _numbered(ordered[:count]), _quality(process, system), str(_table()["licence"])


def _settled(made: list[tuple[int, int, int, TraceRequest]], start_us: int) -> int:
    """The number of turns that no later conversation can precede."""
    return sum(entry[0] <= start_us for entry in made)


def _session(session: int, start_us: int, seed: int, system: Sharing | None) -> Iterator[TraceRequest]:
    table = _table()
    drawn = _numbers(seed ^ _SESSION_STREAM, session)
    turns = max(1, round(_quantile(table, "turns", next(drawn))))
    history: list[Segment] = list(_opening(seed, next(drawn), system))
    before, arrival_us = None, start_us
    for turn in range(1, turns + 1):
        name = "later_user_tokens" if before else "first_prompt_tokens"
        asked, answered = (
            max(1, round(_quantile(table, part, next(drawn)))) for part in (name, "output_tokens")
        )
        pause_us = round(float(np.interp(next(drawn), np.arange(20) / 20, table["pause_s"])) * 1e6)
        key = FIRST_KEY + (1 << 40) + (session << 12) + turn * 2
        prompt = [*history, Segment(key, asked)]
        total = sum(tokens for _, tokens in prompt)
        if total + answered > _LONGEST:
            return
        arrival_us += pause_us if before else 0
        request = TraceRequest(
            request_id=turn,
            arrival_us=arrival_us,
            prompt_tokens=total,
            output_tokens=answered,
            segments=tuple(prompt),
            session=str(session),
            turn=turn,
            think_us=pause_us if before else None,
            output_key=key + 1,
        )
        yield request
        history, before = [*prompt, Segment(key + 1, answered)], request


def _opening(seed: int, drawn: float, system: Sharing | None) -> Iterator[Segment]:
    if system is not None and system.share:
        key = FIRST_KEY + zipf_place(drawn, system.count, system.zipf)
        yield Segment(key, text_tokens(seed, key, system.share * _table()["means"]["first_prompt_tokens"]))


def _numbered(turns: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The turns with ids in order of arrival, and links to the turn before."""
    last: dict[str | None, int] = {}
    numbered = []
    for number, turn in enumerate(turns):
        before = last.get(turn.session)
        fields: dict[str, Any] = {name: getattr(turn, name) for name in _KEPT}
        if before is not None:
            fields |= {"parent": before, "after": (before,), "release": AFTER}
        numbered.append(TraceRequest(request_id=number, **fields))
        last[turn.session] = number
    return tuple(numbered)


def _quality(process: ArrivalProcess, system: Sharing | None) -> dict[str, float | str]:
    table = _table()
    ratios = {
        f"{name}_mean_ratio": round(_mean(table, name) / mean, 4) for name, mean in table["means"].items()
    }
    return {
        "calibrated_on": chat_source(),
        **ratios,
        "arrivals": f"conversations {process.describe()}",
        "sharing": "history of each conversation" + (f"; {system.describe()}" if system else ""),
        "longest_tokens": _LONGEST,
    }


def _mean(table: dict[str, Any], name: str) -> float:
    """Mean of draws from the table, before rounding."""
    places = (np.arange(100_000) + 0.5) / 100_000
    return float(np.mean([np.interp(places, *_knots(table, name))]))


def _quantile(table: dict[str, Any], name: str, share: float) -> float:
    return float(np.interp(share, *_knots(table, name)))


def _knots(table: dict[str, Any], name: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    values = table[name]
    places = np.array([*(step / 20 for step in range(20)), 0.99, 1.0])
    return places, np.array([*values[:20], table["p99"][name], values[20]])


@lru_cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files("traces") / "data" / "chat_turns.json").read_text("utf-8"))
    return table


def _numbers(seed: int, session: int) -> Iterator[float]:
    count = 64
    while True:
        yield from islice(uniform(seed, session, count).tolist(), count // 2 if count > 64 else 0, None)
        count *= 2
