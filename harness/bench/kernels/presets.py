"""Ready-made grids: what to time when nothing in particular is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.bench.kernels.full_presets import FULL
from harness.bench.kernels.grid import CaseSpec, expand, unique

Axes = Mapping[str, Sequence[Any]]

MHA, GQA, MQA = (32, 32), (32, 8), (32, 1)


def cpu() -> list[CaseSpec]:
    """A minute on two cores: the torch paths at sizes that a CPU serves."""
    small: Axes = {"heads": [(16, 4)], "head_dim": [64], "dtype": ["fp32"]}
    return unique(
        [
            *expand({"batch": [1, 8], "context": [256, 1024], "block_size": [16], **small}),
            *expand({"batch": [8], "context": [1024], "block_size": [8, 32, 64, 128], **small}),
            *expand({"batch": [8], "context": [1024], "block_size": [16], "ragged": [True], **small}),
            *expand(
                {"batch": [8], "context": [1024], "block_size": [16], "shared_prefix": [512, 768], **small}
            ),
            *expand({"batch": [1], "context": [512], "block_size": [16], "queries": [256], **small}),
        ]
    )


def gpu() -> list[CaseSpec]:
    """Some minutes on one large GPU: every axis once around a case that fills its memory system."""
    model: Axes = {"heads": [GQA], "head_dim": [128], "dtype": ["bf16"]}
    wide: Axes = {"batch": [32], "context": [4096]}
    return unique(
        [
            *expand({**wide, "block_size": [1, 8, 16, 32, 64, 128, 256], **model}),
            *expand({**wide, "block_size": [16, 128], "layout": ["HND"], **model}),
            *expand({"batch": [1, 8, 11, 13, 64], "context": [1024, 8192], "block_size": [16], **model}),
            *expand({"batch": [1], "context": [32768, 131072], "block_size": [16], **model}),
            *expand({**wide, "block_size": [16], "ragged": [True], **model}),
            *expand({**wide, "block_size": [16], "heads": [MHA, MQA], "head_dim": [128], "dtype": ["bf16"]}),
            *expand({**wide, "block_size": [16], "heads": [GQA], "head_dim": [64, 256], "dtype": ["bf16"]}),
            *expand(
                {**wide, "block_size": [16], "heads": [GQA], "head_dim": [128], "dtype": ["fp16", "fp8_e4m3"]}
            ),
            *expand({**wide, "block_size": [16], "shared_prefix": [256, 1024, 2048, 3584], **model}),
            *expand({"batch": [4], "context": [4096], "queries": [512, 4096], "block_size": [16], **model}),
        ]
    )


def gate() -> list[CaseSpec]:
    """What the latency gate compares: large enough for the memory's speed, small ones for the launches."""
    model: Axes = {"heads": [GQA], "head_dim": [128], "dtype": ["bf16"]}
    return unique(
        [
            *expand({"batch": [32], "context": [4096], "block_size": [16, 64, 128], **model}),
            *expand({"batch": [1, 12], "context": [1024, 32768], "block_size": [16], **model}),
            *expand({"batch": [32], "context": [4096], "block_size": [16], "ragged": [True], **model}),
            *expand(
                {
                    "batch": [32],
                    "context": [2048],
                    "block_size": [16],
                    "heads": [MHA],
                    "head_dim": [128],
                    "dtype": ["bf16"],
                }
            ),
            *expand({"batch": [4], "context": [4096], "queries": [2048], "block_size": [16], **model}),
        ]
    )


PRESETS = {"cpu": cpu, "gpu": gpu, "gate": gate, **FULL}
