"""Every provider that runs here computes the case's attention, or says by name what it cannot serve."""

import sys
import types

import pytest
import torch
from tiers import cases

from paged_kernels import OptionError
from paged_kernels.case import CaseSpec, DisagreementError, build_case, exact_output, verify
from paged_kernels.providers import FlexAttention, UnsupportedCaseError, find_providers

CPU = torch.device("cpu")
SMALL = {"heads": 8, "kv_heads": 2, "dk": 32, "dtype": torch.float32}
SPECS = [
    CaseSpec((40, 40, 40), block_size=16, **SMALL),
    CaseSpec((100, 1, 33), block_size=16, **SMALL),
    CaseSpec((100, 33), block_size=32, window=20, **SMALL),
    CaseSpec((70, 90, 66), shared_tokens=64, **SMALL),
    CaseSpec((40, 40), (40, 40), **SMALL),
    CaseSpec((40, 40), (8, 8), layout="HND", **SMALL),
    CaseSpec((100, 33), (20, 33), window=15, **SMALL),
    CaseSpec((50, 20), k_scale=0.5, v_scale=2.0, kv_dtype=torch.float8_e4m3fn, **SMALL),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_all_that_serve_a_case_agree_with_float64(spec):
    case = build_case(spec)
    exact, served = exact_output(case), []
    for provider in find_providers().values():
        if provider.available(CPU) is None and provider.name != "flex":
            try:
                run = provider.prepare(case)
            except UnsupportedCaseError:
                continue
            assert verify(run(), exact, provider.name, case) == verify(run(), exact, provider.name, case)
            served.append(provider.name)
    assert {"paged", "sdpa"} <= set(served)


@pytest.mark.nightly
@cases(
    "spec",
    SPECS[:3],
    day=1,
    ids=lambda spec: spec.name,
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_reads_the_pool_through_its_block_mask(spec):
    case = build_case(spec)
    verify(FlexAttention(compiled=False).prepare(case)(), exact_output(case), "flex", case)


def test_ours_comes_first_and_others_say_why_they_cannot_run_here():
    found = find_providers()
    assert next(iter(found)) == "paged"
    assert "needs a CUDA device" in found["flashinfer"].available(CPU)
    assert "needs a CUDA device" in found["flash-attn"].available(CPU)
    assert "CUDA device" in found["contiguous"].available(CPU)


def test_a_wrong_output_is_not_accepted():
    case = build_case(SPECS[0])
    exact = exact_output(case)
    with pytest.raises(DisagreementError, match=r"theirs on decode/b3/l40.*relative error"):
        verify(exact * 1.001, exact, "theirs", case)
    with pytest.raises(DisagreementError, match="relative error nan"):
        verify(torch.full_like(exact, float("nan")), exact, "theirs", case)


def test_one_wrong_row_of_many_is_not_accepted():
    """It is half a percent of all rows together, less than bfloat16's rounding."""
    case = build_case(CaseSpec((4096,), (4096,), heads=1, kv_heads=1, dk=16, dtype=torch.bfloat16))
    exact = exact_output(case)
    found = exact.clone()
    assert verify(found.bfloat16(), exact, "theirs", case) < 0.005
    found[-1] = 0
    with pytest.raises(DisagreementError, match="1 rows are wrong, from row 4095 on"):
        verify(found, exact, "theirs", case)


@pytest.mark.parametrize("queries", [(), (3, 3)])
def test_peers_say_that_they_take_values_as_wide_as_keys(queries):
    """FlashInfer would take the width of keys for that of values, and flash-attn raises an error of its own."""
    spec = CaseSpec((300, 300), queries, heads=2, kv_heads=1, dk=32, dv=16, block_size=256)
    for name in ("flashinfer", "flash-attn"):
        with pytest.raises(UnsupportedCaseError, match="width"):
            find_providers()[name].prepare(build_case(spec))


def test_a_users_function_runs_as_it_is_or_with_its_own_preparation(monkeypatch):
    module = types.ModuleType("their_kernels")
    module.attend = exact_output
    module.planned = lambda case: None
    module.planned.prepare = lambda case: lambda: exact_output(case)
    monkeypatch.setitem(sys.modules, "their_kernels", module)
    case = build_case(SPECS[0])
    for name in ("their_kernels:attend", "their_kernels:planned"):
        provider = find_providers(name)[name]
        assert verify(provider.prepare(case)(), exact_output(case), name, case) < 1e-12


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:attend", "cannot be imported"),
        ("math:attend", "has no function 'attend'"),
        ("math", "write module:function"),
    ],
)
def test_a_function_that_is_not_there_is_refused_with_the_reason(name, reason):
    with pytest.raises(OptionError, match=reason):
        find_providers(name)
