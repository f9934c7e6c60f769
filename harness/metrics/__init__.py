"""The table of all metrics: name, unit and meaning. Simulation, measurement and report use it.

A new metric gets a line in `METRICS` here. If it is no total of a run, its computation is in `harness.metrics.compute`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.metrics.log import SLOT_STATES, WASTE_COLUMNS

Better = Literal["lower", "higher", "neither"]

SHARE = "share"
"""Unit of the metrics that are a share of a whole, 0 to 1; their errors are differences, not ratios."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of merit: `name` is its key in records, `label` and `unit` go on axes.

    `total` is the total of `harness.metrics.compute` that it is, where it is one: X_sum for a count X of a step.
    """

    name: str
    label: str
    unit: str
    definition: str
    better: Better = "neither"
    total: str | None = None

    @property
    def is_share(self) -> bool:
        """Whether errors are differences; a relative error of a share near zero has no meaning."""
        return self.unit == SHARE

    @property
    def is_time(self) -> bool:
        """Whether it is in seconds, or in seconds of something."""
        return self.unit == "s" or self.unit.startswith("s/")


QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
"""The quantiles given for every distribution, beside its mean."""

_LATENCIES = (
    ("ttft", "TTFT", "s",
     "time to first token: from arrival to the end of the step that chose the first token"),
    ("tpot", "TPOT", "s", "time per output token: (E2E − TTFT) / (output tokens − 1), for outputs above 1"),
    ("itl", "ITL", "s", "inter-token latency: every gap between two tokens of a request, once for all its sequences"),
    ("e2e", "E2E latency", "s", "from arrival to the end of the step that chose the last token, or of a static batch"),
    ("norm_latency", "normalized latency", "s/token", "E2E latency / output tokens of one sequence"),
    ("queue", "queue time", "s",
     "from arrival to the start of the first step that ran a token of the request"),
)  # fmt: skip

_STATE_MEANING = {
    "token": "K and V that a live sequence attends to; a shared slot counts once",
    "cached": "a reusable prefix that no live sequence refers to; not waste",
    "reserved": "allocated, and its owner will fill it before it ends",
    "internal": "allocated, and its owner will never fill it: block tail or over-reservation",
    "external": "free, but unusable for the request at the head of the queue",
    "free": "free and usable",
}


def _latencies() -> Iterator[Metric]:
    for name, label, unit, meaning in _LATENCIES:
        yield Metric(f"{name}_mean", f"{label} mean", unit, f"mean of {meaning}", "lower")
        for short, level in QUANTILES.items():
            quantile = f"{level * 100:g}th percentile of {meaning}"
            yield Metric(f"{name}_{short}", f"{label} {short}", unit, quantile, "lower")


def _slot_shares() -> Iterator[Metric]:
    for state in SLOT_STATES:
        better: Better = "lower" if state in ("internal", "external") else "neither"
        meaning = f"time-weighted share of the pool's slots that hold {_STATE_MEANING[state]}"
        if state not in ("token", "cached"):
            meaning = f"time-weighted share of the pool's slots that are {_STATE_MEANING[state]}"
        yield Metric(f"{state}_share", f"{state} slots", SHARE, meaning, better)


_THROUGHPUT = (
    Metric("request_throughput", "request throughput", "requests/s", "finished requests / span", "higher"),
    Metric("output_throughput", "output throughput", "tokens/s",
           "tokens of the sequences that answer the finished requests / span; a beam search is answered by its best "
           "sequence, parallel samples by all of them", "higher"),
    Metric("generated_throughput", "generated tokens", "tokens/s",
           "tokens generated in all sequences of the finished requests / span, those of beams that are not returned "
           "too"),
    Metric("total_throughput", "total throughput", "tokens/s",
           "prompt and generated tokens of the finished requests / span", "higher"),
    Metric("span", "span", "s", "virtual time at the end of the last step", "lower"),
)  # fmt: skip


def _waste_shares() -> Iterator[Metric]:
    for name, meaning in WASTE_COLUMNS.items():
        better: Better = "neither" if name in ("token", "cached", "reserved", "free") else "lower"
        label = f"{name.replace('_', ' ')}, of the pools' bytes"
        whole = (
            f"time-weighted share of the bytes of all pools that are {meaning}; where layers are in groups"
        )
        yield Metric(f"waste_{name}", label, SHARE, whole, better)


_MEMORY = (
    Metric("gauge", "blocks in use", SHARE,
           "time-weighted share of the pool in blocks that a sequence refers to: what vLLM's kv_cache_usage_perc "
           "shows"),
    Metric("utilisation", "utilisation of allocated slots", SHARE,
           "time-weighted token / (token + reserved + internal): at an instant, tokens over slots of blocks in use are "
           "vLLM's coming kv_cache_token_usage_perc", "higher"),
    Metric("reserved_of_allocated", "reserved, of allocated slots", SHARE,
           "time-weighted reserved / (token + reserved + internal): not waste, its owner fills it before it ends"),
    Metric("internal_of_allocated", "internal, of allocated slots", SHARE,
           "time-weighted internal / (token + reserved + internal): the waste, slots that are never filled", "lower"),
    Metric("sharing_saving", "sharing saving", SHARE,
           "1 − physical blocks / logical blocks, each integrated over time", "higher"),
    Metric("tail_waste", "unfilled slots per decoding sequence", "slots",
           "reserved and internal slots / rows, summed over the steps that only decode", "lower"),
    Metric("peak_kv", "peak KV in use", "bytes",
           "largest token + reserved + internal of any step (of one replica), times the KV bytes of a token", "lower"),
)  # fmt: skip

_CACHE = (
    Metric("hit_tokens", "hit tokens, fresh", "tokens",
           "prompt tokens found cached at first admission", "higher", total="hit_tokens"),
    Metric("resumed_hit_tokens", "hit tokens, after preemption", "tokens",
           "tokens found cached when a preempted request came back", total="resumed_hit_tokens"),
    Metric("hit_ratio", "hit ratio", SHARE,
           "fresh hit tokens / prompt tokens of the requests that were scheduled; none without a prefix cache",
           "higher"),
)  # fmt: skip

KEEPS_MORE = (
    "Windows and states keep more here than with vLLM 0.33's default (cache.retention_interval=0, as its "
    "prefix_cache_retention_interval): documents asked twice hit 0.458 here and 0.000 there."
)
"""What to know of hits with groups of layers where everything is kept, as in records without the setting."""

_OPTIMUM = (
    Metric("optimal_hit_tokens", "hit tokens, bound", "tokens",
           "bound on the fresh hit tokens of any order of eviction, for the run's own order of admissions and ends "
           "(Belady); blocks of running requests may put it out of reach; with replay.optimum=true"),
    Metric("optimal_hit_ratio", "hit ratio, bound", SHARE,
           "bound on the hit tokens / prompt tokens of the requests that were scheduled"),
)  # fmt: skip

_TIERS = (
    *(
        metric
        for tier in ("host", "disk")
        for metric in (
            Metric(f"{tier}_hit_tokens", f"hit tokens, {tier} tier", "tokens",
                   f"tokens of hits, after preemptions too, that were loaded from the {tier} tier; part of all hits",
                   "higher"),
            Metric(f"{tier}_read_bytes", f"bytes read, {tier} tier", "bytes",
                   f"bytes of the blocks or chunks that were read from the {tier} tier"),
            Metric(f"{tier}_written_bytes", f"bytes written, {tier} tier", "bytes",
                   f"bytes of the blocks or chunks that were written to the {tier} tier"),
        )
    ),
    Metric("tier_load_s", "seconds of loading", "s",
           "seconds that reading from tiers took, before or beside the steps that admitted the requests", "lower"),
    Metric("tier_saved_s", "seconds of computing spared", "s",
           "seconds that the device's arithmetic would have taken to compute what was loaded; less the seconds of "
           "loading it is what the tiers gain", "higher"),
    Metric("tier_write_s", "seconds of writing", "s",
           "seconds that writing to tiers took; it has a direction of its own, so no step waits for it. More than the "
           "span: the link does not keep up", "lower"),
)  # fmt: skip

_COUNTS = (
    Metric("finished", "finished requests", "requests", "requests that generated all their tokens", "higher",
           total="finished"),
    Metric("steps", "engine steps", "steps", "steps that the engine took", total="steps"),
    Metric("computed_tokens", "computed tokens", "tokens", "query tokens of all steps", "lower",
           total="query_tokens_sum"),
    Metric("blocks_allocated", "blocks allocated", "blocks",
           "blocks taken from the pool over the run, but for those of swaps back", "lower", total="new_blocks_sum"),
    Metric("copies_per_token", "copies per generated token", "blocks/token",
           "blocks copied on write / tokens generated in all sequences of the finished requests", "lower"),
    Metric("recomputed_tokens", "recomputed tokens", "tokens",
           "tokens computed again after preemptions", "lower", total="recomputed_tokens"),
    Metric("preemptions", "preemptions", "requests", "times that a request lost its blocks", "lower",
           total="preemptions"),
    Metric("running_mean", "running requests, mean", "requests",
           "requests in the batch (mean of replicas), weighted by seconds of steps: idle time is left out", "higher"),
    Metric("running_peak", "running requests, peak", "requests",
           "most requests in the batch of a replica at once", "higher", total="running_peak"),
    Metric("waiting_mean", "waiting requests, mean", "requests",
           "requests in the queue (mean of replicas), weighted by seconds of steps: idle time is left out", "lower"),
)  # fmt: skip

_TIME = (
    Metric("step_mean", "step time, mean", "s", "seconds of all steps / steps", "lower"),
    Metric("busy_share", "busy share", SHARE, "seconds of all steps / span"),
    Metric("attention_per_step", "attention per step", "s",
           "attention seconds over all layers / steps", "lower"),
    Metric("attention_per_decode_step", "attention per decode step", "s",
           "attention seconds over all layers of the steps that only decode / such steps", "lower"),
    Metric("kv_read_per_decode_step", "KV slots read per decode step", "slots",
           "KV slots that the rows of the steps that only decode read / such steps; the load of their attention"),
    Metric("attention_per_kv_token", "attention per KV slot read", "s/slot",
           "attention seconds of the steps that only decode / KV slots that their rows read", "lower"),
    Metric("attention_share", "attention share of step time", SHARE,
           "attention seconds / seconds of all steps"),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        *_latencies(),
        *_THROUGHPUT,
        *_slot_shares(),
        *_MEMORY,
        *_waste_shares(),
        *_CACHE,
        *_OPTIMUM,
        *_TIERS,
        *_COUNTS,
        *_TIME,
    )
}
"""Every metric by name, in the order in which tables show them."""

HEADLINE = (
    "output_throughput", "ttft_p50", "ttft_p99", "tpot_p50", "itl_p99", "norm_latency_mean",
    "internal_share", "utilisation", "hit_ratio", "attention_per_decode_step",
)  # fmt: skip
"""The metrics that verdicts and pictures show first: throughput, latency, fragmentation, sharing, kernel time."""
