"""`twin --check`: what a server says of itself on its /metrics page, beside what is predicted for its log.

Counters (prefix cache, preemptions) are rates over prompt tokens and finished requests: since the server started, or
between the first and the last page of a file that has several (`curl URL >> FILE` before and after the load). Gauges
(running, waiting, KV use) are of an instant: they agree where they lie in the range that the prediction has for nine
tenths of the time in which requests are under way. Pages of an idle server have no part in it. Not compared, and said,
are gauges of another number of engines than is predicted, what a page does not have, and hits where the log does not
say what prompts share.

The names are those of vLLM 0.9 to 0.33: `vllm/v1/metrics/loggers.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import median

import numpy as np

from harness.config.errors import UserError
from harness.twin.log import FloatArray
from harness.twin.prediction import PredictedRun
from harness.twin.scrape import KV, RUNNING, WAITING, Samples, fetched, parse, pool_of, values
from harness.twin.sharing import UNSAID

_SAMPLES, _EVERY_S = 5, 1.0  # of a live server's gauges
_RANGE = (5, 95)  # percentiles of the predicted time
_LEAST_SHARE, _LEAST_COUNT = 0.02, 1.0  # differences that are none
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_PREEMPTIONS, _FINISHED = ("vllm:num_preemptions_total",), ("vllm:request_success_total",)
_TOKEN_USE = ("vllm:kv_cache_token_usage_perc",)
_NONE = "the page has none"
POOL = "KV pool of a replica, tokens"
Range = tuple[float, float]


@dataclass(frozen=True)
class Compared:
    """A figure of the page and the range that is predicted for it; `real` is None where it cannot be compared."""

    name: str
    predicted: Range
    real: float | None
    why: str = ""  # it is not compared
    least: float = _LEAST_SHARE

    def agrees(self, tolerance: float) -> bool:
        """Whether it lies in the range, or outside by at most the tolerance. True where it is not compared."""
        if self.real is None:
            return True
        low, high = self.predicted
        off = max(low - self.real, self.real - high, 0.0)
        return off <= max(self.least, tolerance * max(abs(self.real), high))

    def line(self, tolerance: float) -> str:
        """The row of the table."""
        low, high = self.predicted
        told = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}" if low < high else "–"
        if self.real is None:
            return f"{self.name:34}  {told:>20}  {'–':>9}  not compared: {self.why}"
        verdict = "agrees" if self.agrees(tolerance) else "DIFFERS"
        return f"{self.name:34}  {told:>20}  {self.real:>9.4g}  {verdict}"


@dataclass(frozen=True)
class Pages:
    """Pages of one server in the order of time, and that from which its counters are counted (empty: its start)."""

    samples: Sequence[Samples]
    base: Samples = field(default_factory=dict)

    def counted(self, names: tuple[str, ...]) -> float | None:
        """What a counter has counted, over all engines; None where the page has none of these names."""
        found = values(self.samples[-1], names)
        return sum(found) - sum(values(self.base, names)) if found else None

    def said(self, log_requests: int) -> str:
        """What the counters count, in a sentence."""
        since = "between the first and the last page" if self.base else "since the server started"
        finished = self.counted(_FINISHED)
        count = "an unknown number of" if finished is None else f"{finished:,.0f}"
        return f"Counters: of {count} finished requests {since}; the log has {log_requests:,}."


def pages(source: str, sleep: Callable[[float], None] = time.sleep) -> Pages:
    """The page or pages in a file, or a few of a live server, a second apart.

    Raises:
        UserError: it cannot be read, is no page of vLLM, or the pages are not of one run of one server.
    """
    is_live = source.startswith(("http://", "https://"))
    if is_live:
        found = []
        for number in range(_SAMPLES):
            sleep(_EVERY_S if number else 0.0)
            found.append(parse(fetched(source, "--check"))[-1])
    else:
        try:
            found = parse(Path(source).expanduser().read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise UserError(f"--check {source}: cannot be read: {error.strerror or error}") from error
    for page in found:
        if not any(name in page for name in RUNNING):
            reason = f"--check {source}: has none of {', '.join(RUNNING)}: no /metrics page of a vLLM server"
            raise UserError(reason)
    if len(models := _labelled(found, "model_name")) > 1:
        raise UserError(f"--check {source}: has figures of several models: {', '.join(sorted(models))}")
    for names in (_QUERIES, _HITS, _PREEMPTIONS, _FINISHED):
        counts = [sum(values(page, names)) for page in found]
        if counts != sorted(counts):
            raise UserError(f"--check {source}: {names[0]} falls between two pages: the server was restarted")
    return Pages(found, found[0] if len(found) > 1 and not is_live else {})


def _labelled(found: Sequence[Samples], label: str) -> set[str]:
    return {labels.get(label, "") for name in RUNNING for page in found for labels, _ in page.get(name, ())}


def compared(
    run: PredictedRun, found: Pages, notes: Sequence[str] = (), *, plain: bool = True
) -> list[Compared]:
    """Every figure that both sides can have, by what the notes on the log say of it. Blocks of `plain` models alone
    hold all layers.
    """
    return [*_counters(run, found, any(UNSAID in note for note in notes), plain), *_gauges(run, found)]


def _counters(run: PredictedRun, found: Pages, is_unsaid: bool, plain: bool) -> Iterator[Compared]:
    requests = run.log.requests
    prompts, hits, preempted = (
        float(np.sum(requests[name])) for name in ("prompt_tokens", "hit_tokens", "preemptions")
    )
    real_hits, queries, real_preempted, finished = map(
        found.counted, (_HITS, _QUERIES, _PREEMPTIONS, _FINISHED)
    )
    ratio, each = hits / max(1.0, prompts), 100 * preempted / len(run.arrival_s)
    real, why = _share(real_hits, queries, "no prompt was looked up in the prefix cache")
    if real is not None and real > 1:
        real, why = None, "the page has more hits than were asked for"
    elif real and is_unsaid:
        why, real = f"{UNSAID}, the page has {100 * real:.3g} %", None
    yield Compared("hit ratio of prompt tokens", (ratio, ratio), real, why)
    real, why = _share(real_preempted, finished, "no request has finished")
    real = None if real is None else 100 * real
    yield Compared("preemptions of 100 requests", (each, each), real, why, _LEAST_COUNT)
    if pool := pool_of(found.samples[-1]):
        tokens, ours = (pool["num_gpu_blocks"] - 1) * pool["block_size"], float(run.log.capacity_slots)
        why = "a block of the page holds a part of the layers"
        yield Compared(POOL, (ours, ours), float(tokens) if plain else None, why, _LEAST_COUNT)


def _share(part: float | None, whole: float | None, none: str) -> tuple[float | None, str]:
    """A share of two counters, or why there is none."""
    if part is None or whole is None:
        return None, _NONE
    return (part / whole, "") if whole else (None, none)


def _gauges(run: PredictedRun, found: Pages) -> Iterator[Compared]:
    at_s = np.linspace(float(run.arrival_s.min()), float(run.last_token_s.max()), 4000)
    series = run.series(at_s)
    busy = series.running + series.waiting > 0
    at_work = [page for page in found.samples if sum(values(page, RUNNING)) + sum(values(page, WAITING))]
    engines, replicas = len(_labelled(found.samples[-1:], "engine")), run.log.replicas
    refused = f"the page has {engines} engines, the prediction {replicas}" if engines != replicas else ""

    def gauge(name: str, ours: FloatArray, names: tuple[str, ...], least: float, mean: bool) -> Compared:
        low, high = np.percentile(ours[busy], _RANGE)
        each = [values(page, names) for page in at_work or found.samples]
        real, why = None, refused or ("the server is idle" if all(each) else _NONE)
        if all(each) and at_work and not refused:
            real = median(sum(one) / (len(one) if mean else 1) for one in each)
        if mean and max((max(one) for one in each if one), default=0.0) > 1:
            real, why = None, "it is above 1, so it is no share"
        return Compared(name, (float(low), float(high)), real, why, least)

    yield gauge("running requests", series.running, RUNNING, _LEAST_COUNT, mean=False)
    yield gauge("waiting requests", series.waiting, WAITING, _LEAST_COUNT, mean=False)
    if series.kv_use is None:
        yield Compared("kv_cache_usage_perc", (nan, nan), None, "use of several pools is not predicted")
        return
    yield gauge("kv_cache_usage_perc", series.kv_use, KV, _LEAST_SHARE, mean=True)
    tokens = run.token_use(at_s)
    yield gauge("kv_cache_token_usage_perc", tokens, _TOKEN_USE, _LEAST_SHARE, mean=True)
