"""`twin --check`: what a server says of itself on its /metrics page, beside what is predicted for its log.

Counters (prefix cache, preemptions) are those since the server started, as rates over its prompt tokens and its
finished requests. Gauges (running, waiting, KV use) are of an instant: they agree where they lie in the range that the
prediction has for nine tenths of the time in which requests are under way. A gauge of an idle server is not compared.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from harness.config.errors import UserError
from harness.twin.log import FloatArray
from harness.twin.prediction import PredictedRun
from harness.twin.scrape import KV, RUNNING, WAITING, Samples, fetched, parse, pool_of, values

TOLERANCE = 0.1  # of the larger of both figures
_SAMPLES, _EVERY_S = 5, 1.0  # of a live server's gauges
_RANGE = (5, 95)  # percentiles of the predicted time
_LEAST_SHARE, _LEAST_COUNT = 0.02, 1.0  # differences that are none
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_PREEMPTIONS, _FINISHED = ("vllm:num_preemptions_total",), ("vllm:request_success_total",)
_TOKEN_USE = ("vllm:kv_cache_token_usage_perc",)
Range = tuple[float, float]


@dataclass(frozen=True)
class Compared:
    """A figure of the page and the range that is predicted for it; `real` is None where it cannot be compared."""

    name: str
    predicted: Range
    real: float | None
    least: float
    why: str = ""  # it is not compared

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
        told = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
        if self.real is None:
            return f"{self.name:34}  {told:>20}  {'–':>9}  not compared: {self.why}"
        verdict = "agrees" if self.agrees(tolerance) else "DIFFERS"
        return f"{self.name:34}  {told:>20}  {self.real:>9.4g}  {verdict}"


def pages(source: str, sleep: Callable[[float], None] = time.sleep) -> list[Samples]:
    """The page in a file, or a few of a live server, a second apart.

    Raises:
        UserError: it cannot be read, or is no page of vLLM.
    """
    if source.startswith(("http://", "https://")):
        found = []
        for number in range(_SAMPLES):
            sleep(_EVERY_S if number else 0.0)
            found.append(parse(fetched(source, "--check")))
    else:
        try:
            found = [parse(Path(source).expanduser().read_text(encoding="utf-8", errors="replace"))]
        except OSError as error:
            raise UserError(f"--check {source}: cannot be read: {error.strerror or error}") from error
    if not any(name in found[0] for name in RUNNING):
        raise UserError(
            f"--check {source}: has none of {', '.join(RUNNING)}: no /metrics page of a vLLM server"
        )
    return found


def compared(run: PredictedRun, found: Sequence[Samples]) -> list[Compared]:
    """Every figure that both sides can have."""
    return [*_counters(run, found[-1]), *_gauges(run, found)]


def _counters(run: PredictedRun, page: Samples) -> Iterator[Compared]:
    requests = run.log.requests
    prompts, hits, preempted = (
        float(np.sum(requests[name])) for name in ("prompt_tokens", "hit_tokens", "preemptions")
    )
    real_hits, queries, real_preempted, finished = (
        sum(values(page, names)) for names in (_HITS, _QUERIES, _PREEMPTIONS, _FINISHED)
    )
    ratio = hits / max(1.0, prompts)
    off = "no prompt was looked up in the prefix cache"
    if real_hits > queries:
        off, queries = "the page has more hits than were asked for", 0.0
    yield _row("hit ratio of prompt tokens", (ratio, ratio), real_hits / queries if queries else None, off)
    each = 100 * preempted / len(run.arrival_s)
    real = 100 * real_preempted / finished if finished else None
    yield _row("preemptions of 100 requests", (each, each), real, "no request has finished", _LEAST_COUNT)
    for labels, _ in page.get("vllm:cache_config_info", ()):
        if pool := pool_of(labels):
            tokens, ours = pool["num_gpu_blocks"] * pool["block_size"], float(run.log.capacity_slots)
            yield _row("KV pool of a replica, tokens", (ours, ours), float(tokens), "", _LEAST_COUNT)
            return


def _gauges(run: PredictedRun, found: Sequence[Samples]) -> Iterator[Compared]:
    at_s = np.linspace(float(run.arrival_s.min()), float(run.last_token_s.max()), 4000)
    series = run.series(at_s)
    busy = series.running + series.waiting > 0
    idle = "the server is idle"
    at_work = any(sum(values(page, RUNNING)) + sum(values(page, WAITING)) for page in found)

    def gauge(name: str, ours: FloatArray, names: tuple[str, ...], least: float, mean: bool) -> Compared:
        low, high = np.percentile(ours[busy], _RANGE)
        each = [values(page, names) for page in found]
        real = median(sum(one) / (len(one) if mean else 1) for one in each) if all(each) and at_work else None
        return _row(name, (float(low), float(high)), real, idle if all(each) else "the page has none", least)

    yield gauge("running requests", series.running, RUNNING, _LEAST_COUNT, mean=False)
    yield gauge("waiting requests", series.waiting, WAITING, _LEAST_COUNT, mean=False)
    if series.kv_use is not None:
        yield gauge("kv_cache_usage_perc", series.kv_use, KV, _LEAST_SHARE, mean=True)
        tokens = run.token_use(at_s)
        yield gauge("kv_cache_token_usage_perc", tokens, _TOKEN_USE, _LEAST_SHARE, mean=True)


def _row(name: str, predicted: Range, real: float | None, why: str, least: float = _LEAST_SHARE) -> Compared:
    return Compared(name, predicted, real, least, why)
