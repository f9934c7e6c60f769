"""Our own attention as providers: as an engine calls it, over contiguous KV, and with shared prefixes read once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from paged_kernels.attention import prepare_native, prepare_torch, run_triton
from paged_kernels.backends import (
    Demand,
    check_prefill_kernel,
    choose_backend,
    no_hopper,
    unavailable,
    unserved_by_native,
)
from paged_kernels.cascade_groups import (
    CascadeCost,
    CascadeGroups,
    cost_of,
    find_cascade_groups,
    rows_per_tile,
)
from paged_kernels.checks import OptionError
from paged_kernels.memory import PagedBatch, Workspace
from paged_kernels.providers.case import Case, Everywhere, Run, UnsupportedCaseError, contiguous_kv
from paged_kernels.torch import attention as torch_attention

# With this cost every shared block is read once. It measures the crossover that the cost rule is compared with.
ALWAYS = CascadeCost(memory_bytes_per_s=1.0, cache_bytes_per_s=1.0, cache_bytes=0, overhead_s=0.0)


@dataclass(frozen=True, slots=True)
class Paged(Everywhere):
    """Our paged attention: Triton on a CUDA device, torch elsewhere."""

    name: str = "paged"

    def prepare(self, case: Case) -> Run:
        """Prepare as an engine does, once per step for all layers."""
        batch, out, workspace = batch_of(case), output_of(case), Workspace()
        if backend_of(case) == "triton":
            from paged_kernels.triton.decode import PartsOfStep

            splits = splits_of(case) if case.decode else None
            arguments = (batch, case.scoring, out, None, splits, workspace, PartsOfStep())
            return returning(out, partial(run_triton, *arguments))
        return returning(out, prepare_torch(batch, case.scoring, out, None, workspace))


@dataclass(frozen=True, slots=True)
class HopperPrefill(Everywhere):
    """Our prefill with the kernel for H100 and H200, which no GPU has run yet."""

    name: str = "paged-hopper"

    def available(self, device: torch.device) -> str | None:
        """It runs on compute capability 9.0 alone."""
        return no_hopper(device) or None

    def prepare(self, case: Case) -> Run:
        """The same preparation as `Paged`, with the other kernel."""
        if case.decode:
            raise UnsupportedCaseError(f"{case.name} is a decode; this kernel computes prefills")
        try:
            inputs = (case.q, case.key_cache, case.value_cache)
            check_prefill_kernel("hopper", backend_of(case), *inputs, case.scoring)
        except OptionError as error:
            raise UnsupportedCaseError(f"{case.name}: {error}") from error
        out = output_of(case)
        arguments = (batch_of(case), case.scoring, out, None, None, None)
        return returning(out, partial(run_triton, *arguments, prefill_kernel="hopper"))


@dataclass(frozen=True, slots=True)
class ContiguousDecode(Everywhere):
    """The Triton decode over contiguous KV: the same code with plain addressing, so the difference is paging."""

    name: str = "contiguous"

    def available(self, device: torch.device) -> str | None:
        """It is a Triton kernel."""
        reason = unavailable("triton", device) or ("" if device.type == "cuda" else "needs a CUDA device")
        return f"is the Triton decode without a block table, which {reason}" if reason else None

    def prepare(self, case: Case) -> Run:
        """Copy each sequence's KV into contiguous memory."""
        if not case.decode:
            why = "is no decode; only the decode kernel has a contiguous form"
            raise UnsupportedCaseError(f"{case.name} {why}")
        if backend_of(case) != "triton":
            raise UnsupportedCaseError(f"{case.name} is served by torch, whose decode has no contiguous form")
        from paged_kernels.triton.decode import PartsOfStep, run_contiguous_decode

        keys, values = contiguous_kv(case)
        out, splits = output_of(case), splits_of(case)
        arguments = (case.q, keys, values, case.seq_lens, case.scoring, out, None, splits)
        return returning(
            out, partial(run_contiguous_decode, *arguments, workspace=Workspace(), parts=PartsOfStep())
        )


@dataclass(frozen=True, slots=True)
class Cascade(Everywhere):
    """Our decode with shared prefixes read once, if the cost rule says so (`always`: whenever blocks are shared)."""

    name: str = "cascade"
    always: bool = False

    def prepare(self, case: Case) -> Run:
        """Divide the batch into groups. If no group saves time, run the flat decode."""
        if not case.decode or not case.shared_tokens:
            raise UnsupportedCaseError(f"{case.name} shares no prefix between decode rows")
        groups = self._groups(case)
        if groups is None:
            return Paged().prepare(case)
        out = output_of(case)
        shared, lens, table, lengths, ids = (
            torch.from_numpy(values.astype(np.int32)).to(case.device)
            for values in (
                groups.shared_tables,
                groups.prefix_lens,
                groups.suffix_tables,
                groups.suffix_lens,
                groups.group_ids,
            )
        )
        caches, workspace = (case.q, case.key_cache, case.value_cache), Workspace()
        if backend_of(case) == "triton":
            from paged_kernels.triton.cascade import run_cascade, sort_groups

            prefixes = sort_groups(shared, lens, ids, lengths)
            arguments = (*caches, prefixes, table, lengths, case.scoring, out)
            return returning(out, partial(run_cascade, *arguments, workspace=workspace))
        sizes = {"block_size": case.block_size, "token_bytes": case.token_bytes}
        metadata = torch_attention.cascade_metadata(shared, lens, table, lengths, ids, **sizes)
        torch_arguments = (*caches, metadata, case.scoring, out, None, workspace)
        return returning(out, partial(torch_attention.run_cascade, *torch_arguments))

    def _groups(self, case: Case) -> CascadeGroups | None:
        return find_cascade_groups(
            case.block_table.cpu().numpy().astype(np.int64),
            np.array(case.lengths),
            case.block_size,
            token_bytes=case.token_bytes,
            rows_per_tile=rows_per_tile(case.heads // case.kv_heads, case.device),
            cost=ALWAYS if self.always else cost_of(case.device),
        )


@dataclass(frozen=True, slots=True)
class Native:
    """Our C kernels, which the engine runs on a CPU."""

    name: str = "native"
    capturable: bool = False

    def available(self, device: torch.device) -> str | None:
        """It needs a CPU and a C compiler."""
        return unavailable("native", device) or None

    def prepare(self, case: Case) -> Run:
        """Prepare as an engine does, once per step. Chunks in 16 bits may be left to torch, as there."""
        demand = Demand.of(case.q, case.key_cache, case.value_cache, case.scoring)
        if reason := unserved_by_native(demand):
            raise UnsupportedCaseError(
                f"{case.name} is left to torch ('paged'): the compiled kernel {reason}"
            )
        out = output_of(case)
        return returning(out, prepare_native(batch_of(case), case.scoring, out, Workspace()))


def batch_of(case: Case) -> PagedBatch:
    """The case in the form that the kernels take."""
    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    return PagedBatch(case.q, case.key_cache, case.value_cache, *tables, max(case.queries))


def output_of(case: Case) -> torch.Tensor:
    """A buffer for the case's output."""
    return case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])


def splits_of(case: Case) -> int | None:
    """The parts of each row that the Triton decode is launched with; None: the device lists them."""
    from paged_kernels.triton.decode import pick_splits

    return pick_splits(case.lengths, case.q, case.key_cache, case.value_cache, case.scoring.window)


def backend_of(case: Case) -> str:
    """The backend of ours that serves the case on its device. The C kernels are a provider of their own."""
    name = "auto" if case.device.type == "cuda" else "torch"
    return choose_backend(name, case.device, Demand.of(case.q, case.key_cache, case.value_cache)).backend


def returning(out: torch.Tensor, run: Callable[[], None]) -> Run:
    """A call that runs `run` and returns the buffer that it fills."""

    def call() -> torch.Tensor:
        run()
        return out

    return call
