"""Our own attention as providers: as an engine calls it, without paging, and with shared prefixes read once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from paged_kernels.attention import PagedBatch, prepare_torch, run_triton
from paged_kernels.backends import Demand, choose_backend
from paged_kernels.cascade_groups import (
    CascadeCost,
    CascadeGroups,
    cost_of,
    find_cascade_groups,
    rows_per_tile,
)
from paged_kernels.memory import Workspace
from paged_kernels.providers.case import Case, Run, UnsupportedCaseError, contiguous_kv
from paged_kernels.torch import cascade as torch_cascade

# A cost under which every shared block is worth reading once: for the crossover, which the rule is judged by.
ALWAYS = CascadeCost(memory_bytes_per_s=1.0, cache_bytes_per_s=1.0, cache_bytes=0, overhead_s=0.0)


@dataclass(frozen=True, slots=True)
class Paged:
    """Our paged attention: Triton on a CUDA device, torch elsewhere."""

    name: str = "paged"
    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It runs everywhere."""
        return None

    def prepare(self, case: Case) -> Run:
        """Plan as an engine does once a step for all layers."""
        batch, out, workspace = batch_of(case), output_of(case), Workspace()
        if backend_of(case) == "triton":
            from paged_kernels.triton.launch import pick_splits

            splits = pick_splits(case.lengths, case.kv_heads, case.device) if case.decode else None
            return returning(out, partial(run_triton, batch, case.scoring, out, None, splits, workspace))
        return returning(out, prepare_torch(batch, case.scoring, out, None, workspace))


@dataclass(frozen=True, slots=True)
class ContiguousDecode:
    """The Triton decode over contiguous KV: the same code with plain addressing, so that the rest is paging."""

    name: str = "contiguous"
    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It is a Triton kernel."""
        reason = choose_backend("auto", device).reason
        return f"is the Triton decode without its table, and that {reason}" if reason else None

    def prepare(self, case: Case) -> Run:
        """Lay each sequence's keys out in one piece."""
        if not case.decode:
            raise UnsupportedCaseError(f"{case.name} is no decode; the twin is of the decode kernel")
        if backend_of(case) != "triton":
            raise UnsupportedCaseError(f"{case.name} is served by torch, which has no such twin")
        from paged_kernels.triton.decode import run_contiguous_decode
        from paged_kernels.triton.launch import pick_splits

        keys, values = contiguous_kv(case)
        out, splits = output_of(case), pick_splits(case.lengths, case.kv_heads, case.device)
        arguments = (case.q, keys, values, case.seq_lens, case.scoring, out, None, splits)
        return returning(out, partial(run_contiguous_decode, *arguments, workspace=Workspace()))


@dataclass(frozen=True, slots=True)
class Cascade:
    """Our decode with shared prefixes read once, where the cost rule says so (`always`: wherever blocks are shared)."""

    name: str = "cascade"
    always: bool = False
    capturable: bool = True

    def available(self, device: torch.device) -> str | None:
        """It runs everywhere."""
        return None

    def prepare(self, case: Case) -> Run:
        """Divide the batch; where sharing does not pay this is the flat decode."""
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

            prefixes = sort_groups(shared, lens, ids)
            arguments = (*caches, prefixes, table, lengths, case.scoring, out)
            return returning(out, partial(run_cascade, *arguments, workspace=workspace))
        sizes = {"block_size": case.block_size, "token_bytes": _token_bytes(case)}
        metadata = torch_cascade.cascade_metadata(shared, lens, table, lengths, ids, **sizes)
        arguments = (*caches, metadata, case.scoring, out, None, workspace)
        return returning(out, partial(torch_cascade.run_cascade, *arguments))

    def _groups(self, case: Case) -> CascadeGroups | None:
        return find_cascade_groups(
            case.block_table.cpu().numpy().astype(np.int64),
            np.array(case.lengths),
            case.block_size,
            token_bytes=_token_bytes(case),
            rows_per_tile=rows_per_tile(case.heads // case.kv_heads, case.device),
            cost=ALWAYS if self.always else cost_of(case.device),
        )


def _token_bytes(case: Case) -> int:
    """What one token's K and V take in one layer."""
    return case.key_cache[0, 0].nbytes + case.value_cache[0, 0].nbytes


def batch_of(case: Case) -> PagedBatch:
    """The case as the kernels take it."""
    tables = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    return PagedBatch(case.q, case.key_cache, case.value_cache, *tables, max(case.queries))


def output_of(case: Case) -> torch.Tensor:
    """A buffer for the case's output."""
    return case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])


def backend_of(case: Case) -> str:
    """The backend that serves the case on its device."""
    return choose_backend("auto", case.device, Demand.of(case.q, case.key_cache, case.value_cache)).backend


def returning(out: torch.Tensor, run: Callable[[], None]) -> Run:
    """A call that runs and gives the buffer that was filled."""

    def call() -> torch.Tensor:
        run()
        return out

    return call
