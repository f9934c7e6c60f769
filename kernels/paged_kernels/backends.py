"""The backends: which exist, which can run here, and why a call does not run on the fastest of them."""

import importlib.util
import logging
import math
import os
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from paged_kernels import native
from paged_kernels.arguments import BackendUnavailableError, OptionError, Scoring

BACKENDS = ("native", "torch", "torch_ref", "triton")
PREFILL_KERNELS = ("auto", "plain", "hopper")  # "hopper" has never run on a GPU: it is only chosen by name
HOPPER = (9, 0)  # its compute capability, the only one with the matrix instructions of that kernel (wgmma)
MAX_HEAD_DIM = 256
MAX_GROUP = 128
LANES = 16  # numbers of a vector of the C kernels, at most
FP8_CAPABILITY = (8, 9)  # the first architecture with instructions that widen 8-bit floats
log = logging.getLogger(__name__)


class BackendChoice(NamedTuple):
    """The backend that runs a call. Where `auto` fell back to torch, `reason` says why ("" otherwise)."""

    backend: str
    reason: str = ""


class Demand(NamedTuple):
    """The properties of a call that decide which kernels can serve it."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    group: int
    head_dim: int  # the wider of K's and V's
    aligned: bool = True  # addresses in whole 16 bytes, strides in whole 16 elements
    paired: bool = True  # caches that can be read in pairs of 8-bit numbers: even widths and strides
    divisor: int = 0  # of both widths, the largest; 0: `head_dim`
    contiguous: bool = True  # caches
    options: tuple[str, ...] = ()  # what is asked beside a window: softcap, sinks, ALiBi, LSE, cascade

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scoring: Scoring | None = None,
    ) -> "Demand":
        """The demand of an attention call, or of a write to the cache (q is then the rows to write)."""
        dk, dv, caches = key_cache.shape[3], value_cache.shape[3], (key_cache, value_cache)
        aligned = all(tensor.data_ptr() % 16 == 0 and _whole(tensor) for tensor in (q, *caches))
        group = q.shape[1] // key_cache.shape[2]
        return cls(
            q.dtype, key_cache.dtype, group, max(dk, dv), aligned, all(map(_even, caches)),
            divisor=math.gcd(dk, dv), contiguous=all(cache.is_contiguous() for cache in caches),
            options=scoring.options if scoring else (),
        )  # fmt: skip


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The backend to run for `name` on `device`: `auto` is `triton` on CUDA, `native` on a CPU, or else `torch`.

    `triton` are the kernels for CUDA devices and `native` those in C for CPUs, where a compiler is; `torch` serves any
    device, and `torch_ref` is the readable reference.
    Raises `BackendUnavailableError` if a backend chosen by name cannot run, and `OptionError` for an unknown name.
    """
    return choose_backend(name, device).backend


def choose_backend(name: str, device: torch.device | str, demand: Demand | None = None) -> BackendChoice:
    """As `resolve_backend`, but also checks what the call demands, and gives the reason of a fallback."""
    if name not in ("auto", *BACKENDS):
        raise OptionError(f"backend {name!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    device = torch.device(device)
    wanted = name if name != "auto" else "native" if device.type == "cpu" else "triton"
    if wanted not in ("native", "triton"):
        return BackendChoice(wanted)
    reason = unavailable(wanted, device)
    if demand and not reason:
        reason = unserved_by_native(demand) if wanted == "native" else _unserved(device, demand)
    if not reason:
        return BackendChoice(wanted)
    if name == wanted:
        raise BackendUnavailableError(f"backend {wanted!r} {reason}; use backend 'torch'")
    _say_once(wanted, reason)
    return BackendChoice("torch", reason)


def choose_for_layers(name: str, device: torch.device | str, demands: Iterable[Demand]) -> BackendChoice:
    """The backend of a model whose layers have these demands, and why some of them run on torch ("" where none does).

    The metadata of `native` leaves single layers to torch. Triton serves all layers or, with `auto`, none. Raises as
    `choose_backend` where a named backend does not serve a layer.
    """
    choices = [choose_backend(name, device, demand) for demand in demands] or [choose_backend(name, device)]
    reason = next((choice.reason for choice in choices if choice.reason), "")
    found = {choice.backend for choice in choices}
    return BackendChoice("native" if "native" in found else "torch" if reason else found.pop(), reason)


@cache
def _say_once(wanted: str, reason: str) -> None:
    log.info("attention runs on torch: backend %s %s", wanted, reason)


def unavailable(name: str, device: torch.device) -> str:
    """Why `native` or `triton` cannot run on a device, whatever the call, or ""."""
    return _no_native(device) if name == "native" else _no_triton(device)


def _no_native(device: torch.device) -> str:
    """Why the C kernels cannot run on a device, or ""."""
    if device.type != "cpu":
        return f"runs on CPUs only, and this run is on {device.type!r}"
    missing = native.why_unavailable()
    return f"needs compiled kernels: {missing}" if missing else ""


def unserved_by_native(demand: Demand) -> str:
    """Why the C kernels do not serve a call, or ""."""
    if demand.options:
        return f"does not know {', '.join(demand.options)}"
    if demand.dtype not in (torch.float32, torch.bfloat16) or demand.kv_dtype != demand.dtype:
        return f"serves float32 and bfloat16 queries and caches of one dtype, not {demand.dtype} and {demand.kv_dtype}"
    divisor = demand.divisor or demand.head_dim
    if divisor % LANES or not demand.contiguous:
        return f"reads contiguous caches whose widths are multiples of {LANES}"
    return ""


def check_prefill_kernel(
    name: str,
    backend: str,
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scoring: Scoring,
) -> None:
    """Refuse a prefill kernel that cannot run the call. `backend` is the one that was chosen.

    Raises:
        OptionError: there is no kernel of that name, or it does not serve the call.
        BackendUnavailableError: the device or the backend has no such kernel.
    """
    if name not in PREFILL_KERNELS:
        raise OptionError(f"prefill_kernel {name!r} does not exist; choose {', '.join(PREFILL_KERNELS)}")
    if name != "hopper":
        return
    reason = no_hopper(q.device)
    if reason or backend != "triton":
        reason = reason or f"is a kernel of backend 'triton', and this call runs on {backend!r}"
        raise BackendUnavailableError(f"prefill_kernel 'hopper' {reason}; use prefill_kernel='plain'")
    if reason := _not_on_hopper(q, key_cache, value_cache, scoring):
        raise OptionError(f"prefill_kernel 'hopper' {reason}; use prefill_kernel='plain'")


def no_hopper(device: torch.device) -> str:
    """The reason why the prefill kernel for Hopper cannot run on a device, or ""."""
    if device.type != "cuda":
        return f"is compiled for GPUs of compute capability 9.0 (H100, H200, GH200), and this run is on {device.type!r}"
    found = torch.cuda.get_device_capability(device)
    if found != HOPPER:
        return f"is compiled for compute capability 9.0 (H100, H200, GH200), and this GPU has {found[0]}.{found[1]}"
    return ""


def _not_on_hopper(
    q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, scoring: Scoring
) -> str:
    dims, dtypes = {key_cache.shape[3], value_cache.shape[3]}, {q.dtype, key_cache.dtype, value_cache.dtype}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16}:
        return f"serves bfloat16 or float16 queries and caches of one dtype, not {', '.join(sorted(map(str, dtypes)))}"
    if len(dims) > 1 or not dims <= {64, 128}:
        return f"serves K and V of head_dim 64 or of 128, not {' and '.join(map(str, sorted(dims)))}"
    if not scoring.scale * scoring.k_scale > 0:
        return f"needs a scale above 0, not {scoring.scale * scoring.k_scale}"
    named = {"window": scoring.window > 0, "softcap": scoring.softcap > 0}
    named |= {"sinks": scoring.sinks is not None, "alibi": scoring.alibi is not None}
    asked = [option for option, on in named.items() if on]
    return f"does not know {', '.join(asked)}" if asked else ""


def _no_triton(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package (pip install triton)"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"compiles for a CUDA device and this run is on {device.type!r} (TRITON_INTERPRET=1 steps through the "
            "kernels on the CPU, thousands of times slower)"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"is tuned for sm_80 and newer, and {torch.cuda.get_device_name(device)} is older"
    return ""


def _unserved(device: torch.device, demand: Demand) -> str:
    if torch.float64 in (demand.dtype, demand.kv_dtype):
        return "knows float16, bfloat16, float32 and fp8 caches, not float64"
    if demand.head_dim > MAX_HEAD_DIM:
        return f"serves a head_dim up to {MAX_HEAD_DIM}, not {demand.head_dim}"
    if demand.group > MAX_GROUP:
        return f"serves up to {MAX_GROUP} query heads per KV head, not {demand.group}"
    if demand.kv_dtype.itemsize == 1 and demand.dtype != torch.float32 and not demand.paired:
        return "reads 8-bit caches in pairs and needs an even head_dim and even strides"
    if device.type != "cuda":
        return ""
    if demand.kv_dtype.itemsize == 1 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return f"needs sm_89 or newer for a cache of {demand.kv_dtype}"
    if not demand.aligned:
        return (
            "reads rows in wide loads and needs addresses that are multiples of 16 bytes and "
            "strides that are multiples of 16 elements (head_dim 64, 80, 96 ...)"
        )
    return ""


def _whole(tensor: torch.Tensor) -> bool:
    """Whether every stride but the last is a multiple of 16 elements: the compiled kernels rely on it."""
    pairs = zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    return all(stride % 16 == 0 for stride, size in pairs if size > 1)


def _even(cache: torch.Tensor) -> bool:
    """Whether pairs of numbers of a row lie at even places."""
    numbers = (*cache.stride()[:-1], cache.shape[-1], cache.storage_offset())
    return all(number % 2 == 0 for number in numbers)
