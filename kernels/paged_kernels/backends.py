"""Which implementations there are, and which of them can run here."""

import importlib.util
import os

import torch

from paged_kernels.errors import BackendUnavailableError, KernelError

BACKENDS = ("torch", "torch_ref", "triton")


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The backend to run for `name` on `device`; `auto` is `torch`, any other name is taken at its word.

    `torch` is the fast path of any device, `torch_ref` the readable reference, `triton` the kernels for CUDA devices.
    Raises `BackendUnavailableError` where a backend that was asked for by name cannot run, and `KernelError` for a
    name that does not exist.
    """
    if name == "auto":
        return "torch"
    if name not in BACKENDS:
        raise KernelError(f"backend {name!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    if name == "triton":
        _check_triton(torch.device(device).type)
    return name


def _check_triton(kind: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailableError("backend 'triton' needs the triton package; install pagetwin[gpu]")
    if kind != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailableError(
            f"backend 'triton' compiles for a CUDA device and this run is on {kind!r}; use backend 'torch' "
            "(or set TRITON_INTERPRET=1 to step through the kernels on the CPU, thousands of times slower)"
        )
