"""Mistakes planted in the source of the decode kernel for a few queries a row and for latent vectors: each is noticed.

Run by `test_triton.py` in a process of its own, as `interpreted_checks.py`. A mistake is noticed if an output or an LSE
of a small batch is not that of float64.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from interpreted_cases import cut_short_rows, latent_case, spec_of

from paged_kernels.case import TOLERANCE, build_case, exact_attention, relative_error
from paged_kernels.triton import decode

SOURCE = Path(decode.__file__).read_text(encoding="utf-8")
# name: what stands in the source, once, and what stands there instead
PLANTED = {
    "a query sees the key behind its own": ("length - queries + token, asked", "length - queries + token + 1, asked"),
    "no query is hidden from the last keys": ("tl.maximum(length - queries + 1, 0)", "length"),
    "a listed part forgets the windows of earlier queries": (
        "scoring.window and scoring.window + max(1, rows.tokens) - 1",
        "scoring.window",
    ),
    "a fixed part forgets the windows of earlier queries": ("SPLITS, window + EACH - 1, TILE", "SPLITS, window, TILE"),
    "queries of a row share a partial result": ("place += token * HEADS", "place += token * 0"),
    "the merge takes the first query's parts": ("first += token * HEADS", "first += token * 0"),
    "the merge steps from query to query": ("first, count, EACH * HEADS, top", "first, count, HEADS, top"),
    "the merge leaves the sinks out": (
        "total * tl.exp(base - higher) + tl.exp(sink - higher)",
        "total * tl.exp(base - higher)",
    ),
    "a row of a cut sequence sees too little": ("[:, None] - (stops - ends)", "[:, None] - (stops - begins)"),
    "the last row of a cut sequence is missing": ("pieces = -(-queries.most // tokens)", "pieces = 1"),
    "heads and queries of a tile are mixed up": ("token = member // GROUP", "token = member % EACH"),
    "the last tile is left out": ("last = tl.cdiv(length, TILE)", "last = length // TILE"),
    "tiles that all see are read twice": ("whole if MASKED else begin", "begin"),
    "the rotary query is the latent one": ("asking + DK + second[None, :]", "asking + second[None, :]"),
    "half of the rotary query is left out": ("real[:, None] & (second < DV)", "real[:, None] & (second < DV // 2)"),
}  # fmt: skip


def of_rows(spec):
    """Inputs of a decode, its bounds and most queries, whether keys are latent, and the exact result."""
    case = build_case(spec)
    inputs = (case.q, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.scoring)
    return inputs, case.cu_seqlens_q, max(case.queries), False, exact_attention(case)


def of_latents(lengths, queries, heads):
    inputs, bounds, exact = latent_case(lengths, queries, heads, (32, 16))
    return inputs, bounds, max(queries), True, exact


BATCHES = [
    (lambda: of_rows(spec_of((264, 90, 0, 1), (8, 3, 0, 1), window=6)), None),
    (lambda: of_rows(spec_of((264, 40), (8, 2), window=6)), 2),
    (lambda: of_rows(spec_of((300, 133, 64), (5, 40, 1), sinks=True)), None),
    (lambda: of_latents((300, 133), (5, 2), 4), None),
]


def unlike(module):
    """Whether a module's decode gives anything but the exact outputs and sums of all batches."""
    for make, splits in BATCHES:
        inputs, bounds, most, latent, (exact, sums) = make()
        q = inputs[0]
        out, lse = (
            torch.full_like(exact, float("nan")).to(q.dtype),
            torch.full_like(sums, float("nan")).float(),
        )
        several = module.Queries(bounds, most)
        module.run_decode(*inputs, out, lse, splits, queries=several, latent=latent)
        if not relative_error(out, exact) < TOLERANCE[q.dtype] or not torch.allclose(
            lse.double(), sums, atol=1e-5
        ):
            return True
    return False


def loaded(folder, before="", after=""):
    """The module of the decode kernel from its source, in which `after` stands for `before`."""
    path = folder / "planted_decode.py"
    path.write_text(SOURCE.replace(before, after) if before else SOURCE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("planted_decode", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_without_a_mistake_is_right(monkeypatch, tmp_path):
    cut_short_rows(monkeypatch)
    assert not unlike(loaded(tmp_path))


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_noticed(monkeypatch, tmp_path, name):
    cut_short_rows(monkeypatch)
    before, after = PLANTED[name]
    assert SOURCE.count(before) == 1
    assert unlike(loaded(tmp_path, before, after))
