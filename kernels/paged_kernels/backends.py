"""Which implementations there are, and which of them can run here."""

import torch

from paged_kernels.errors import BackendUnavailableError, KernelError

BACKENDS = ("torch", "torch_ref", "triton")


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The backend to run for `name` on `device`; `auto` chooses, any other name is taken at its word.

    `torch` is the fast path, `torch_ref` the readable reference. Raises `BackendUnavailableError` where a
    backend that was asked for by name cannot run, and `KernelError` for a name that does not exist.
    """
    kind = torch.device(device).type
    if name == "auto":
        return "torch"
    if name not in BACKENDS:
        raise KernelError(f"backend {name!r} does not exist; choose auto, {', '.join(BACKENDS)}")
    if name == "triton" and kind != "cuda":
        raise BackendUnavailableError(
            f"backend 'triton' compiles for a CUDA device and this run is on {kind!r}; use backend 'torch'"
        )
    if name == "triton":
        raise BackendUnavailableError(
            "backend 'triton' has no kernels in this version of paged_kernels; use backend 'torch'"
        )
    return name
