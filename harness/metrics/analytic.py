"""The analytic column: metrics that follow from the trace's lengths alone, with neither simulator nor engine."""

from dataclasses import dataclass

from harness.metrics import closed_forms
from harness.metrics.closed_forms import Lengths
from harness.metrics.hits import ideal_hit_tokens


@dataclass(frozen=True)
class CacheShape:
    """The KV memory: blocks of `block_size` tokens, or, where `reserve_tokens` is given, so many slots a
    sequence.

    Without `prefix_caching` nothing is found in the cache; a contiguous allocator has none.
    """

    block_size: int
    reserve_tokens: int | None = None
    prefix_caching: bool = True
    uneven: bool = False  # reservations differ in length: what they waste has no closed form here


def analytic_metrics(lengths: Lengths, cache: CacheShape) -> dict[str, float]:
    """The metrics of `METRICS` that have a closed form for this workload and cache; the others are absent.

    They assume that every request finishes, that nothing is preempted or evicted, and that a prompt is cached
    before the next request asks for it. What the closed forms over time assume:
    `harness.metrics.closed_forms`.
    """
    if len(lengths.prompt_tokens) == 0:
        return {}
    hits = _hits(lengths, cache)
    figures = {
        "finished": float(len(lengths.prompt_tokens)),
        "hit_tokens": float(hits),
        "hit_ratio": hits / float(lengths.prompt_tokens.sum()),
        "computed_tokens": float(closed_forms.total_work_tokens(lengths) - hits),
    }
    if cache.reserve_tokens is not None:
        return figures if cache.uneven else figures | _contiguous(lengths, cache.reserve_tokens)
    return figures | _paged(lengths, cache.block_size, hits)


def _hits(lengths: Lengths, cache: CacheShape) -> int:
    if cache.reserve_tokens is not None or not cache.prefix_caching:
        return 0
    prompts = zip(lengths.prompt_tokens.tolist(), lengths.segments, strict=False)
    return ideal_hit_tokens(prompts, cache.block_size)


def _contiguous(lengths: Lengths, reserve_tokens: int) -> dict[str, float]:
    if lengths.width > 1 or not lengths.decode_steps.any():
        return {}
    figures = closed_forms.reserved_split(lengths, reserve_tokens)
    figures["tail_waste"] = (1 - figures["utilisation"]) * reserve_tokens
    return figures | {"sharing_saving": 0.0, "copies_per_token": 0.0}


def _paged(lengths: Lengths, block_size: int, hits: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    decodes = bool(lengths.decode_steps.any())
    if decodes:
        figures["tail_waste"] = closed_forms.tail_waste(lengths, block_size)
    if lengths.beam and lengths.width > 1:
        return figures
    figures["blocks_allocated"] = float(
        closed_forms.blocks_allocated(lengths, block_size) - hits // block_size
    )
    generated = float(lengths.output_tokens.sum()) * lengths.width
    figures["copies_per_token"] = closed_forms.forked_copies(lengths, block_size) / generated
    if decodes and hits == 0:
        figures |= closed_forms.paged_split(lengths, block_size)
        figures["sharing_saving"] = closed_forms.forked_saving(lengths, block_size)
    return figures
