"""How large the KV pool is: from a number of tokens, from bytes, or from what the device has left."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.runtime.errors import ModelError

if TYPE_CHECKING:
    from engine.runtime.model import LoadedModel

GIB = 1 << 30
CPU_BYTES = GIB  # on a CPU, where nobody says what memory is for


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool: what it holds and what it costs. One more block, the null block, is in `bytes`."""

    blocks: int
    block_size: int
    bytes: int

    @property
    def tokens(self) -> int:
        """KV slots."""
        return self.blocks * self.block_size

    def __str__(self) -> str:
        return f"KV pool: {self.blocks:,} blocks of {self.block_size} = {self.tokens:,} tokens, {_size(self.bytes)}"


def _size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, width in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{count} bytes"


def pool_size(
    loaded: "LoadedModel",
    block_size: int,
    *,
    tokens: int | None = None,
    memory_bytes: int | None = None,
    utilization: float = 0.9,
    useful_tokens: int | None = None,
    bytes_per_token: int | None = None,
) -> PoolSize:
    """`tokens` slots, or `memory_bytes`, or `utilization` of the device less what is in use (1 GiB on a CPU).

    More than `useful_tokens` are never taken unless asked for by `tokens`. `bytes_per_token` is what K and V of
    all lanes take (a draft model's too, and in the pool's type); None: the model's own. Raises ModelError if not one
    block fits.
    """
    per_token = loaded.kv_bytes_per_token if bytes_per_token is None else bytes_per_token
    if tokens is None:
        budget = memory_bytes if memory_bytes is not None else _device_budget(loaded, utilization)
        tokens = budget // per_token - block_size  # the null block
        if useful_tokens is not None:
            tokens = min(tokens, -(-useful_tokens // block_size) * block_size)
    blocks = tokens // block_size
    if blocks < 1:
        raise ModelError(
            f"model {loaded.name}: its KV cache takes {per_token:,} bytes a token, and the memory given to it holds "
            f"no block of {block_size} tokens; raise kv_cache_memory_bytes, gpu_memory_utilization or pool_tokens"
        )
    return PoolSize(blocks, block_size, (blocks + 1) * block_size * per_token)


def _device_budget(loaded: "LoadedModel", utilization: float) -> int:
    """Bytes for KV: of a GPU its share of the memory less what is in use, and a tenth of it for activations."""
    import torch

    if loaded.device.type != "cuda":
        return CPU_BYTES
    free, total = torch.cuda.mem_get_info(loaded.device)
    activations = total // 10
    return max(0, int(utilization * total) - (total - free) - activations)
