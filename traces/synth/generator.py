"""Generate traces from a built-in table, without any download.

A table has published quantiles and arrival figures of real traces, as JSON in `traces/data/`, and no rows. Each file
names its source, its licence, and how close draws come to the data.

Lengths are drawn by inverse CDF. If prompt and output lengths depend on each other in the data, they are drawn together
with a Gaussian copula. Gaps are gamma distributed unless an arrival process is given. Prompts are unique
unless a sharing model is given: sharing gives prompts the texts that they begin with, and does not change their
lengths. Shared lengths are not rounded to any block size, so these traces show the effect of the block size on hits.

The generator `chat` makes conversations from the table `chat_turns`: the prompt of a turn is all earlier questions and
answers, and then a new question. A later turn waits for the answer and a pause. `output_key` is the key of the answer
in the next prompt.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from math import erf, pi, sin, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.arrivals import FIRST_KEY, ArrivalProcess, uniform, zipf_cumulative
from traces.errors import ParameterError
from traces.reshape import check_sharing
from traces.trace import AFTER, CONTENT, Requests, Segment, SegmentColumns, Trace, TraceHeader, TraceRequest

MODELS = ("system", "few_shot", "tree", "passages")
_CHOICE, _LENGTH, _WALK = 11, 12, 13  # stream numbers; changing one changes every trace with sharing
_EXAMPLES, _DEPTH, _BRANCHES, _PASSAGES = 8, 6, 3, 5
Pieces = list[Segment]


@dataclass(frozen=True)
class PrefixSharing:
    """How prompts share their beginnings.

    system: one of `count` system prompts with Zipf popularity, about `share` of the mean prompt long.
    few_shot: one of `count` tasks, then as many of its 8 examples, in order, as fit in `share` of the prompt.
    tree: a walk down one of `count` trees (3 branches per node, 6 levels), until `share` of the prompt is shared.
    passages: one of 4 system prompts, then 5 of `count` passages by Zipf, together about `share` of the mean prompt.
    `zipf` is the exponent of the popularity; 0 is uniform.
    """

    model: str
    share: float = 0.5
    count: int = 16
    zipf: float = 1.0

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ParameterError("sharing", f'one of {", ".join(MODELS)} expected, found "{self.model}"')
        check_sharing(self.share, self.count, self.zipf)

    def describe(self) -> str:
        """The model in words, for headers."""
        return f"{self.model}: {self.share:.3g} of prompts, {self.count} shared texts, Zipf exponent {self.zipf:g}"


@dataclass(frozen=True)
class FixedPrefix:
    """Every prompt begins with the same text of `tokens` tokens."""

    tokens: int

    def describe(self) -> str:
        """The model in words, for headers."""
        return f"all prompts begin with the same {self.tokens} tokens"


def share_prompts(
    requests: Sequence[TraceRequest], sharing: PrefixSharing | FixedPrefix, seed: int
) -> Sequence[TraceRequest]:
    """The same requests with shared beginnings. Draws depend on (seed, request_id) only.

    Lengths of shared texts follow the mean prompt of the first 1,000 requests, so more requests do not change them.
    """
    if isinstance(sharing, FixedPrefix):
        return tuple(_begun_with(request, [Segment(FIRST_KEY, sharing.tokens)]) for request in requests)
    if not sharing.share:
        return requests
    sample = requests[:1000]
    typical = sharing.share * sum(request.prompt_tokens for request in sample) / len(sample)
    drawn = uniform(seed, _CHOICE, max(request.request_id for request in requests) + 1)
    make = _MODELS[sharing.model]
    return tuple(
        _begun_with(request, make(sharing, seed, typical, request, float(drawn[request.request_id])))
        for request in requests
    )


def zipf_place(share: float, count: int, exponent: float) -> int:
    """The rank, from 0, of the text at quantile `share` of a Zipf popularity over `count` texts."""
    return min(int(np.searchsorted(zipf_cumulative(count, exponent), share, "right")), count - 1)


def text_tokens(seed: int, key: int, typical: float) -> int:
    """The length of a shared text: uniform from half to one and a half of `typical`."""
    return max(1, round(typical * (0.5 + float(uniform(seed ^ _LENGTH, key, 1)[0]))))


def _system(sharing: PrefixSharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    key = FIRST_KEY + zipf_place(drawn, sharing.count, sharing.zipf)
    return [Segment(key, text_tokens(seed, key, typical))]


def _few_shot(
    sharing: PrefixSharing, seed: int, typical: float, request: TraceRequest, drawn: float
) -> Pieces:
    task = zipf_place(drawn, sharing.count, sharing.zipf)
    room, pieces = sharing.share * request.prompt_tokens, []
    for example in range(_EXAMPLES):
        key = FIRST_KEY + task * _EXAMPLES + example
        tokens = text_tokens(seed, key, typical / 3)
        if tokens > room:
            break
        pieces.append(Segment(key, tokens))
        room -= tokens
    return pieces


def _tree(sharing: PrefixSharing, seed: int, typical: float, request: TraceRequest, drawn: float) -> Pieces:
    root = zipf_place(drawn, sharing.count, sharing.zipf)
    steps = uniform(seed ^ _WALK, request.request_id, _DEPTH)
    node, room, pieces = 1, sharing.share * request.prompt_tokens, []
    for level in range(_DEPTH):
        key = FIRST_KEY + (root << 20) + node
        tokens = min(text_tokens(seed, key, typical / 2), int(room))
        if tokens < 1:
            break
        pieces.append(Segment(key, tokens))
        room -= tokens
        node = node * _BRANCHES + zipf_place(float(steps[level]), _BRANCHES, sharing.zipf)
    return pieces


def _passages(
    sharing: PrefixSharing, seed: int, typical: float, request: TraceRequest, drawn: float
) -> Pieces:
    system = FIRST_KEY + zipf_place(drawn, 4, sharing.zipf)
    pieces = [Segment(system, text_tokens(seed, system, typical / 3))]
    steps = uniform(seed ^ _WALK, request.request_id, _PASSAGES)
    for step in steps.tolist():
        key = FIRST_KEY + 4 + zipf_place(step, sharing.count, sharing.zipf)
        pieces.append(Segment(key, text_tokens(seed, key, typical * 2 / 3 / _PASSAGES)))
    return pieces


_MODELS: dict[str, Callable[[PrefixSharing, int, float, TraceRequest, float], Pieces]] = {
    "system": _system,
    "few_shot": _few_shot,
    "tree": _tree,
    "passages": _passages,
}


def _begun_with(request: TraceRequest, pieces: Pieces) -> TraceRequest:
    """The request that begins with the pieces, cut so that at least its last token is unique."""
    kept, room = [], request.prompt_tokens - 1
    for key, tokens in pieces:
        if not room:
            break
        kept.append(Segment(key, min(tokens, room)))
        room -= kept[-1].tokens
    return replace(request, segments=(*kept, Segment(None, room + 1)))


TABLES = (
    *("azure_conv", "azure_code", "mooncake_conversation", "mooncake_synthetic", "ragpulse", "sharegpt_8k"),
    *("bwb", "arxiv", "agentic", "sosp23_sharegpt", "sosp23_alpaca", "sosp23_wmt16_one_shot"),
    *("sosp23_wmt16_five_shot", "sosp23_chatbot"),
)
_Q21 = [step / 20 for step in range(21)]
_TAIL = [0.96, 0.97, 0.98, 0.99, 0.995, 0.999]
POSITIONS = np.array([*_Q21[:-1], *_TAIL, 1.0])


@dataclass(frozen=True)
class LengthTable:
    """Quantiles of a length in tokens: `q21` at 0, 5, ... 100 %, `tail` at 96, 97, 98, 99, 99.5, 99.9 %.

    The tail is needed: with `q21` alone, the last interval makes means up to 2.4 times too large. `ks` and `mean_ratio`
    compare draws with the data of the table (Kolmogorov-Smirnov distance; drawn mean / data mean).
    """

    q21: tuple[float, ...]
    tail: tuple[float, ...]
    mean: float
    ks: float | None  # None: only means are published
    mean_ratio: float

    def quantile(self, share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Length in tokens below which `share` (0 to 1, any shape) of the requests lie; linear between knots."""
        lengths: npt.NDArray[np.float64] = np.interp(share, POSITIONS, self._knots())
        return lengths

    def cdf(self, tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Share of drawn lengths at or below `tokens`, after rounding to whole tokens."""
        knots = self._knots()
        rising = np.maximum.accumulate(knots + np.arange(len(knots)) * 1e-9)  # interp needs increasing knots
        shares: npt.NDArray[np.float64] = np.interp(np.floor(tokens) + 0.5, rising, POSITIONS)
        return shares

    def _knots(self) -> npt.NDArray[np.float64]:
        return np.array([*self.q21[:-1], *self.tail, self.q21[-1]])


@dataclass(frozen=True)
class GammaArrivals:
    """A renewal process: gaps drawn from a gamma distribution of this shape, at this mean rate in requests/s."""

    rate_rps: float
    gamma_shape: float
    gamma_ks: float | None  # of the fit to recorded gaps; None if the recording clock hides them
    recorded_gap_cv: float | None
    note: str

    def process(self) -> ArrivalProcess:
        """The same as an arrival process."""
        return ArrivalProcess("gamma", self.rate_rps, shape=self.gamma_shape)


@dataclass(frozen=True)
class CalibrationTable:
    """The published figures that a generated trace is calibrated on."""

    name: str
    title: str
    source: str
    licence: str
    rows: int
    prompt_tokens: LengthTable
    output_tokens: LengthTable
    prompt_output_spearman: float
    arrivals: GammaArrivals
    copula: bool = False  # prompt and output lengths are drawn with their rank correlation
    shared_prefix_tokens: int = 0  # all prompts begin with this text

    def sharing(self) -> "FixedPrefix | None":
        """The sharing that the table describes, or None."""
        return FixedPrefix(self.shared_prefix_tokens) if self.shared_prefix_tokens else None

    def specification(self) -> dict[str, object]:
        """All figures, for the digest of a generated trace, without fields that the table does not use."""
        plain = asdict(self)
        unused = [name for name in ("copula", "shared_prefix_tokens") if not plain[name]]
        return {name: value for name, value in plain.items() if name not in unused}

    def quality(self) -> Mapping[str, float | str]:
        """How close draws come to the data, for the trace's header."""
        return {
            "calibrated_on": f"{self.title}: {self.source}",
            "prompt_ks": _or_unknown(self.prompt_tokens.ks),
            "prompt_mean_ratio": self.prompt_tokens.mean_ratio,
            "output_ks": _or_unknown(self.output_tokens.ks),
            "output_mean_ratio": self.output_tokens.mean_ratio,
            "recorded_prompt_output_spearman": self.prompt_output_spearman,
            "generated_prompt_output_spearman": self.prompt_output_spearman if self.copula else 0.0,
            "arrival_rate_rps": self.arrivals.rate_rps,
            "arrival_gamma_shape": self.arrivals.gamma_shape,
            "arrival_gamma_ks": _or_unknown(self.arrivals.gamma_ks),
            "recorded_gap_cv": _or_unknown(self.arrivals.recorded_gap_cv),
            "arrivals": self.arrivals.note,
        }


def _or_unknown(value: float | None) -> float | str:
    return "not known" if value is None else value


@lru_cache
def load_table(name: str) -> CalibrationTable:
    """The embedded table of that name. Raises ParameterError that lists the tables."""
    if name not in TABLES:
        raise ParameterError("table", f'no table "{name}"; there are {", ".join(TABLES)}')
    raw: dict[str, Any] = json.loads((files("traces") / "data" / f"{name}.json").read_text("utf-8"))
    return CalibrationTable(
        prompt_tokens=_lengths(raw.pop("prompt_tokens")),
        output_tokens=_lengths(raw.pop("output_tokens")),
        arrivals=GammaArrivals(**raw.pop("arrivals")),
        **raw,
    )


def _lengths(raw: dict[str, Any]) -> LengthTable:
    return LengthTable(**{**raw, "q21": tuple(raw["q21"]), "tail": tuple(raw["tail"])})


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
