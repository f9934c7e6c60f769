"""Families of models as tiny random ones, and the runs in which each must equal `generate()`."""

import itertools

COMMON = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 640,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied, random models repeat what they read
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
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
}
# family: (what is special about it, further values of its configuration)
FAMILIES = {
    "llama": ("", {}),
    "qwen2": ("biases", {}),
    "qwen3": ("norms on q and k", {}),
    "mistral": ("sliding window", {"sliding_window": 19}),
    "ministral": ("sliding window", {"sliding_window": 19}),
    "gemma": ("one KV head", {"num_key_value_heads": 1}),
    "gemma2": ("sliding window, softcap", {"sliding_window": 19, "query_pre_attn_scalar": 8}),
    "gemma3_text": ("sliding window, two RoPEs", {"sliding_window": 19, "query_pre_attn_scalar": 8}),
    "gemma4_text": (
        "sliding window, heads of two widths, layers that share K and V, inputs of each layer",
        {"global_head_dim": 16, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16}
        | {"vocab_size_per_layer_input": 256, "sliding_window": 19, "num_hidden_layers": 6}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    ),
    "phi": ("partial RoPE", {}),
    "phi3": ("sliding window", {"sliding_window": 19}),
    "olmo": ("", {}),
    "olmo2": ("norms on q and k", {}),
    "olmo3": ("sliding window", {"sliding_window": 19}),
    "granite": ("scaled attention", {}),
    "cohere": ("interleaved RoPE", {}),
    "cohere2": ("sliding window", {"sliding_window": 19}),
    "starcoder2": ("sliding window", {"sliding_window": 19}),
    "gpt2": ("learned positions", {"n_positions": 640}),
    "opt": ("learned positions, scaled queries", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "gpt_neox": ("partial RoPE", {"num_key_value_heads": 4}),
    "gpt_bigcode": ("one KV head", {"n_positions": 640}),
    "biogpt": ("learned positions", {}),
    "smollm3": ("layers without RoPE", {}),
    "glm": ("partial RoPE", {}),
    "glm4": ("partial RoPE", {}),
    "helium": ("", {}),
    "arcee": ("", {}),
    "ernie4_5": ("", {}),
    "seed_oss": ("", {}),
    "exaone4": ("sliding window", {"sliding_window": 19}),
    "mixtral": ("experts", EXPERTS),
    "qwen2_moe": ("experts", EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("experts", EXPERTS),
    "olmoe": ("experts", EXPERTS),
    "granitemoe": ("experts", EXPERTS),
    "gpt_oss": (
        "experts, sliding window, sinks",
        EXPERTS | {"sliding_window": 19, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "deepseek_v2": ("experts, latent attention", LATENT),
    "deepseek_v3": ("experts, latent attention", LATENT),
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MIXED_STATE = ["linear_attention", "full_attention"] * 2
# models with a recurrent state in some layers, which run in groups alone
STATEFUL = {
    "qwen3_next": (
        "gated delta nets, experts",
        EXPERTS
        | LINEAR
        | {"num_hidden_layers": 4, "layer_types": MIXED_STATE, "shared_expert_intermediate_size": 16},
    ),
    "falcon_h1": (
        "state spaces and attention in every layer",
        {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
    ),
    "jamba": (
        "state spaces whose prompts go token by token",
        EXPERTS
        | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False},
    ),
    "lfm2": (
        "short convolutions",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "kimi_linear": (
        "delta nets, latent attention",
        LATENT
        | EXPERTS
        | {"num_hidden_layers": 4, "layer_types": MIXED_STATE, "linear_head_dim": 8, "linear_num_heads": 4},
    ),
}
DISTINCT = ("llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")  # the day's
BRIEFLY = (  # much like one of the others
    *(
        "ministral",
        "olmo",
        "olmo3",
        "cohere2",
        "gemma4_text",
        "biogpt",
        "smollm3",
        "glm",
        "glm4",
        "helium",
        "arcee",
        "ernie4_5",
    ),
    *("seed_oss", "exaone4", "qwen2_moe", "olmoe", "granitemoe", "deepseek_v2"),
)
SHORT, LONG = (1, 5, 32, 128), (512, 7)  # tokens of the prompts that are served together
NEW = 5

BLOCKS = (1, 8, 16, 32, 128)
BUDGETS = (64, 200, 1024)
PREFIXES = (False, True)
MEMORY = ("calm", "recompute", "swap")
CONTIGUOUS = ("contiguous_max", "contiguous_pow2", "contiguous_oracle")


def build(family, layer_types=()):
    """A random model whose special parameters (sinks, norms, biases) are not all zero or one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    kinds = {"layer_types": list(layer_types), "num_hidden_layers": len(layer_types)} if layer_types else {}
    config = AutoConfig.for_model(family, **COMMON | (FAMILIES | STATEFUL)[family][1] | kinds)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def prompts(sizes):
    """Prompts of these lengths; the longest begins as the one before it, where that is long enough to share blocks."""
    import numpy as np

    rng = np.random.default_rng(1)
    drawn = [rng.integers(0, 256, size).tolist() for size in sizes]
    drawn[-1][:32] = drawn[-2][: len(drawn[-1][:32])]
    return drawn


def pairwise(*factors):
    """Rows that hold every pair of values of two factors at least once; greedy, always the same."""
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(factors[one], factors[two])
    }
    rows = []
    while missing:
        (one, a), (two, b) = min(missing, key=repr)
        row = {one: a, two: b}
        for index, values in enumerate(factors):
            if index not in row:
                row[index] = max(values, key=lambda value: _gain(row, index, value, missing))
        rows.append(tuple(row[index] for index in range(len(factors))))
        missing -= set(itertools.combinations(sorted(row.items()), 2))
    return rows


def _gain(row, index, value, missing):
    return sum(tuple(sorted([(index, value), item])) in missing for item in row.items())


def runs_of(families):
    """(family, block size, budget, prefix caching, memory or contiguous policy, lengths of the prompts).

    All pairs of them for the families that are paired; for the others a row each of the same kind. Every family has a
    reservation policy.
    """
    paired = tuple(family for family in families if family not in BRIEFLY)
    rows = pairwise(paired, BLOCKS, BUDGETS, PREFIXES, MEMORY, (SHORT, LONG))
    turns = itertools.cycle(pairwise(BLOCKS, BUDGETS, PREFIXES, MEMORY, (SHORT, LONG)))
    rows += [(family, *next(turns)) for family in families if family in BRIEFLY]
    policies = itertools.cycle(itertools.product(CONTIGUOUS, BUDGETS))
    for family in families:
        policy, budget = next(policies)
        rows.append((family, 1, budget, False, policy, SHORT))
    return rows


def all_runs():
    """The whole grid."""
    paged = list(itertools.product(FAMILIES, BLOCKS, BUDGETS, PREFIXES, MEMORY, (SHORT, LONG)))
    return paged + list(itertools.product(FAMILIES, (1,), BUDGETS, (False,), CONTIGUOUS, (SHORT, LONG)))


def unowned_are_void(pool):
    """Whether null pages hold zeros, and nothing beside them and the pages that a group has written holds anything.

    It reads all memory, and writes to a part of it for that time.
    """
    import numpy as np
    import torch

    tensors = [each for pages in pool._pages for each in pages.tensors]
    nulls = [tensor.select(axis, 0) for tensor, axis, _ in tensors]
    if any(bool(null.any()) for null in nulls):
        return False
    memory = {tensor.untyped_storage().data_ptr(): tensor for tensor, *_ in tensors}
    whole = [
        torch.empty(0, dtype=tensor.dtype, device=pool.device).set_(tensor.untyped_storage())
        for tensor in memory.values()
    ]
    saved, owner = [each.clone() for each in whole], pool._owner.copy()
    pool.poison(np.flatnonzero(owner != -1).tolist())
    for null in nulls:
        null.fill_(float("nan"))
    held = any(bool(torch.isfinite(each).any()) for each in whole)
    for each, before in zip(whole, saved, strict=True):
        each.copy_(before)
    pool._owner = owner
    return not held
