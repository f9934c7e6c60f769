"""Generate traces from a built-in table, without any download.

Lengths are drawn by inverse CDF. If prompt and output lengths depend on each other in the data, they are drawn together
with a Gaussian copula. Gaps are gamma distributed unless an arrival process is given. Prompts are unique
unless a sharing model is given.

The generator `chat` makes conversations from the table `chat_turns`: the prompt of a turn is all earlier questions and
answers, and then a new question. A later turn waits for the answer and a pause. `output_key` is the key of the answer
in the next prompt.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from math import erf, pi, sin, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.arrivals import FIRST_KEY, ArrivalProcess, uniform
from traces.errors import ParameterError
from traces.synth.tables import (
    TABLES,
    CalibrationTable,
    PrefixSharing,
    load_table,
    share_prompts,
    text_tokens,
    zipf_place,
)
from traces.trace import AFTER, CONTENT, Requests, Segment, SegmentColumns, Trace, TraceHeader, TraceRequest

CHAT = "chat"
_STARTS = ArrivalProcess("poisson", 0.2)
_LONGEST = 8192  # tokens of prompt and answer; a conversation ends before it exceeds them
_MEAN_TURNS = 6
_SESSION_STREAM = 21


def chat_source() -> str:
    """The data that the conversations are calibrated on."""
    return str(_table()["source"])


def chat_requests(
    count: int, seed: int, starts: ArrivalProcess | None, system: PrefixSharing | None
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
        # Enough are made when no later conversation can precede `count` of the turns.
        enough = len(made) >= count + 64 * _MEAN_TURNS
        if enough and sum(entry[0] <= start_us for entry in made) >= count:
            break
    ordered = [turn for *_, turn in sorted(made, key=lambda entry: entry[:3])]
    return _numbered(ordered[:count]), _chat_quality(process, system), str(_table()["licence"])


def _session(session: int, start_us: int, seed: int, system: PrefixSharing | None) -> Iterator[TraceRequest]:
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


def _opening(seed: int, drawn: float, system: PrefixSharing | None) -> Iterator[Segment]:
    if system is not None and system.share:
        key = FIRST_KEY + zipf_place(drawn, system.count, system.zipf)
        yield Segment(key, text_tokens(seed, key, system.share * _table()["means"]["first_prompt_tokens"]))


def _numbered(turns: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The turns with ids in order of arrival, and links to the turn before."""
    last: dict[str | None, int] = {}
    numbered = []
    for number, turn in enumerate(turns):
        before = last.get(turn.session)
        linked: dict[str, Any] = {}
        if before is not None:
            linked = {"parent": before, "after": (before,), "release": AFTER}
        numbered.append(replace(turn, request_id=number, **linked))
        last[turn.session] = number
    return tuple(numbered)


def _chat_quality(process: ArrivalProcess, system: PrefixSharing | None) -> dict[str, float | str]:
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


Floats = npt.NDArray[np.float64]
_PROMPTS, _OUTPUTS = 1, 2  # stream numbers; changing one changes every generated trace
GENERATORS = (*TABLES, CHAT)


MOST_REQUESTS = 10**7  # of one trace, which is in memory as a whole: some 100 bytes each, while it is drawn


def correlated(first: Floats, second: Floats, spearman: float) -> Floats:
    """Uniform numbers whose rank correlation with `first` is `spearman`, made of `first` and an independent `second`.

    The normal correlation that gives a Spearman coefficient s is 2 sin(pi s / 6) (Kruskal 1958).
    """
    linear = 2 * sin(pi * spearman / 6)
    inverse = NormalDist().inv_cdf
    smallest = 2.0**-53
    normal_first = np.array([inverse(max(u, smallest)) for u in first.tolist()])
    normal_second = np.array([inverse(max(u, smallest)) for u in second.tolist()])
    mixed = linear * normal_first + sqrt(1 - linear**2) * normal_second
    return np.array([(1 + erf(z / sqrt(2))) / 2 for z in mixed.tolist()])


def generate_trace(
    table: str,
    *,
    num_requests: int,
    seed: int,
    arrivals: ArrivalProcess | None = None,
    sharing: PrefixSharing | None = None,
) -> Trace:
    """`num_requests` requests of a generator (one of `GENERATORS`); raises ParameterError.

    Without `arrivals` they arrive at the table's recorded rate. Without `sharing` prompts share only what the table
    itself describes.
    """
    if num_requests < 1:
        raise ParameterError("num_requests", f"at least 1 expected, found {num_requests}")
    if num_requests > MOST_REQUESTS:
        raise ParameterError("num_requests", f"at most {MOST_REQUESTS:,} expected, found {num_requests:,}")
    if table not in GENERATORS:
        raise ParameterError("table", f'no table "{table}"; there are {", ".join(GENERATORS)}')
    if table == CHAT:
        return _chat(num_requests, seed, arrivals, sharing)
    chosen = load_table(table)
    process = arrivals or chosen.arrivals.process()
    requests: Sequence[TraceRequest] = _lengths_only(chosen, process, num_requests, seed)
    model = sharing or chosen.sharing()
    specification: dict[str, object] = {"table": chosen.specification(), "seed": seed}
    quality = dict(chosen.quality())
    if arrivals is not None:
        specification["arrivals"] = asdict(arrivals)
        quality = {name: value for name, value in quality.items() if not name.startswith("arrival")}
        quality["arrivals"] = arrivals.describe()
    if model is not None:
        specification["sharing"] = asdict(model)
        quality["sharing"] = model.describe()
        requests = share_prompts(requests, model, seed)
    return Trace(_header(table, chosen.licence, specification, quality, num_requests, seed), requests)


def _lengths_only(table: CalibrationTable, process: ArrivalProcess, count: int, seed: int) -> Requests:
    first, second = uniform(seed, _PROMPTS, count), uniform(seed, _OUTPUTS, count)
    if table.copula:
        second = correlated(first, second, table.prompt_output_spearman)
    drawn = table.prompt_tokens.quantile(first), table.output_tokens.quantile(second)
    prompts, outputs = (np.maximum(np.rint(side), 1).astype(np.int64) for side in drawn)
    times = np.array(process.times_us(count, seed), dtype=np.int64)
    return Requests(np.arange(count), times, prompts, outputs, SegmentColumns.private(prompts))


def _chat(
    num_requests: int, seed: int, arrivals: ArrivalProcess | None, sharing: PrefixSharing | None
) -> Trace:
    if sharing is not None and sharing.model != "system":
        reason = f'{CHAT} shares by conversation; beside it only "system" can be added'
        raise ParameterError("sharing", reason)
    requests, quality, licence = chat_requests(num_requests, seed, arrivals, sharing)
    specification = {
        "source": chat_source(),
        "seed": seed,
        "arrivals": arrivals and asdict(arrivals),
        "sharing": sharing and asdict(sharing),
    }
    return Trace(_header(CHAT, licence, specification, quality, num_requests, seed), requests)


def _header(
    name: str,
    licence: str,
    specification: Mapping[str, object],
    quality: Mapping[str, float | str],
    num_requests: int,
    seed: int,
) -> TraceHeader:
    text = json.dumps(specification, sort_keys=True)
    return TraceHeader(
        name=name,
        format="generated",
        source=f"generator {name}, seed {seed}",
        key_kind=CONTENT,
        source_block_tokens=None,
        clock_quantum_us=1,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        rows_read=num_requests,
        rows_kept=num_requests,
        licence=licence,
        calibration=quality,
    )
