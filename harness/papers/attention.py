"""What claims say about attention itself, computed in float64 with the readable reference of our kernels.

Each function is named by rows of `claims.yaml`. torch is imported here alone.
"""

from harness.papers.sizes import Found

_TIGHT = 1e-12


def merged_blocks() -> Found:
    """Attention block by block, merged by (maximum, sum, output), in two orders, against softmax over all keys."""
    import torch

    from paged_kernels.arguments import Scoring
    from paged_kernels.operations import merge_attn_states
    from paged_kernels.reference import attend

    torch.manual_seed(0)
    q = torch.randn(1, 4, 32, dtype=torch.float64)
    k, v = (torch.randn(80, 2, 32, dtype=torch.float64) for _ in range(2))
    scoring = Scoring(32**-0.5)
    whole, _ = attend(q, k, v, scoring)
    errors = []
    for order in (range(5), (3, 0, 4, 2, 1)):
        parts = [attend(q, k[16 * b : 16 * b + 16], v[16 * b : 16 * b + 16], scoring) for b in order]
        out, lse = parts[0]
        for one, other in parts[1:]:
            out, lse = merge_attn_states(out, lse, one, other, backend="torch")
        errors.append(float((out - whole).abs().max()))
    return {"exact_up_to_rounding": max(errors) < _TIGHT}


def permuted_table() -> Found:
    """Paged attention through a permuted block table, whose other slots are NaN, against contiguous K and V."""
    import torch

    from paged_kernels.arguments import Scoring
    from paged_kernels.reference import attend, paged_attention

    torch.manual_seed(0)
    q = torch.randn(1, 4, 32, dtype=torch.float64)
    k, v = (torch.randn(40, 2, 32, dtype=torch.float64) for _ in range(2))
    table = [5, 2, 7]
    key_cache, value_cache = (torch.full((8, 16, 2, 32), float("nan"), dtype=torch.float64) for _ in range(2))
    for position in range(40):
        slot = table[position // 16], position % 16
        key_cache[slot], value_cache[slot] = k[position], v[position]
    scoring = Scoring(32**-0.5)
    lens, bounds = torch.tensor([40]), torch.tensor([0, 1])
    out, _ = paged_attention(q, key_cache, value_cache, torch.tensor([table]), lens, bounds, scoring)
    return {"equal_to_contiguous": float((out - attend(q, k, v, scoring)[0]).abs().max()) < _TIGHT}


def causal_rows(tokens: int) -> Found:
    """How many columns each row of a causal mask sees."""
    from paged_kernels.arguments import causal_window

    return {"columns": [int(row.sum()) for row in causal_window(tokens, tokens)]}


def layers_that_change() -> Found:
    """Change token 0 of a tiny model: whether the keys of token 5 change, in the first layer and in the second."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, **heads)
    model = LlamaForCausalLM(config).double().eval()
    keys = []
    for first in (1, 2):
        with torch.no_grad():
            cache = model(torch.tensor([[first, 10, 11, 12, 13, 14]]), use_cache=True).past_key_values
        keys.append([cache.layers[layer].keys[0, :, 5] for layer in range(2)])
    changes = [float((one - other).abs().max()) > _TIGHT for one, other in zip(*keys, strict=True)]
    return {"first_layer_changes": changes[0], "second_layer_changes": changes[1]}
