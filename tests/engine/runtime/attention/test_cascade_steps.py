"""The engine on Triton kernels: how the host divides a step. `test_triton.py` runs them in the interpreter."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need pagetwin[gpu]")


TABLES = np.array([[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 4, 9], [5, 6, 0, 0]])
LENGTHS = np.array([50, 50, 50, 20])


def halves(monkeypatch, tables=TABLES, lengths=LENGTHS):
    from engine.runtime.attention import metadata as cascading
    from paged_kernels.cascade_groups import CascadeCost

    monkeypatch.setattr(cascading, "cost_of", lambda device: CascadeCost(1.0, 1.0, 0, 0.0))
    device = torch.device("cpu")
    return cascading.share_step(tables, lengths, 16, token_bytes=64, group=2, device=device)


def test_rows_are_divided_into_what_they_share_and_what_is_their_own(monkeypatch):
    found = halves(monkeypatch)
    ids = found.prefixes.group_ids.tolist()
    assert ids[0] == ids[1] >= 0
    assert ids[3] == -1
    shared = [found.prefixes.lens.tolist()[group] if group >= 0 else 0 for group in ids]
    assert [own + part for own, part in zip(found.lengths.tolist(), shared, strict=True)] == LENGTHS.tolist()
    assert found.tables[3, :2].tolist() == [5, 6]
    assert found.tables.shape[1] % 16 == found.prefixes.tables.shape[1] % 16 == 0


@pytest.mark.parametrize("rows", [slice(0, 1), slice(2, 4), slice(0, 0)])
def test_rows_without_a_first_block_in_common_are_not_divided(rows, monkeypatch):
    assert halves(monkeypatch, TABLES[rows], LENGTHS[rows]) is None


def test_the_rule_of_the_device_decides():
    from engine.runtime.attention.metadata import share_step

    sizes = {"token_bytes": 64, "group": 2, "device": torch.device("cpu")}
    assert share_step(TABLES, LENGTHS, 16, **sizes) is None  # 3 KB: two more passes cost more
    long = np.tile(np.arange(1, 513), (8, 1))
    long[:, -1] += np.arange(8)
    found = share_step(long, np.full(8, 8192), 16, **{**sizes, "token_bytes": 4096})
    assert found is not None
    assert found.prefixes.lens.tolist() == [8176]


def test_parts_of_a_prefix_are_powers_of_two():
    from paged_kernels.triton.cascade import pick_prefix_splits

    device = torch.device("cpu")
    found = {pick_prefix_splits(1, longest, device) for longest in range(16, 20_000, 500)}
    assert all(count & (count - 1) == 0 for count in found)
