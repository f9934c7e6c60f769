"""Rotation in C gives the numbers of transformers' own function, and other rules of rotation stay as they are."""

from inspect import unwrap

import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereAttention
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig

from engine.runtime.models.cpu_layers import rotary_forward

pytestmark = pytest.mark.usefixtures("compiled_kernels")

WIDTH = 64
DTYPES = [torch.float32, torch.bfloat16]


def attention(dtype=torch.float32, width=WIDTH):
    config = LlamaConfig(
        hidden_size=4 * width, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager"
    )
    torch.manual_seed(0)
    return modeling_llama.LlamaAttention(config, 0).to(dtype).eval()


def replaced_rotation(module):
    forward = rotary_forward(module)
    assert forward is not None
    return forward.__func__.__globals__["apply_rotary_pos_emb"]


def inputs(tokens, dtype, width=WIDTH):
    """q, k, cos, sin as a layer has them: heads are a view of rows, and the halves of cos and sin differ."""
    torch.manual_seed(1)
    q, k = (torch.randn(1, tokens, heads, width).to(dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, 1, tokens, width).to(dtype)
    return q, k, cos, sin


def exact(x, cos, sin):
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_q_and_k_are_rotated_as_the_exact_rule_says(tokens, width, dtype):
    q, k, cos, sin = inputs(tokens, dtype, width)
    found = replaced_rotation(attention())(q, k, cos, sin)
    for one, x in zip(found, (q, k), strict=True):
        wanted = exact(x, cos, sin)
        assert one.shape == x.shape
        assert one.dtype is dtype
        assert torch.allclose(one.double(), wanted, **tolerance(dtype))


def tolerance(dtype):
    return {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 4e-2}


def test_in_bfloat16_every_bit_is_that_of_transformers():
    given = inputs(37, torch.bfloat16)
    found, wanted = replaced_rotation(attention())(*given), modeling_llama.apply_rotary_pos_emb(*given)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_that_are_parts_of_wider_rows_are_read_where_they_lie(dtype):
    q, k, cos, sin = inputs(9, dtype)
    rows = torch.cat([q.transpose(1, 2), k.transpose(1, 2)], dim=2)
    views = [part.transpose(1, 2) for part in rows.split([6, 2], dim=2)]
    rotation = replaced_rotation(attention())
    for one, other in zip(rotation(*views, cos, sin), rotation(q, k, cos, sin), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_the_two_numbers_of_its_pair_alone(dtype):
    q, k, cos, sin = inputs(3, dtype)
    q[0, 4, 1, 5] = float("nan")
    strange = replaced_rotation(attention())(q, k, cos, sin)[0].isnan().nonzero().tolist()
    assert strange == [[0, 4, 1, 5], [0, 4, 1, 5 + WIDTH // 2]]


def test_the_arguments_stay_as_they_are():
    given = inputs(5, torch.float32)
    kept = [x.clone() for x in given]
    replaced_rotation(attention())(*given)
    assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))


@pytest.mark.parametrize(
    "case", ["two sequences", "float64", "cos in float32", "narrow heads", "another axis", "strided width"]
)
def test_what_c_does_not_compute_is_computed_by_transformers(case):
    q, k, cos, sin = inputs(4, torch.float32)
    more = {}
    if case == "two sequences":
        q, k = q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1)
    elif case == "float64":
        q, k, cos, sin = (x.double() for x in (q, k, cos, sin))
    elif case == "cos in float32":
        q, k = q.bfloat16(), k.bfloat16()
    elif case == "narrow heads":
        q, k, cos, sin = (x[..., :24] for x in (q, k, cos, sin))
    elif case == "another axis":
        q, k, more = q.transpose(1, 2), k.transpose(1, 2), {"unsqueeze_dim": 2}
    else:
        q, k = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    found = replaced_rotation(attention())(q, k, cos, sin, **more)
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin, **more)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "other", [CohereAttention, GptOssAttention]
)  # neighbours rotate; cos of half the width
def test_an_attention_that_rotates_by_another_rule_keeps_its_forward(other):
    assert rotary_forward(other.__new__(other)) is None


@pytest.mark.parametrize("change", ["sign", "halves", "scale"])
def test_a_function_that_differs_a_little_is_not_replaced(change, monkeypatch):
    own = modeling_llama.apply_rotary_pos_emb

    def planted(q, k, cos, sin, unsqueeze_dim=1):
        if change == "sign":
            sin = -sin
        elif change == "halves":  # the rule of models whose cos repeats its first half
            cos = torch.cat([cos[..., : cos.shape[-1] // 2]] * 2, dim=-1)
        else:
            cos = cos * (1 + 1e-4)
        return own(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", planted)
    assert rotary_forward(attention()) is None


def test_the_layer_computes_what_its_own_forward_computes():
    layer = attention()
    _, _, cos, sin = inputs(7, torch.float32)
    x = torch.randn(1, 7, 4 * WIDTH)
    with torch.inference_mode():
        own = layer(x, (cos, sin), None)[0]
        found = rotary_forward(layer)(x, (cos, sin), None)[0]
    assert torch.allclose(found, own, atol=1e-6)


def test_transformers_keeps_its_own_function():
    before = modeling_llama.apply_rotary_pos_emb
    rotary_forward(attention())
    assert modeling_llama.apply_rotary_pos_emb is before
    assert unwrap(modeling_llama.LlamaAttention.forward).__globals__ is vars(modeling_llama)
