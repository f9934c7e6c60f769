"""Weights in the matrix kernels' own order change no token."""

import ctypes
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 9, 63, 64, 65, 70, 96])
def test_a_packed_layer_computes_the_same(dtype, rows):
    from engine.runtime.models.cpu_layers import pack_linears, restore_layers

    torch.manual_seed(1)
    layer = torch.nn.Linear(96, 160, dtype=getattr(torch, dtype)).eval()
    x = torch.randn(1, rows, 96, dtype=layer.weight.dtype)
    with torch.inference_mode():
        plain = layer(x)
        assert pack_linears(layer) == 1
        packed = layer(x)
        restore_layers(layer)
        assert torch.equal(layer(x), plain)
    assert torch.allclose(packed.float(), plain.float(), atol=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(
    ("rows", "bias"), [(1, True), (1, False), (5, True), (6, False), (64, True), (390, False)]
)
@pytest.mark.parametrize(("width", "outs"), [(48, 112), (1040, 16), (50, 112), (48, 100)])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_in_bfloat16_in_c_are_those_of_float64(width, outs, rows, bias, threads, monkeypatch):
    from engine.runtime.models import cpu_layers

    monkeypatch.setattr(cpu_layers, "_onednn_packs", lambda dtype: dtype is torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(3)
    layer = torch.nn.Linear(width, outs, bias=bias, dtype=torch.bfloat16).eval()
    x = torch.randn(1, rows, width, dtype=torch.bfloat16)
    with torch.inference_mode():
        cpu_layers.pack_linears(layer)
        found = layer(x)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x.float())
        expected = torch.nn.Linear.forward(layer.double(), x.double())
    assert found.dtype is torch.bfloat16
    assert torch.allclose(found.double(), expected, atol=1e-6, rtol=2**-8)  # rounded once


@pytest.mark.parametrize("wins", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("rows", "bias"), [(1, True), (3, False), (8, False), (256, True), (257, False), (300, True)]
)
@pytest.mark.parametrize("width", [64, 1040])  # the larger one has more than 4 MiB
def test_a_layer_computes_the_same_whichever_library_is_faster(width, rows, bias, wins, monkeypatch):
    from engine.runtime.models import cpu_layers
    from engine.runtime.models.cpu_layers import pack_linears

    monkeypatch.setattr(cpu_layers, "onednn_wins", lambda: wins[0])
    if not cpu_layers.why_unavailable():
        monkeypatch.setattr(cpu_layers, "c_wins", lambda: wins[1])
    torch.manual_seed(2)
    layer = torch.nn.Linear(width, 1104, bias=bias).eval()
    x = torch.randn(1, rows, width)
    with torch.inference_mode():
        pack_linears(layer)
        found = layer(x)
        assert torch.allclose(found.double(), torch.nn.Linear.forward(layer.double(), x.double()), atol=1e-5)


def test_a_product_that_other_threads_compute_has_no_time_for_nothing(monkeypatch):
    """The probe's own thread only waits for them."""
    from engine.runtime.models import cpu_layers

    with ThreadPoolExecutor(1) as others:
        slow = partial(others.submit, time.sleep, 0.01)
        monkeypatch.setattr(cpu_layers, "product_in_c", lambda weight, bias: lambda rows: slow().result())
        monkeypatch.setattr(cpu_layers, "why_unavailable", lambda: "")
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        assert not cpu_layers.c_wins()


def test_few_numbers_of_rows_reach_the_library_however_many_batches_have():
    from engine.runtime.models.cpu_layers import pad_rows, unpad_rows

    sizes = set()
    for rows in range(1, 600):
        x = torch.ones(1, rows, 4)
        filled = pad_rows(x)
        sizes.add(len(filled))
        assert len(filled) >= rows
        assert torch.equal(unpad_rows(filled, x), x)
    assert len(sizes) < 40


def test_tokens_are_the_same_with_and_without(model_of, prompts):
    from engine.runtime.llm import LLM
    from engine.runtime.models.cpu_layers import restore_layers
    from engine.runtime.params import SamplingParams

    said = []
    for pack in (True, False):
        restore_layers(model_of().model)
        llm = LLM(model_of(), pool_tokens=1024, pack_weights=pack)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0))
        said.append([output.outputs[0].token_ids for output in outputs])
    assert said[0] == said[1]


def test_packing_is_for_models_that_leave_memory_free_and_others_are_told(model_of, monkeypatch, caplog):
    from engine.runtime.models import cpu_layers as packing

    assert packing.packs_unasked(model_of().model)
    assert not caplog.messages
    monkeypatch.setattr(packing, "_free_bytes", lambda: 1000)
    assert not packing.packs_unasked(model_of().model)
    (said,) = caplog.messages
    assert "pack_weights=True" in said


def test_a_type_that_nothing_packs_is_told(model_of, monkeypatch, caplog):
    from engine.runtime.models import cpu_layers as packing

    monkeypatch.setattr(packing, "packs", lambda dtype: False)
    assert not packing.packs_unasked(model_of().model)
    (said,) = caplog.messages
    assert said.endswith("nothing here packs float32")


class GatedNorm(torch.nn.Module):
    """An RMS norm with a gate, which a call may leave out."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, rows, gate=None):
        normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return normed if gate is None else normed * gate


def test_a_norm_that_may_be_called_with_a_gate_keeps_its_own_forward():
    from engine.runtime.models.cpu_layers import replace_layers

    norm, rows = GatedNorm().eval(), torch.ones(1, 3, 32)
    replace_layers(norm)
    assert torch.equal(norm(rows, 2 * rows), 2 * norm(rows))


def test_memory_that_a_product_frees_is_kept_for_the_next_one():
    from engine.runtime.models.cpu_layers import _keep_freed_memory

    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library has no mallopt")
    _keep_freed_memory()
    faults = []
    for _ in range(10):  # the first ones lay out the heap
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 << 20)  # 64 MB, freed at once
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert faults[-1] < 1000  # of 16,384 pages
