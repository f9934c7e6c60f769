"""The latency layer's way from a case to ratios, on the CPU with torch's attention in the twin's place."""

from dataclasses import replace

import pytest

from harness.bench.cases import KernelCase
from harness.cost import timings as names
from harness.environment import kernel_digest
from harness.gate import beside
from harness.gate.findings import GateVerdict, new_baseline
from harness.gate.latency import judge, measure_cases, unfit

torch = pytest.importorskip("torch")
TINY = {"batch": 2, "context": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": "fp32"}


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    ten = replace(beside.DEVICE, fewest=10, most=10)
    monkeypatch.setattr(beside.interleaved, "__defaults__", (ten,))
    monkeypatch.setattr(names, "CONTIGUOUS", "sdpa")
    torch.set_num_threads(1)


@pytest.mark.usefixtures("few_rounds")
def test_decode_and_prefill_give_a_ratio_to_each_yardstick() -> None:
    decode, prefill = KernelCase(**TINY), KernelCase(**TINY, queries=32)
    found = measure_cases([decode, prefill], torch.device("cpu"), "a CPU")
    assert list(found.cases) == [
        *(f"{decode.name} / sdpa", f"{decode.name} / copy"),
        *(f"{prefill.name} / sdpa", f"{prefill.name} / matmul"),
    ]
    assert all(len(values["ratios"]) == 10 and min(values["ratios"]) > 0 for values in found.cases.values())
    assert found.made_on["device"] == "a CPU"
    assert found.kernels == kernel_digest()


@pytest.mark.usefixtures("few_rounds")
def test_a_case_that_fails_is_left_out_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_kernels.providers import Paged

    prepare = Paged.prepare

    def broken_for_blocks_of_8(self, case):
        if case.block_size == 8:
            raise RuntimeError("no such device function")
        return prepare(self, case)

    monkeypatch.setattr(Paged, "prepare", broken_for_blocks_of_8)
    bad, good = KernelCase(**TINY, block_size=8), KernelCase(**TINY)
    found = measure_cases([bad, good], torch.device("cpu"), "a CPU")
    assert list(found.cases) == [f"{good.name} / sdpa", f"{good.name} / copy"]
    assert found.remarks == (f"{bad.name} was not timed: RuntimeError: no such device function",)
    # no baseline has it: nothing was found missing, and a baseline without it could be written
    regressed = [one for one in judge(found, new_baseline(found, "test")).findings if one.case == bad.name]
    assert [one.verdict for one in regressed] == [GateVerdict.regressed]
    assert f"{bad.name}: was not timed: RuntimeError: no such device function" in [*unfit(found)]


@pytest.mark.usefixtures("few_rounds")
def test_a_kernel_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from paged_kernels.providers import Paged

    prepare = Paged.prepare
    monkeypatch.setattr(Paged, "prepare", lambda self, case: lambda: prepare(self, case)() * 1.01)
    found = measure_cases([KernelCase(**TINY)], torch.device("cpu"), "a CPU")
    assert found.cases == {}
    assert "DisagreementError" in found.remarks[0]
