"""Chooses the attention backend: Triton on CUDA, compiled C on a CPU, else torch.

A backend that is named in the options and cannot run here is refused, and so is a KV data type that it cannot read.
"""

from collections.abc import Iterable

import torch

from engine.runtime.attention.metadata import (
    AttentionMetadata,
    NativeMetadata,
    StepLayout,
    TorchMetadata,
    TritonMetadata,
)
from engine.runtime.attention.native import why_unavailable
from engine.runtime.errors import ModelError
from engine.runtime.group_pool import CacheTensors
from engine.runtime.options import KVDtype
from paged_kernels import BackendUnavailableError, Workspace, choose_backend, resolve_backend
from paged_kernels.backends import FP8_CAPABILITY, Demand

NATIVE = "native"


def engine_backend(name: str, device: torch.device, demands: Iterable[Demand] = ()) -> str:
    """The backend for `name` on `device`. `auto` is `triton` on CUDA, `native` on a CPU with a compiler, else `torch`.

    Where the Triton kernels do not serve one of `demands`, those of a model's layers, `auto` is `torch` and the log
    says why. Raises BackendUnavailableError if the named backend cannot run here, or not these layers, and OptionError
    for an unknown name.
    """
    if name == NATIVE:
        reason = "runs on CPUs only" if device.type != "cpu" else why_unavailable()
        if reason:
            raise BackendUnavailableError(f"backend 'native': {reason}; use backend 'torch'")
        return NATIVE
    if name == "auto" and device.type == "cpu" and not why_unavailable():
        return NATIVE
    choices = (choose_backend(name, device, demand).backend for demand in demands)
    return next((backend for backend in choices if backend != "triton"), resolve_backend(name, device))


def attention_metadata(
    layout: StepLayout, pool: CacheTensors, workspace: Workspace, backend: str
) -> AttentionMetadata:
    """The attention metadata of a step, for a backend that `engine_backend` returned."""
    if backend == NATIVE:
        return NativeMetadata(layout, pool, workspace)
    return (TritonMetadata if backend == "triton" else TorchMetadata)(layout, pool, workspace)


def check_kv_dtype(name: KVDtype | str, device: torch.device, backend: str = "auto") -> None:
    """Raise ModelError if the device, or the named backend, cannot read 8-bit K and V.

    CUDA devices can from sm_89 on; the compiled CPU kernels cannot.
    """
    if name == KVDtype.fp8_e4m3 and backend == "native":
        raise ModelError("kv_dtype fp8_e4m3 is not read by backend native; use backend torch, or auto")
    if name != KVDtype.fp8_e4m3 or device.type != "cuda":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise ModelError(
            f"kv_dtype fp8_e4m3 needs sm_{FP8_CAPABILITY[0]}{FP8_CAPABILITY[1]} or newer, and "
            f"{torch.cuda.get_device_name(device)} is sm_{found[0]}{found[1]}; use kv_dtype model"
        )
