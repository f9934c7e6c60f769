"""Which attention kernels an engine runs: those of `paged_kernels`, and on a CPU the compiled ones."""

import torch

from engine.runtime.kernels import AttentionPlan, StepLayout, plan_attention
from engine.runtime.kv_pool import KVPool
from engine.runtime.native.compiling import why_unavailable
from engine.runtime.native.paged import NativePlan
from paged_kernels import BackendUnavailableError, Workspace, resolve_backend

NATIVE = "native"


def engine_backend(name: str, device: torch.device) -> str:
    """The backend for `name` on `device`: `auto` is `triton` on CUDA, `native` on a CPU with a compiler, else `torch`.

    Raises BackendUnavailableError where a backend that was asked for by name cannot run, and OptionError for a name
    that does not exist.
    """
    if name == NATIVE:
        reason = "runs on CPUs only" if device.type != "cpu" else why_unavailable()
        if reason:
            raise BackendUnavailableError(f"backend 'native': {reason}; use backend 'torch'")
        return NATIVE
    if name == "auto" and device.type == "cpu" and not why_unavailable():
        return NATIVE
    return resolve_backend(name, device)


def plan_step(layout: StepLayout, pool: KVPool, workspace: Workspace, backend: str) -> AttentionPlan:
    """The step's attention plan for a resolved backend."""
    if backend == NATIVE:
        return NativePlan(layout, pool, workspace)
    return plan_attention(layout, pool, workspace, backend)
