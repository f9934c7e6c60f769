"""Prometheus metrics, with vLLM's names where the meaning is the same."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.runtime.async_engine import AsyncEngine
from engine.runtime.requests import RequestOutput

_LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
            80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_OF_REQUESTS = {  # seconds, in the order of `_observe_end`
    "time_to_first_token_seconds": "From arrival to the first token",
    "request_time_per_output_token_seconds": "Mean time per token after the first, by request",
    "e2e_request_latency_seconds": "From arrival to the end",
    "request_queue_time_seconds": "From arrival to the first batch",
    "request_inference_time_seconds": "From the first batch to the last token",
    "request_prefill_time_seconds": "From the first batch to the first token",
    "request_decode_time_seconds": "From the first token to the last token",
}


class _Totals(Collector):
    """Reads the engine's counters when the metrics are requested."""

    def __init__(self, engine: AsyncEngine, labels: tuple[str, str]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        """The present gauges and counters."""
        counters = self._engine.counters
        for name, text, value in (
            ("num_requests_running", "Requests in the batch", counters.running),
            ("num_requests_waiting", "Requests in the queue", counters.waiting),
            ("kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1", counters.usage),
            ("kv_cache_token_usage_perc", "Tokens over slots of blocks in use, 0 to 1", counters.token_usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (
            ("num_preemptions", "Preemptions", counters.preemptions),
            ("prompt_tokens", "Prompt tokens processed", counters.prompt_tokens),
            ("generation_tokens", "Tokens generated", counters.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache", counters.prefix_hits),
            ("spec_decode_num_drafts", "Drafts that were verified", counters.drafts),
            ("spec_decode_num_draft_tokens", "Tokens that the draft model proposed", counters.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Proposed tokens that were right", counters.accepted_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield self._successes()
        yield self._capacity()

    def _successes(self) -> Metric:
        labels = (*_LABELS, "finished_reason")
        family = CounterMetricFamily("vllm:request_success", "Requests that are over", labels=labels)
        for reason in ("stop", "length", "abort", "error"):
            family.add_metric((*self._labels, reason), self._engine.counters.finished[reason])
        return family

    def _capacity(self) -> Metric:
        size = self._engine.facts.capacity
        names = ("num_gpu_blocks", "block_size", "kv_cache_bytes")
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pool", labels=(*_LABELS, *names, "enable_prefix_caching")
        )
        # as vLLM does, with the null block
        values = (str(size.blocks + 1), str(size.block_size), str(size.bytes))
        family.add_metric((*self._labels, *values, str(self._engine.facts.prefix_caching)), 1)
        return family


def between(begin_s: float | None, end_s: float | None) -> float | None:
    """Seconds between two times, None if one of them has not happened."""
    return None if begin_s is None or end_s is None else end_s - begin_s


class ServerMetrics:
    """The metrics of one server. Each server has its own registry, so that one process can have several."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = (model_name, "0")
        self._registry.register(_Totals(engine, labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            return family.labels(*labels)

        self._itl = histogram("inter_token_latency_seconds", "Between two tokens of a sequence", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._step_tokens = histogram("iteration_tokens_total", "Tokens of an engine step", _TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self._seconds = {name: histogram(name, text, _SECONDS) for name, text in _OF_REQUESTS.items()}
        self._engine, self._steps = engine, 0

    def observe(self, outputs: list[RequestOutput]) -> None:
        """Add the outputs of one step to the histograms."""
        counters = self._engine.counters
        if counters.steps != self._steps and counters.step_tokens:  # vLLM counts no step without output
            self._steps = counters.steps
            self._step_tokens.observe(counters.step_tokens)
        for output in outputs:
            for gap_s in output.metrics.gaps_s:
                self._itl.observe(gap_s)
            if output.finished:
                self._observe_end(output)

    def _observe_end(self, output: RequestOutput) -> None:
        metrics = output.metrics
        self._prompt.observe(metrics.prompt_tokens)
        self._generated.observe(metrics.output_tokens)
        seconds = (
            *(metrics.ttft_s, metrics.tpot_s, metrics.e2e_s, metrics.queue_s),
            between(metrics.scheduled_s, metrics.last_token_s),
            between(metrics.scheduled_s, metrics.first_token_s),
            between(metrics.first_token_s, metrics.last_token_s),
        )
        for family, value in zip(self._seconds.values(), seconds, strict=True):
            if value is not None:
                family.observe(value)

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)
