"""Faster layers for CPUs: linear layers with packed weights, gated MLPs, norms, and the rotation of q and k.

The code of transformers is not edited. A layer keeps its weights and gets another `forward`. Norms and MLPs are
recognised by their parts, not by the name of their class, and are replaced only if the new `forward` gives the same
results on random rows. The norm is one pass in C (`layer.c`). Linear weights are copied once into the order that the
CPU's matrix kernels read; oneDNN's results are bit-identical in bfloat16, and in float32 the order of the sums differs.
Where no library multiplies bfloat16 (AVX2), C does, several times faster than torch: it widens a copy of the weights
panel by panel, and its sums have an order of their own. The gate and the up layer of an MLP become one product, and C
computes silu(gate) * up of it in one pass. In float32 the many rows of a prefill are multiplied by the weights as they
are, unless a short probe finds that MKL does not use all of this CPU; another one asks whether C is faster for one row.
The middle of an MLP lies in memory that is kept, and glibc is told to keep what is freed: new memory of tens of
megabytes would be cleared by the operating system at every call.

transformers rotates q and k with a function of the model's file, in about ten passes over memory. An attention module
gets its own `forward` with another function in that place, in one pass of C. Everything else keeps its
function. The function is replaced only if both give the same numbers for random input.
"""

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from inspect import signature, unwrap
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch

from engine.runtime.kv_pool import host_memory
from paged_kernels.native import c_function, why_unavailable
from paged_kernels.native.attention import in_threads
from paged_kernels.private import has_packed_products, packed_product

log = logging.getLogger(__name__)
_linear = torch.nn.functional.linear
Forward = Callable[[torch.Tensor], torch.Tensor]


class Replacement(NamedTuple):
    """A new forward of a layer: the width of its rows, and the linear layers inside that it packs itself."""

    width: int
    forward: Forward
    packed: tuple[torch.nn.Linear, ...] = ()


_BATCH = 64  # rows that the layout is chosen for; any number works
_FINE, _COARSE = 8, 64  # rows are padded to multiples of _FINE up to _BATCH rows, of _COARSE above
_FEW_ROWS = 4  # with fewer rows plain float32 is faster, or our product in C
_MANY_ROWS = 256  # with more rows plain float32 is faster too, if torch has MKL that uses all of the CPU
_PROBE_ROUNDS = 7
_WINS = 1.1  # by so much another product must be faster than MKL's at all of these rows
_SMALL_WEIGHT_BYTES = 4 << 20  # about the cache of one core; a larger weight is read best in oneDNN's blocks
_SMALL_SHARE = 0.25  # of the free memory: larger packed copies are made only if the options say so
_KEPT_BYTES = 256 << 20  # of a block that glibc keeps for the next call, and of all that it keeps at the end
_NORM_FUNCTIONS = {torch.float32: "rms_norm_f32", torch.bfloat16: "rms_norm_bf16"}
_PRODUCT_FUNCTIONS = {torch.float32: "product_f32", torch.bfloat16: "product_bf16"}
_SILU_MUL_FUNCTIONS = {torch.float32: "silu_mul_f32", torch.bfloat16: "silu_mul_bf16"}
_VECTOR, _DEPTH = 16, 256  # LANES of the C files, at most; DEPTH of layer.c

# The rows that a new forward is checked with. Small rows show another epsilon; random rows have a mean near 0.
_CHECK_ROWS = 7
_CHECK_SCALES = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 1e-3, 30.0])[:, None]
_CHECK_MEANS = torch.tensor([0.0, 0.0, 0.0, 3.0, -3.0, 0.0, 0.0])[:, None]
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number: allows other rounding only


def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this data type are packed on this CPU: by oneDNN, or for our own product in bfloat16."""
    return _onednn_packs(dtype) or (dtype is torch.bfloat16 and not why_unavailable())


def _onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this data type here: bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and has_packed_products(dtype)


def packs_unasked(model: Any) -> bool:
    """Whether a model's weights are packed where no option says it. A CPU model whose weights are not is told why."""
    if next(model.parameters()).device.type != "cpu":
        return False
    weights = sum(module.weight.nbytes for module in model.modules() if type(module) is torch.nn.Linear)
    if not packs(model.dtype):
        reason = f"nothing here packs {str(model.dtype).removeprefix('torch.')}"
    elif weights >= _SMALL_SHARE * _free_bytes():
        reason = f"a copy of {weights / 1e9:.1f} GB is no small part of the free memory; pack_weights=True makes it"
    else:
        return True
    log.warning("products may be several times slower than packed weights make them: %s", reason)
    return False


def pack_linears(model: Any) -> int:
    """Pack every linear layer that is not packed yet and that can be. Returns the number of linear layers."""
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        if "forward" not in vars(layer) and packs(layer.weight.dtype):
            vars(layer)["forward"] = _packed_forward(layer)
    return len(layers)


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
    own, (few, many) = layer.weight, _packed_numbers(layer.weight)
    packed, plain = _product(own.detach(), layer.bias), partial(_linear, weight=own, bias=layer.bias)
    short = product_in_c(own.detach(), layer.bias) if few and c_wins() else plain
    return lambda x: (short if x.numel() < few else packed if x.numel() <= many else plain)(x)


def _packed_numbers(weight: torch.Tensor) -> tuple[float, float]:
    """From how many numbers to how many the product of rows is faster with a packed weight."""
    if weight.dtype is not torch.float32:
        return 0, math.inf
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    few = _FEW_ROWS if weight.nbytes > _SMALL_WEIGHT_BYTES or onednn_wins() or c_wins() else 0
    return few * weight.shape[1], _MANY_ROWS * weight.shape[1] if has_mkl and not onednn_wins() else math.inf


def onednn_wins() -> bool:
    """Whether oneDNN multiplies many float32 rows clearly faster than MKL.

    It does on CPUs on which MKL keeps to narrower instructions than they have, such as AMD's.
    """
    return _beats_mkl(_packed, (2816, 512), (64, 256), torch.get_num_threads())


def c_wins() -> bool:
    """Whether our C multiplies one float32 row, and two, clearly faster than MKL."""
    return not why_unavailable() and _beats_mkl(product_in_c, (1024, 512), (1, 2), torch.get_num_threads())


@cache
def _beats_mkl(
    make: Callable[..., Forward], shape: tuple[int, int], counts: tuple[int, ...], threads: int
) -> bool:
    """Whether the linear function of a weight is clearly faster than the plain one for all of these numbers of rows.

    It is measured once a process, in about 0.1 s; by the clock where `threads` work, for which this one waits.
    """
    weight, clock = torch.ones(shape), time.thread_time if threads == 1 else time.perf_counter
    ours, plain = make(weight, None), partial(_linear, weight=weight)

    def seconds(run: Forward, rows: torch.Tensor) -> float:
        start = clock()
        run(rows)
        return clock() - start

    for count in counts:
        rows = torch.ones(count, weight.shape[1])
        with torch.inference_mode():
            pairs = [(seconds(plain, rows), seconds(ours, rows)) for _ in range(1 + _PROBE_ROUNDS)]
        theirs, mine = (min(found) for found in zip(*pairs, strict=True))
        if theirs < _WINS * mine:
            return False
    return True


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Forward:
    """The linear function of a packed copy of a weight `[out, in]`."""
    if weight.dtype is torch.float32 and weight.nbytes <= _SMALL_WEIGHT_BYTES and not onednn_wins():
        turned = host_memory(weight.t().shape, weight.dtype).copy_(weight.t()).t()
        return lambda x: _linear(x, turned, bias)
    return (_packed if _onednn_packs(weight.dtype) else product_in_c)(weight, bias)


def product_in_c(weight: torch.Tensor, bias: torch.Tensor | None) -> Forward:
    """The linear function in C, of few rows in float32, and of any in bfloat16, where torch's may be far slower.

    Torch computes what does not fill vectors, and says what is wrong with rows of another type.
    """
    plain, (outs, width) = partial(_linear, weight=weight, bias=bias), weight.shape
    if outs % _VECTOR or width % _VECTOR:
        return plain
    panels = weight
    if weight.dtype is torch.bfloat16:
        panels = weight.view(-1, _VECTOR, width).transpose(1, 2).contiguous()
    run = c_function(_PRODUCT_FUNCTIONS[weight.dtype], "ppppiiiiipp")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not weight.dtype:
            return plain(x)
        rows, out, count = x.contiguous(), x.new_empty(*x.shape[:-1], outs), x.numel() // width
        given = [0 if tensor is None else tensor.data_ptr() for tensor in (rows, weight, panels, bias)]

        def part(start: int, end: int) -> None:
            scratch = _SCRATCH.take(count * (width + _VECTOR) + _DEPTH * _VECTOR)
            run(*given, count, width, outs, start, end, out.data_ptr(), scratch.data_ptr())

        in_threads(part, outs, _VECTOR)
        return out

    return forward


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> Forward:
    """The linear function in oneDNN of a packed copy of a weight."""
    run = packed_product(weight, _BATCH)
    return lambda x: unpad_rows(run(pad_rows(x), bias), x)


def _free_bytes() -> int:
    """Memory that is available without swapping, from Linux's /proc/meminfo; 0 where there is none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0


def norm_forward(module: torch.nn.Module) -> Replacement | None:
    """A forward in C for a module that looks like an RMS norm; None for other modules.

    None also if there are no compiled kernels, and for a norm that takes more than rows (a gate).
    """
    if len(signature(type(module).forward).parameters) != 2:  # self and the rows
        return None
    weight = getattr(module, "weight", None)
    named = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    eps = next((value for value in named if isinstance(value, float)), None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None or why_unavailable():
        return None
    if weight.dtype not in _NORM_FUNCTIONS or len(weight) % _VECTOR or len(list(module.parameters())) > 1:
        return None
    run, width, own = c_function(_NORM_FUNCTIONS[weight.dtype], "ppiifp"), len(weight), type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not weight.dtype:
            return own(module, x)  # type: ignore[no-any-return]
        rows = x.contiguous()
        out = torch.empty_like(rows)
        run(rows.data_ptr(), weight.data_ptr(), rows.numel() // width, width, eps, out.data_ptr())
        return out

    return Replacement(width, forward)


def replace_layers(model: Any) -> int:
    """Replace norms, gated MLPs and the rotation of attention where results stay the same, then pack linear weights.

    Returns the number of replaced modules. A second call changes nothing and returns 0.
    """
    _keep_freed_memory()
    replaced = [module for module in model.modules() if "forward" not in vars(module) and _replace(module)]
    pack_linears(model)
    return len(replaced)


@cache
def _keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next call; by itself it gives back those above 32 MB, at most."""
    libc = ctypes.CDLL(None)
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        if hasattr(libc, "mallopt"):  # another C library has none
            libc.mallopt(parameter, _KEPT_BYTES)


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
    attention = rotary_forward(module)
    if attention is not None:
        vars(module)["forward"] = attention
        return True
    made = norm_forward(module) or _gated_mlp(module)
    if made is None or not _same_results(module, made.width, made.forward):
        return False
    vars(module)["forward"] = made.forward
    for layer in made.packed:
        vars(layer)["forward"] = layer.forward
    return True


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


def _gated_mlp(module: torch.nn.Module) -> Replacement | None:
    """A forward for down(silu(gate(x)) * up(x)) with one product for gate and up."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(part) is torch.nn.Linear for part in parts):
        return None
    gate, up, down = (part for part in parts if isinstance(part, torch.nn.Linear))
    alike = gate.weight.shape == up.weight.shape and (gate.bias is None) == (up.bias is None)
    if not alike or not packs(gate.weight.dtype) or not _is_silu(getattr(module, "act_fn", None)):
        return None
    bias = None if gate.bias is None else torch.cat([gate.bias.detach(), up.bias.detach()])
    both = torch.cat([gate.weight.detach(), up.weight.detach()])
    product, (few, many) = _product(both, bias), _packed_numbers(both)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > many:
            return down(_gated_rows(x, gate, up))  # type: ignore[no-any-return]
        if x.numel() < few:
            return down(torch.nn.functional.silu(gate(x), inplace=True).mul_(up(x)))  # type: ignore[no-any-return]
        return down(silu_mul(product(x)))  # type: ignore[no-any-return]

    return Replacement(gate.in_features, forward, (gate, up))


class _Scratch(threading.local):
    """Memory in float32 that a thread keeps. It holds what one layer computes until the next call of `take`."""

    _held = torch.empty(0)

    def take(self, *shape: int) -> torch.Tensor:
        """A tensor with undefined content."""
        numbers = math.prod(shape)
        if self._held.numel() < numbers:
            self._held = torch.empty(0)  # free the old memory first
            with torch.inference_mode(False):  # else it could be written in this mode alone
                self._held = host_memory((numbers,), torch.float32)
        return self._held[:numbers].view(shape)


_SCRATCH = _Scratch()


def _gated_rows(x: torch.Tensor, gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.Tensor:
    """silu(gate(x)) * up(x) in float32, in memory that the next call overwrites."""
    rows = x.detach().reshape(-1, x.shape[-1])
    both = _SCRATCH.take(2, len(rows), gate.out_features)
    found, times = both[0], both[1]
    for layer, out in ((gate, found), (up, times)):
        weight, bias = layer.weight.detach().t(), cast("torch.Tensor | None", layer.bias)
        if bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(bias.detach(), rows, weight, out=out)
    if found.numel() % _VECTOR or why_unavailable():
        torch.nn.functional.silu(found, inplace=True).mul_(times)
    else:  # for C this is one row with the gate, then up; it writes where it has read
        run = c_function(_SILU_MUL_FUNCTIONS[found.dtype], "piip")
        run(both.data_ptr(), 1, found.numel(), found.data_ptr())
    return found.view(*x.shape[:-1], gate.out_features)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `[..., 2 * width]`, which has the gate, then up. Rounds after each of the two."""
    width = x.shape[-1] // 2
    if width % _VECTOR or why_unavailable():
        gate, up = torch.split(x, width, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)
    rows = x.contiguous()
    out = x.new_empty(*x.shape[:-1], width)
    run = c_function(_SILU_MUL_FUNCTIONS[x.dtype], "piip")
    run(rows.data_ptr(), rows.numel() // (2 * width), width, out.data_ptr())
    return out


def _is_silu(activation: Any) -> bool:
    """Compare the activation itself, because with small weights different activations give similar layer outputs."""
    if not isinstance(activation, torch.nn.Module):
        return False
    x = torch.linspace(-8, 8, 97)
    return bool(torch.allclose(activation(x), torch.nn.functional.silu(x), atol=1e-6))


Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_ROTATION = "apply_rotary_pos_emb"  # what the files of transformers call it
_ROTATION_PARAMETERS = ["q", "k", "cos", "sin", "unsqueeze_dim"]
_ROTATE_FUNCTIONS = {torch.float32: "rotate_f32", torch.bfloat16: "rotate_bf16"}
_ROTATION_WIDTH = 32  # heads have a multiple of this width: two halves of LANES, see the C files
# C may round once where torch rounds twice in float32
_ROTATE_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.0}


def rotary_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """A forward of an attention module that rotates in C; None if it does not rotate, or not by this rule."""
    own = unwrap(type(module).forward, stop=_is_whole)
    if not isinstance(own, FunctionType) or _ROTATION not in own.__code__.co_names or why_unavailable():
        return None
    theirs = own.__globals__.get(_ROTATION)
    if not isinstance(theirs, FunctionType):
        return None
    dtypes = _equal_dtypes(theirs)
    if not dtypes or next(module.parameters()).dtype not in dtypes:
        return None

    def rotation(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if rest or more or q.dtype not in dtypes or not (_fits(q, cos, sin) and _fits(k, cos, sin)):
            return theirs(q, k, cos, sin, *rest, **more)  # type: ignore[no-any-return]
        cos, sin = cos.contiguous(), sin.contiguous()
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    names = {**own.__globals__, _ROTATION: rotation}
    copy = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return MethodType(copy, module)


def _is_whole(function: Any) -> bool:
    """Not what transformers wraps around a function that takes the old name of an argument too."""
    return getattr(function, "__globals__", {}).get("__name__") != "transformers.utils.deprecation"


def _fits(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether C can rotate heads `[1, heads, tokens, width]` by cos and sin `[1, tokens, width]`."""
    return (
        x.dim() == 4
        and cos.shape == sin.shape == (1, *x.shape[2:])
        and x.shape[0] == 1
        and x.dtype is cos.dtype is sin.dtype
        and x.shape[3] % _ROTATION_WIDTH == 0
        and x.stride(3) == 1
    )


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Heads `[1, heads, tokens, width]`; they lie in memory token by token, as attention stores and reads them."""
    _, heads, tokens, width = x.shape
    out = x.new_empty(1, tokens, heads, width)
    sizes = (tokens, heads, width // 2, x.stride(2), x.stride(1))
    rotate = c_function(_ROTATE_FUNCTIONS[x.dtype], "pppiiiiip")
    rotate(x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes, out.data_ptr())
    return out.transpose(1, 2)


@cache
def _equal_dtypes(theirs: FunctionType) -> frozenset[torch.dtype]:
    """The data types in which a function of transformers gives the numbers of ours."""
    if list(signature(theirs).parameters) != _ROTATION_PARAMETERS:
        return frozenset()
    return frozenset(dtype for dtype in _ROTATE_FUNCTIONS if _is_equal(theirs, dtype))


def _is_equal(theirs: Rotation, dtype: torch.dtype) -> bool:
    """cos and sin are random too, so that their halves differ and no other rule gives the same."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 3, 5, 64), (1, 2, 5, 64), (1, 5, 64), (1, 5, 64))
    q, k, cos, sin = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    with torch.inference_mode():
        try:
            wanted = theirs(q, k, cos, sin)
        except RuntimeError:  # it takes cos and sin of another width
            return False
        found = (_rotated(q, cos, sin), _rotated(k, cos, sin))
    return all(
        one.shape == other.shape
        and one.dtype is other.dtype
        and torch.allclose(one, other, rtol=0, atol=_ROTATE_TOLERANCE[dtype])
        for one, other in zip(found, wanted, strict=True)
    )
