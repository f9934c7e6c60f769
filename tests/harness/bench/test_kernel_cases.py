"""Cases of the kernel benchmark: names, grids, and tensors in which whatever must not be read is poison."""

import numpy as np
import pytest

from harness.bench.calls import build, copies_past_cache
from harness.bench.cases import KernelCase, expand, preset, presets
from harness.config.errors import UserError


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
        KernelCase(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", presets())
def test_names_of_a_preset_are_unique_and_lead_back_to_the_case(name: str) -> None:
    cases = preset(name)
    assert len({case.name for case in cases}) == len(cases)
    assert all(KernelCase(**case.values()) == case for case in cases)


def test_a_ragged_batch_has_the_context_as_its_mean() -> None:
    lengths = KernelCase(batch=9, context=1000, ragged=True).lengths
    assert np.mean(lengths) == 1000
    assert (min(lengths), max(lengths)) == (500, 1500)


@pytest.mark.parametrize(
    ("dtype", "query"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp8_e4m3", "bfloat16")]
)
def test_tensors_are_what_the_numbers_say(dtype: str, query: str) -> None:
    torch = pytest.importorskip("torch")
    spec = KernelCase(
        batch=3,
        context=24,
        block_size=8,
        heads=4,
        kv_heads=2,
        head_dim=16,
        dtype=dtype,
        shared_prefix=8,
        layout="HND",
    )
    case = build(spec, torch.device("cpu"), seed=1)
    assert case.name == spec.name
    assert case.lengths == (24, 24, 24)
    assert case.q.shape == (3, 4, 16)
    assert case.q.dtype == getattr(torch, query)
    assert case.key_cache.element_size() == spec.element_bytes
    assert case.key_cache.stride(1) < case.key_cache.stride(2)
    assert case.kv_bytes == spec.kv_bytes
    assert case.distinct_kv_bytes == spec.kv_bytes * (24 + 2 * 16) // 72


def test_inputs_are_rotated_past_the_cache() -> None:
    assert copies_past_cache(537_000_000, 60 * 2**20) == 1
    assert copies_past_cache(2**20, 60 * 2**20, most=500) == 180
    assert copies_past_cache(2**20, 60 * 2**20) == 16
    assert copies_past_cache(2**20, 0) == 1
