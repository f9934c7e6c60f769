"""From a case as plain numbers to its tensors, made by the kernels' own room: permuted blocks, poison elsewhere."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.bench.kernels.grid import CaseSpec

if TYPE_CHECKING:
    import torch

    from paged_kernels.providers import Case


def build(spec: CaseSpec, device: "torch.device", seed: int) -> "Case":
    """The case under the grid's name for it, with contents drawn from `seed`."""
    from paged_kernels.providers.build import CaseSpec as TensorSpec
    from paged_kernels.providers.build import build_case

    element = _element(spec.dtype)
    narrow = spec.dtype.startswith("fp8")
    wanted = TensorSpec(
        lengths=spec.lengths,
        queries=(spec.queries,) * spec.batch,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dk=spec.head_dim,
        block_size=spec.block_size,
        dtype=_element("bf16") if narrow else element,
        kv_dtype=element if narrow else None,
        layout=spec.layout,
        shared_tokens=spec.shared_prefix,
    )
    return replace(build_case(wanted, device=device, seed=seed), name=spec.name)


def _element(name: str) -> Any:
    import torch

    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    names |= {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    return getattr(torch, names[name])
