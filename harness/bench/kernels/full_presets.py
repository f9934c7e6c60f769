"""The grids of `bench gpu --part kernels`: every axis over its whole range, as far as one GPU's memory and minutes go.

Cases come in an order that is fixed and looks drawn, so that a run whose time ends has left out a bit of everything
instead of the last axis. `bench kernels --preset full-decode` runs one of them alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from harness.bench.kernels.grid import CaseSpec, expand, unique

MOST_KV_BYTES = 4.4e9
"""Of one call: with the copies that other providers lay out it takes a few times as much."""
MOST_SCORES = 2**29
"""Queries x keys x heads of one sequence: the float64 reference of a prefill holds some of such matrices at once."""

HEADS = ((32, 32), (32, 8), (64, 8))
"""Query and KV heads: groups of 1, 4 and 8."""
CONTEXTS = (1024, 4096, 16_384, 32_768, 131_072)
OWN_TOKENS = 128
"""Of each sequence behind a shared prefix."""
BEAM_TOKENS = 32
"""The same of a beam, most of whose text is shared."""


def full_decode() -> list[CaseSpec]:
    """Batch 1 to 256, context 1k to 128k, groups 1, 4 and 8; neighbours of 12 rows for cliffs; ragged lengths."""
    grid = expand({"batch": [1, 8, 32, 64, 128, 256], "context": CONTEXTS, "heads": HEADS, **_BF16})
    cliffs = expand({"batch": [11, 12, 13], "context": [16_384], "heads": [(32, 8)], **_BF16})
    ragged = expand({"batch": [32], "context": [4096], "ragged": [True], "heads": HEADS, **_BF16})
    return _spread([*grid, *cliffs, *ragged])


def full_blocks() -> list[CaseSpec]:
    """Block sizes 1 to 256 at two shapes; the kernels' tile does not depend on the block size."""
    sizes = [1, 8, 16, 32, 64, 128, 256]
    wide = expand({"batch": [32], "context": [4096], "heads": [(32, 8)], **_BF16, "block_size": sizes})
    long = expand({"batch": [8], "context": [16_384], "heads": [(32, 8)], **_BF16, "block_size": sizes})
    return [*wide, *long]


def full_prefill() -> list[CaseSpec]:
    """Whole prompts, and chunks of them behind a cached prefix."""
    pairs = [(4096, 4096), (2048, 4096), (2048, 8192), (512, 4096), (512, 16_384), (512, 32_768), (128, 8192)]
    return _spread(
        case
        for queries, context in pairs
        for case in expand(
            {
                "batch": [1, 4],
                "queries": [queries],
                "context": [context],
                "heads": [(32, 32), (32, 8)],
                **_BF16,
            }
        )
    )


def full_cascade() -> list[CaseSpec]:
    """2 to 256 sequences that share 128 to 32k tokens, and 2 to 8 beams of one request."""
    lengths = (128, 256, 512, 1024, 2048, 4096, 8192, 32_768)
    sequences = [case for shared in lengths for case in _sharing((2, 4, 8, 16, 64, 256), shared, OWN_TOKENS)]
    beams = [
        case for shared in (256, 1024, 4096, 16_384) for case in _sharing((2, 4, 8), shared, BEAM_TOKENS)
    ]
    return _spread([*sequences, *beams])


def full_flex() -> list[CaseSpec]:
    """A few shapes for a provider that compiles some ten seconds for each."""
    wide = expand({"batch": [32], "context": [4096], "heads": [(32, 8)], **_BF16, "block_size": [16, 128]})
    return [
        *wide,
        *expand({"batch": [8], "context": [16_384], "heads": [(32, 8)], **_BF16, "block_size": [64]}),
    ]


def _sharing(batches: Iterable[int], shared: int, own: int) -> list[CaseSpec]:
    lengths = {"context": [shared + own], "shared_prefix": [shared]}
    return expand({"batch": list(batches), **lengths, "heads": [(32, 8)], **_BF16})


def _spread(cases: Iterable[CaseSpec]) -> list[CaseSpec]:
    """The cases that fit, each once, in an order of their names' digests."""
    fitting = [case for case in unique(cases) if _fits(case)]
    return sorted(fitting, key=lambda case: hashlib.blake2b(case.name.encode()).digest())


def _fits(case: CaseSpec) -> bool:
    scores = case.queries * max(case.lengths) * case.heads
    return case.distinct_kv_bytes <= MOST_KV_BYTES and (case.queries == 1 or scores <= MOST_SCORES)


_BF16: Mapping[str, Sequence[Any]] = {"block_size": [16], "head_dim": [128], "dtype": ["bf16"]}
FULL: Mapping[str, Callable[[], list[CaseSpec]]] = {
    "full-decode": full_decode,
    "full-blocks": full_blocks,
    "full-prefill": full_prefill,
    "full-cascade": full_cascade,
    "full-flex": full_flex,
}
