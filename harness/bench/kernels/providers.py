"""Who is timed: the providers of `paged_kernels`, and the compiled decode that our engine runs on a CPU."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from harness.bench.kernels.names import NATIVE
from paged_kernels import Workspace
from paged_kernels.providers import Case, Provider, Run, UnsupportedCaseError, find_providers

if TYPE_CHECKING:
    from engine.runtime.attention.plans import StepLayout
    from engine.runtime.kv_pool import KVPool


def known_providers(function: str | None = None) -> dict[str, Provider]:
    """Every provider by name, whether or not it can run here; `function` adds the user's `module:function`.

    Raises `OptionError` where that function cannot be found.
    """
    return {**find_providers(function), NATIVE: Native()}


@dataclass(frozen=True)
class _Pool:
    """What an attention plan asks of the engine's pool."""

    block_size: int
    device: torch.device
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Native:
    """The engine's attention on a CPU: compiled decode that reads blocks where they lie, planned once a step."""

    name: str = NATIVE
    capturable: bool = False

    def available(self, device: torch.device) -> str | None:
        """It needs a CPU and a C compiler."""
        from engine.runtime.attention.native.compile import why_unavailable

        return "runs on CPUs only" if device.type != "cpu" else why_unavailable() or None

    def prepare(self, case: Case) -> Run:
        """The engine's own plan of the step; chunks are torch's, as in the engine."""
        from engine.runtime.attention.plans import NativePlan, serves

        if not case.decode:
            raise UnsupportedCaseError(f"{case.name} is no decode; the engine runs chunks by torch ('paged')")
        if not serves(case.q, case.key_cache, case.value_cache, case.scoring):
            raise UnsupportedCaseError(f"{case.name} is not what the compiled kernel computes")
        token_bytes = case.key_cache[0, 0].nbytes + case.value_cache[0, 0].nbytes
        pool = cast("KVPool", _Pool(case.block_size, case.device, token_bytes))
        plan = NativePlan(_layout(case), pool, Workspace())
        out = case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])
        run = partial(plan.attend, case.q, case.key_cache, case.value_cache, case.scoring, out)

        def call() -> torch.Tensor:
            run()
            return out

        return call


def _layout(case: Case) -> "StepLayout":
    """The batch as the engine lays it out: unused table entries are the null block."""
    from engine.runtime.attention.plans import StepLayout

    lengths = np.array(case.lengths, dtype=np.int64)
    table = case.block_table.numpy().astype(np.int64)
    needed = -(-lengths // case.block_size)
    used = np.arange(table.shape[1]) < needed[:, None]
    return StepLayout(np.where(used, table, 0), lengths, [])
