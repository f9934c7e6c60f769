"""Faster layers for CPUs: linear layers with packed weights, gated MLPs, and norms.

The code of transformers is not edited. A layer keeps its weights and gets another `forward`. Norms and MLPs are
recognised by their parts, not by the name of their class, and are replaced only if the new `forward` gives the same
answer on random rows. The norm is one pass in C (`norm.c`). Linear weights are copied once into the order that the
CPU's matrix kernels read. Their results are bit-identical in bfloat16; in float32 the sums run in another order.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from engine.runtime import huge_pages
from engine.runtime.attention.native.compile import library, why_unavailable

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


_NAMES = {torch.float32: "rms_norm_f32", torch.bfloat16: "rms_norm_bf16"}
_LANES = 16  # as in the C files


def norm_forward(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """The width of a norm's rows and a forward for it, if it looks like one and there are compiled kernels."""
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return None
    if weight.dtype not in _NAMES or len(weight) % _LANES or len(list(module.parameters())) > 1:
        return None
    if why_unavailable():
        return None
    run, width, own = _kernel(_NAMES[weight.dtype]), len(weight), type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not weight.dtype:
            return own(module, x)  # type: ignore[no-any-return]
        rows = x.contiguous()
        out = torch.empty_like(rows)
        run(rows.data_ptr(), weight.data_ptr(), rows.numel() // width, width, eps, out.data_ptr())
        return out

    return width, forward


def _epsilon(module: torch.nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


@cache
def _kernel(name: str) -> Any:
    function = getattr(library(), name)
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, whole, whole, ctypes.c_float, pointer]
    function.restype = None
    return function


_ROWS = 7  # of the proof
_SCALES = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1e-3, 30.0])[:, None]  # small rows show another epsilon
_MEANS = torch.tensor([0.0, 0.0, 0.0, 3.0, -3.0, 0.0, 0.0])[
    :, None
]  # random rows have next to none: one is given
_TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # of the largest number: another rounding, not another rule
_Maker = Callable[[torch.nn.Module], tuple[int, Forward] | None]


def adopt_layers(model: Any) -> int:
    """Adopt what qualifies, then pack all linear weights; returns how many layers were adopted. Twice is once."""
    adopted = [module for module in model.modules() if "forward" not in vars(module) and _adopt(module)]
    pack_linears(model)
    return len(adopted)


def give_back_layers(model: Any) -> None:
    """Give every layer its own forward back."""
    for module in model.modules():
        vars(module).pop("forward", None)


@contextmanager
def own_layers(model: Any) -> Iterator[None]:
    """The model as transformers computes it, for a while."""
    adopted = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    give_back_layers(model)
    try:
        yield
    finally:
        for module, forward in adopted:
            vars(module)["forward"] = forward


def _adopt(module: torch.nn.Module) -> bool:
    for maker in _MAKERS:
        made = maker(module)
        if made is not None and _same_answer(module, *made):
            vars(module)["forward"] = made[1]
            return True
    return False


def _same_answer(module: torch.nn.Module, width: int, forward: Forward) -> bool:
    """Whether `forward` does to random rows, each by its own largest number, what the module does."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, _ROWS, width, generator=generator) * _SCALES + _MEANS
    rows = rows.to(weight.dtype)
    with torch.inference_mode():
        own, ours = module(rows), forward(rows)
    if own.shape != ours.shape or own.dtype is not ours.dtype:
        return False
    least = _TOLERANCE[weight.dtype] * own.abs().amax(dim=-1)
    return bool(((own - ours).abs().amax(dim=-1) <= least).all())


def _gated_mlp(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """down(silu(gate(x)) * up(x)): without fresh buffers, in bfloat16 within the products themselves."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is torch.nn.Linear for part in parts):
        return None
    if not _is_silu(getattr(module, "act_fn", None)):
        return None
    gate, up, down = (part for part in parts if isinstance(part, torch.nn.Linear))
    if gate.weight.dtype is torch.bfloat16:
        return gate.in_features, _fused_gate(gate, up, down)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(gate(x), inplace=True)
        return down(hidden.mul_(up(x)))  # type: ignore[no-any-return]

    return gate.in_features, forward


def _is_silu(activation: Any) -> bool:
    """Asked directly: in the answer of a layer with small weights one activation looks like another."""
    if not isinstance(activation, torch.nn.Module):
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(activation(x), torch.nn.functional.silu(x), atol=1e-6))


def _fused_gate(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> Forward:
    """Activation and product are done by oneDNN before it writes a result."""
    first, second = reordered(gate), reordered(up)
    run, combine = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = in_step(x)
        hidden = run(rows, first, gate.bias, "swish", [], "")
        return out_of_step(down(combine(rows, hidden, second, up.bias, "mul")), x)

    return forward


_MAKERS: tuple[_Maker, ...] = (norm_forward, _gated_mlp)
