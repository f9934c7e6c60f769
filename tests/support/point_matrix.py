"""Every policy of the core, every way of decoding and both real trace formats, as small points on crowded pools."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from point_cases import azure_file, mooncake_file, small_config, with_trace
from tiers import tier

from engine.core.options import CachePolicy, Preemption, Retention, Scheduling, SpeculationMode, TierStore
from harness.config.checks import check_config
from harness.config.compose import normalise
from harness.config.schema import (
    Compiled,
    CostKind,
    DecodingMode,
    Oversize,
    ReplayMode,
    RunConfig,
    TraceFormat,
)
from harness.metrics.log import RunLog
from harness.point.cost import cost_model
from harness.workload.deployment import deployment_of
from harness.workload.point import resolve
from harness.workload.simulate import simulate

Change = Callable[[RunConfig], None]


def paged(config: RunConfig) -> None:
    config.cache.policy = CachePolicy.paged


def unnamed(config: RunConfig) -> None:
    config.cache.prefix_caching = False


def frugal(config: RunConfig) -> None:
    config.cache.deduplicate, config.cache.retention = True, Retention.none


def copies(config: RunConfig) -> None:
    config.cache.copy_at_fork = True


def contiguous(policy: CachePolicy) -> Change:
    def change(config: RunConfig) -> None:
        config.cache.policy, config.cache.pool_tokens = policy, 2048
        config.decoding.draft_place = SpeculationMode.lookahead  # others share blocks

    return change


def swap(config: RunConfig) -> None:
    config.cache.host_tokens, config.scheduler.preemption = 4000, Preemption.swap


def host_tier(config: RunConfig) -> None:
    config.cache.tier_tokens, config.cache.tier_store = 4000, TierStore.evicted


def swap_groups(config: RunConfig) -> None:
    config.cache.host_tokens, config.scheduler.preemption = 4000, Preemption.auto


def priority(config: RunConfig) -> None:
    config.scheduler.policy, config.scheduler.long_prefill_tokens = Scheduling.priority, 16
    config.scheduler.admit_whole_prompt, config.scheduler.watermark = False, 0.05


def static(config: RunConfig) -> None:
    config.scheduler.static_batch = True


def whole_prompts(config: RunConfig) -> None:
    config.scheduler.chunked_prefill = False


def users(config: RunConfig) -> None:
    config.replay.mode, config.replay.users, config.replay.think_s = ReplayMode.closed, 5, 0.01


def own(config: RunConfig) -> None:
    config.scheduler.victim = "own_policies:LongestFirst"
    config.scheduler.order = "own_policies:ShortPromptsFirst"
    config.cache.eviction = "own_policies:MostRecentFirst"


POLICIES: dict[str, Change] = {
    **{change.__name__: change for change in (paged, unnamed, frugal, copies, swap, swap_groups)},
    **{change.__name__: change for change in (priority, static, whole_prompts, users, own)},
    **{str(policy): contiguous(policy) for policy in CachePolicy if policy is not CachePolicy.paged},
    "host_tier": host_tier,
}


def greedy(config: RunConfig) -> None:
    config.decoding.mode = DecodingMode.greedy


def beams(config: RunConfig) -> None:
    config.decoding.beam_width = 3


def samples(config: RunConfig) -> None:
    config.decoding.mode, config.decoding.n = DecodingMode.sample, 3


def ending_samples(config: RunConfig) -> None:
    samples(config)
    config.decoding.branch_hazard = 0.05


def drafts(config: RunConfig) -> None:
    config.decoding.draft_tokens, config.decoding.acceptance = 3, 0.6


def forked_drafts(config: RunConfig) -> None:
    drafts(config)
    config.decoding.draft_place = SpeculationMode.fork


MODES: dict[str, Change] = {
    change.__name__: change for change in (greedy, beams, samples, ending_samples, drafts, forked_drafts)
}
FORMATS = (TraceFormat.azure, TraceFormat.mooncake)


@dataclass(frozen=True)
class Case:
    folder: Path
    format: TraceFormat
    policy: str
    mode: str

    @cached_property
    def config(self) -> RunConfig:
        config = small_config(self.folder)
        config.measure, config.cost.kind, config.replay.compiled = False, CostKind.roofline, Compiled.never
        config.workload.oversize, config.workload.request_rate = Oversize.drop, 2000.0
        config.cache.pool_tokens, config.cache.max_model_len = 640, 512
        if self.format is TraceFormat.azure:
            config.workload.length_scale = 1.0
            with_trace(config, self.format, azure_file(self.folder))
        else:
            config.workload.length_scale, config.cache.block_size = 0.02, 4
            with_trace(config, self.format, mooncake_file(self.folder))
        POLICIES[self.policy](config)
        MODES[self.mode](config)
        assert not check_config(config)
        return normalise(config)

    def log(self, *, fast_forward: bool = True) -> RunLog:
        workload = resolve(self.config)
        return simulate(workload, cost_model(deployment_of(self.config)), fast_forward=fast_forward)


PAIRS = [
    (policy, mode)
    for policy in POLICIES
    for mode in MODES
    if not (
        policy.startswith("contiguous") and mode == "forked_drafts"
    )  # is refused: nothing is shared there
]

ALL = [(format_, policy, mode) for format_ in FORMATS for policy, mode in PAIRS]
# by day every policy once, and in these every mode and both formats
SOME = [
    (FORMATS[place % 2], policy, modes[place // 2 % len(modes)])
    for place, policy in enumerate(POLICIES)
    for modes in ([mode for other, mode in PAIRS if other == policy],)
]


def matrix(folder: Path) -> Iterator[Case]:
    """The cases of this run's tier."""
    for format_, policy, mode in tier(SOME, ALL):
        yield Case(folder, format_, policy, mode)
