"""Rules that tie the keys of one policy together, and the shape of the names of a user's own."""

import re
from collections.abc import Iterator

from harness.config.errors import ConfigError
from harness.config.schema import CachePolicy, PreemptionRule, RunConfig

OWN_POLICIES = ("cache.eviction", "scheduler.order", "scheduler.victim", "scheduler.admission")
_CLASS = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_policy(config: RunConfig) -> Iterator[ConfigError]:
    """What is wrong with the cache's and the scheduler's options, taken together."""
    cache, scheduler = config.cache, config.scheduler
    for key in OWN_POLICIES:
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not _CLASS.fullmatch(value):
            yield ConfigError(key, f"found '{value}', must be module:Class of an importable class, or null")
    if scheduler.preemption is not PreemptionRule.recompute and cache.policy is CachePolicy.paged:
        if not cache.host_tokens:
            yield ConfigError(
                "scheduler.preemption",
                f"found {scheduler.preemption}, which saves blocks in host memory, but cache.host_tokens is 0; "
                "set it, or preemption=recompute",
            )
        elif cache.host_tokens < cache.block_size:
            yield ConfigError(
                "cache.host_tokens",
                f"found {cache.host_tokens}, less than one block (cache.block_size={cache.block_size})",
            )
    if scheduler.long_prefill_tokens is not None and not scheduler.chunked_prefill:
        yield ConfigError(
            "scheduler.long_prefill_tokens",
            f"found {scheduler.long_prefill_tokens}, but scheduler.chunked_prefill=false cuts no prompt; set null",
        )
