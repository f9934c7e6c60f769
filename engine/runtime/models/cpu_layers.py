"""Faster layers for CPUs: linear layers with packed weights, gated MLPs, and norms.

The code of transformers is not edited. A layer keeps its weights and gets another `forward`. Norms and MLPs are
recognised by their parts, not by the name of their class, and are replaced only if the new `forward` gives the same
results on random rows. The norm is one pass in C (`norm.c`). Linear weights are copied once into the order that the
CPU's matrix kernels read. The results are bit-identical in bfloat16; in float32 the order of the sums differs.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from typing import Any

import torch

from engine.runtime import huge_pages
from engine.runtime.attention.native.compile import library, why_unavailable

Forward = Callable[[torch.Tensor], torch.Tensor]
_MakeForward = Callable[[torch.nn.Module], tuple[int, Forward] | None]  # gives row width and forward

_BATCH = 64  # rows that the layout is chosen for; any number works
_FINE, _COARSE = 8, 64  # rows are padded to multiples of _FINE up to _BATCH rows, of _COARSE above
_FEW_ROWS = 4  # with fewer rows plain float32 is faster
_SMALL_WEIGHT_BYTES = 4 << 20  # about the cache of one core; a larger weight is read best in oneDNN's blocks
_SMALL_SHARE = 0.25  # of the free memory: larger packed copies are made only if the options say so
_DTYPES = (torch.float32, torch.bfloat16)
_NORM_FUNCTIONS = {torch.float32: "rms_norm_f32", torch.bfloat16: "rms_norm_bf16"}
_VECTOR = 16  # LANES of the C files

# The rows that a new forward is checked with. Small rows show another epsilon; random rows have a mean near 0.
_CHECK_ROWS = 7
_CHECK_SCALES = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1e-3, 30.0])[:, None]
_CHECK_MEANS = torch.tensor([0.0, 0.0, 0.0, 3.0, -3.0, 0.0, 0.0])[:, None]
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number: allows other rounding only


def can_pack(model: Any) -> bool:
    """Whether the weights are on a CPU with oneDNN, in a data type that it packs."""
    device = next(model.parameters()).device.type
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and has_onednn and model.dtype in _DTYPES


def is_small(model: Any) -> bool:
    """Whether a second copy of the linear weights takes less than a quarter of the free memory."""
    return _linear_bytes(model) < _SMALL_SHARE * _free_bytes()


def pack_linears(model: Any) -> int:
    """Pack every linear layer that is not packed yet. Returns the number of linear layers."""
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        if "forward" not in vars(layer):
            vars(layer)["forward"] = _packed_forward(layer)
    return len(layers)


def unpack_linears(model: Any) -> None:
    """Restore the original forward of every linear layer."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            vars(module).pop("forward", None)


def reordered(layer: torch.nn.Linear) -> torch.Tensor:
    """A copy of the layer's weight in the order that oneDNN's matrix product reads."""
    with torch.no_grad():
        weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _BATCH)
    return weight


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows `[rows, width]` of x, padded with zeros to one of few numbers of rows.

    oneDNN compiles a product for every number of rows, which takes about a millisecond, and keeps a thousand of them.
    Without padding, batches of all sizes would make it compile again and again.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count <= _FINE:
        return rows
    missing = -count % (_FINE if count <= _BATCH else _COARSE)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def unpad_rows(product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product without the padded rows, in the shape of x."""
    return product[: x.numel() // x.shape[-1]].view(*x.shape[:-1], product.shape[-1])


def _packed_forward(layer: torch.nn.Linear) -> Forward:
    is_float32 = layer.weight.dtype is torch.float32
    small = is_float32 and layer.weight.nbytes <= _SMALL_WEIGHT_BYTES
    return _transposed(layer) if small else _reordered(layer)


def _transposed(layer: torch.nn.Linear) -> Forward:
    own = layer.weight.detach().t()
    weight = huge_pages.empty(own.shape, own.dtype).copy_(own).t()
    run, bias = torch.nn.functional.linear, layer.bias
    return lambda x: run(x, weight, bias)


def _reordered(layer: torch.nn.Linear) -> Forward:
    weight = reordered(layer)
    run, plain = torch.ops.mkldnn._linear_pointwise.default, torch.nn.functional.linear
    few = _FEW_ROWS if layer.weight.dtype is torch.float32 else 0
    width, own, bias = layer.in_features, layer.weight, layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() < few * width:
            return plain(x, own, bias)
        return unpad_rows(run(pad_rows(x), weight, bias, "none", [], ""), x)

    return forward


def _linear_bytes(model: Any) -> int:
    return sum(module.weight.nbytes for module in model.modules() if type(module) is torch.nn.Linear)


def _free_bytes() -> int:
    """Memory that is available without swapping, from Linux's /proc/meminfo; 0 where there is none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def norm_forward(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """The row width and a forward in C for a module that looks like an RMS norm; None for other modules.

    None also if there are no compiled kernels, and for a norm that takes more than rows (a gate).
    """
    if len(signature(type(module).forward).parameters) != 2:  # self and the rows
        return None
    weight, eps = getattr(module, "weight", None), _epsilon(module)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        return None
    if weight.dtype not in _NORM_FUNCTIONS or len(weight) % _VECTOR or len(list(module.parameters())) > 1:
        return None
    if why_unavailable():
        return None
    run, width, own = _norm_function(_NORM_FUNCTIONS[weight.dtype]), len(weight), type(module).forward

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
def _norm_function(name: str) -> Any:
    function = getattr(library(), name)
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, integer, integer, ctypes.c_float, pointer]
    function.restype = None
    return function


def replace_layers(model: Any) -> int:
    """Replace norms and gated MLPs where the results stay the same, then pack all linear weights.

    Returns the number of replaced norms and MLPs. A second call changes nothing and returns 0.
    """
    replaced = [module for module in model.modules() if "forward" not in vars(module) and _replace(module)]
    pack_linears(model)
    return len(replaced)


def restore_layers(model: Any) -> None:
    """Restore the original forward of every layer."""
    for module in model.modules():
        vars(module).pop("forward", None)


@contextmanager
def original_layers(model: Any) -> Iterator[None]:
    """Restore the original layers inside of the context; the faster ones return at its end."""
    replaced = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]
    restore_layers(model)
    try:
        yield
    finally:
        for module, forward in replaced:
            vars(module)["forward"] = forward


def _replace(module: torch.nn.Module) -> bool:
    for make_forward in _MAKE_FORWARD:
        made = make_forward(module)
        if made is not None and _same_results(module, *made):
            vars(module)["forward"] = made[1]
            return True
    return False


def _same_results(module: torch.nn.Module, width: int, forward: Forward) -> bool:
    """Whether `forward` gives the module's results on random rows, within a tolerance of each row's largest number."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(1, _CHECK_ROWS, width, generator=generator) * _CHECK_SCALES + _CHECK_MEANS
    rows = rows.to(weight.dtype)
    with torch.inference_mode():
        own, ours = module(rows), forward(rows)
    if own.shape != ours.shape or own.dtype is not ours.dtype:
        return False
    allowed = _TOLERANCE[weight.dtype] * own.abs().amax(dim=-1)
    return bool(((own - ours).abs().amax(dim=-1) <= allowed).all())


def _gated_mlp(module: torch.nn.Module) -> tuple[int, Forward] | None:
    """A forward for down(silu(gate(x)) * up(x)) without new buffers; in bfloat16 oneDNN fuses it into the products."""
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
    """Compare the activation itself, because with small weights different activations give similar layer outputs."""
    if not isinstance(activation, torch.nn.Module):
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(activation(x), torch.nn.functional.silu(x), atol=1e-6))


def _fused_gate(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> Forward:
    """A forward in which oneDNN computes activation and product before it writes the results of a matrix product."""
    first, second = reordered(gate), reordered(up)
    run, combine = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = pad_rows(x)
        hidden = run(rows, first, gate.bias, "swish", [], "")
        return unpad_rows(down(combine(rows, hidden, second, up.bias, "mul")), x)

    return forward


_MAKE_FORWARD: tuple[_MakeForward, ...] = (norm_forward, _gated_mlp)
