"""Layers are computed in another way only where that was proved to give the same."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from tiny_models import SHAPE

from engine.runtime.models import cpu_layers
from engine.runtime.models.cpu_layers import original_layers, packs, replace_layers, restore_layers
from paged_kernels.native import why_unavailable


def model(family, dtype="float32"):
    from engine.runtime.models.load import load_model
    from engine.runtime.models.spec import ModelSpec

    return load_model(
        ModelSpec(name=family, family=family, kv_heads=4 if family == "gpt2" else 2, dtype=dtype, **SHAPE)
    ).model


def adopted(model):
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("llama", {"Linear", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm"}),
        ("qwen3", {"Linear", "Qwen3Attention", "Qwen3MLP", "Qwen3RMSNorm"}),
        (
            "gemma2",
            {"Linear", "Gemma2Attention"},
        ),  # its norm adds one to the weight, its activation is another
        ("gpt2", set()),  # its layers are no linear layers
    ],
)
def test_what_computes_the_same_is_adopted(family, wanted):
    if why_unavailable():
        wanted = {name for name in wanted if not name.endswith(("RMSNorm", "Attention"))}
    one = model(family)
    replace_layers(one)
    assert adopted(one) - {"Linear"} == wanted - {"Linear"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_hidden_states_are_as_near_to_the_exact_ones_as_transformers_own(family, dtype):
    one, exact = model(family, dtype), model(family, dtype).double()
    torch.manual_seed(3)
    x = torch.randn(1, 9, SHAPE["hidden"]).to(one.dtype)
    with torch.inference_mode():
        own, wanted = parts(one, x), parts(exact, x.double())
        replace_layers(one)
        ours = parts(one, x)
    for mine, theirs, true in zip(ours, own, wanted, strict=True):
        most = 1.25 * (theirs.double() - true).abs().max() + 1e-6
        assert (mine.double() - true).abs().max() <= most


def parts(model, x):
    layer = model.model.layers[0]
    return [layer.input_layernorm(x), layer.mlp(x)]


def test_a_layer_with_another_rule_is_left_alone_however_alike_its_answers_are():
    one = model("llama")
    one.model.layers[0].mlp.act_fn = torch.nn.GELU()
    for part in one.model.layers[0].mlp.parameters():
        part.data.mul_(1e-3)
    replace_layers(one)
    assert "forward" not in vars(one.model.layers[0].mlp)
    assert "forward" in vars(one.model.layers[1].mlp)


def test_another_element_type_than_the_weights_goes_the_norms_own_way():
    one = model("llama", "bfloat16")
    replace_layers(one)
    x = torch.randn(1, 3, SHAPE["hidden"])
    norm = one.model.norm
    assert torch.equal(norm(x), type(norm).forward(norm, x))


def test_layers_are_lent_back_for_a_reference_run_and_returned():
    one = model("llama")
    assert replace_layers(one) > 0
    assert replace_layers(one) == 0
    before = adopted(one)
    with original_layers(one):
        assert not adopted(one)
    assert adopted(one) == before
    restore_layers(one)
    assert not adopted(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 1024, 4096])
def test_a_norm_that_takes_the_mean_away_is_left_alone_at_every_width(width, dtype):
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm

    for norm in (torch.nn.LayerNorm(width, bias=False), CohereLayerNorm(width)):
        one = torch.nn.ModuleList([norm.to(dtype)])
        replace_layers(one)
        assert adopted(one) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_another_epsilon_than_it_names_is_left_alone(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Larger(LlamaRMSNorm):
        def forward(self, x):
            variance = x.float().pow(2).mean(-1, keepdim=True)
            return self.weight * (x * torch.rsqrt(variance + 10 * self.variance_epsilon)).to(x.dtype)

    one = torch.nn.ModuleList([Larger(512).to(dtype)])
    replace_layers(one)
    assert adopted(one) == set()


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_gated_layers_of_real_widths_are_adopted(dtype):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    shape = LlamaConfig(hidden_size=1024, intermediate_size=2816)
    one = torch.nn.ModuleList([LlamaRMSNorm(1024), LlamaMLP(shape)]).to(dtype)
    replace_layers(one)
    assert {"LlamaRMSNorm", *(["LlamaMLP"] if packs(dtype) else [])} <= adopted(one)


def test_layers_that_the_cpu_cannot_pack_keep_their_own_forward(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(cpu_layers, "why_unavailable", lambda: "no compiler")
    one = model("llama", "bfloat16")
    replace_layers(one)
    assert not {"Linear", "LlamaMLP"} & adopted(one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 50])
def test_silu_times_up_is_torchs(width, dtype):
    from engine.runtime.models.cpu_layers import silu_mul

    x = torch.randn(2, 7, 2 * width, generator=torch.Generator().manual_seed(0)) * 6
    x[0, 0, :6] = torch.tensor([0.0, -90.0, 90.0, float("nan"), -1e31, -3e38])
    gate, up = x.to(dtype).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found = silu_mul(x.to(dtype))
    assert torch.allclose(found, expected, rtol=1e-6 if dtype is torch.float32 else 8e-3, equal_nan=True)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_with_biases_computes_the_same(bias):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    layer = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96, mlp_bias=bias))
    one, x = torch.nn.ModuleList([layer]), torch.randn(1, 9, 64)
    with torch.inference_mode():
        own = layer(x)
        assert replace_layers(one) == 1
        assert torch.allclose(layer(x), own, atol=1e-5)


def gated_layer(bias=False, wide=528):
    """A gated layer with a replaced forward, and the same layer in float64."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    layer = LlamaMLP(LlamaConfig(hidden_size=256, intermediate_size=wide, mlp_bias=bias)).eval()
    exact = deepcopy(layer).double()
    assert replace_layers(torch.nn.ModuleList([layer])) == 1
    return layer, exact


@pytest.mark.parametrize("wide", [528, 527])  # whole vectors of C or not
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 257), (301,), (2, 150)])
def test_a_gated_layer_of_many_rows_is_near_to_the_exact_one(shape, bias, wide):
    layer, exact = gated_layer(bias, wide)
    x = torch.randn(*shape, 256)
    with torch.inference_mode():
        found, wanted = layer(x), exact(x.double())
    assert found.shape == wanted.shape
    assert torch.allclose(found.double(), wanted, atol=1e-5)


def test_a_gated_layer_leaves_earlier_results_and_its_rows_as_they_are():
    layer, exact = gated_layer()
    first, second = torch.randn(2, 300, 256)
    with torch.inference_mode():
        kept = layer(first)
        layer(second)
        assert torch.allclose(kept.double(), exact(first.double()), atol=1e-5)


def test_gated_layers_of_two_threads_do_not_share_memory():
    layer, exact = gated_layer()
    many = torch.randn(8, 300, 256)
    wanted = [exact(x.double()) for x in many]

    def run(number):
        with torch.inference_mode():
            return all(
                torch.allclose(layer(many[number]).double(), wanted[number], atol=1e-5) for _ in range(6)
            )

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, range(len(many))))


def test_a_gated_layer_of_many_rows_runs_in_and_outside_of_inference_mode():
    layer, exact = gated_layer()
    x = torch.randn(300, 256)
    with torch.inference_mode():
        layer(x)
    assert torch.allclose(layer(x).double(), exact(x.double()), atol=1e-5)


def test_nan_in_one_of_many_rows_stays_in_its_row():
    layer, _ = gated_layer()
    x = torch.randn(300, 256)
    x[7, 3] = float("nan")
    with torch.inference_mode():
        strange = layer(x).isnan()
    assert strange[7].all()
    assert strange.any(dim=1).sum() == 1


def test_gate_and_up_are_packed_once():
    one = model("llama")
    replace_layers(one)
    own = torch.nn.Linear.forward
    kept = {
        name
        for name, layer in one.model.layers[0].mlp.named_children()
        if getattr(layer.forward, "__func__", None) is own
    }
    assert kept == {"gate_proj", "up_proj"}
