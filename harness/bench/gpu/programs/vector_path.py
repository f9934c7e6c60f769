"""Our decode with every key finding its own block, at every block size, as a provider for `bench kernels --function`.

By default a tile that lies in one block reads one id. A sweep over block sizes would cross from one code to the other
where the block reaches the tile, and show that instead of the block size.
"""

from functools import partial

import torch

from paged_kernels import Workspace
from paged_kernels.providers import Case, Run, UnsupportedCaseError


def attend(case: Case) -> torch.Tensor:
    """The case's attention; `bench kernels` calls `prepare` instead."""
    return prepare(case)()


def prepare(case: Case) -> Run:
    """As our own provider, with the addressing fixed. Raises UnsupportedCaseError off a GPU and for prefills."""
    if case.device.type != "cuda" or not case.decode:
        raise UnsupportedCaseError(f"{case.name}: the addressing of the Triton decode alone can be fixed")
    from paged_kernels.triton.decode import run_decode
    from paged_kernels.triton.launch import pick_splits

    out = case.q.new_empty(*case.q.shape[:2], case.value_cache.shape[3])
    splits = pick_splits(case.lengths, case.kv_heads, case.device)
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens)
    run = partial(run_decode, *inputs, case.scoring, out, None, splits, workspace=Workspace(), path="vector")

    def call() -> torch.Tensor:
        run()
        return out

    return call


attend.prepare = prepare  # type: ignore[attr-defined]
attend.capturable = True  # type: ignore[attr-defined]
