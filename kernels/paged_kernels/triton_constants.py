"""The constants that a kernel is compiled with, from shape and scoring: one place for the launcher and for the gate."""

from typing import Any, NamedTuple

import torch
import triton

from paged_kernels.scoring import Scoring
from paged_kernels.triton_config import (
    LOG2E,
    AttentionShape,
    LaunchConfig,
    id_path,
    interpreted,
    min_tiles,
    padded,
)


class Features(NamedTuple):
    """What of a scoring changes the compiled code."""

    window: bool = False
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    lse: bool = False

    @classmethod
    def of(cls, scoring: Scoring, *, lse: bool) -> "Features":
        """The features that `scoring` asks for."""
        return cls(
            scoring.window > 0, scoring.softcap > 0, scoring.sinks is not None, scoring.alibi is not None, lse
        )


def decode_constants(
    shape: AttentionShape,
    config: LaunchConfig,
    features: Features,
    *,
    splits: int,
    rows: int,
    direct: bool,
    path: str,
) -> dict[str, Any]:
    """Constants of `decode_kernel`: `splits` 0 balances on the device over at most `rows` rows."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "SPLITS": splits,
        "ROWS_PAD": rows_pad(rows),
        "MIN_TILES": min_tiles(config.tile),
        "DIRECT": direct,
        "HAS_SINKS": features.sinks and direct,
        "HAS_LSE": features.lse,
    }


def combine_constants(
    shape: AttentionShape,
    config: LaunchConfig,
    features: Features,
    *,
    splits: int,
    rows: int,
    prefix_splits: int = 0,
) -> dict[str, Any]:
    """Constants of `combine_kernel`; they follow the decode's."""
    return {
        "HEADS": shape.heads,
        "DV": shape.dv,
        "DV_PAD": padded(shape.dv),
        "TILE": config.tile,
        "SPLITS": splits,
        "ROWS_PAD": rows_pad(rows),
        "MIN_TILES": min_tiles(config.tile),
        "PREFIX_SPLITS": prefix_splits,
        "CHUNK": 8,
        "HAS_WINDOW": features.window,
        "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse,
    }


def prefill_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, sequences: int, path: str
) -> dict[str, Any]:
    """Constants of `prefill_kernel`."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "ROWS_PAD": rows_pad(sequences),
        "HAS_SINKS": features.sinks,
        "HAS_LSE": features.lse,
    }


def prefix_constants(
    shape: AttentionShape, config: LaunchConfig, features: Features, *, groups: int, splits: int, path: str
) -> dict[str, Any]:
    """Constants of `prefix_kernel`, the shared half of a cascade."""
    return _common(shape, config, features) | {
        "PATH": id_path(shape.block_size, config.tile, path),
        "GROUPS_PAD": rows_pad(groups),
        "SPLITS": splits,
    }


def store_constants(shape: AttentionShape, *, values: bool = True) -> dict[str, Any]:
    """Constants of `store_kernel`; without `values` it writes one cache alone."""
    dv = shape.dv if values else 0
    return {
        "HEADS": shape.kv_heads,
        "DK": shape.dk,
        "K_PAD": triton.next_power_of_2(shape.kv_heads * shape.dk),
        "DV": dv,
        "V_PAD": triton.next_power_of_2(shape.kv_heads * max(dv, 1)),
        "BLOCK_SIZE": shape.block_size,
        "LIMIT": torch.finfo(shape.kv_dtype).max if shape.kv_dtype.itemsize == 1 else 0,
    }


def merge_constants(heads: int, dv: int) -> dict[str, Any]:
    """Constants of `merge_kernel`."""
    block = min(8, triton.next_power_of_2(heads))
    return {"HEADS": heads, "HEADS_PAD": block, "DV": dv, "DV_PAD": triton.next_power_of_2(dv)}


def rows_pad(rows: int) -> int:
    """Rows as a power of two, at least 64: few distinct values, so few compilations."""
    return max(64, int(triton.next_power_of_2(rows)))


def _common(shape: AttentionShape, config: LaunchConfig, features: Features) -> dict[str, Any]:
    return {
        "KV_HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "ROWS": config.rows,
        "DK": shape.dk,
        "DK_PAD": padded(shape.dk),
        "DV": shape.dv,
        "DV_PAD": padded(shape.dv),
        "BLOCK_SIZE": shape.block_size,
        "TILE": config.tile,
        "HAS_WINDOW": features.window,
        "HAS_SOFTCAP": features.softcap,
        "HAS_ALIBI": features.alibi,
        "DOT_F32": interpreted(),
        "LOG2E": LOG2E,
    }
