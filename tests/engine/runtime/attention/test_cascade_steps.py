"""The engine on Triton kernels: how the host divides a step. `test_triton.py` runs them in the interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")


TABLES = np.array([[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4, 9], [5, 6, 0, 0]])
LENGTHS = np.array([50, 50, 50, 20])


def rows_of(tables, lengths, counts=None):
    """Rows as a step has them, of `counts` queries each."""
    from engine.runtime.attention import metadata as cascading
    from paged_kernels.triton.decode import Queries

    copies, queries = (torch.from_numpy(tables).int(), torch.from_numpy(lengths).int()), None
    if counts is not None:
        bounds = torch.from_numpy(np.cumsum([0, *counts])).int()
        queries = Queries(bounds, int(counts.max()))
    return cascading.KernelRows(tables, lengths, copies, counts, queries)


def halves(monkeypatch, tables=TABLES, lengths=LENGTHS, counts=None):
    from engine.runtime.attention import metadata as cascading
    from paged_kernels.cascade_groups import CascadeCost

    monkeypatch.setattr(cascading, "cost_of", lambda device: CascadeCost(1.0, 1.0, 0, 0.0))
    return cascading.share_step(rows_of(tables, lengths, counts), 16, token_bytes=64, group=2)


def test_rows_are_divided_into_what_they_share_and_what_is_their_own(monkeypatch):
    found = halves(monkeypatch)
    ids = found.prefixes.group_ids.tolist()
    assert ids[0] == ids[1] >= 0
    assert ids[3] == -1
    shared = [found.prefixes.lens.tolist()[group] if group >= 0 else 0 for group in ids]
    assert [own + part for own, part in zip(found.lengths.tolist(), shared, strict=True)] == LENGTHS.tolist()
    assert found.tables[3, :2].tolist() == [5, 6]
    assert found.tables.shape[1] % 16 == found.prefixes.tables.shape[1] % 16 == 0


def test_of_several_queries_each_has_its_rows_group_and_sees_the_tokens_up_to_its_own(monkeypatch):
    found = halves(monkeypatch, counts=np.array([3, 2, 18, 1]))
    ids, own = (each.tolist() for each in (found.prefixes.group_ids, found.prefixes.own))
    assert ids[:5] == [ids[0]] * 5
    assert ids[0] >= 0
    assert ids[-1] == -1
    assert own[:5] == [16, 17, 18, 17, 18]
    assert own[-1] == 20


def test_a_block_that_holds_a_query_is_not_shared(monkeypatch):
    """Of 50 tokens in blocks of 16 the last 3 lie in the third and fourth block, so two blocks are shared."""
    found = halves(monkeypatch, TABLES[:2], LENGTHS[:2], np.array([3, 3]))
    assert found.prefixes.lens.tolist() == [32]
    assert found.prefixes.own.tolist() == [16, 17, 18] * 2


@pytest.mark.parametrize("rows", [slice(0, 1), slice(2, 4), slice(0, 0)])
def test_rows_without_a_first_block_in_common_are_not_divided(rows, monkeypatch):
    assert halves(monkeypatch, TABLES[rows], LENGTHS[rows]) is None


def test_the_rule_of_the_device_decides():
    from engine.runtime.attention.metadata import share_step

    assert (
        share_step(rows_of(TABLES, LENGTHS), 16, token_bytes=64, group=2) is None
    )  # 3 KB: two passes cost more
    long = np.tile(np.arange(1, 513), (8, 1))
    long[:, -1] += np.arange(8)
    found = share_step(rows_of(long, np.full(8, 8192)), 16, token_bytes=4096, group=2)
    assert found is not None
    assert found.prefixes.lens.tolist() == [8176]


def test_parts_of_a_prefix_are_powers_of_two():
    from paged_kernels.triton.cascade import pick_prefix_splits

    device = torch.device("cpu")
    found = {pick_prefix_splits(1, longest, device) for longest in range(16, 20_000, 500)}
    assert all(count & (count - 1) == 0 for count in found)
