"""Other families run unchanged through `adopt_model`: windows, sinks, softcaps, MLA's unequal widths, experts."""

import numpy as np
import pytest

from engine.core.limits import SchedulerLimits

COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "qwen2": {},
    "phi3": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "gpt_neox": {"num_key_value_heads": 4},
    "starcoder2": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
}


def build(family):
    """A random model whose special parameters (sinks, norms, biases) are not all zero or one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **COMMON | FAMILIES[family])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_equal_generate_with_chunks_and_shared_prefixes(family):
    import torch

    from engine.runtime.llm import LLM, SamplingParams
    from engine.runtime.model import adopt_model, native_attention

    loaded = adopt_model(build(family), name=family)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, size).tolist() for size in (3, 30, 17)]
    prompts.append(prompts[1][:20] + prompts[2][:5])
    limits = SchedulerLimits(12, 8, max_model_len=64)
    llm = LLM(loaded, limits=limits, pool_tokens=96, block_size=4, audit="full")
    params = SamplingParams(max_tokens=10, temperature=0)
    found = [done.outputs[0].token_ids for done in llm.generate(prompts, params)]
    with native_attention(loaded) as model:
        expected = [
            model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[
                0, len(prompt) :
            ].tolist()
            for prompt in prompts
        ]
    assert found == expected


def test_layers_with_unequal_widths_get_the_widths_they_send():
    from engine.runtime.model import adopt_model

    assert adopt_model(build("deepseek_v3"), name="mla").kv_shapes == (((4, 16), (4, 12)),) * 2
