"""Rules that tie the keys of decoding together: widths, beams, branches that end, drafts."""

from collections.abc import Iterator
from os.path import exists, expanduser

from harness.config.errors import ConfigError
from harness.config.schema import CachePolicy, DecodingMode, DraftPlace, RunConfig


def check_decoding(config: RunConfig) -> Iterator[ConfigError]:
    """What is wrong with the options of decoding, taken together and beside the scheduler's."""
    yield from _width(config)
    yield from _beams(config)
    yield from _drafts(config)


def _width(config: RunConfig) -> Iterator[ConfigError]:
    decoding, limits = config.decoding, config.scheduler
    beams = decoding.beam_width > 1
    key, width = ("decoding.beam_width", decoding.beam_width) if beams else ("decoding.n", decoding.n)
    for name in ("max_running", "max_batched_tokens"):
        limit = getattr(limits, name)
        if width > limit:
            yield ConfigError(
                key, f"found {width}, more than scheduler.{name}={limit}: a group runs in one step"
            )
    if beams and config.model.path is None and width > config.model.vocab:
        yield ConfigError(
            key, f"found {width}, more than the tokens there are (model.vocab={config.model.vocab})"
        )
    if not beams and decoding.mode is DecodingMode.greedy and decoding.n > 1:
        yield ConfigError(
            "decoding.n",
            f"found {decoding.n}, but greedy decoding has one sequence; use decoding.mode=sample",
        )


def _beams(config: RunConfig) -> Iterator[ConfigError]:
    decoding = config.decoding
    if decoding.beam_parents is None:
        return
    if decoding.beam_churn is not None:
        yield ConfigError(
            "decoding.beam_churn",
            f"found {decoding.beam_churn}, but decoding.beam_parents replays recorded beams; set one of them to null",
        )
    if not exists(expanduser(decoding.beam_parents)):
        yield ConfigError(
            "decoding.beam_parents",
            f"no such file or folder: '{decoding.beam_parents}'; name a point's folder, a store, or a parents.parquet",
        )


def _drafts(config: RunConfig) -> Iterator[ConfigError]:
    decoding, budget = config.decoding, config.scheduler.max_batched_tokens
    drafts = decoding.draft_tokens
    if drafts < 1:
        return
    width = max(decoding.beam_width, decoding.n)
    if width > 1:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, but a request has {width} sequences, and speculation is for one; set draft_tokens=0, or "
            "beam_width and n to 1",
        )
    if decoding.draft_place is DraftPlace.fork and config.cache.policy is not CachePolicy.paged:
        yield ConfigError(
            "decoding.draft_place",
            f"found fork, but cache.policy={config.cache.policy} shares no blocks with a child; use lookahead",
        )
    if drafts >= budget:
        yield ConfigError(
            "decoding.draft_tokens",
            f"found {drafts}, must be less than scheduler.max_batched_tokens={budget}: they are verified in one step",
        )
