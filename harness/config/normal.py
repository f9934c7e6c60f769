"""One spelling for each experiment: settings that do not apply are set to one value.

Two configurations that differ only in what has no effect are then the same point, run and counted once.
"""

from dataclasses import replace
from os.path import expanduser
from typing import Any

from harness.config.schema import CacheConfig, CachePolicy, DecodingMode, ReplayConfig, ReplayMode, RunConfig


def normalise(config: RunConfig) -> RunConfig:
    """The same run with settings that do not apply set to their neutral value.

    A contiguous cache has single slots, shares and swaps nothing; without a prefix cache nothing is named; beam search
    ignores `mode`, `n` and `temperature`; greedy decoding ignores `temperature`; without beams nothing is re-parented;
    users and pauses matter to the replay modes that have them. `~` in a path becomes the home folder.
    """
    cache, decoding = config.cache, config.decoding
    plain = CacheConfig()
    if cache.policy is not CachePolicy.paged:
        cache = replace(
            cache,
            block_size=1,
            prefix_caching=False,
            deduplicate=False,
            copy_at_fork=False,
            host_tokens=0,
            eviction=None,
        )
    else:
        cache = replace(cache, placement=plain.placement)
    if not cache.prefix_caching:
        cache = replace(cache, retention=plain.retention, hash=plain.hash, deduplicate=False)
    if decoding.beam_width > 1:
        decoding = replace(decoding, mode=DecodingMode.greedy, n=1, temperature=1.0)
    else:
        decoding = replace(decoding, beam_churn=None)
    if decoding.mode is DecodingMode.greedy:
        decoding = replace(decoding, temperature=1.0)
    return replace(
        config,
        out=expanduser(config.out),
        trace=replace(config.trace, path=_home(config.trace.path)),
        model=replace(config.model, path=_home(config.model.path)),
        cost=replace(config.cost, cache_dir=_home(config.cost.cache_dir)),
        cache=cache,
        decoding=decoding,
        replay=_replay(config.replay),
    )


def _replay(replay_: ReplayConfig) -> ReplayConfig:
    neutral = ReplayConfig()
    unused: dict[str, Any] = {}
    if replay_.mode is not ReplayMode.closed:
        unused["users"] = neutral.users
    if replay_.mode not in (ReplayMode.closed, ReplayMode.sessions):
        unused["think_s"] = neutral.think_s
    if replay_.mode is not ReplayMode.gamma:
        unused["burstiness"] = neutral.burstiness
    return replace(replay_, **unused)


def _home(path: str | None) -> str | None:
    return None if path is None else expanduser(path)
