"""Cases of the kernel benchmark: names, grids, and tensors in which whatever must not be read is poison."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bench.kernels.clock import copies_past_cache
from harness.bench.kernels.grid import CaseSpec, expand
from harness.bench.kernels.inputs import GARBAGE, block_tables, build
from harness.bench.kernels.presets import PRESETS
from harness.config.errors import UserError

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "fp32"}


def test_a_grid_is_every_combination_once() -> None:
    cases = expand({"batch": [1, 8, 8], "block_size": [16, 32], "heads": [(32, 8)]})
    assert [(case.batch, case.block_size) for case in cases] == [(1, 16), (1, 32), (8, 16), (8, 32)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "6 heads are no multiple of 4 KV heads"),
        ({"dtype": "int3"}, "dtype 'int3' does not exist; choose bf16"),
        ({"shared_prefix": 24}, "no whole number of 16-token blocks"),
        ({"shared_prefix": 1024}, "context 1024 must hold 1024 shared tokens"),
        ({"queries": 2000}, "context 1024 must hold 0 shared tokens and 2000 queries"),
        ({"batch": 0}, "batch is 0"),
        ({"layout": "DHN"}, "layout 'DHN' does not exist"),
    ],
)
def test_an_impossible_case_is_refused_with_its_figures(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CaseSpec(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_names_of_a_preset_are_unique_and_lead_back_to_the_case(preset: str) -> None:
    cases = PRESETS[preset]()
    assert len({case.name for case in cases}) == len(cases)
    assert all(CaseSpec(**case.values()) == case for case in cases)


def test_a_ragged_batch_has_the_context_as_its_mean() -> None:
    lengths = CaseSpec(batch=9, context=1000, ragged=True).lengths
    assert np.mean(lengths) == 1000
    assert (min(lengths), max(lengths)) == (500, 1500)


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 5),
    blocks=st.integers(1, 6),
    extra=st.integers(1, 16),
    block_size=st.sampled_from([1, 8, 16]),
    ragged=st.booleans(),
)
def test_a_table_gives_each_sequence_blocks_of_its_own_behind_the_shared_ones(
    batch: int, blocks: int, extra: int, block_size: int, ragged: bool
) -> None:
    prefix = blocks * block_size
    spec = CaseSpec(
        batch=batch,
        context=2 * prefix + extra,
        block_size=block_size,
        ragged=ragged,
        shared_prefix=prefix,
        **SMALL,
    )
    table, pool = block_tables(spec, np.random.default_rng(0))
    counts = [-(-length // block_size) for length in spec.lengths]
    own = [set(row[blocks:count]) for row, count in zip(table, counts, strict=True)]
    assert len({tuple(row[:blocks]) for row in table}) == 1
    assert sum(map(len, own)) == len(set().union(*own)) == sum(counts) - batch * blocks
    assert all((row[count:] == GARBAGE).all() for row, count in zip(table, counts, strict=True))
    assert table[table != GARBAGE].min() > 0
    assert table[table != GARBAGE].max() < pool


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8_e4m3"])
def test_only_slots_of_tokens_hold_numbers(dtype: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    spec = CaseSpec(
        batch=3, context=21, block_size=8, heads=4, kv_heads=2, head_dim=16, dtype=dtype, layout=layout
    )
    case = build(spec, torch.device("cpu"), seed=1)
    numbers = ~case.key_cache.float().isnan()
    assert int(numbers.all(-1).all(-1)[1:].sum()) == 3 * 21
    assert bool((case.key_cache[0].float() == 0).all())
    assert case.key_cache.stride(-1) == 1
    assert (case.key_cache.stride(1) < case.key_cache.stride(2)) == (layout == "HND")


def test_equal_seeds_give_equal_tensors_and_others_others() -> None:
    torch = pytest.importorskip("torch")
    spec = CaseSpec(batch=2, context=9, block_size=4, **SMALL)
    first, again, other = (build(spec, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.block_table, again.block_table)
    assert not torch.equal(first.q, other.q)


def test_inputs_are_rotated_past_the_cache() -> None:
    assert copies_past_cache(537_000_000, 60 * 2**20) == 1
    assert copies_past_cache(2**20, 60 * 2**20, most=500) == 180
    assert copies_past_cache(2**20, 60 * 2**20) == 16
    assert copies_past_cache(2**20, 0) == 1
