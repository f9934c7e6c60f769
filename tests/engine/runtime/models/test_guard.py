"""A model that would give wrong tokens on paged KV is refused at load, whatever its name, and a right one is not."""

import planted_models as planted
import pytest
import torch

from engine.runtime.errors import ModelError
from engine.runtime.models import guard
from engine.runtime.models.guard import small_config, small_copy
from engine.runtime.models.load import wrap_model


def build(kind, **values):
    torch.manual_seed(3)
    return kind._from_config(planted.config(**values), attn_implementation="eager")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (planted.WithState, "carries more from step to step than K and V"),
        (
            planted.MaskOnlyWindow,
            "hide keys .* that its layers do not tell their attention, for example layer 0",
        ),
        (planted.OwnPositions, "counts positions itself"),
        (planted.CrossAttention, "attends to other keys"),
        (planted.TiedCache, "not every layer has one KV cache per token"),
        (planted.Mixing, "carries more from step to step"),
        (planted.LooseLogits, "asked for the logits of 13 tokens of a step it gives 14"),
    ],
)
def test_what_is_planted_is_refused_with_its_reason(kind, reason):
    with pytest.raises(ModelError, match=reason):
        wrap_model(build(kind), name="planted")


def test_a_window_in_masks_is_refused_by_the_numbers_too(monkeypatch):
    from engine.runtime.models import probe

    monkeypatch.setattr(probe, "check_masks", lambda *rest: None)
    with pytest.raises(ModelError, match="attends to other keys"):
        wrap_model(build(planted.MaskOnlyWindow), name="planted")


def test_states_that_a_single_token_moves_otherwise_than_a_piece_are_refused_by_the_numbers(monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.runtime.models import load

    monkeypatch.setattr(load, "check_config", lambda *rest: None)  # which refuses it by name
    config = AutoConfig.for_model("nemotron_h", layers_block_type=["mamba", "attention"])
    with pytest.raises(ModelError, match="carries more from step to step"):
        wrap_model(AutoModelForCausalLM.from_config(small_config(config)), name="planted")


def test_the_same_model_without_anything_planted_is_not_refused():
    assert wrap_model(build(planted.Plain), name="plain").kv_shapes == (((2, 16), (2, 16)),) * 3


def test_a_window_as_long_as_the_longest_sequence_hides_nothing_and_is_not_refused():
    wrap_model(build(planted.MaskOnlyWindow, sliding_window=256), name="planted")


def test_a_refused_model_gets_its_own_attention_back():
    model = build(planted.WithState)
    with pytest.raises(ModelError):
        wrap_model(model, name="planted")
    assert model.config._attn_implementation == "eager"


def test_a_model_that_no_small_copy_can_be_built_of_is_tested_itself(monkeypatch):
    def fail(model, head_dim):
        raise ValueError("these sizes are not allowed")

    monkeypatch.setattr(guard, "small_copy", fail)
    with pytest.raises(ModelError, match="carries more from step to step"):
        wrap_model(build(planted.WithState), name="planted")
    wrap_model(build(planted.Plain), name="plain")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_reason_to_refuse(monkeypatch, dtype):
    monkeypatch.setattr(guard, "small_copy", lambda model, head_dim: 1 / 0)
    wrap_model(build(planted.Plain).to(dtype), name="plain")
    with pytest.raises(ModelError, match="carries more from step to step"):
        wrap_model(build(planted.WithState).to(dtype), name="planted")


def test_the_verdict_is_found_once_for_each_architecture(monkeypatch):
    compared = []
    found = guard._difference
    monkeypatch.setattr(guard, "_verdicts", {})
    monkeypatch.setattr(guard, "_difference", lambda *args: compared.append(1) or found(*args))
    for layers in (2, 2, 3):
        wrap_model(build(planted.Plain, num_hidden_layers=layers), name="plain")
    assert len(compared) == 2


def test_the_small_copy_keeps_layers_and_switches_and_shrinks_sizes():
    config = planted.config(num_hidden_layers=5, attention_bias=True, sliding_window=40, hidden_act="gelu")
    small = small_config(config)
    assert (small.num_hidden_layers, small.attention_bias, small.hidden_act) == (5, True, "gelu")
    assert (small.hidden_size, small.vocab_size, small.sliding_window) == (64, 96, 5)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)


def test_the_small_copy_leaves_the_global_random_state_alone():
    model = build(planted.Plain)
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    small_copy(model)
    assert torch.rand(1) == expected


def test_masks_are_not_made_after_a_model_was_probed():
    from transformers import AttentionMaskInterface

    from engine.runtime.attention.layer import IMPLEMENTATION

    wrap_model(build(planted.Plain), name="plain")
    assert IMPLEMENTATION not in AttentionMaskInterface._global_mapping
