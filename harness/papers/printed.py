"""Published values that need no simulation: each function is named by `compute` in a file of `conf/reproduce`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.papers.sizes import GIB, KIB, shape_of


def pages(models: Mapping[str, Sequence[int]], page_kib: Sequence[int]) -> dict[str, float]:
    """Page tables of the GPU driver in place of block tables (vAttention): tokens of a page, and the worst waste.

    A model is layers, KV heads and devices, with heads of 128 and 2 bytes an element. K and V of each layer have pages
    of their own on each device, so in the worst case 2 x layers x devices pages of a request are nearly empty.
    """
    found: dict[str, float] = {}
    for size in page_kib:
        tokens = [size * KIB / (heads / devices * 128 * 2) for _, heads, devices in models.values()]
        waste = [2 * layers * devices * size / KIB for layers, _, devices in models.values()]
        found |= {
            f"fewest_tokens_{size}": min(tokens),
            f"most_tokens_{size}": max(tokens),
            f"least_mib_{size}": min(waste),
            f"most_mib_{size}": max(waste),
        }
    return found


def memory(pools_gib: Mapping[str, float], model: str, memory_gb: float) -> dict[str, float]:
    """KV slots of each model's pool (GiB), and the shares of weights and KV in a GPU of `memory_gb` with `model`.

    OPT has no gate in its MLP and one matrix for both embeddings.
    """
    shape = replace(shape_of(model), mlp_matrices=2, tied_embeddings=True)
    slots = {
        f"slots_{name}": gib * GIB // shape_of(name).kv_bytes_per_token for name, gib in pools_gib.items()
    }
    return {
        **slots,
        "weights_percent": 100 * shape.weight_bytes / (memory_gb * 1e9),
        "kv_percent": 100 * pools_gib[model] / memory_gb,
    }
