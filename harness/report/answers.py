"""What the sweep says, in sentences: each is computed from the points, has its uncertainty, and names its figure.

A sentence compares points that differ in one setting alone. It gives the median of their ratios with a 95 % bootstrap
interval over the matched points; of fewer than three it gives their range. Measured values are used where there are
any; a measured point is not compared with a predicted one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf, log
from statistics import median
from typing import Any

from harness.console import numbered
from harness.metrics import METRICS
from harness.metrics.record import PointRecord, Side
from harness.metrics.verdict import COUNTS, ClassVerdict, Trust, Verdict, median_interval
from harness.report import numbers
from harness.report.axes import BLOCK, POLICY, RATE, Axes, short_label
from harness.report.study import SHARE, Study

BEAMS, SAMPLES = "decoding.beam_width", "decoding.n"
RATES, LATENCY = "request_throughput", "norm_latency_mean"
_LATENCY_WORDS = "end-to-end time per output token"  # what normalized latency is
_FEW = 1 / 3  # of the differences exceed the spread: below, a setting does not matter
_SAME = 0.01  # differences below this, of shares a point of 100, are none
# What a user is given and does not choose. Points that differ in it are compared each with its like.
_GIVEN = ("workload.", "trace", "replay.", "cost", BEAMS, SAMPLES)
_WAITING = 0.5  # requests in the queue, on average: memory or the batch is short
_PAIRED = 200  # points that are compared two by two, at most
_SIDES: tuple[Side, ...] = ("measured", "simulated")
_KNEE = 2.0  # the load at which normalized latency is so many times that of the lowest load

Pair = tuple[PointRecord, PointRecord]

# What a contiguous policy does for each sequence, in words.
RESERVES = {
    "contiguous_max": "reserves the longest length",
    "contiguous_pow2": "reserves the next power of two",
    "contiguous_oracle": "reserves just the final length",
}


@dataclass(frozen=True)
class Choice:
    """A cell of the first screen: what to choose for a setting, or what it costs, its effect in a few words, and how
    sure that is. What is no choice says so in `setting`: the cost of beams, the effect of shared prompts.

    `number` is the part of the effect that counts; `band` is its interval and what it rests on (empty: not known).
    `caution` is a sentence that must stand beside it where it stands alone.
    """

    setting: str
    value: str
    number: str
    effect: str
    band: str = ""
    caution: str = ""

    def __str__(self) -> str:
        band = f" ({self.band})" if self.band else ""
        effect = f"{self.number} {self.effect}".strip()
        return f"{self.setting}: {self.value}. {effect[0].upper()}{effect[1:]}{band}. {self.caution}".rstrip()


@dataclass(frozen=True)
class Answer:
    """A question of the reader, the sentences that answer it, and the figure that shows it (empty: none)."""

    key: str
    question: str
    text: str
    figure: str = ""
    items: tuple[str, ...] = ()  # further sentences, one by one
    choice: Choice | None = None


@dataclass(frozen=True)
class Ratio:
    """The median of matched ratios with its interval or range; `clear` of the pairs differ by more than chance."""

    middle: float
    low: float
    high: float
    pairs: int
    clear: int

    @property
    def sure(self) -> bool:
        """Whether the interval leaves out 1, and not by chance."""
        return (self.low > 1 or self.high < 1) and self.clear >= _FEW * self.pairs

    @property
    def kind(self) -> str:
        """What `low` and `high` are."""
        return "95 % interval" if self.pairs > 2 else "range"

    def __str__(self) -> str:
        return f"{self.middle:.2f} times ({self.kind} {self.low:.2f} to {self.high:.2f})"

    @property
    def number(self) -> str:
        """The middle alone, for the first screen: '2.13×'."""
        return f"{self.middle:.2f}×"

    @property
    def band(self) -> str:
        """The interval, or of fewer than three pairs the range, and what it rests on."""
        return f"{self.kind} {self.low:.2f}–{self.high:.2f}, {numbered(self.pairs, 'pair')}"


def answers(study: Study, axes: Axes, verdict: Verdict) -> list[Answer]:
    """The answers that these points can give, in the order in which a reader asks."""
    found = [
        *_against_baselines(study, axes),
        *_settings(study, axes),
        *_along(study, axes, SHARE, "What does sharing save?", _sharing_text),
        *_along(study, axes, BEAMS, "What do beams cost?", _width_text),
        *_along(study, axes, SAMPLES, "What do parallel samples cost?", _width_text),
        *_load(study, axes),
    ]
    return [*found, *_trust(study, axes, verdict)]


def value(record: PointRecord, metric: str) -> float | None:
    """A metric of a point: measured (median of the runs) if the point was measured, else simulated."""
    return record.value(metric, "measured" if record.measured else "simulated")


def sides(records: Sequence[PointRecord]) -> str:
    """Whether figures of these points are measured, predicted, or measured where the point was."""
    measured = sum(bool(record.measured) for record in records)
    if not measured:
        return "predicted"
    return "measured" if measured == len(records) else "measured where it was"


def ratio(pairs: Sequence[Pair], metric: str) -> Ratio | None:
    """The ratios of a metric over pairs of points, first to second; None where no pair has both values."""
    values = [(value(one, metric), value(other, metric)) for one, other in pairs]
    found = [one / other for one, other in values if one is not None and other]
    if not found:
        return None
    low, high = median_interval(found) or (min(found), max(found))
    return Ratio(median(found), low, high, len(found), sum(differs(*pair, metric) for pair in pairs))


def matched(records: Sequence[PointRecord], axes: Axes, *, free: Sequence[str]) -> list[list[PointRecord]]:
    """Groups of points, all measured or none, alike in every swept setting and the policy, except in `free`."""
    fixed = [key for key in (POLICY, *axes.values) if key not in free]
    groups: dict[tuple[Any, ...], list[PointRecord]] = {}
    for record in records:
        alike = bool(record.measured), *(record.setting(key) for key in fixed)
        groups.setdefault(alike, []).append(record)
    return [group for group in groups.values() if len(group) > 1]


def _paired(groups: Sequence[Sequence[PointRecord]], key: str, first: Any, second: Any) -> list[Pair]:
    """The pairs of points of a group that have the first and the second value of a setting."""
    return [
        (one, other)
        for group in groups
        for one in group
        for other in group
        if (one.setting(key), other.setting(key)) == (first, second)
    ]


def _against_baselines(study: Study, axes: Axes) -> Iterator[Answer]:
    """Paging against each contiguous policy, at equal settings; every block size counts."""
    for name in sorted({record.policy for record in study.records} - {"paged"}):
        pairs = _paired(matched(study.records, axes, free=[POLICY, BLOCK]), POLICY, "paged", name)
        served, held = ratio(pairs, RATES), ratio(pairs, "utilisation")
        if served is None:
            continue
        text = f"Against {name}, paging serves {_more(served)} requests per second"
        if held is not None:
            memory = replace(held, middle=1 / held.middle, low=1 / held.high, high=1 / held.low)
            text += f", and allocates {memory} the memory for the same tokens"
        text += f" (medians over {_matched(served.pairs)}, {sides([one for pair in pairs for one in pair])})."
        value = ("paged" if served.middle > 1 else name) if served.sure else "either"
        other = f"{name} ({RESERVES[name]})" if name in RESERVES else name
        effect = (
            f"the requests per second of {other}" if value != name else f"as many with paging as with {other}"
        )
        choice = Choice("Cache", value, served.number, effect, served.band)
        yield Answer(
            f"against_{name}", f"What does paging save against {name}?", text, "memory", choice=choice
        )


def _more(found: Ratio) -> str:
    if not found.sure:
        return f"as many ({found}: no difference is shown)"
    return f"{'more' if found.middle > 1 else 'FEWER'}: {found} the"


def _matched(count: int) -> str:
    return f"{numbered(count, 'matched pair')} of points"


def _settings(study: Study, axes: Axes) -> Iterator[Answer]:
    """The best value of each swept number that can be chosen, or of each such name where no number was swept; the
    block size first.
    """
    named = [key for key in axes.values if not key.startswith(_GIVEN)]
    keys = [key for key in named if key in axes.numeric] or named
    for key in sorted(keys, key=lambda key: key != BLOCK):
        records = [r for r in study.records if r.policy == "paged"] if key == BLOCK else study.records
        groups = matched(records, axes, free=[key])
        if any(combinations(group, 2) for group in groups):
            yield _best(study, key, groups)


def _best(study: Study, key: str, groups: Sequence[Sequence[PointRecord]]) -> Answer:
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    name = short_label(key).capitalize()
    is_named, question = isinstance(groups[0][0].setting(key), str), f"Which {short_label(key)} is best?"
    figure = "tradeoff" if is_named else "curve_" + key.replace(".", "_")
    caution = study.block_size_caution if key == BLOCK and not study.measured else ""
    if key == BLOCK and study.block_size_unpriced and not study.measured:
        wastes = _waste(groups)
        text = f"{study.block_size_unpriced} Blocks differ in memory alone: {wastes}."
        open_ = Choice(name, "not told by times", "", f"the cost model has no price of it; {wastes}")
        return Answer(key, question, text, figure, choice=open_)
    clear = {metric: sum(differs(*pair, metric) for pair in pairs) for metric in (RATES, LATENCY)}
    shown = " and ".join(
        f"{count:,} of {len(pairs):,} differences in {METRICS[metric].label}"
        for metric, count in clear.items()
    )
    limit = _chance(study)
    best, safest = best_value(groups, key, LATENCY, higher=False), _safest(groups, key, LATENCY)
    few, advice = max(clear.values()) < _FEW * len(pairs), ""
    if few:
        verdict, here = f"{name} does not matter here", clear[LATENCY]
        told = f"{here:,} of {len(pairs):,} differences" if here else "no difference"
        choice = Choice(name, "any", "", f"{told} in {_LATENCY_WORDS} beyond {limit}")
    elif best and best[1].low > 1 and log(best[1].middle) > _SAME:  # failed points may rank another first
        verdict = f"{name} {best[0]} is best: the next best has {best[1]} its normalized latency"
        choice = Choice(
            name, f"{best[0]}", best[1].number, f"{_LATENCY_WORDS} with the next best", best[1].band
        )
    else:
        beaten = safest is None or safest.loss > 0
        verdict = f"{name} matters at some points" + (", and none is the best everywhere" if beaten else "")
        advice = f" {safest}" if safest else ""
        choice = safest.choice(name) if safest else Choice(name, "depends", "", "see the curves")
    text = f"{verdict}: {shown} exceed {limit}.{advice}{f' {caution}' if caution else ''}"
    return Answer(key, question, text, figure, choice=replace(choice, caution=caution))


def _waste(groups: Sequence[Sequence[PointRecord]]) -> str:
    sizes: dict[Any, list[float]] = {}
    for record in (record for group in groups for record in group):
        if (found := value(record, "internal_of_allocated")) is not None:
            sizes.setdefault(record.setting(BLOCK), []).append(found)
    said = (f"{size} never fills {100 * median(found):.1f} %" for size, found in sorted(sizes.items()))
    return f"{', '.join(said)} of slots in use, time-weighted"


def differs(one: PointRecord, other: PointRecord, metric: str) -> bool:
    """Whether two points differ by more than both their spreads of repeats, and by 1 %, of shares by a point of 100."""
    first, second = value(one, metric), value(other, metric)
    if first is None or second is None:
        return False
    spreads = [record.value(metric, "spread") for record in (one, other)]
    noise = max([_SAME, *(spread for spread in spreads if spread is not None)])
    if METRICS[metric].is_share:
        return abs(first - second) > noise
    return abs(log(first / second)) > noise if first and second else first != second


def _chance(study: Study) -> str:
    """What a difference that counts exceeds, in words."""
    repeated = any(record.value(RATES, "spread") is not None for record in study.measured)
    return "the run-to-run spread" if repeated else f"{100 * _SAME:g} %"


def best_value(
    groups: Sequence[Sequence[PointRecord]], key: str, metric: str, *, higher: bool
) -> tuple[Any, Ratio] | None:
    """The value of `key` with the best metric, and the ratio of the metric at the next best value to it."""
    relative: dict[Any, list[float]] = {}
    for group in groups:
        known = [(record.setting(key), found) for record in group if (found := value(record, metric))]
        mean = median(found for _, found in known) if known else 0.0
        for place, found in known:
            relative.setdefault(place, []).append(found / mean)
    ranked = sorted(relative, key=lambda place: median(relative[place]), reverse=higher)
    if len(ranked) < 2:
        return None
    lead = ratio(_paired(groups, key, ranked[1], ranked[0]), metric)
    return (ranked[0], lead) if lead else None


@dataclass(frozen=True)
class Safest:
    """The value of a setting whose worst loss against the best value of each group is the smallest (minimax regret).

    Losses are shares by which the metric is above the best value's: `loss` the worst one of `value`, `reach` that of
    the worst value, `other`. At `good` of `settings` groups no value beats it beyond the spread of repeats.
    """

    metric: str
    value: Any
    loss: float
    other: Any
    reach: float
    good: int
    settings: int

    def __str__(self) -> str:
        name, reach = METRICS[self.metric].label, f"{100 * self.reach:.0f} %"
        if not self.loss:
            never = f"No other clearly beats {self.value} in {name} at any of {self.settings}"
            return f"{never} settings; with {self.other} it can be {reach} above the best one's."
        return (
            f"The safest is {self.value}: at {self.good} of {self.settings} settings no other beats it, and its {name}"
            f" is at most {100 * self.loss:.0f} % above the best one's; with {self.other} it can be {reach}."
        )

    def choice(self, setting: str) -> Choice:
        """The same as a cell of the first screen."""
        worst = f"never more than {100 * self.loss:.0f} % above the best" if self.loss else "never beaten"
        return Choice(
            setting,
            f"{self.value}",
            f"+{100 * self.reach:.0f} %",
            f"{_LATENCY_WORDS} with {self.other} in the worst case; {self.value} is {worst}",
            f"of {self.settings} settings",
        )


def _safest(groups: Sequence[Sequence[PointRecord]], key: str, metric: str) -> Safest | None:
    """The safest value; None where no group has every value. A loss within the spread of repeats is none."""
    wanted = {record.setting(key) for group in groups for record in group}
    losses: dict[Any, list[float]] = {place: [] for place in wanted}
    for group in groups:
        known = [(record.setting(key), record, found) for record in group if (found := value(record, metric))]
        if {place for place, _, _ in known} != wanted:
            continue
        _, best, lowest = min(known, key=lambda one: one[2])
        for place, record, found in known:
            losses[place].append(found / lowest - 1 if differs(record, best, metric) else 0.0)
    ranked = sorted(wanted, key=lambda one: (max(losses[one], default=0.0), median(losses[one] or [0.0])))
    first, last = ranked[0], ranked[-1]
    if not losses[first]:
        return None
    good = sum(loss == 0 for loss in losses[first])
    return Safest(metric, first, max(losses[first]), last, max(losses[last]), good, len(losses[first]))


def _along(
    study: Study,
    axes: Axes,
    key: str,
    question: str,
    words: Callable[[Sequence[Pair], Any, Any], tuple[str, Choice | None]],
) -> Iterator[Answer]:
    """Compare the lowest with the highest value of a swept setting, on the paged points."""
    known = [v for v in axes.values.get(key, ()) if isinstance(v, int | float)]
    if len(known) < 2:
        return
    low, high = known[0], known[-1]
    groups = matched([r for r in study.records if r.policy == "paged"], axes, free=[key])
    pairs = _paired(groups, key, high, low)
    text, choice = words(pairs, low, high) if pairs else ("", None)
    if text:
        text += f" ({_matched(len(pairs))}, {sides([one for pair in pairs for one in pair])})."
        choice = choice and replace(choice, setting=f"{choice.setting} {short_label(key).lower()}")
        yield Answer(key, question, text, "curve_" + key.replace(".", "_"), choice=choice)


def _sharing_text(pairs: Sequence[Pair], low: Any, high: Any) -> tuple[str, Choice | None]:
    hits = [found for one, _ in pairs if (found := value(one, "hit_ratio")) is not None]
    saved = [found for one, _ in pairs if (found := value(one, "sharing_saving")) is not None]
    first, served = ratio(pairs, "ttft_p50"), ratio(pairs, RATES)
    if first is None or served is None:
        return "", None
    text, cached = f"With {100 * high:g} % of the prompt tokens shared instead of {100 * low:g} %", ""
    if hits:
        share, why = f"{100 * median(hits):.1f} %", _not_found([one for one, _ in pairs], median(hits))
        cached = f", {share} of prompt tokens from the cache{why}"
        text += f", {share} come from the cache{why}"
    if saved:
        text += f", {100 * median(saved):.0f} % of the blocks are saved by sharing"
    text += f"; the median time to first token is {first}, requests per second are {served}"
    effect = f"the time to first token, {served.number} the requests per second{cached}"
    shares = f"{100 * high:g} % instead of {100 * low:g} %"
    return text, Choice("Effect of", shares, first.number, effect, first.band)


def _not_found(records: Sequence[PointRecord], hits: float) -> str:
    """Why fewer prompt tokens come from the cache than are shared: what no pool finds, and what this one lost."""
    shared = [float(said) for one in records if (said := one.trace.get("realised_prefix_share")) is not None]
    most = [found for one in records if (found := one.value("hit_ratio", "analytic")) is not None]
    if not shared or not most:
        return ""
    ends, lost = median(shared) - median(most), median(most) - hits
    gone = f", {100 * lost:.1f} % were not in the pool" if lost >= 0.0005 else ""
    return f" ({100 * ends:.1f} % fill no block{gone})"


def _width_text(pairs: Sequence[Pair], low: Any, high: Any) -> tuple[str, Choice | None]:
    served, made = ratio(pairs, RATES), ratio(pairs, "generated_throughput")
    saved = [found for one, _ in pairs if (found := value(one, "sharing_saving")) is not None]
    if served is None:
        return "", None
    text = f"With {high} sequences for each request instead of {low}, requests per second are {served}"
    if made is not None:
        text += f", generated tokens per second {made}"
    if saved:
        text += f"; sharing saves {100 * median(saved):.0f} % of their blocks"
    widths = f"{high} instead of {low}"
    return text, Choice("Cost of", widths, served.number, "the requests per second", served.band)


def _load(study: Study, axes: Axes) -> Iterator[Answer]:
    question, figure = "Where does it saturate?", "pool_over_time"
    if len([v for v in axes.values.get(RATE, ()) if isinstance(v, int | float)]) > 1:
        yield Answer("load", question, " ".join(_knees(study, axes)), "curve_workload_request_rate")
        return
    waits = [record for record in study.records if (value(record, "waiting_mean") or 0.0) > _WAITING]
    lost = [record for record in study.records if (value(record, "preemptions") or 0.0) > 0]
    free = [found for record in study.records if (found := value(record, "free_share")) is not None]
    if not free:
        return
    total, least, most = len(study.records), f"{100 * min(free):.0f}", f"{100 * max(free):.0f}"
    share = least if least == most else f"between {least} and {most}"
    text = (
        f"Requests queued at {len(waits):,} of {total:,} points and lost their blocks (preemption) at {len(lost):,}; "
        f"{share} % of the pool's slots were free, time-weighted."
    )
    if not waits and not lost:
        text += " The pool was never short: raise the load or shrink the pool to see memory pressure."
    yield Answer("load", question, text, figure)


def _knees(study: Study, axes: Axes) -> Iterator[str]:
    for policy in sorted(
        {record.policy for record in study.records}, key=lambda name: (name != "paged", name)
    ):
        mine = [record for record in study.records if record.policy == policy]
        knees, last = [], max(v for v in axes.values[RATE] if isinstance(v, int | float))
        for group in matched(mine, axes, free=[RATE]):
            ordered = sorted(
                (r for r in group if r.setting(RATE) is not None), key=lambda r: float(r.setting(RATE))
            )
            base = value(ordered[0], LATENCY) if ordered else None
            over = [r for r in ordered if base and (value(r, LATENCY) or inf) > _KNEE * base]
            knees.append(float(over[0].setting(RATE)) if over else None)
        found = [knee for knee in knees if knee is not None]
        if not knees:
            continue
        if not found:
            yield f"{policy}: normalized latency does not double up to {last:g} requests/s."
            continue
        span = f"{min(found):g}" if min(found) == max(found) else f"{min(found):g} to {max(found):g}"
        rest = f"; at {len(knees) - len(found)} it does not" if len(found) < len(knees) else ""
        yield (
            f"{policy}: normalized latency doubles at {span} requests/s at {len(found)} of {len(knees)} settings{rest}."
        )


@dataclass(frozen=True)
class Ranking:
    """How often the simulation orders two points as measured, of all pairs and of those that clearly differ."""

    agree: int
    pairs: int
    clear_agree: int
    clear: int


def ranking(pairs: Sequence[Pair], metric: str) -> Ranking:
    """The order of measured pairs against their predicted order; a predicted tie is no agreement."""
    agree = total = clear_agree = clear = 0
    for one, other in pairs:
        measured, predicted = (
            [found for record in (one, other) if (found := record.value(metric, side)) is not None]
            for side in _SIDES
        )
        if len(measured) < 2 or len(predicted) < 2:
            continue
        same = (measured[0] - measured[1]) * (predicted[0] - predicted[1]) > 0
        total, agree = total + 1, agree + same
        if differs(one, other, metric):
            clear, clear_agree = clear + 1, clear_agree + same
    return Ranking(agree, total, clear_agree, clear)


def _trust(study: Study, axes: Axes, verdict: Verdict) -> Iterator[Answer]:
    if not verdict.measured:
        return
    lines = []
    paged = [record for record in study.measured if record.policy == "paged"]
    pairs = [pair for group in matched(paged, axes, free=[BLOCK]) for pair in combinations(group, 2)]
    for metric in (RATES, LATENCY):
        found = ranking(pairs, metric)
        if found.pairs:
            lines.append(
                f"The simulation orders block sizes by {METRICS[metric].label} as measured in {found.agree} of "
                f"{found.pairs} pairs, and in {found.clear_agree} of the {found.clear} that differ by more than "
                f"{_chance(study)}."
            )
    # of many points an evenly spread part
    few = study.measured[:: max(1, -(-len(study.measured) // _PAIRED))]
    everywhere = ranking(list(combinations(few, 2)), RATES)
    if everywhere.clear:
        lines.append(
            f"Of any two points it orders {everywhere.clear_agree:,} of {everywhere.clear:,} that clearly differ in "
            "requests per second as measured."
        )
    lines += _apart(study.measured)
    items = tuple(class_text(one) for one in verdict.classes)
    yield Answer("trust", "How far can it be trusted?", " ".join(lines), "errors", items)


def _apart(records: Sequence[PointRecord]) -> Iterator[str]:
    """How far the runs of a point lie apart: what changes more slowly than that is not in the noise of repeats."""
    over = [record.seconds.get("measured_over") for record in records if len(_runs(record)) > 1]
    known = [seconds for seconds in over if seconds is not None]
    if known:
        yield (
            f"From the first to the last run of a point it took {median(known):,.0f} s in the median: the noise of "
            "repeats holds what changed on the machine meanwhile."
        )
    if before := sum(int(record.environment.get("runs_of_earlier_starts") or 0) for record in records):
        yield (
            f"{before:,} of {sum(len(_runs(record)) for record in records):,} runs were taken before an interruption, "
            "and the others of their points after it."
        )


def _runs(record: PointRecord) -> Sequence[Any]:
    return record.measured.get("runs") or ()


def class_text(one: ClassVerdict) -> str:
    """The verdict on a class in a sentence, with the figures that it rests on."""
    name = one.name.capitalize()
    worst = one.worst
    if one.name == COUNTS or worst is None:
        words = {Trust.trusted: "trusted: identical", Trust.not_trusted: "not trusted: they DIFFER"}
        return f"{name}: {words.get(one.trust, 'not compared')}."
    metric = worst.metric
    verdict = str(one.trust)
    if one.trust is Trust.within and one.within is not None:
        verdict += f" {numbers.error_size(metric, one.within)} at nine of ten points"
    if one.trust is Trust.untested:
        verdict += ": a single run of a single point says nothing about chance"
    typical = numbers.error_size(metric, worst.median_error)
    floor = f", noise floor {numbers.error_size(metric, worst.floor)}" if worst.floor is not None else ""
    errors = f"typical error {typical}{floor}, worst {numbers.error(metric, worst.worst_error)}"
    return f"{name}: {verdict} ({metric.label}: {errors})."
