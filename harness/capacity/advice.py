"""Advice for a workload on a model and a device: block size, pool, sequences, and what goes wrong without a word.

Every answer comes from simulations of the same requests at their own arrival times, and from exact counts over the
trace. Seconds are predictions of the configured cost model; counts of blocks and hits are those of the policy core.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from engine.core.memory.group_layout import unseen_share
from engine.core.options import GroupPages
from engine.runtime.options import VLLM_NAMES
from harness.capacity import Slo, broken_goals, smallest
from harness.config.errors import ConfigError
from harness.config.schema import Oversize, ReplayMode, RunConfig
from harness.metrics import KEEPS_MORE
from harness.point.cost import cost_model
from harness.replay.folds import Prediction
from harness.workload.deployment import PoolShape, deployment_of, layer_sets, max_position, model_shape
from harness.workload.point import resolve
from harness.workload.simulate import predict
from traces.analysis.reuse import PrefixPaths, optimal_hit_tokens, reuse_profile, shared_prefix_tokens
from traces.trace import Trace

# Fewer requests than this are too little data for flags.
FEWEST = 30

# Block sizes that vLLM's kernels take and that are tried.
SIZES = (16, 32, 64, 128)

_SAME_THROUGHPUT, _SAME_LATENCY = 0.02, 0.05  # shares below which predictions do not differ
_FASTER = (1, 2, 4, 8)  # times the trace's own rate
_CLIFF = 0.05  # share of computed tokens that are computed again, from which on admission thrashes
_CLOSER = 3  # bisections of the rate of a cliff
_HIDDEN = 4  # a match unit hides reuse that is so many times what is found
_WORTH_SAYING = 0.01
Tell = Callable[[str], None]


@dataclass(frozen=True)
class SizeRow:
    """What one block size does: shares are of the pool (waste) or of the prompt tokens (hits)."""

    block_size: int
    match_unit: int
    waste: float
    hits: float
    most_hits: float
    throughput: float
    ttft_p99_s: float
    preemptions: float


@dataclass
class Advice:
    """Answers in words, the evidence for them, warnings, and the flags of vLLM that they come to."""

    answers: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rows: list[SizeRow] = field(default_factory=list)
    floor: str = ""
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def advise(config: RunConfig, trace: Trace, slo: Slo, tell: Tell) -> Advice:
    """Advice for `trace` on the configured model, device and scheduler.

    Raises:
        ConfigError: no pool fits, or a setting is not allowed.
    """
    config = replace(config, measure=False, workload=replace(config.workload, oversize=Oversize.drop))
    advice = Advice()
    adviser = _Adviser(config, trace, slo)
    tell("block sizes")
    size = adviser.block_sizes(advice)
    adviser.config = replace(config, cache=replace(config.cache, block_size=size))
    adviser.reuse(advice)
    adviser.windows(advice)
    tell("pool and sequences")
    adviser.capacity(advice)
    tell("admission")
    adviser.admission(advice)
    advice.flags = _flags(adviser.config)
    return advice


class _Adviser:
    """The simulations behind an advice; `config` is the point that is varied."""

    def __init__(self, config: RunConfig, trace: Trace, slo: Slo) -> None:
        self.config = config
        self._trace, self._slo = trace, slo
        self._pool = deployment_of(config).pool
        self._memory_tokens = self._tokens_of(self._pool)
        self._paths = PrefixPaths(trace)

    def _tokens_of(self, pool: PoolShape) -> int:
        """The pool as tokens in all layers, so that each block size gets the same memory."""
        return pool.tokens * pool.slot_bytes // pool.kv_bytes_per_token

    def _run(
        self,
        *,
        block_size: int | None = None,
        tokens: int | None = None,
        running: int | None = None,
        whole: bool | None = None,
        faster: float = 1.0,
    ) -> Prediction:
        config = self.config
        cache = replace(config.cache, pool_blocks=None, pool_tokens=tokens or self._memory_tokens)
        scheduler = config.scheduler
        if block_size is not None:
            cache = replace(cache, block_size=block_size)
        if running is not None:
            scheduler = replace(scheduler, max_running=running)
        if whole is not None:
            scheduler = replace(scheduler, admit_whole_prompt=whole)
        config = replace(config, cache=cache, scheduler=scheduler)
        trace = self._trace if faster == 1 else _faster(self._trace, faster)
        point = resolve(config, trace)
        return predict(point, cost_model(point.deployment), rows=False)

    # -- block size ----------------------------------------------------------------------------------------

    def block_sizes(self, advice: Advice) -> int:
        """Compare block sizes in the same memory; returns the one to take."""
        for size in sorted({*SIZES, self.config.cache.block_size}):
            metrics = self._run(block_size=size).metrics
            unit = deployment_of(_with_size(self.config, size)).pool.block_size
            most = reuse_profile(self._paths, unit, spare_last_token=True)
            advice.rows.append(
                SizeRow(
                    size,
                    unit,
                    metrics.get("gauge", 0.0) - metrics.get("token_share", 0.0),
                    metrics.get("hit_ratio", 0.0),
                    float(most.blocks.sum()) * unit / max(1, most.prompt_tokens),
                    metrics.get("output_throughput", 0.0),
                    metrics.get("ttft_p99", 0.0),
                    metrics.get("preemptions", 0.0),
                )
            )
        recorded = self._trace.header.source_block_tokens
        if recorded and recorded > min(row.block_size for row in advice.rows):
            advice.warnings.append(
                f"the trace records sharing in blocks of {recorded} tokens: hits of smaller blocks cannot differ here, "
                "and a real workload's do"
            )
        best = min(advice.rows, key=lambda row: (-row.throughput, row.ttft_p99_s, row.block_size))
        alike = [row for row in advice.rows if _as_good(row, best)]
        chosen = min(alike, key=lambda row: (row.block_size != self.config.cache.block_size, row.block_size))
        low, high = min(row.waste for row in advice.rows), max(row.waste for row in advice.rows)
        spread = f"waste {_percent(low)} to {_percent(high)} of the pool"
        if len(alike) == len(advice.rows):
            advice.answers.append(
                f"Block size: it does not matter here, because throughput and time to first token are the same within "
                f"{100 * _SAME_THROUGHPUT:g} and {100 * _SAME_LATENCY:g} %: {spread}, and {_preempted(advice.rows)}. "
                f"Keep {chosen.block_size}."
            )
        else:
            worst = max(advice.rows, key=lambda row: (-row.throughput, row.ttft_p99_s))
            advice.answers.append(
                f"Block size: {chosen.block_size} ({chosen.throughput:,.0f} output tokens/s, TTFT p99 "
                f"{chosen.ttft_p99_s:.2f} s; {worst.block_size} has {worst.throughput:,.0f} and "
                f"{worst.ttft_p99_s:.2f} s): {spread}."
            )
        return chosen.block_size

    # -- hits ----------------------------------------------------------------------------------------------

    def reuse(self, advice: Advice) -> None:
        """What the prefixes allow, what the match unit leaves of it, and what the pool leaves of that."""
        shared = shared_prefix_tokens(self._trace)
        prompts = [request.prompt_tokens for request in self._trace.requests]
        exact = sum(shared) / max(1, sum(prompts))
        row = next(row for row in advice.rows if row.block_size == self.config.cache.block_size)
        advice.floor = (
            f"{_percent(exact)} of the prompt tokens stood at the start of an earlier prompt; in whole match units of "
            f"{row.match_unit} tokens {_percent(row.most_hits)}, in this pool {_percent(row.hits)}"
        )
        if deployment_of(self.config).pool.groups is None:
            blocks = self._memory_tokens // row.block_size
            best = optimal_hit_tokens(self._paths, row.block_size, blocks) / max(1, sum(prompts))
            advice.floor += (
                f", and at most {_percent(best)} with any eviction (Belady's optimum, a bound: blocks of running "
                "requests may put it out of reach)"
            )
        if not self.config.cache.prefix_caching:
            if exact > _WORTH_SAYING:
                advice.warnings.append(
                    f"the prefix cache is off, and {_percent(exact)} of the prompt tokens could be hits"
                )
            return
        if exact > _WORTH_SAYING and row.most_hits * _HIDDEN < exact:
            sharing = [tokens for tokens in shared if tokens]
            advice.warnings.append(
                f"{_percent(row.most_hits)} hits: prompts of {median(prompts):,.0f} tokens that share "
                f"{median(sharing):,.0f} (medians), match unit {row.match_unit}; a smaller block, or a model without "
                f"states, could hit {_percent(exact)}"
            )
        elif row.most_hits > _WORTH_SAYING and row.hits * 2 < row.most_hits:
            advice.warnings.append(
                f"the pool is too small for its prefixes: {_percent(row.hits)} hits of {_percent(row.most_hits)} that "
                "an unlimited pool has"
            )

    def windows(self, advice: Advice) -> None:
        """What windowed layers keep in vain where groups are off."""
        sets = layer_sets(model_shape(self.config.model))
        ends = [request.prompt_tokens + request.output_tokens for request in self._trace.requests]
        mean = sum(ends) // max(1, len(ends))
        unseen = unseen_share(sets, mean)
        if self.config.cache.groups is GroupPages.off and unseen > _WORTH_SAYING:
            advice.warnings.append(
                f"windowed layers keep every block (--disable-hybrid-kv-cache-manager): {_percent(unseen)} of the KV "
                f"of a request of {mean:,} tokens is never read again; cache.groups=uniform predicts "
                "vLLM without this flag"
            )
        cache = self.config.cache
        if cache.groups is not GroupPages.off and cache.prefix_caching and cache.retention_interval is None:
            advice.warnings.append(KEEPS_MORE)

    # -- pool and sequences --------------------------------------------------------------------------------

    def _meets(self, found: Prediction) -> bool:
        lost = found.outcome.get("rejected", 0) + found.outcome.get("unfinished", 0)
        return not lost and not broken_goals(self._slo, found.metrics)

    def capacity(self, advice: Advice) -> None:
        """The smallest pool and the fewest sequences that meet the SLO."""
        goals = ", ".join(map(str, self._slo))
        now = self._run()
        preemptions = now.metrics.get("preemptions", 0)
        if preemptions:
            advice.warnings.append(
                f"{preemptions:,.0f} requests lose their blocks and are computed again "
                f"({now.metrics.get('recomputed_tokens', 0):,.0f} tokens)"
            )
        if not self._meets(now):
            broken = broken_goals(self._slo, now.metrics)
            found = (f"{goal.metric} is {now.metrics[goal.metric]:.3g}" for goal in broken)
            reason = "; ".join(found) or "requests do not finish"
            larger = self._run(tokens=8 * self._memory_tokens)
            helps = "a larger pool helps" if self._meets(larger) else "even 8 times the pool does not help"
            advice.answers.append(f"The SLO ({goals}) is not met: {reason}; {helps}.")
            return
        page = max(1, self.config.cache.block_size)
        least = smallest(
            lambda blocks: self._fits(blocks * page),
            start=max(1, int(self._memory_tokens * _peak_share(now)) // page),
            high=max(1, self._memory_tokens // page),
        )
        most = self.config.scheduler.max_running
        peak = max(1, int(now.metrics.get("running_peak", 1)))
        fewest = smallest(
            lambda count: self._meets(self._run(running=count)), start=min(peak, most), high=most
        )
        assert least is not None
        assert fewest is not None
        advice.answers.append(
            f"Pool: {least * page:,} tokens meet the SLO ({goals}); this device holds {self._memory_tokens:,}. "
            f"max_num_seqs: {fewest} is enough; {peak} is the observed peak of these {len(self._trace.requests):,} "
            f"requests, and no load beyond theirs was tried. The flag is the limit that was simulated, {most}."
        )

    def _fits(self, tokens: int) -> bool:
        """Whether a pool of so many tokens meets the SLO, and drops no request that the whole pool takes."""
        try:
            found = self._run(tokens=tokens)
        except ConfigError:  # it holds no page, or no request
            return False
        whole = resolve(
            replace(
                self.config,
                cache=replace(self.config.cache, pool_blocks=None, pool_tokens=self._memory_tokens),
            ),
            self._trace,
        )
        return sum(found.outcome.values()) == len(whole.trace.requests) and self._meets(found)

    # -- admission -----------------------------------------------------------------------------------------

    def _thrashes(self, faster: float, whole: bool) -> tuple[float, float]:
        """The share of computed tokens that are computed again, and output tokens/s."""
        metrics = self._run(faster=faster, whole=whole).metrics
        again = metrics.get("recomputed_tokens", 0.0) / max(1.0, metrics.get("computed_tokens", 1.0))
        return again, metrics.get("output_throughput", 0.0)

    def admission(self, advice: Advice) -> None:
        """The rate from which on requests are admitted by their first chunk and have no room for the rest."""
        span_s = (self._trace.requests[-1].arrival_us - self._trace.requests[0].arrival_us) / 1e6
        held = self._trace.header.client.max_in_flight or self.config.replay.max_in_flight
        if span_s <= 0 or held or self.config.replay.mode is not ReplayMode.trace:
            advice.notes.append(
                "requests do not arrive at the times of the trace: no rate at which admission thrashes was looked for"
            )
            return
        rate = (len(self._trace.requests) - 1) / span_s
        good, bad = 0.0, 0.0
        for faster in _FASTER:
            if self._thrashes(faster, whole=False)[0] > _CLIFF:
                bad = float(faster)
                break
            good = float(faster)
        if not bad:
            advice.notes.append(
                f"no admission cliff up to {_FASTER[-1]} times this rate ({rate * _FASTER[-1]:.3g} requests/s)"
            )
            return
        for _ in range(_CLOSER if good else 0):
            middle = (good * bad) ** 0.5
            good, bad = (good, middle) if self._thrashes(middle, whole=False)[0] > _CLIFF else (middle, bad)
        again, first = self._thrashes(bad, whole=False)
        kept, whole = self._thrashes(bad, whole=True)
        advice.warnings.append(
            f"admission cliff at {rate * bad:.3g} requests/s under first-chunk admission: {_percent(again)} of the "
            f"computed tokens are computed again ({first:,.0f} output tokens/s); with whole prompts admitted "
            f"{_percent(kept)} ({whole:,.0f} output tokens/s)"
        )


def _with_size(config: RunConfig, size: int) -> RunConfig:
    return replace(config, cache=replace(config.cache, block_size=size))


def _as_good(row: SizeRow, best: SizeRow) -> bool:
    return (
        row.throughput >= best.throughput * (1 - _SAME_THROUGHPUT)
        and row.ttft_p99_s <= best.ttft_p99_s * (1 + _SAME_LATENCY) + 1e-3
    )


def _preempted(rows: Sequence[SizeRow]) -> str:
    most = max(row.preemptions for row in rows)
    return f"at most {most:,.0f} preemptions" if most else "no request is preempted at any of them"


def _peak_share(found: Prediction) -> float:
    return min(1.0, max(found.metrics.get("gauge", 1.0), 0.01))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else "0 %"


def _faster(trace: Trace, factor: float) -> Trace:
    first = trace.requests[0].arrival_us if trace.requests else 0
    rows = (replace(row, arrival_us=first + int((row.arrival_us - first) / factor)) for row in trace.requests)
    return replace(trace, requests=tuple(rows))


def _flags(config: RunConfig) -> list[str]:
    """vLLM's flags (0.33) for the configuration that was simulated, with the block size of the advice."""
    cache, scheduler, device = config.cache, config.scheduler, config.device
    said = {
        "block_size": cache.block_size,
        "max_running": scheduler.max_running,
        "max_batched_tokens": scheduler.max_batched_tokens,
        "max_model_len": cache.max_model_len or max_position(config.model),
        "memory_utilization": f"{device.memory_utilization:g}" if deployment_of(config).pool.memory else None,
        "prefix_caching": cache.prefix_caching,
        "tensor_parallel": device.tensor_parallel if device.tensor_parallel > 1 else None,
    }
    if cache.groups is not GroupPages.off and cache.prefix_caching and cache.retention_interval != 0:
        said["retention_interval"] = str(cache.retention_interval)  # vLLM reads the word None
    flags = []
    for ours, value in said.items():
        name = VLLM_NAMES[ours].replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags.append(f"--{name} {value}")
    if cache.groups is GroupPages.off and any(each.window for each in layer_sets(model_shape(config.model))):
        flags.append("--disable-hybrid-kv-cache-manager")
    return flags
