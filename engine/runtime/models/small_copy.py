"""A small copy of a model: its own classes and all of its layers, with small sizes and random weights.

The copy shows in a fraction of a second whether an architecture computes the same on paged KV as it does natively.
Only sizes change. What decides how a layer works (kinds of layers, switches, RoPE) is kept. Sliding windows and chunks
become shorter than the test sequences if they are shorter than the model's longest sequence; otherwise they hide
nothing in the model, and must hide nothing in the copy.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

HEADS, HEAD_DIM = 4, 16
WINDOW = 5  # tokens of a sliding window or chunk in the copy
VOCAB = 96
FIRST_ID = 8  # the ids below it may be special tokens
_WEIGHTS = 0.125  # standard deviation of random weights: 1 / sqrt(64) keeps the scale of what passes a layer


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WIDTHS = _keys(
    """hidden_size d_model n_embd dim emb_dim embedding_dim embedding_size word_embed_proj_dim input_embedding_size
    output_embedding_size dim_model_base hidden_size_global vision_output_dim out_hidden_size ple_embed_dim
    ngram_embed_dim"""
)
_HEADS = _keys(
    """num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads
    num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads index_n_heads indexer_n_heads
    linear_num_heads
    linear_num_value_heads linear_num_key_heads"""
)
_KV_HEADS = _keys(
    """num_key_value_heads num_kv_heads kv_n_heads n_head_kv swa_num_key_value_heads num_global_key_value_heads"""
)
_HEAD_DIMS = _keys(
    """head_dim d_head dim_head attention_head_size kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim
    swa_head_dim global_head_dim index_head_dim indexer_head_dim linear_head_dim linear_key_head_dim
    linear_value_head_dim rotary_dim swa_v_head_dim"""
)
_VOCABS = _keys("vocab_size decoder_vocab_size vocab_size_per_layer_input text_vocab_size")
_WINDOWS = _keys(
    """sliding_window sliding_window_size attention_chunk_size window_size local_attention attention_window_size
    keep_window_size"""
)
_LARGEST = (  # a number, and the keys whose values are at most this number in the copy
    (
        32,
        _keys(
            """intermediate_size ffn_dim n_inner d_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
            moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size
            moe_shared_expert_intermediate_size dense_intermediate_size intermediate_size_mlp router_hidden_size
            feed_forward_size hidden_size_per_layer_input"""
        ),
    ),
    (
        16,
        _keys(
            """kv_lora_rank q_lora_rank o_lora_rank gated_norm_rank adapter_rank laurel_rank hc_lowrank d_rel
            mamba_d_state mamba_chunk_size ssm_state_size"""
        ),
    ),
    (4, _keys("num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num")),
    (
        2,
        _keys("num_experts_per_tok num_experts_per_token moe_top_k moe_topk moe_k top_k_experts n_group"),
    ),
    (1, _keys("topk_group num_expert_group n_shared_experts num_shared_experts")),
    (4096, _keys("max_position_embeddings n_positions max_target_positions n_ctx max_seq_len")),
    # what an indexer keeps, in tokens and in blocks: fewer than the test sequences have
    (4, _keys("index_topk index_block_size indexer_budget")),
    (2, _keys("indexer_compress_ratio")),
    (1, _keys("index_topk_blocks index_local_blocks")),
)
_SMALL = {key: largest for largest, keys in _LARGEST for key in keys}
# a state beside attention: its heads x width = 2 x 64, the width of the residual stream; of Zamba's attention too
_EXACT = {
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
}
_WEIGHT_SCALES = _keys("initializer_range init_std initializer_factor")
_DROPPED = _keys(  # not about the architecture; some classes do not take their own defaults back
    """quantization_config dtype torch_dtype id2label label2id transformers_version _name_or_path output_attentions
    output_hidden_states return_dict"""
)


def small_copy(model: Any, *, head_dim: int = HEAD_DIM) -> Any:
    """A small model of the same classes in float32 on the CPU, always with the same random weights.

    Raises what the model's code raises for sizes that it does not allow.
    """
    config = small_config(model.config, head_dim=head_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        copy = type(model)._from_config(config, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            for parameter in copy.parameters():
                if parameter.dim() == 1:  # norms, biases and sinks are all alike in a new model
                    parameter.add_(torch.randn_like(parameter) * _WEIGHTS)
    return copy.eval()


def small_config(config: Any, *, head_dim: int = HEAD_DIM, **more: Any) -> Any:
    """The configuration of the small copy; `more` replaces values of it."""
    longest = longest_sequence(config.get_text_config()) or math.inf
    return type(config).from_dict(_reduced(config.to_dict(), longest, head_dim) | more)


def longest_sequence(config: Any) -> int | None:
    """The longest sequence that a configuration names, in tokens; None if it names none."""
    for key in (
        "max_position_embeddings",
        "n_positions",
        "max_target_positions",
        "max_seq_len",
        "model_max_length",
    ):
        value = getattr(config, key, None)
        if isinstance(value, int):
            return value
    return None


def _reduced(values: Mapping[str, Any], longest: float, head_dim: int) -> dict[str, Any]:
    return {
        key: _value(key, value, values, longest, head_dim)
        for key, value in values.items()
        if key not in _DROPPED
    }


def _value(key: str, value: Any, beside: Mapping[str, Any], longest: float, head_dim: int) -> Any:
    if isinstance(value, Mapping):
        return _reduced(value, longest, head_dim)
    if isinstance(value, list):
        return [_value(key, one, beside, longest, head_dim) for one in value]
    if key in _WEIGHT_SCALES and isinstance(value, float):
        return _WEIGHTS
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return _number(key, value, beside, longest, head_dim)


def _number(key: str, value: int, beside: Mapping[str, Any], longest: float, head_dim: int) -> int:
    if key.endswith(("token_id", "token_index", "token_ids")):
        return value if 0 <= value < FIRST_ID else 1
    if key in _WINDOWS:
        return min(value, WINDOW) if 0 < value < longest else value
    if key in _KV_HEADS:
        heads = next((beside[name] for name in _HEADS if isinstance(beside.get(name), int)), value)
        return HEADS if value >= heads else 1 if value == 1 else HEADS // 2
    if key == "qk_head_dim":
        return 2 * head_dim
    if key in _EXACT:
        return _EXACT[key]
    for names, small in (
        (_WIDTHS, HEADS * head_dim),
        (_HEADS, HEADS),
        (_HEAD_DIMS, head_dim),
        (_VOCABS, VOCAB),
    ):
        if key in names and value:
            return small
    return min(value, _SMALL.get(key, value))
