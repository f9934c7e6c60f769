"""Shared prefixes: found in the tables, read once where that pays, and no different from the flat decode."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_kernels import cascade_attention_decode
from paged_kernels.cascade_groups import CPU, H200, CascadeCost, RowGroup, find_cascade_groups
from paged_kernels.case import TOLERANCE, CaseSpec, build_case, exact_attention, relative_error
from paged_kernels.providers import ALWAYS, Cascade, Paged

TOKEN_BYTES = 4096  # 8 KV heads of 128 in bfloat16


def planned(tables, lengths, *, block_size=16, cost=ALWAYS, rows_per_tile=16):
    """The plan for ragged tables."""
    width = max(map(len, tables))
    table = np.full((len(tables), width), 2**30)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    options = {"token_bytes": TOKEN_BYTES, "rows_per_tile": rows_per_tile, "cost": cost}
    return find_cascade_groups(table, np.array(lengths), block_size, **options)


def uniform(rows, shared, own, block_size=16):
    """Tables of `rows` sequences that share `shared` tokens and have `own` each."""
    common, each = shared // block_size, -(-own // block_size)
    tables = [
        [*range(1, common + 1), *range(1000 + row * each, 1000 + (row + 1) * each)] for row in range(rows)
    ]
    return tables, [shared + own] * rows


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40, "alibi": True}, {"softcap": 2.0, "sinks": True}, {"layout": "HND"}, {"dv": 32}],
)
def test_the_cascade_equals_float64(options):
    spec = CaseSpec(
        (33, 96, 70), heads=4, kv_heads=2, dk=16, dtype=torch.float32, shared_tokens=32, **options
    )
    case = build_case(spec)
    lse = torch.empty(3, 4)
    found = cascade_attention_decode(
        case.q, case.key_cache, case.value_cache, case.block_table[:1, :2], torch.tensor([32]),
        case.block_table[:, 2:], case.seq_lens - 32, **case.scoring._asdict(), lse=lse,
    )  # fmt: skip
    exact, sums = exact_attention(case)
    assert relative_error(found, exact) < TOLERANCE[torch.float32]
    assert torch.allclose(lse.double(), sums, atol=1e-5)


def test_what_the_windows_of_all_rows_have_left_of_a_prefix_may_be_nan():
    case = build_case(
        CaseSpec((33, 40), heads=4, kv_heads=2, dk=16, dtype=torch.float32, shared_tokens=32, window=9)
    )
    exact, _ = exact_attention(case)
    for cache in (case.key_cache, case.value_cache):
        cache[case.block_table[0, 0].long()] = float("nan")
    found = cascade_attention_decode(
        case.q, case.key_cache, case.value_cache, case.block_table[:1, :2], torch.tensor([32]),
        case.block_table[:, 2:], case.seq_lens - 32, **case.scoring._asdict(),
    )  # fmt: skip
    assert relative_error(found, exact) < TOLERANCE[torch.float32]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=5), st.integers(0, 9))
def test_any_division_gives_the_reference(rows, seed):
    """Rows are (group - 1, own tokens); groups share 0, 8 and 16 tokens."""
    case = build_case(
        CaseSpec((40,) * 8, heads=2, kv_heads=1, dk=16, block_size=8, dtype=torch.float32), seed=seed
    )
    ids, own = (torch.tensor(column) for column in zip(*rows, strict=True))
    count = len(rows)
    inputs = (
        case.q[:count], case.key_cache, case.value_cache, case.block_table[5:8], torch.tensor([0, 8, 16]),
        case.block_table[:count], own, ids - 1,
    )  # fmt: skip
    found, exact = (
        cascade_attention_decode(*inputs, scale=0.3, backend=name) for name in ("torch", "torch_ref")
    )
    assert torch.allclose(found, exact, atol=1e-5)


def test_a_common_prompt_is_one_group():
    plan = planned(*uniform(4, 64, 20))
    assert plan.prefix_lens.tolist() == [64]
    assert plan.shared_tables.tolist() == [[1, 2, 3, 4]]
    assert plan.suffix_lens.tolist() == [20] * 4
    assert plan.suffix_tables[1].tolist() == [1002, 1003]


def test_beams_of_two_requests_are_two_groups_and_a_lone_row_is_none():
    tables = [[1, 2, 3], [7, 8, 20], [1, 2, 4], [9], [7, 8, 21], [1, 2, 5]]
    plan = planned(tables, [40, 40, 40, 10, 40, 40])
    assert plan.group_ids.tolist() == [0, 1, 0, -1, 1, 0]
    assert plan.prefix_lens.tolist() == [32, 32]
    assert plan.suffix_tables[3, 0] == 9


def test_a_short_common_prefix_gives_way_to_longer_ones_of_its_parts():
    """All six begin with one system prompt; three share a long document beyond it, and so do the others."""
    documents = [list(range(10, 110)), list(range(200, 300))]
    tables = [[1, *documents[row // 3], 900 + row] for row in range(6)]
    plan = planned(tables, [102 * 16 - 1] * 6)
    assert plan.prefix_lens.tolist() == [101 * 16] * 2
    assert plan.group_ids.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_last_token_is_never_shared():
    """Rows of equal tables that end with a full block: the query's own token stays in the suffix."""
    plan = planned([[1, 2], [1, 2]], [32, 32])
    assert plan.prefix_lens.tolist() == [16]
    assert plan.suffix_lens.tolist() == [16, 16]


@pytest.mark.parametrize("tables", [[[1], [2], [3]], [[1, 2]], [[], []]])
def test_without_shared_blocks_there_is_no_cascade(tables):
    assert planned(tables, [16 * len(blocks) for blocks in tables]) is None


def test_on_a_gpu_short_prefixes_stay_flat_and_long_ones_do_not():
    assert planned(*uniform(8, 256, 64), cost=H200) is None
    assert planned(*uniform(32, 512, 64), cost=H200) is None
    assert planned(*uniform(32, 8192, 64), cost=H200).saved_s > 50e-6
    assert planned(*uniform(2, 32768, 64), cost=H200) is not None


def test_a_prefix_that_stays_in_the_cache_is_priced_at_the_caches_speed():
    cost = CascadeCost(1e12, 4e12, 64 << 20, 0.0)
    small, large = 16 << 20, 48 << 20
    assert cost.saved_s(RowGroup(9, small, 1)) == pytest.approx(8 * small / 4e12)
    assert cost.saved_s(RowGroup(9, large, 1)) == pytest.approx(8 * large / 1e12)


def test_packing_few_rows_a_tile_saves_less():
    cost, run = CascadeCost(1e12, 1e12, 0, 0.0), RowGroup(32, 1 << 20, 1)
    assert cost.saved_s(run._replace(tiles=8)) < cost.saved_s(run)


@pytest.mark.parametrize("lengths", [(70, 90, 66), (65, 80)])
def test_the_provider_reads_shared_blocks_once_or_stays_flat(lengths):
    spec = CaseSpec(lengths, heads=4, kv_heads=2, dk=16, dtype=torch.float32, shared_tokens=64)
    case = build_case(spec)
    exact, _ = exact_attention(case)
    for provider in (Cascade(), Cascade("always", always=True), Paged()):
        assert relative_error(provider.prepare(case)(), exact) < TOLERANCE[torch.float32]
    assert Cascade()._groups(case) is None
    assert Cascade("always", always=True)._groups(case) is not None


def test_the_figures_of_a_cpu_price_memory_far_above_those_of_a_gpu():
    assert CPU.memory_bytes_per_s < H200.memory_bytes_per_s / 50


def test_more_rows_than_python_may_call_that_each_go_on_from_another_are_planned():
    tables = [list(range(row + 1)) for row in range(1, 1400)]
    found = planned(tables, [16 * len(table) for table in tables])
    assert found is None or (found.suffix_lens > 0).all()
