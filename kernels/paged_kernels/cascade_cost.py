"""When a shared prefix is worth reading once: seconds saved on memory against seconds of two more launches.

Published crossovers say why a rule is needed: at 128 beams a prefix of 128 tokens loses (0.52x) and one of 256 wins
(2.2x; TensorRT-LLM #14396), and with a prefix of 512 tokens one engine's cascade was slower at every batch size
(vllm #44397): a short prefix stays in the L2, where the flat decode reads it at the cache's speed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class SharedRun(NamedTuple):
    """A group of rows and what they share."""

    rows: int
    kv_bytes: int  # K and V of the shared tokens, in one layer
    tiles: int  # how often the cascade reads them: once per program that packs rows


@dataclass(frozen=True, slots=True)
class CascadeCost:
    """What reading and launching cost on one device."""

    memory_bytes_per_s: float
    cache_bytes_per_s: float  # what repeated reads reach when the shared blocks stay in the last-level cache
    cache_bytes: int
    overhead_s: float  # everything that a cascade does on top of a flat decode, once a call

    def saved_s(self, run: SharedRun) -> float:
        """Seconds that reading `run.tiles` times instead of `run.rows` times saves, the overhead not deducted.

        Half the cache is counted as the shared blocks' own: the rows' private blocks stream through the rest.
        """
        again = self.cache_bytes_per_s if run.kv_bytes <= self.cache_bytes / 2 else self.memory_bytes_per_s
        return (run.rows - run.tiles) * run.kv_bytes / again


# Copy bandwidth as measured on an H200 (4.3 TB/s, read + write). Not measured: what its L2 gives (taken as twice the
# memory) and the overhead, at the upper end of two launches of 5 to 10 us, so that a doubtful case stays flat.
H200 = CascadeCost(4.3e12, 8.6e12, 60 << 20, 20e-6)

# One thread of a shared x86 machine, torch path, 4 to 8 KV heads of 64 to 128: gathering and reading gives 2 to 6 GB/s.
# Interleaved with the flat decode, a cascade took 0.6 to 1.04 of its time over prefixes of 256 to 1024 tokens and 2 to
# 16 rows; the overhead is set so that the cases near 1 stay flat.
CPU = CascadeCost(4e9, 8e9, 4 << 20, 2e-3)


def cost_of(device: torch.device) -> CascadeCost:
    """The rule's figures for a device. On a slower GPU the H200's leave some gain unused, and cost none."""
    return H200 if device.type == "cuda" else CPU
