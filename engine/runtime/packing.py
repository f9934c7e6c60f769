"""Linear weights in the order that the CPU's matrix kernels read them, laid out once instead of in every call.

The layers stay transformers' own; only their `forward` goes through another product: oneDNN's packed one (what torch's
compiler does when it freezes a model), or for small float32 weights a plain one over the transposed copy, which runs
at four fifths of the time. In bfloat16 the results are the same to the bit; in float32 sums run in another order.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.runtime import huge_pages

Forward = Callable[[torch.Tensor], torch.Tensor]

_BATCH = 64  # rows that the layout is chosen for; any number works
_FINE, _COARSE = 8, 64  # rows are filled up to multiples of these, up to _BATCH and beyond
_FEW_ROWS = 4  # below, float32 is faster as it is
_SMALL_WEIGHT_BYTES = (
    4 << 20
)  # about what a core's own cache holds; a larger one is read best in oneDNN's blocks
_SMALL_SHARE = 0.25  # of the memory that is free: packed copies above that are made on demand only
_DTYPES = (torch.float32, torch.bfloat16)


def can_pack(model: Any) -> bool:
    """Whether the model's weights lie on a CPU that has oneDNN, in a type that it packs."""
    device = next(model.parameters()).device.type
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and has_onednn and model.dtype in _DTYPES


def is_small(model: Any) -> bool:
    """Whether a second copy of the weights is small beside the memory that is free."""
    return _linear_bytes(model) < _SMALL_SHARE * _free_bytes()


def pack_linears(model: Any) -> int:
    """Pack every linear layer that is not packed yet; returns how many there are."""
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        if "forward" not in vars(layer):
            vars(layer)["forward"] = _faster(layer)
    return len(layers)


def unpack_linears(model: Any) -> None:
    """Give every linear layer its own forward back."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            vars(module).pop("forward", None)


def reordered(layer: torch.nn.Linear) -> torch.Tensor:
    """A copy of the layer's weight as oneDNN's product wants it."""
    with torch.no_grad():
        weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _BATCH)
    return weight


def in_step(x: torch.Tensor) -> torch.Tensor:
    """Rows `[rows, width]` of x, filled up with zeros to a number of rows that comes often.

    oneDNN compiles a product for every number of rows that it meets, at about a millisecond, and keeps a thousand of
    them: batches of all sizes would make it compile for ever.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count <= _FINE:
        return rows
    missing = -count % (_FINE if count <= _BATCH else _COARSE)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def out_of_step(product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The rows that answer x, in its shape."""
    return product[: x.numel() // x.shape[-1]].view(*x.shape[:-1], product.shape[-1])


def _faster(layer: torch.nn.Linear) -> Forward:
    exact = layer.weight.dtype is torch.float32
    return _transposed(layer) if exact and layer.weight.nbytes <= _SMALL_WEIGHT_BYTES else _packed(layer)


def _transposed(layer: torch.nn.Linear) -> Forward:
    own = layer.weight.detach().t()
    weight = huge_pages.empty(own.shape, own.dtype).copy_(own).t()
    run, bias = torch.nn.functional.linear, layer.bias
    return lambda x: run(x, weight, bias)


def _packed(layer: torch.nn.Linear) -> Forward:
    weight = reordered(layer)
    run, plain = torch.ops.mkldnn._linear_pointwise.default, torch.nn.functional.linear
    few = _FEW_ROWS if layer.weight.dtype is torch.float32 else 0
    width, own, bias = layer.in_features, layer.weight, layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < few * width:
            return plain(x, own, bias)
        return out_of_step(run(in_step(x), weight, bias, "none", [], ""), x)

    return forward


def _linear_bytes(model: Any) -> int:
    return sum(module.weight.nbytes for module in model.modules() if type(module) is torch.nn.Linear)


def _free_bytes() -> int:
    """Memory that can be had without swapping, as Linux tells it; 0 where nobody says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
